"""Turn prompts into token ids, by the tokenizer's chat template or, for plain strings, directly."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.config import DataConfig
from tepo_megatron.data.rendering import ChatRenderer
from tepo_megatron.data.schemas import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
