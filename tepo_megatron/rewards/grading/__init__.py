"""Code of the grading workers. It imports neither PyTorch nor pydantic, so that a worker starts in a fraction of a second."""
