"""What this code costs, beside others'. `python -m benchmarks --help`; each file but `_*.py` can be run alone as well."""
