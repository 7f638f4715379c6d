"""Coordinate trainer and engine: schedule sampling and weight updates, assign the devices, and log each step.

schedule.py       sampling and weight updates: in turn with training, or up to `max_staleness` steps ahead of it
placement.py      trainer and engine on the same devices, or on devices of their own
gate.py           check before each update that the engine sampled with the weights that it was sent
driver.py         rank 0's side of a run: engine, grader, prompts and log
method.py         what the objective requires of sampling and rewards
step_log.py       the metrics of one step
memory_report.py  the memory of ranks and servers, by phase
"""
