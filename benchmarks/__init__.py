"""Benchmarks of this code next to that of others. See `python -m benchmarks --help`; each file but `_*.py` can also be run
alone.
"""
