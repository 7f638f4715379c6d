"""Environments of other projects, as generation functions."""
