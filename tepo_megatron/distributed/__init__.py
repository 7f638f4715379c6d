"""TODO distributed."""
