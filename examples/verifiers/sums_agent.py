"""The tasks of `sums.py`, played by verifiers: docs/agents.md."""

import os

from tepo_megatron.rollout.connectors.verifiers import play_verifiers

agent = play_verifiers(os.environ.get("VERIFIERS_URL", "http://127.0.0.1:8001"))
