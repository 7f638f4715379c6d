"""Check a machine with one GPU, offline and in a bounded time: `python tools/gpu_check.py`.

    parts.py         the parts in order of value, their tasks, the lines that each task reports, their time limits
    machine.py       what is known before torch is imported: missing packages, no GPU, an unknown GPU
    command.py       the command: one task after the other, while the next ones start; results on disk whenever a line is known
    task_process.py  the process group of one task: started, given its turn, ended
    report.py        the JSON file, the table in Markdown, the timeline of a step
    lines.py         how a task reports its lines while it runs
    part.py          the process of one task: it imports, waits for its turn, and runs
    worlds.py        training steps on several ranks, in a world that serves many layouts
    model.py         a random Qwen3 in the shape that the machine allows
    run_*.py         the parts

The first seven import nothing but the standard library, so that they report on a machine where the rest cannot be imported.
With `--parts cpu` the parts that need no GPU run on the platform `cpu` at tiny sizes, which tests them
(tests/unit/benches/test_gpu_check.py).
"""
