"""Check that the ids of a tokenizer lie in the vocabulary."""

import json
from pathlib import Path

from tepo_megatron.base.errors import CheckpointError, ConversionError


def check_tokenizer(model_path: str | Path, vocab_size: int) -> None:
    """Check that every id of tokenizer.json has a row in the embedding. Do nothing without a tokenizer.json.

    Raises:
        ConversionError: an id is too large; the message names the token with the largest id.
        CheckpointError: tokenizer.json cannot be read.
    """
    path = Path(model_path) / "tokenizer.json"
    if not path.exists():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocab = content["model"].get("vocab", {})
        # a unigram model lists [token, score] pairs, the others map tokens to ids
        ids = vocab if isinstance(vocab, dict) else {str(entry[0]): i for i, entry in enumerate(vocab)}
        ids = {**ids, **{t["content"]: t["id"] for t in content.get("added_tokens") or ()}}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path}: not a tokenizer ({e!r}); copy the file again") from None
    token = max(ids, key=ids.__getitem__, default=None)
    if token is not None and ids[token] >= vocab_size:
        raise ConversionError(
            f"{path}: token {token!r} has id {ids[token]}, but config.json's vocab_size={vocab_size} leaves the embedding no "
            "row for it; use the tokenizer that belongs to the model, or resize the embedding"
        )
