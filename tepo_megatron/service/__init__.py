"""The rollout service: one process that turns prompts into batches, owns the servers, and logs. No Megatron-Core.

service.py        the process: threads, the calls that it answers
messages.py       the messages between rank 0 and the service
opening.py        load the prompts, start the engine and the graders, and give Prometheus the metrics of the run
main_driver.py    collect and evaluate with the engine, write the log, hold what a checkpoint needs of it
method.py         what the objective requires of sampling and rewards
batch_memory.py   batches as flat arrays in shared memory
trace.py          the service's side of a traced step
"""
