"""Code that runs inside the servers' own processes. It imports little: an engine's environment lacks what training needs."""
