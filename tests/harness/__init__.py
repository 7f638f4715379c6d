"""Long experiments that resume across sessions: each is a command that appends one JSON line per trial."""
