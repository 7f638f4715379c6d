"""Measurements that need a GPU: `python tools/gpu_check.py`."""
