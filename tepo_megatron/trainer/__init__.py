"""The training loop, which every rank runs: schedule sampling and weight updates, check, learn, save, and log each step.

worker.py         the process of a rank
train.py          the training loop
schedule.py       sampling and weight updates: in turn with training, or up to `max_staleness` steps ahead of it
placement.py      trainer and engine on the same devices, or on devices of their own; their memory, by phase
gate.py           check before each update that the engine sampled with the weights that it was sent
learning.py       the optimizer steps of one batch
driver.py         the interface between the loop and the rollout side of a run, and the metrics of a step
service_client.py rank 0's connection to the rollout service
batch_receiver.py batches reach the ranks of every machine
tracing.py        traces of a step
sft/              supervised fine-tuning with the same actor and checkpoints
"""
