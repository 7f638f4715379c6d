"""The `tepo` command: start the ranks and the service of a run, watch them, and turn any failure into one message.

parsers.py          the words of each command, and how errors become one message
commands.py         what each command does
replay.py, trace_request.py   commands that need a file of their own
start.py            a run from its config, or that of the run to resume, over all checks to its exit status
launcher.py         one run: its machines, its ranks, its log, its exit status
ranks.py            the ranks and the rollout service as child processes
"""
