"""Check what a run reads: the model's weights, tokenizer and chat template, the prompts and their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tepo_megatron.base.types import Prompt, Rollout
from tepo_megatron.config import DataConfig, RewardConfig
from tepo_megatron.data import load_data, load_tokenizer, stop_tokens
from tepo_megatron.doctor.findings import Finding
from tepo_megatron.models.families import find_family, read_config
from tepo_megatron.models.hf_io import HfReader, check_tensors
from tepo_megatron.models.ops import Architecture
from tepo_megatron.rewards.build import build_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tepo_megatron.models.families import WeightMapping


# type of a term, or how the reasoning_gym term finds the answer -> a right response
RIGHT = {"math": r"\boxed{{{}}}", "answer_line": "Answer: {}", "tag": "<answer>{}</answer>", "number": "{}", "whole": "{}"}
GRADED = 64  # number of answers that are graded
NEAR_LIMIT = 0.95  # if the 95% quantile of prompt lengths is above this share of the limit, longer ones were likely dropped


def data(model_path: str, cfg: DataConfig, reward: RewardConfig, prompts_per_step: int) -> Iterator[Finding]:
    """Check both datasets as the run will read them, show the first prompt, and check that the grader accepts right answers."""
    tokenizer = load_tokenizer(model_path)
    loaded = load_data(cfg, reward, tokenizer)
    for line in loaded.log_lines:
        yield Finding("data", "warn" if line.startswith("warning") else "pass", line.removeprefix("warning: "))
    train = [prompt for prompts, _ in loaded.train for prompt in prompts]
    first = train[0]
    yield Finding("first prompt", "pass", f"{len(first.token_ids)} tokens: {tokenizer.decode(first.token_ids)!r:.200}")
    yield lengths(cfg.max_prompt_tokens, sorted(len(prompt.token_ids) for prompt in train))
    if loaded.count < prompts_per_step:
        state = f"{loaded.count} prompts, and a step takes rollout.prompts_per_step={prompts_per_step}"
        yield Finding("prompts", "fail", state, "lower that, or add prompts")
    yield from grading(reward, train[:: max(1, len(train) // GRADED)][:GRADED])


def lengths(limit: int, tokens: Sequence[int]) -> Finding:
    """Check the lengths of the prompts against the limit."""
    middle, most, longest = tokens[len(tokens) // 2], tokens[len(tokens) * 19 // 20], tokens[-1]
    state = f"{middle} tokens in the median, {most} at 95%, {longest} at most; data.max_prompt_tokens={limit}"
    if most > NEAR_LIMIT * limit:
        return Finding("prompt lengths", "warn", state, "the limit cuts into the prompts: raise data.max_prompt_tokens")
    return Finding("prompt lengths", "pass", state)


def grading(cfg: RewardConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Check that a response that consists of the right answer, in the form that the first term reads, is graded as right."""
    verdict = cfg.terms[0]
    form = RIGHT.get(verdict.answer if verdict.type == "reasoning_gym" else verdict.type)
    if form is None:
        yield Finding("grading", "skip", f"{verdict.type} needs more than the answer, so only a run can try it")
        return
    texts = [form.format(prompt.answer) for prompt in prompts]
    with build_reward(replace(cfg, terms=[verdict]), decode=lambda ids: texts[ids[0]]) as reward:
        graded = reward.score([_answered(i, prompt) for i, prompt in enumerate(prompts)])
    wrong = [f"{p.answer!r} ({r.status})" for p, r in zip(prompts, graded, strict=True) if r.score <= 0]
    if wrong:
        shown = ", ".join(wrong[:5]) + (" ..." if len(wrong) > 5 else "")
        yield Finding(
            "grading", "fail" if len(wrong) == len(prompts) else "warn",
            f"{len(wrong)} of {len(prompts)} right answers are not found right: {shown}",
            "fix these answers in the dataset, or take their rows out",
        )  # fmt: skip
    else:
        yield Finding("grading", "pass", f"{len(prompts)} right answers are found right")


def _answered(i: int, prompt: Prompt) -> Rollout:
    return Rollout(
        prompt_id=prompt.id,
        token_ids_L=torch.tensor([0, i]),
        response_mask_L=torch.tensor([False, True]),
        rollout_logprobs_L=torch.zeros(2),
        policy_version=0,
        stop_reason="stop",
        answer=prompt.answer,
        row=prompt.meta,
    )


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
    state = f"{count} of {len(expected)} tensors ({nbytes / 1e6:.0f} MB) are what they were after HF -> tp={tp} -> HF"
    yield Finding("conversion", "pass", state)


def _ends(row: WeightMapping, arch: Architecture) -> list[tuple[str, ...]]:
    """Return a row's first and last instance; with experts the first and last expert of the first and last layer."""
    instances = list(row.instances(arch))
    of_layer = arch.experts.number if arch.experts is not None and "{expert}" in row.megatron else 1
    kept = {0, of_layer - 1, len(instances) - of_layer, len(instances) - 1} if instances else set()
    return [instances[i] for i in sorted(kept)]


def _changed(row: WeightMapping, names: Sequence[str], tensors: Sequence[Tensor], arch: Architecture, tp: int) -> str:
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
    own_tokenizer, config = load_tokenizer(model_path), read_config(model_path)
    rows = find_family(config).architecture(config).vocab_size
    stops = stop_tokens(model_path, own_tokenizer, stop_token_ids)
    yield _vocabulary(own_tokenizer, rows)
    yield _stops(own_tokenizer, stops)
    if own_tokenizer.chat_template is not None:
        yield from _template(data.template_kwargs, own_tokenizer, stops)
    elif data.as_chat:
        yield Finding(
            "chat template", "fail", "data.as_chat=true, and the tokenizer has none", "use a chat model's tokenizer, or strings"
        )


def _vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int) -> Finding:
    state = f"{len(tokenizer)} tokens, {rows} rows of the embedding"
    if len(tokenizer) > rows:
        return Finding("vocabulary", "fail", state, "use the tokenizer that belongs to the model")
    return Finding("vocabulary", "pass", state)


def _stops(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> Finding:
    """Check the stop tokens. A pad token as one of several is harmless, because responses are not padded here."""
    named = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in stops)
    fix = "name the tokens that end a response in rollout.stop_token_ids"
    if not stops:
        return Finding("stop tokens", "fail", "none: every response would be cut off at rollout.max_response_tokens", fix)
    if wrong := [token for token in stops if tokenizer.convert_ids_to_tokens(token) is None]:
        return Finding("stop tokens", "fail", f"{wrong} are no tokens of the tokenizer", "correct eos_token_id in config.json")
    if set(stops) == {tokenizer.pad_token_id} and tokenizer.eos_token_id is None:
        return Finding("stop tokens", "warn", f"{named}, the pad token, and there is no end-of-sequence token", fix)
    return Finding("stop tokens", "pass", f"{named} end a response")


def _template(own: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> Iterator[Finding]:
    chat = [{"role": "user", "content": QUESTION}]

    def text(messages: Sequence[dict[str, str]] = chat, prompt: bool = True, **kwargs: object) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt, **kwargs))

    asked = text(**own)
    silent = text(prompt=False, **own)
    if not asked.startswith(silent) or asked == silent:
        state = "it adds no generation prompt: the model would continue the user's message"
        yield Finding("chat template", "warn", state, "use a template with add_generation_prompt")
        return
    by_template = list(tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, return_dict=False, **own))
    if by_template != list(tokenizer(asked, add_special_tokens=False).input_ids):
        state = "its tokens are not those of its text"
        yield Finding("chat template", "warn", state, "see whether its special tokens are in the tokenizer")
        return
    for name, value in own.items():
        if isinstance(value, bool) and asked == text(**{**own, name: not value}):
            state = f"data.template_kwargs.{name} changes nothing of a prompt"
            yield Finding("chat template", "warn", state, "remove it, or use the template that knows it")
    answered = text([*chat, {"role": "assistant", "content": ANSWER}], prompt=False, **own)
    ending = list(tokenizer(answered.rpartition(ANSWER)[2], add_special_tokens=False).input_ids)
    if ending and not set(ending) & set(stops):
        token = tokenizer.convert_ids_to_tokens(ending[0])
        state = f"it ends an answer with {token!r} ({ending[0]}), which does not end a response here"
        yield Finding("chat template", "warn", state, f"if prompts are chats: rollout.stop_token_ids: [{ending[0]}]")
        return
    yield Finding("chat template", "pass", f"a question ends with {asked[len(silent) :]!r}")
