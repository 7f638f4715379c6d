"""The stop tokens that the files of a model name."""

from collections.abc import Mapping
from typing import Any


def eos_token_ids(hf_config: Mapping[str, Any]) -> set[int]:
    """Return the end-of-sequence tokens of a config.json or generation_config.json."""
    text = hf_config.get("text_config") or {}  # of a model that also reads images
    values = (part.get("eos_token_id") for part in (hf_config, text))
    return {token for value in values for token in (value if isinstance(value, list) else [value]) if token is not None}
