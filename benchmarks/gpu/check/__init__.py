"""Check a machine with one GPU, offline and in a bounded time: `python tools/gpu_check.py`.

    parts.py      the parts in order of value, the lines that each of them reports, their time limits
    command.py    the command: one subprocess per part, results written after each
    report.py     the JSON file and the table in Markdown
    lines.py      how a part reports its lines while it runs
    part.py       the subprocess of one part
    worlds.py     training steps on several ranks, in a world that serves many layouts
    one_rank.py   an actor in a world of one rank
    pytests.py    files of tests/gpu, each in a process of its own
    model.py      a random Qwen3 in the shape that the machine allows
    run_*.py      one module per part

The command and these first three modules import nothing but the standard library, so that they report on a machine where the
rest cannot be imported. With `--parts cpu` the parts that need no GPU run on the platform `cpu` at tiny sizes, which tests
them (tests/unit/benches/test_gpu_check.py).
"""
