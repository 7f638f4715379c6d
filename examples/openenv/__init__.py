"""The demo's text game as an environment of an OpenEnv server."""
