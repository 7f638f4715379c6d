"""Turn rows of a dataset into conversations: token ids, and which of them are learned.

A turn is tokenized alone, after the tokens of what comes before it, as in sampling: the prompt's tokens are those that a server
gets, and the tokens of a turn are those that the policy would choose. A learned turn ends with a stop token.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tepo_megatron.config import SftConfig
from tepo_megatron.data.readers import Row, RowReader, describe_value
from tepo_megatron.data.report import RowFaults
from tepo_megatron.data.schemas import Messages, has, is_chat, value_at
from tepo_megatron.data.sources import DatasetSource
from tepo_megatron.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHATS = ("messages", "conversations", "conversation", "prompt")
_PAIRS = tuple(
    (prompt, response)
    for prompt in ("prompt", "instruction", "question", "problem", "input", "query")
    for response in ("response", "completion", "output", "answer", "solution")
)
_SHARE_GPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}


@dataclass(frozen=True)
class Demonstration:
    """One row to learn from.

    Attributes:
        token_ids_L: int64.
        learned_mask_L: bool, True where the token is learned; False at the first token.
    """

    token_ids_L: Tensor
    learned_mask_L: Tensor


@dataclass(frozen=True)
class LoadedConversations:
    """The conversations of one dataset.

    Attributes:
        conversations: In the order of the dataset.
        line: What was read and dropped, for the log.
    """

    conversations: list[Demonstration]
    line: str


def load_conversations(
    source: str,
    cfg: SftConfig,
    tokenizer: "PreTrainedTokenizerBase",
    stop_ids: Collection[int],
    template_kwargs: Mapping[str, Any],
    skip_bad_rows: bool,
) -> LoadedConversations:
    """Load a dataset as conversations.

    Raises:
        DataError: A row cannot be used (the message has file, row and the fix), or none is left.
    """
    place = DatasetSource.of(source)
    reader = place.reader()
    faults = RowFaults(skip_bad_rows)
    rows = place.slice(list(_rows(reader, cfg, faults)))
    encoder = _TurnEncoder(tokenizer, stop_ids, template_kwargs, cfg.train_on)
    found: list[Demonstration] = []
    too_long = 0
    for where, value in rows:
        try:
            conversation = encoder.encode(value)
        except DataError as e:
            faults.add(f"{where}: {e}")
            continue
        if conversation.token_ids_L.numel() > cfg.max_tokens:
            too_long += 1
        else:
            found.append(conversation)
    if not found:
        what = f"all {too_long} are longer than sft.max_tokens={cfg.max_tokens}; raise it" if too_long else "it has no rows"
        raise DataError(f"{source}: no conversation left: {what}")
    learned = sum(int(c.learned_mask_L.sum()) for c in found)
    dropped = [f"{too_long} longer than sft.max_tokens={cfg.max_tokens}"] if too_long else []
    dropped += [f"{faults.count} that cannot be used ({faults.first[0]})"] if faults.count else []
    line = f"{source}: {len(found)} conversations, {learned} tokens to learn; dropped: {', '.join(dropped) or 'none'}"
    return LoadedConversations(found, line)


def _rows(reader: RowReader, cfg: SftConfig, faults: RowFaults) -> Iterator[tuple[str, Messages | tuple[str, str]]]:
    """Yield (place, chat or prompt and response) of each row."""
    for place, row in reader.rows((), passing_repeats=False):
        where = reader.where(place)
        if isinstance(row, DataError):
            faults.add(str(row))
            continue
        try:
            yield where, _value(reader.whole(place), cfg)
        except DataError as e:
            faults.add(f"{where}: {e}")


def _value(row: Row, cfg: SftConfig) -> Messages | tuple[str, str]:
    """Return the chat of a row, or its prompt and response."""
    if cfg.response_key is None:
        for key in (cfg.prompt_key,) if cfg.prompt_key is not None else _CHATS:
            if not has(row, key) or not isinstance(value_at(row, key), list):
                continue
            chat = _chat(value_at(row, key), key)
            if key != "prompt" or chat[-1]["role"] == "assistant":  # otherwise the response is in a column of its own
                return chat
    pairs = [(cfg.prompt_key or prompt, cfg.response_key or response) for prompt, response in _PAIRS]
    for prompt_key, response_key in pairs:
        if prompt_key != response_key and has(row, prompt_key) and has(row, response_key):
            prompt, response = value_at(row, prompt_key), value_at(row, response_key)
            if prompt_key == "instruction" and isinstance(row.get("input"), str) and row["input"]:
                prompt = f"{prompt}\n\n{row['input']}"
            if isinstance(prompt, list) and isinstance(response, str):
                return [*_chat(prompt, prompt_key), {"role": "assistant", "content": response}]
            if not isinstance(prompt, str) or not isinstance(response, str):
                what = describe_value(response if isinstance(prompt, str) else prompt)
                raise DataError(f"{prompt_key!r} and {response_key!r} must be strings, not {what}")
            return prompt, response
    found = ", ".join(map(repr, row)) or "none"
    raise DataError(
        f"no chat and no prompt with a response in these keys: {found}; name them with sft.prompt_key and sft.response_key"
    )


def _chat(value: Any, key: str) -> Messages:
    """Return messages with role and content; ShareGPT's `from` and `value` are renamed."""
    if isinstance(value, list) and value and all(isinstance(m, dict) and {"from", "value"} <= m.keys() for m in value):
        unknown = sorted({str(m["from"]) for m in value} - _SHARE_GPT.keys())
        if unknown:
            raise DataError(f"{key!r} has a message from {unknown[0]!r}; known are {', '.join(_SHARE_GPT)}")
        value = [{"role": _SHARE_GPT[m["from"]], "content": m["value"]} for m in value]
    if not is_chat(value):
        raise DataError(f"{key!r} must be a list of messages with string 'role' and 'content', not {describe_value(value)}")
    return [{k: v for k, v in message.items() if v is not None} for message in value]


class _TurnEncoder:
    """Tokenizes conversations turn by turn."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", stop_ids: Collection[int], template_kwargs: Mapping[str, Any], train_on: str
    ) -> None:
        self._tokenizer, self._stop_ids, self._kwargs, self._train_on = tokenizer, set(stop_ids), template_kwargs, train_on

    def encode(self, value: Messages | tuple[str, str]) -> Demonstration:
        """Return the tokens of a conversation. Raise DataError if the chat template does not let turns be distinguished."""
        pieces = self._pieces(value) if isinstance(value, list) else [(value[0], False), (value[1], True)]
        ids: list[int] = []
        mask: list[bool] = []
        for text, learned in pieces:
            more = list(self._tokenizer(text, add_special_tokens=False).input_ids) if text else []
            if learned:
                more, stop = self._until_stop(more, is_chat=isinstance(value, list))
                mask += [i < stop for i in range(len(more))]
            else:
                mask += [False] * len(more)
            ids += more
        if not any(mask):
            raise DataError("has no token to learn; it needs a message of the assistant, or a response")
        if mask[0]:
            raise DataError("begins with a token to learn, which nothing precedes; give it a prompt")
        return Demonstration(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask))

    def _until_stop(self, ids: list[int], is_chat: bool) -> tuple[list[int], int]:
        """Return the tokens of a turn and the number of those that are learned: up to the first stop token."""
        stop = next((i + 1 for i, token in enumerate(ids) if token in self._stop_ids), None)
        if stop is not None:
            return ids, stop
        if is_chat:
            raise DataError(
                "the chat template ends the assistant's turn with none of the model's stop tokens (config.json), so the model "
                "would not learn to stop; name the token that ends a turn in rollout.stop_token_ids"
            )
        return [*ids, int(self._tokenizer.eos_token_id)], len(ids) + 1

    def _pieces(self, messages: Messages) -> list[tuple[str, bool]]:
        """Return the text of a chat in pieces, and whether each is learned."""
        if self._tokenizer.chat_template is None:
            raise DataError("is a chat, and the tokenizer has no chat template; use a chat model's tokenizer, or strings")
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or turns[0] == 0:
            raise DataError("needs a message of the assistant that follows another one")
        turns = turns[-1:] if self._train_on == "last" else turns
        pieces: list[tuple[str, bool]] = []
        rendered = ""
        for turn in turns:
            before, after = self._render(messages[:turn], True), self._render(messages[: turn + 1], False)
            if not before.startswith(rendered) or not after.startswith(before):
                raise DataError(
                    f"the chat template writes message {turn} in another way once more messages follow, so what a turn "
                    "consists of is not known; set sft.train_on=last"
                )
            pieces += [(before[len(rendered) :], False), (after[len(before) :], True)]
            rendered = after
        return pieces

    def _render(self, messages: Sequence[Mapping[str, Any]], prompted: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=prompted, **dict(self._kwargs)
                )
            )
        except Exception as e:  # a template may raise any exception
            raise DataError(f"is refused by the chat template ({' '.join(str(e).split())}); correct the row") from None
