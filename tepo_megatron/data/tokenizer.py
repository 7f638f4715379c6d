"""The tokenizer of a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tepo_megatron.errors import CheckpointError

# any one of them holds the vocabulary: fast tokenizers, SentencePiece, byte-level BPE
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(model_path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that lies in `model_path`; nothing is downloaded.

    Raises CheckpointError naming the directory, the missing or unreadable file and the mend.
    """
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
