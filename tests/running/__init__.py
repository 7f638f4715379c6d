"""Limits of time, several streams at once, and a second chance for the tests of servers and of whole runs."""
