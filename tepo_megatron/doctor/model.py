"""Check the model as the run reads it: conversion of its weights, tokenizer, chat template."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tepo_megatron.config import DataConfig
from tepo_megatron.data import load_tokenizer, stop_tokens
from tepo_megatron.doctor.findings import Finding
from tepo_megatron.weights.families import find_family, read_config
from tepo_megatron.weights.fit import check_tensors
from tepo_megatron.weights.hf_io import HfReader
from tepo_megatron.weights.ops import Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tepo_megatron.weights.families import WeightMapping

QUESTION, ANSWER = "What is 1 + 1?", "2"


def conversion(model_path: str, tp: int) -> Iterator[Finding]:
    """Check that HF -> shards of parallel.tp ranks -> HF preserves every bit, with one parameter in memory at a time.

    Checked are the parameters outside of layers, and the first and the last layer with their first and last expert.
    """
    config = read_config(model_path)
    family = find_family(config)
    arch, reader = family.architecture(config), HfReader(model_path)
    expected = family.tensor_names(arch)
    check_tensors(reader, family, arch)
    heads = [arch.num_query_groups, *([arch.linear_attention.key_heads] if arch.linear_attention else [])]
    tp = tp if all(number % tp == 0 for number in heads) else 1  # check_layout refuses any other value
    count, nbytes = 0, 0
    for row in family.rows:
        for names in _ends(row, arch):
            if not set(names) <= expected:  # such as the output layer of tied embeddings
                continue
            tensors = [reader.get(name) for name in names]
            if wrong := _changed(row, names, tensors, arch, tp):
                yield Finding("conversion", "fail", wrong, "the weights do not fit their config.json; copy the model again")
                return
            count, nbytes = count + len(names), nbytes + sum(t.nbytes for t in tensors)
    said = f"{count} of {len(expected)} tensors ({nbytes / 1e6:.0f} MB) are what they were after HF -> tp={tp} -> HF"
    yield Finding("conversion", "pass", said)


def _ends(row: "WeightMapping", arch: Architecture) -> list[tuple[str, ...]]:
    """Return a row's first and last instance; with experts the first and last expert of the first and last layer."""
    instances = list(row.instances(arch))
    of_layer = arch.experts.number if arch.experts is not None and "{expert}" in row.megatron else 1
    kept = {0, of_layer - 1, len(instances) - of_layer, len(instances) - 1} if instances else set()
    return [instances[i] for i in sorted(kept)]


def _changed(row: "WeightMapping", names: Sequence[str], tensors: Sequence[Tensor], arch: Architecture, tp: int) -> str:
    """Return what is wrong with the round trip; empty if nothing is."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        return f"{', '.join(names)} hold values that are not finite"
    try:
        back = row.op.unshard([row.op.shard(tensors, arch, tp, rank) for rank in range(tp)], arch)
    except (RuntimeError, ValueError) as e:
        return f"{', '.join(names)} do not have the shapes of config.json: {e}"
    for name, one, other in zip(names, tensors, back, strict=True):
        same = one.shape == other.shape and one.dtype == other.dtype
        if not same or not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
            return f"{name} is another tensor after HF -> tp={tp} -> HF"
    return ""


def tokenizer(model_path: str, data: DataConfig, stop_token_ids: Sequence[int]) -> Iterator[Finding]:
    """Check that responses can end, and that the chat template works as the config assumes."""
    found, config = load_tokenizer(model_path), read_config(model_path)
    rows = find_family(config).architecture(config).vocab_size
    stops = stop_tokens(model_path, found, stop_token_ids)
    yield _vocabulary(found, rows)
    yield _stops(found, stops)
    if found.chat_template is not None:
        yield from _template(data.template_kwargs, found, stops)
    elif data.as_chat:
        yield Finding(
            "chat template", "fail", "data.as_chat=true, and the tokenizer has none", "use a chat model's tokenizer, or strings"
        )


def _vocabulary(found: "PreTrainedTokenizerBase", rows: int) -> Finding:
    said = f"{len(found)} tokens, {rows} rows of the embedding"
    if len(found) > rows:
        return Finding("vocabulary", "fail", said, "use the tokenizer that belongs to the model")
    return Finding("vocabulary", "pass", said)


def _stops(found: "PreTrainedTokenizerBase", stops: Sequence[int]) -> Finding:
    """Check the stop tokens. A pad token as one of several is harmless, because responses are not padded here."""
    named = ", ".join(f"{found.convert_ids_to_tokens(token)!r} ({token})" for token in stops)
    fix = "name the tokens that end a response in rollout.stop_token_ids"
    if not stops:
        return Finding("stop tokens", "fail", "none: every response would be cut off at rollout.max_response_tokens", fix)
    if wrong := [token for token in stops if found.convert_ids_to_tokens(token) is None]:
        return Finding("stop tokens", "fail", f"{wrong} are no tokens of the tokenizer", "correct eos_token_id in config.json")
    if set(stops) == {found.pad_token_id} and found.eos_token_id is None:
        return Finding("stop tokens", "warn", f"{named}, the pad token, and there is no end-of-sequence token", fix)
    return Finding("stop tokens", "pass", f"{named} end a response")


def _template(own: Mapping[str, Any], found: "PreTrainedTokenizerBase", stops: Sequence[int]) -> Iterator[Finding]:
    chat = [{"role": "user", "content": QUESTION}]

    def text(messages: Sequence[dict[str, str]] = chat, prompt: bool = True, **kwargs: object) -> str:
        return str(found.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt, **kwargs))

    asked = text(**own)
    silent = text(prompt=False, **own)
    if not asked.startswith(silent) or asked == silent:
        said = "it adds no generation prompt: the model would continue the user's message"
        yield Finding("chat template", "warn", said, "use a template with add_generation_prompt")
        return
    by_template = list(found.apply_chat_template(list(chat), add_generation_prompt=True, return_dict=False, **own))
    if by_template != list(found(asked, add_special_tokens=False).input_ids):
        said = "its tokens are not those of its text"
        yield Finding("chat template", "warn", said, "see whether its special tokens are in the tokenizer")
        return
    for name, value in own.items():
        if isinstance(value, bool) and asked == text(**{**own, name: not value}):
            said = f"data.template_kwargs.{name} changes nothing of a prompt"
            yield Finding("chat template", "warn", said, "remove it, or use the template that knows it")
    answered = text([*chat, {"role": "assistant", "content": ANSWER}], prompt=False, **own)
    ending = list(found(answered.rpartition(ANSWER)[2], add_special_tokens=False).input_ids)
    if ending and not set(ending) & set(stops):
        token = found.convert_ids_to_tokens(ending[0])
        said = f"it ends an answer with {token!r} ({ending[0]}), which does not end a response here"
        yield Finding("chat template", "warn", said, f"if prompts are chats: rollout.stop_token_ids: [{ending[0]}]")
        return
    yield Finding("chat template", "pass", f"a question ends with {asked[len(silent) :]!r}")
