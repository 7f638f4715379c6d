"""Recipes, and the toy task of the demo."""
