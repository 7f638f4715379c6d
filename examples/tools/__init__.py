"""A tool for the demo's model: a generation function of one's own."""
