"""Prompts as tokens: the tokenizer's chat template, or strings as they stand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import DataConfig
from tepo_megatron.data.schemas import Messages
from tepo_megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Encoder:
    """Tokenizes prompts as `data.as_chat`, `system_prompt`, `instruction` and `template_kwargs` say.

    A string is tokenized as it stands, without special tokens; a chat by the template, with the prompt for generation. Raises
    ConfigError for a key of `template_kwargs` that the chat template never mentions: it would do nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig) -> None:
        self._tokenizer, self._cfg = tokenizer, cfg
        for name in cfg.template_kwargs if tokenizer.chat_template is not None else ():
            if not re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template()):
                raise ConfigError(f"data.template_kwargs.{name}: the chat template of the tokenizer has no {name}; remove it")

    def encode(self, prompts: Sequence[str | Messages]) -> list[tuple[int, ...] | DataError]:
        """The tokens of each prompt, or what is wrong with it. Raises ConfigError for strings that are asked to be chats."""
        laid_out = [self._laid_out(prompt) for prompt in prompts]
        results: list[tuple[int, ...] | DataError] = [DataError("the tokenizer was not asked")] * len(prompts)
        for chats in (False, True):
            places = [i for i, prompt in enumerate(laid_out) if isinstance(prompt, list) is chats]
            for place, result in zip(places, self._tokens([laid_out[i] for i in places], chats), strict=True):
                results[place] = result
        return results

    def _laid_out(self, prompt: str | Messages) -> str | Messages:
        """With instruction and system prompt."""
        cfg = self._cfg
        ending = "" if cfg.instruction is None else f"\n\n{cfg.instruction}"
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
        """All at once; one by one where that fails, to tell which."""
        if not prompts:
            return []
        if chats and self._tokenizer.chat_template is None:
            return [
                DataError("has chat messages but the tokenizer has no chat template; use a chat model's tokenizer or strings")
            ] * len(prompts)
        try:
            ids = self._ask(prompts, chats)
        except Exception as e:  # templates raise what their authors like; lone surrogates are a TypeError
            if len(prompts) == 1:
                return [DataError(f"is refused by the tokenizer ({' '.join(str(e).split())}); mend the prompt")]
            return [self._tokens([prompt], chats)[0] for prompt in prompts]
        return [tuple(row) if row else DataError("has no tokens; fill it in or remove the row") for row in ids]

    def _ask(self, prompts: list[Any], chats: bool) -> list[list[int]]:
        tokenizer = self._tokenizer
        if not chats:
            return list(tokenizer(prompts, add_special_tokens=False).input_ids)
        kwargs = self._cfg.template_kwargs
        return list(tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False, **kwargs))
