"""TODO launcher."""
