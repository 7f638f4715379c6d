"""What a run tells about itself: metrics, their outputs, the folder they are in, and which rank hangs where.

run_dir.py        the folder of a run
sinks.py          metrics.jsonl, the terminal, TensorBoard, Weights & Biases
metrics.py        means over microbatches and ranks
histogram.py      histograms that add up over ranks
timing.py         wall time by phase
hang_watchdog.py  hang detection
"""
