"""Weights between Hugging Face and Megatron layouts: mapping tables, resharding, and files."""
