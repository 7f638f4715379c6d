"""`tepo plan`: memory per rank and time per step of a config, before any GPU is asked for. Without torch."""
