"""Rewards: terms, the pool of grading workers, and `grading/`, which the workers and sandboxes run."""
