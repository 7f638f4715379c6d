"""A taskset of verifiers, the server that plays it, and the agent of a run."""
