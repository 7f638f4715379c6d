"""Measure the rollout data path between inference servers and training ranks, at the sizes of a cluster, without a GPU.

    python -m benchmarks.controller

`fake_pool.py` is a process that looks like many vLLM servers and answers at once. `engine_rows.py` puts the package's own
engine client in front of it, `host_rows.py` times what happens to a step's rollouts afterwards, and `single_figures.py`
measures what is one number rather than a growth. `results_table.py` keeps the figures, and `__main__.py` is the command.
"""
