"""The tokenizer of a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_megatron.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# any one of them holds the vocabulary: fast tokenizers, SentencePiece, byte-level BPE
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(model_path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that lies in `model_path`; nothing is downloaded.

    Raises CheckpointError naming the directory, the missing or unreadable file and the mend.
    """
    from transformers import AutoTokenizer  # seconds, which only the rank that has the prompts needs to spend

    directory = Path(model_path)
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: no such directory; model.path must name a local Hugging Face model "
            "(`hf download REPO --local-dir DIR` fetches one)"
        )
    if not any((directory / name).is_file() for name in _VOCABULARY_FILES):
        raise CheckpointError(
            f"{directory}: no tokenizer here ({', '.join(_VOCABULARY_FILES)} are all missing); "
            "copy the tokenizer files of the base model into it"
        )
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as e:  # transformers raises whatever its parsers raise, a bare Exception among them
        raise CheckpointError(
            f"{directory}: the tokenizer files cannot be read ({type(e).__name__}: {e}); copy them anew from the base model"
        ) from e


def stop_tokens(model_path: str | Path, tokenizer: PreTrainedTokenizerBase, further: Sequence[int] = ()) -> tuple[int, ...]:
    """The tokens that end a response: the model's end-of-sequence tokens (config.json), the tokenizer's, and `further`.

    generation_config.json has no say: it is the model author's advice for chatting. Raises ConfigError for a `further` one that
    is no token of the model.
    """
    config = json.loads((Path(model_path) / "config.json").read_text())
    of_model = config.get("eos_token_id")
    stops = {*further, *(of_model if isinstance(of_model, list) else [of_model]), tokenizer.eos_token_id} - {None}
    wrong = [token for token in further if token >= config["vocab_size"]]
    if wrong:
        raise ConfigError(
            f"rollout.stop_token_ids={list(further)}: {wrong[0]} is no token of {model_path}, which has {config['vocab_size']}"
        )
    return tuple(sorted(stops))
