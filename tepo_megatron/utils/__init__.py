"""TODO utils."""
