"""Benchmarks of this code next to that of others: `python -m benchmarks --help`. Each file but `_*.py` also runs alone."""
