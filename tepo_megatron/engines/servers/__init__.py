"""Inference servers: their processes, their HTTP interface, and the fleet that keeps several of them alive as one engine."""
