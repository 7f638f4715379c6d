"""Recipes of the paper's tables, and its training data in the form that they read."""
