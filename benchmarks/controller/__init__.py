"""Measure the rollout data path between inference servers and training ranks, at the sizes of a cluster, without a GPU.

    python -m benchmarks.controller

`fake_pool.py` is a process that looks like many vLLM servers and answers at once. `engine_rows.py` puts the package's own
engine client and collector in front of it: what the rollout service computes. `hand_over.py` measures both ends of the way to
the ranks, and `host_rows.py` what each rank does with the rollouts. `__main__.py` is the command and keeps the figures.
"""
