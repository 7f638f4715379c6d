"""Whole runs under a clock that runs X times as fast (`make slow`): to every deadline they are X times as slow."""
