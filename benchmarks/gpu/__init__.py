"""Measurements that need a GPU: `python tools/gpu_check.py`, and `python -m benchmarks.gpu.step` for the step of a config."""
