"""Render a chat whose messages quote texts of others, so that nothing in these texts ends a message or begins one."""

import itertools
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tepo_megatron.config.judge import FIELD
from tepo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class QuotedChat:
    """Messages with fields, as tokens.

    The chat template renders the messages once, with a mark in place of each field, so that a template never sees the texts.
    What is between the marks may hold special tokens. A text is tokenized by itself: where it spells a special or an added
    token, that spelling is cut in two, and each part is ordinary text. Raises ConfigError if the chat template refuses the
    messages, or loses a field.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", messages: Sequence[tuple[str, str]]) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()  # a fast tokenizer is for one thread at a time
        added = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
        spelled = {token for token in added if len(token) > 1 and not token.isspace()}  # a single one has no parts
        # unknown characters have the token that says so, and it controls nothing
        self._added_ids = {tokenizer.convert_tokens_to_ids(token) for token in spelled} - {tokenizer.unk_token_id}
        self._spelled = re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True))) or r"(?!)")
        # ids of what is between two fields, and the name of the field that follows; None after the last
        self._parts: list[tuple[list[int], str | None]] = []
        mark = f"field{secrets.token_hex(8)}x"
        marked = [{"role": role, "content": FIELD.sub(lambda found: f"{mark}{found[1]}x", text)} for role, text in messages]
        pieces = re.split(rf"{mark}(prompt|response|answer)x", self._rendered(marked))
        wanted = sum(len(FIELD.findall(text)) for _, text in messages)
        if len(pieces) != 2 * wanted + 1:
            raise ConfigError(
                f"the chat template of the judge's tokenizer shows {len(pieces) // 2} of the {wanted} fields of the messages; "
                "use another template, or put all fields into question"
            )
        for i in range(0, len(pieces), 2):
            ids = list(tokenizer(pieces[i], add_special_tokens=False).input_ids) if pieces[i] else []
            self._parts.append((ids, pieces[i + 1] if i + 1 < len(pieces) else None))

    def encode(self, fields: Mapping[str, str]) -> list[int]:
        """Return the tokens of the chat with these texts, up to where the model writes."""
        with self._lock:
            texts = {name: self._quoted(text) for name, text in fields.items()}
        return [token for ids, name in self._parts for token in (*ids, *(texts[name] if name is not None else ()))]

    def _quoted(self, text: str) -> list[int]:
        cuts = [0, *(found.start() + 1 for found in self._spelled.finditer(text)), len(text)]
        ids = self._tokenized([text[begin:end] for begin, end in itertools.pairwise(cuts)])
        if self._added_ids.isdisjoint(ids):
            return ids
        # the tokenizer finds them in other spellings, too, such as another case
        return [token for token in self._tokenized(list(text)) if token not in self._added_ids]

    def _tokenized(self, pieces: Sequence[str]) -> list[int]:
        asked = [piece for piece in pieces if piece]
        rows = self._tokenizer(asked, add_special_tokens=False).input_ids if asked else []
        return [token for row in rows for token in row]

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        if self._tokenizer.chat_template is None:
            return "\n\n".join(message["content"] for message in messages)
        try:
            return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except Exception as e:  # a template may raise any exception
            raise ConfigError(f"the judge's chat template refuses the messages ({e}); leave out system") from None
