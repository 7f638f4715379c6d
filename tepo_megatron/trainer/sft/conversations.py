"""Turn rows of a dataset into conversations: token ids, and which of them are learned.

A column or key that changes what is learned is honoured, or refused by its name. The tokens are those that template and
tokenizer give for the whole conversation; a token is learned if it begins in a learned turn, up to the turn's first stop token.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tepo_megatron.base.errors import DataError
from tepo_megatron.config import DataConfig, SftConfig
from tepo_megatron.data import stop_tokens
from tepo_megatron.data.readers import Row, RowReader, describe_value
from tepo_megatron.data.rendering import ChatRenderer, TokenSpans
from tepo_megatron.data.rows import RowFaults
from tepo_megatron.data.schemas import Messages, has, is_chat, value_at
from tepo_megatron.data.sources import DatasetSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHATS = ("messages", "conversations", "conversation", "prompt")
_PAIRS = tuple(
    (prompt, response)
    for prompt in ("prompt", "instruction", "question", "problem", "input", "query")
    for response in ("response", "completion", "output", "answer", "solution")
)
_SHARE_GPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}
# columns that would be part of the prompt, or of what its template gets
_OF_PROMPT = ("history", "functions", "documents", "chat_template_kwargs", "images", "videos", "audios")
_SWITCHES = ("weight", "train", "training", "loss", "loss_mask")  # keys of a turn that say whether it is learned
_PARTIAL = ("train_detail", "prefix")  # keys of a turn of which a part is learned
_THOUGHTS_AND_CALLS = ("reasoning_content", "reasoning", "thinking", "tool_calls")


@dataclass(frozen=True)
class Chat:
    """A conversation in messages."""

    messages: Messages
    learned: tuple[bool, ...]  # for each message, whether its turn may be learned
    tools: tuple[Any, ...] = ()  # the tools that the template shows


def read_row(row: Row, cfg: SftConfig) -> Chat | tuple[str, str]:
    """Return the chat of a row, or its prompt and response. Raises DataError for a row that has neither, or that says more."""
    for key in _OF_PROMPT:
        if row.get(key):
            raise DataError(f"has {key!r}, which is not read; write it into the messages, or remove it")
    conversation = _chat_of(row, cfg) or _pair_of(row, cfg)
    system, tools = row.get("system"), _tools(row.get("tools"))
    if isinstance(conversation, tuple):
        unread = [key for key in ("system", "tools") if row.get(key)]
        if row.get("context") and cfg.prompt_key is None:
            unread.append("context")
        if unread:
            raise DataError(f"has {unread[0]!r}, and its prompt is a string, which is learned from as it is; write a chat")
        return conversation
    messages, learned = conversation.messages, conversation.learned
    if system:
        if not isinstance(system, str):
            raise DataError(f"'system' must be a string, not {describe_value(system)}")
        if messages[0]["role"] != "system":
            messages, learned = [{"role": "system", "content": system}, *messages], (False, *learned)
        elif messages[0]["content"] != system:
            raise DataError("has 'system' and another message of the system; keep one of them")
    return Chat(messages, learned, tools)


def _chat_of(row: Row, cfg: SftConfig) -> Chat | None:
    if cfg.response_key is not None:
        return None
    for key in (cfg.prompt_key,) if cfg.prompt_key is not None else _CHATS:
        if has(row, key) and isinstance(value_at(row, key), list):
            chat = _chat(value_at(row, key), key)
            # otherwise the response is in a column of its own
            if key != "prompt" or (chat.messages[-1]["role"] == "assistant" and not has(row, "completion")):
                return chat
    return None


def _pair_of(row: Row, cfg: SftConfig) -> Chat | tuple[str, str]:
    pairs = [(cfg.prompt_key or prompt, cfg.response_key or response) for prompt, response in _PAIRS]
    for prompt_key, response_key in pairs:
        if prompt_key == response_key or not (has(row, prompt_key) and has(row, response_key)):
            continue
        prompt, response = value_at(row, prompt_key), value_at(row, response_key)
        if isinstance(prompt, list):
            asked = _chat(prompt, prompt_key)
            if isinstance(response, str):
                answer = Chat([{"role": "assistant", "content": response}], (True,))
            elif isinstance(response, list):
                answer = _chat(response, response_key)
            else:
                raise DataError(f"{response_key!r} must be a string or messages, not {describe_value(response)}")
            return Chat([*asked.messages, *answer.messages], (*(False for _ in asked.messages), *answer.learned))
        if prompt_key == "instruction" and isinstance(row.get("input"), str) and row["input"]:
            prompt = f"{prompt}\n\n{row['input']}"
        if not isinstance(prompt, str) or not isinstance(response, str):
            what = describe_value(response if isinstance(prompt, str) else prompt)
            raise DataError(f"{prompt_key!r} and {response_key!r} must be two strings or two lists of messages, not {what}")
        return prompt, response
    columns = ", ".join(map(repr, row)) or "none"
    raise DataError(
        f"no chat and no prompt with a response in these keys: {columns}; name them with sft.prompt_key and sft.response_key"
    )


def _tools(value: Any) -> tuple[Any, ...]:
    """Return the column `tools`: a list, or its JSON."""
    if not value:
        return ()
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError as e:
        raise DataError(f"'tools' is not valid JSON ({e})") from None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"'tools' must be a list of tools, or the JSON of one, not {describe_value(value)}")
    return tuple(_without_nulls(tools or ()))


def _without_nulls(value: Any) -> Any:
    """Return a value without null keys: parquet writes each key of a struct in all its rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _chat(value: Any, key: str) -> Chat:
    """Return messages with role and content; ShareGPT's `from` and `value` are renamed."""
    if isinstance(value, list) and value and all(isinstance(m, dict) and {"from", "value"} <= m.keys() for m in value):
        unknown = sorted({str(m["from"]) for m in value} - _SHARE_GPT.keys())
        if unknown:
            raise DataError(f"{key!r} has a message from {unknown[0]!r}; known are {', '.join(_SHARE_GPT)}")
        value = [{**m, "role": _SHARE_GPT[m["from"]], "content": m["value"]} for m in value]
        value = [{k: v for k, v in m.items() if k not in ("from", "value")} for m in value]
    if isinstance(value, list):  # OpenAI's form: a message that calls tools has no content
        value = [{**m, "content": ""} if _only_calls(m) else m for m in value]
    if not is_chat(value):
        raise DataError(f"{key!r} must be a list of messages with string 'role' and 'content', not {describe_value(value)}")
    messages = [_without_nulls(message) for message in value]
    learned = tuple(_is_learned(message, i) for i, message in enumerate(messages))
    return Chat([{k: v for k, v in m.items() if k not in _SWITCHES} for m in messages], learned)


def _only_calls(message: Any) -> bool:
    return isinstance(message, dict) and message.get("content") is None and bool(message.get("tool_calls"))


def _is_learned(message: Mapping[str, Any], number: int) -> bool:
    """Return whether a turn may be learned, as its own keys say. Raises DataError for what is neither yes nor no."""
    for key in _PARTIAL:
        if message.get(key):
            raise DataError(f"message {number} has {key!r}, which is not read; mark whole turns with 'weight', or remove it")
    switches = {key: message[key] for key in _SWITCHES if key in message}
    for key, value in switches.items():
        if value not in (0, 1):  # also of booleans and floats
            raise DataError(f"message {number} has {key!r}: {value!r}; a turn is learned (1, true) or not (0, false)")
        if value and message["role"] != "assistant" and key in ("train", "training", "loss"):
            raise DataError(f"message {number} of the {message['role']} has {key!r}: true; only the assistant's are learned")
    return message["role"] == "assistant" and all(switches.values())


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
    sources = [source for source in (cfg.data, cfg.eval) if source is not None]
    return [load_conversations(source, cfg, tokenizer, stops, data.template_kwargs, data.skip_bad_rows) for source in sources]


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
    faults.refuse()
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
