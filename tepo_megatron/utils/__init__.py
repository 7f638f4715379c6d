"""What every layer may use: processes, locks, private folders, HTTP, damaged files. Nothing here knows what a run trains."""
