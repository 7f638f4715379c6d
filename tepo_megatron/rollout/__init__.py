"""Sampling from an inference server: its process, its HTTP interface, the weights it serves."""
