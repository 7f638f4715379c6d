"""TODO observability."""
