"""TEPO (token-level policy optimization) for language models on Megatron-Core."""

__version__ = "0.1.0"
