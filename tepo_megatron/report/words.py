"""Split token ids and untrusted text into spans that a page can show: no invisible characters, no endless text."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEPT = 6000  # characters kept at each end of a text longer than twice that
# Control characters, marks that change the direction of text, zero-width spaces, lone surrogates. Zero-width joiners are not
# among them: some scripts need them.
_INVISIBLE = re.compile(r"([\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff])")


@dataclass(frozen=True)
class TextSpan:
    """A piece of text of one kind."""

    # "prompt"; "response" (chosen by the policy); "context" (text that something else inserted into the response); "special" (a
    # token that is not text); "control" (the name of an invisible character); "cut" (how much was left out); or "text"
    kind: str
    text: str


def of_text(text: str, kind: str) -> list[TextSpan]:
    """Return `text` in pieces, with invisible characters replaced by their names."""
    parts = _INVISIBLE.split(text)
    pieces = [TextSpan("control", f"U+{ord(p):04X}") if i % 2 else TextSpan(kind, p) for i, p in enumerate(parts)]
    return [piece for piece in pieces if piece.text]


def of_tokens(
    token_ids: Sequence[int], response_mask: Sequence[bool], tokenizer: "PreTrainedTokenizerBase | None"
) -> tuple[list[TextSpan], list[TextSpan]]:
    """Return (prompt, what came after it) of one sequence in pieces. Without a tokenizer the pieces hold the ids."""
    start = list(response_mask).index(True) if any(response_mask) else len(token_ids)
    marks = [("prompt" if i < start else "response" if chosen else "context") for i, chosen in enumerate(response_mask)]
    pieces: list[list[TextSpan]] = [[], []]
    for (kind, special), group in itertools.groupby(
        zip(token_ids, marks, strict=True), key=lambda pair: (pair[1], _is_special(pair[0], tokenizer))
    ):
        ids = [token for token, _ in group]
        if special and tokenizer is not None:
            spans = [TextSpan("special", str(tokenizer.convert_ids_to_tokens(token) or f"token {token}")) for token in ids]
        elif tokenizer is not None:
            text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            spans = of_text(str(text), kind)
        else:
            spans = [TextSpan(kind, " ".join(map(str, ids)) + " ")]
        pieces[kind != "prompt"] += spans
    return pieces[0], pieces[1]


def shortened(pieces: Sequence[TextSpan], kept: int = KEPT) -> list[TextSpan]:
    """Return the first and last `kept` characters, with a piece between them that says how many were left out."""
    length = sum(len(piece.text) for piece in pieces)
    if length <= 2 * kept:
        return list(pieces)
    head = list(_first(pieces, kept))
    tail = [TextSpan(p.kind, p.text[::-1]) for p in _first(((TextSpan(p.kind, p.text[::-1])) for p in reversed(pieces)), kept)]
    return [*head, TextSpan("cut", f"{length - 2 * kept:,} characters left out"), *reversed(tail)]


def _first(pieces: Iterable[TextSpan], limit: int) -> Iterator[TextSpan]:
    for piece in pieces:
        if limit <= 0:
            return
        yield TextSpan(piece.kind, piece.text[:limit])
        limit -= len(piece.text)


def _is_special(token: int, tokenizer: "PreTrainedTokenizerBase | None") -> bool:
    """Return whether the token is an added token (<|im_end|>, <think>, ...) or an id beyond the vocabulary."""
    if tokenizer is None:
        return False
    return token in tokenizer.added_tokens_decoder or token in tokenizer.all_special_ids or token >= len(tokenizer)
