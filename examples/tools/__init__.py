"""A tool for the demo's model, as an example of a user's own generation function."""
