"""Agents that use the `openai` client, and a text game."""
