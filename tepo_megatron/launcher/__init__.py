"""Start the ranks of a run on this machine, watch them, and turn any failure of theirs into one message.

launcher.py    one run: its ranks, its log, its exit status
ranks.py       the ranks as child processes
worker.py      what each rank executes
"""
