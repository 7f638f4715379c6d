"""Turn prompts into token ids: chats by the tokenizer's chat template, plain strings directly.

What a message spells stays text, also `<|im_end|>`.
"""

import contextlib
import itertools
import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.config import DataConfig
from tepo_megatron.data.schemas import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenSpans:
    """The tokens of a rendering, and where each begins and ends in it, in characters."""

    token_ids: list[int]
    starts: list[int]
    ends: list[int]


class ChatRenderer:
    """The chat template and the tokenizer of a model.

    The template sees a mark where a message or a tool spells a special token. If there is such a mark, the rendering is
    tokenized by a copy of the tokenizer that knows its special tokens under secret names, which are put where the template
    wrote them. So the tokens are those of the whole rendering, and what the marks stand for is text like any other.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._kwargs = tokenizer, dict(template_kwargs or {})
        added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._ids: dict[str, int] = {t: int(tokenizer.convert_tokens_to_ids(t)) for t in tokenizer.all_special_tokens} | added
        self._names = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._mark = f"mark{secrets.token_hex(8)}x"
        self._copy: Any = None  # the copy of the tokenizer, made at its first use

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, tools: Sequence[Any] | None = None
    ) -> str:
        """Return the chat as the template writes it, with marks. It raises what the template raises."""
        chat = [self._marked(with_parsed_arguments(message)) for message in messages]
        kwargs = self._kwargs | ({"tools": self._marked(list(tools))} if tools else {})
        return str(
            self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs)
        )

    def has_special(self, value: Any) -> bool:
        """Return whether a text in a message spells a special token."""
        return bool(self._marked(value) != value)

    def encode(self, rendering: str) -> TokenSpans:
        """Return the tokens of a rendering.

        Raises:
            DataError: The tokenizer does not tell where its tokens are, or has no other token for what a message spells.
        """
        if not self._tokenizer.is_fast:
            raise DataError("needs a fast tokenizer (tokenizer.json), which tells where its tokens are; convert the tokenizer")
        if self._mark not in rendering:
            whole = self._tokenizer(rendering, add_special_tokens=False, return_offsets_mapping=True)
            return TokenSpans(list(whole.input_ids), *([offset[i] for offset in whole.offset_mapping] for i in (0, 1)))
        text, quoted, moves, end = "", [], [(0, 0, True)], 0
        for match in re.finditer(rf"{self._mark}(\d+)x|{self._special.pattern}", rendering):
            text += rendering[end : match.start()]
            moves.append((len(text), match.start(), False))
            if match[1] is not None:
                quoted.append((len(text), len(text) + len(self._names[int(match[1])])))
            text += self._secret(match[0]) if match[1] is None else self._names[int(match[1])]
            end = match.end()
            moves.append((len(text), end, True))
        text += rendering[end:]
        ids, starts, ends = self._encode_literally(text)
        self._refuse_special(ids, starts, ends, quoted)
        begins = [move[0] for move in moves]

        def place(position: int) -> int:
            begin, place, moving = moves[bisect_right(begins, position) - 1]
            return place + (position - begin if moving else 0)

        return TokenSpans(ids, list(map(place, starts)), list(map(place, ends)))

    def _marked(self, value: Any) -> Any:
        """Return a value with a mark in place of each special token that its texts spell."""
        if isinstance(value, str):
            return self._special.sub(lambda match: f"{self._mark}{self._names.index(match[0])}x", value)
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        return [self._marked(item) for item in value] if isinstance(value, list | tuple) else value

    def _secret(self, token: str) -> str:
        return f"<{self._mark}{self._names.index(token)}>"

    def _encode_literally(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """Return ids, starts and ends of a text in which special tokens have their secret names."""
        from tokenizers import AddedToken, Tokenizer

        if self._copy is None:
            copy = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
            copy.no_truncation()
            copy.no_padding()
            like = {token.content: token for token in self._tokenizer.added_tokens_decoder.values()}
            for name in self._names:
                strips = {side: getattr(like.get(name), side, False) for side in ("lstrip", "rstrip")}
                copy.add_tokens([AddedToken(self._secret(name), normalized=False, **strips)])
            copy.encode_special_tokens = True
            self._copy = copy, {copy.token_to_id(self._secret(name)): self._ids[name] for name in self._names}
        copy, original = self._copy
        encoding = copy.encode(text, add_special_tokens=False)
        ids = [original.get(token, token) for token in encoding.ids]
        return ids, [start for start, _ in encoding.offsets], [end for _, end in encoding.offsets]

    def _refuse_special(
        self, ids: Sequence[int], starts: Sequence[int], ends: Sequence[int], quoted: Sequence[tuple[int, int]]
    ) -> None:
        special = set(self._ids.values()) - {self._tokenizer.unk_token_id}
        for (token, start, end), (begin, stop) in itertools.product(zip(ids, starts, ends, strict=True), quoted):
            if token in special and start < stop and end > begin:
                name = self._tokenizer.convert_ids_to_tokens(token)
                raise DataError(f"spells the special token {name!r}, which this tokenizer cannot write as text; take it out")


def with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have their arguments as an object, as chat templates expect, and not as JSON."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError):
                function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function} if function else call)
    return {**message, "tool_calls": calls}


class Encoder:
    """Tokenizes prompts by `data.as_chat`, `data.system_prompt`, `data.instruction` and `data.template_kwargs`.

    A string is tokenized unchanged, and no special tokens are added; those that it spells are special tokens. A chat is
    rendered by the chat template, with the generation prompt appended; special tokens that a message spells are text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", cfg: DataConfig) -> None:
        """Check the configuration against the chat template.

        Raises:
            ConfigError: The chat template never mentions a key of `template_kwargs`, which would then have no effect.
        """
        self._tokenizer, self._cfg, self._renderer = tokenizer, cfg, ChatRenderer(tokenizer, cfg.template_kwargs)
        for name in cfg.template_kwargs if tokenizer.chat_template is not None else ():
            if not re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template()):
                raise ConfigError(f"data.template_kwargs.{name}: the chat template of the tokenizer has no {name}; remove it")

    def encode(self, prompts: Sequence[str | Messages]) -> list[tuple[int, ...] | DataError]:
        """Return the token ids of each prompt, or a DataError (returned, not raised) that says why it has none.

        Raises ConfigError if `system_prompt` or `template_kwargs` is set and a prompt is a string without `data.as_chat`.
        """
        laid_out = [self.laid_out(prompt) for prompt in prompts]
        results: list[tuple[int, ...] | DataError] = [DataError("the tokenizer was not asked")] * len(prompts)
        for chats in (False, True):
            places = [i for i, prompt in enumerate(laid_out) if isinstance(prompt, list) is chats]
            for place, result in zip(places, self._tokens([laid_out[i] for i in places], chats), strict=True):
                results[place] = result
        return results

    def laid_out(self, prompt: str | Messages) -> str | Messages:
        """Return the prompt with the instruction appended and the system prompt inserted; a chat unless it stays a string."""
        cfg = self._cfg
        ending = f"\n\n{cfg.instruction}" if cfg.instruction else ""
        if isinstance(prompt, str):
            if not cfg.as_chat:
                for key in ("system_prompt", "template_kwargs"):
                    if getattr(cfg, key):
                        raise ConfigError(
                            f"data.{key} is of chats, and some prompts are strings; set data.as_chat=true, or remove it"
                        )
                return prompt + ending if prompt else prompt
            prompt = [{"role": "user", "content": prompt}]
        if ending:
            prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + ending}]
        if cfg.system_prompt is not None and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": cfg.system_prompt}, *prompt]
        return prompt

    def _tokens(self, prompts: list[Any], chats: bool) -> list[tuple[int, ...] | DataError]:
        """Tokenize all prompts in one call. If that fails, tokenize them one by one to find the prompts at fault."""
        if not prompts:
            return []
        if chats and self._tokenizer.chat_template is None:
            return [
                DataError("has chat messages but the tokenizer has no chat template; use a chat model's tokenizer or strings")
            ] * len(prompts)
        try:
            ids = self._ask(prompts, chats)
        except Exception as e:  # a template may raise any exception; a lone surrogate raises TypeError
            if len(prompts) == 1:
                return [DataError(f"is refused by the tokenizer ({' '.join(str(e).split())}); correct the prompt")]
            return [self._tokens([prompt], chats)[0] for prompt in prompts]
        return [tuple(row) if row else DataError("has no tokens; fill it in or remove the row") for row in ids]

    def _ask(self, prompts: list[Any], chats: bool) -> list[list[int]]:
        """Call the tokenizer, or its chat template for chats, on all prompts at once."""
        tokenizer = self._tokenizer
        if not chats:
            return list(tokenizer(prompts, add_special_tokens=False).input_ids)
        kwargs, renderer = self._cfg.template_kwargs, self._renderer
        if any(map(renderer.has_special, prompts)):
            return [renderer.encode(renderer.render(prompt, add_generation_prompt=True)).token_ids for prompt in prompts]
        return list(tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False, **kwargs))
