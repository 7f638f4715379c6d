"""The text game of `server.py`, an environment of OpenEnv: docs/agents.md."""

import os

from tepo_megatron.rollout.connectors.openenv import play_openenv

game = play_openenv(
    os.environ.get("OPENENV_URL", "http://127.0.0.1:8000"),
    action=lambda text: {"text": text},
    observation=lambda fields: str(fields["text"]),
    reset=lambda prompt: {"answer": prompt.answer},
    stop="=",
)
