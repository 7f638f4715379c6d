"""Tools that every layer may use: errors, data objects, files, processes, HTTP, waiting. They depend on no other package."""
