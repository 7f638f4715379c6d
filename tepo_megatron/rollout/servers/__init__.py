"""Inference servers: their processes, their HTTP interface, and several of them kept alive as one engine."""
