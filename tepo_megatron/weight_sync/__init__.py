"""TODO weight_sync."""
