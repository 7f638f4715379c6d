"""Sampling from inference servers: their processes, their HTTP interface, and the weights that they serve."""
