"""What runs inside a grading worker. Imports neither PyTorch nor pydantic: a worker starts in a fraction of a second."""
