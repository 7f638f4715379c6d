"""Observability of a run: metrics, their outputs, the run's folder, and the detection of hanging ranks.

run_dir.py        the folder of a run
sinks.py          metrics.jsonl, the terminal, TensorBoard, Weights & Biases
metrics.py        means and histograms, which add up over microbatches and ranks
tracer.py         spans of a traced step, and wall time by phase
hang_watchdog.py  hang detection
"""
