"""Tools that every layer may use: processes, locks, private folders, HTTP, damaged files. They depend on no other package."""
