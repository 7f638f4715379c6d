"""The `tepo` command: start the ranks and the service of a run, watch them, and turn any failure into one message.

parsers.py          the words of each command, and how errors become one message
commands.py         what each command does
resume.py, sft.py, replay.py, trace_request.py   commands that need a file of their own
preflight.py        what can be refused before anything is started
start.py            a run from its config to its exit status
launcher.py         one run: its ranks, its log, its exit status
ranks.py            the ranks as child processes
service_process.py  the rollout service as a child process
nodes.py            a run on several machines
"""
