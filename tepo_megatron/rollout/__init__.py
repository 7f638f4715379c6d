"""Rollouts: prompts become graded groups of responses, which are recorded and can be replayed."""
