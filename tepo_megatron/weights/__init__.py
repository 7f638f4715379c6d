"""Weights between Hugging Face and Megatron layouts: mapping tables, resharding, files, and delivery to engines."""
