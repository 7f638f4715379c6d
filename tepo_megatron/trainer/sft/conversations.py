"""Turn rows of a dataset into conversations: token ids, and which of them are learned.

The tokens are those that template and tokenizer give for the whole conversation; a token is learned if it begins in a learned
turn, up to the turn's first stop token.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tepo_megatron.base.errors import DataError
from tepo_megatron.config import DataConfig, SftConfig
from tepo_megatron.data import stop_tokens
from tepo_megatron.data.readers import RowReader
from tepo_megatron.data.rendering import ChatRenderer, TokenSpans
from tepo_megatron.data.report import RowFaults
from tepo_megatron.data.sources import DatasetSource
from tepo_megatron.trainer.sft.rows import Chat, read_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_THOUGHTS_AND_CALLS = ("reasoning_content", "reasoning", "thinking", "tool_calls")


@dataclass(frozen=True)
class Demonstration:
    """One row to learn from."""

    token_ids_L: Tensor  # int64
    learned_mask_L: Tensor  # bool, True where the token is learned; False at the first token


@dataclass(frozen=True)
class LoadedConversations:
    """The conversations of one dataset."""

    conversations: list[Demonstration]  # in the order of the dataset
    line: str  # what was read and dropped, for the log


def load_all(
    cfg: SftConfig, data: DataConfig, model_path: str, tokenizer: "PreTrainedTokenizerBase", stop_token_ids: Sequence[int]
) -> list[LoadedConversations]:
    """Load the conversations to learn from, and the held-out ones if there are any. Raises as `load_conversations`."""
    assert cfg.data is not None, "the command refuses it"
    stops = stop_tokens(model_path, tokenizer, stop_token_ids)
    return [
        load_conversations(source, cfg, tokenizer, stops, data.template_kwargs, data.skip_bad_rows)
        for source in (cfg.data, cfg.eval)
        if source is not None
    ]


def load_conversations(
    source: str,
    cfg: SftConfig,
    tokenizer: "PreTrainedTokenizerBase",
    stop_ids: Collection[int],
    template_kwargs: Mapping[str, Any],
    skip_bad_rows: bool,
) -> LoadedConversations:
    """Load a dataset as conversations. Raises DataError if a row cannot be used (the message has file, row and the fix), or
    none is left.
    """
    place = DatasetSource.of(source)
    reader = place.reader()
    faults = RowFaults(skip_bad_rows)
    rows = place.slice(list(_rows(reader, cfg, faults)))
    encoder = _ConversationEncoder(tokenizer, stop_ids, template_kwargs, cfg.train_on)
    conversations: list[Demonstration] = []
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
            conversations.append(conversation)
    if not conversations:
        what = [f"{too_long} are longer than sft.max_tokens={cfg.max_tokens}; raise it"] if too_long else []
        what += [f"{faults.count} cannot be used ({faults.first[0]})"] if faults.count else []
        raise DataError(f"{source}: no conversation left: {', and '.join(what) or 'it has no rows'}")
    learned = sum(int(c.learned_mask_L.sum()) for c in conversations)
    dropped = [f"{too_long} longer than sft.max_tokens={cfg.max_tokens}"] if too_long else []
    dropped += [f"{faults.count} that cannot be used ({faults.first[0]})"] if faults.count else []
    line = f"{source}: {len(conversations)} conversations, {learned} tokens to learn; dropped: {', '.join(dropped) or 'none'}"
    return LoadedConversations(conversations, line)


def _rows(reader: RowReader, cfg: SftConfig, faults: RowFaults) -> Iterator[tuple[str, Chat | tuple[str, str]]]:
    """Yield (place, chat or prompt and response) of each row."""
    for place, row in reader.rows((), passing_repeats=False):
        where = reader.where(place)
        if isinstance(row, DataError):
            faults.add(str(row))
            continue
        try:
            yield where, read_row(reader.whole(place), cfg)
        except DataError as e:
            faults.add(f"{where}: {e}")


class _ConversationEncoder:
    """Tokenizes conversations as a whole, and marks the learned tokens."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", stop_ids: Collection[int], template_kwargs: Mapping[str, Any], train_on: str
    ) -> None:
        self._tokenizer, self._stop_ids, self._train_on = tokenizer, set(stop_ids), train_on
        self._renderer = ChatRenderer(tokenizer, template_kwargs)

    def encode(self, value: Chat | tuple[str, str]) -> Demonstration:
        """Return the tokens of a conversation. Raise DataError if it is not known which of them are learned."""
        if isinstance(value, Chat):
            text, turns = self._rendered(value)
            tokens = self._renderer.encode(text)
        else:
            text = "".join(value)
            turns, tokens = [(len(value[0]), len(text))], self._renderer.encode(text)
        ids, mask = list(tokens.token_ids), [False] * len(tokens.token_ids)
        for begin, end in turns:
            self._refuse_joined(text, begin, tokens)
            turn = [i for i, start in enumerate(tokens.starts) if begin <= start < end]
            stop = next((n + 1 for n, i in enumerate(turn) if ids[i] in self._stop_ids), None)
            for i in turn[:stop]:
                mask[i] = True
            if stop is None and isinstance(value, Chat):
                raise DataError(
                    "the chat template ends the assistant's turn with none of the model's stop tokens (config.json), so the "
                    "model would not learn to stop; name the token that ends a turn in rollout.stop_token_ids"
                )
            if stop is None:
                ids, mask = [*ids, int(self._tokenizer.eos_token_id)], [*mask, True]
        if not any(mask):
            raise DataError("has no token to learn; it needs a message of the assistant, or a response")
        if mask[0]:
            raise DataError("begins with a token to learn, which nothing precedes; give it a prompt")
        return Demonstration(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask))

    def _refuse_joined(self, text: str, begin: int, tokens: TokenSpans) -> None:
        """Raise DataError if a token holds the end of the prompt and the beginning of the turn, but for white space."""
        for start, end in zip(tokens.starts, tokens.ends, strict=True):
            if start < begin < end and text[begin:end].strip():
                raise DataError(
                    f"the tokenizer joins the end of the prompt and the beginning of the turn to one token, "
                    f"{text[start:end]!r}, which would not be learned; let the prompt, or the template's generation prompt, "
                    "end without a space"
                )

    def _rendered(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Return a chat as text up to its last learned turn, and where each learned turn begins and ends."""
        messages, template = chat.messages, self._tokenizer.chat_template
        if template is None:
            raise DataError("is a chat, and the tokenizer has no chat template; use a chat model's tokenizer, or strings")
        shown = self._tokenizer.get_chat_template(tools=list(chat.tools) or None)
        keys = {key for message in messages for key in _THOUGHTS_AND_CALLS if message.get(key)} | (
            {"tools"} if chat.tools else set()
        )
        if unknown := sorted(key for key in keys if key not in shown):
            raise DataError(
                f"has {unknown[0]!r}, which the chat template does not write; use a template that does, or remove it"
            )
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or turns[0] == 0:
            raise DataError("needs a message of the assistant that follows another one")
        learned = [i for i in (turns[-1:] if self._train_on == "last" else turns) if chat.learned[i]]
        if not learned:
            raise DataError("has no turn to learn: those of the assistant are marked as not learned")
        whole = self._render(chat, learned[-1] + 1, False)
        places = []
        for turn in learned:
            before, after = self._render(chat, turn, True), self._render(chat, turn + 1, False)
            if not after.startswith(before):
                raise DataError(self._other_beginning(before, after, self._render(chat, turn, False), turn))
            if not whole.startswith(after):
                fix = "set sft.train_on=last" if chat.learned[turns[-1]] else "mark it with weight: 0"
                raise DataError(
                    f"the chat template writes message {turn} in another way once more messages follow, so what a turn "
                    f"consists of is not known; {fix}"
                )
            places.append((len(before), len(after)))
        return whole, places

    @staticmethod
    def _other_beginning(before: str, after: str, silent: str, turn: int) -> str:
        """Return why a turn does not begin as the model is prompted."""
        if not after.startswith(silent):
            return (
                f"the chat template writes what comes before message {turn} in another way once that follows, so what the turn "
                "consists of is not known; use another template"
            )
        return (
            f"the chat template's generation prompt {before[len(silent) :]!r} is no beginning of message {turn} as written, "
            f"{after[len(silent) :]!r:.80}, so the model would learn other tokens than it samples; use a template whose turns "
            "begin with its generation prompt"
        )

    def _render(self, chat: Chat, count: int, prompted: bool) -> str:
        try:
            return self._renderer.render(chat.messages[:count], tools=chat.tools, add_generation_prompt=prompted)
        except Exception as e:  # a template may raise any exception
            raise DataError(f"is refused by the chat template ({' '.join(str(e).split())}); correct the row") from None
