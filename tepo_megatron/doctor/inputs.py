"""Check the inputs of a run: the model's tokenizer, the prompts and their answers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from tepo_megatron.config import DataConfig, RewardConfig
from tepo_megatron.data import load_data, load_tokenizer
from tepo_megatron.doctor.findings import Finding
from tepo_megatron.rewards import build_reward
from tepo_megatron.types import Prompt, Rollout

# type of a term, or how the reasoning_gym term finds the answer -> a right response
RIGHT = {"math": r"\boxed{{{}}}", "answer_line": "Answer: {}", "tag": "<answer>{}</answer>", "number": "{}", "whole": "{}"}
GRADED = 64  # number of answers that are graded
NEAR_LIMIT = 0.95  # if the 95% quantile of prompt lengths is above this share of the limit, longer ones were likely dropped


def data(model_path: str, cfg: DataConfig, reward: RewardConfig, prompts_per_step: int) -> Iterator[Finding]:
    """Check both datasets as the run will read them, show the first prompt, and check that the grader accepts right answers."""
    tokenizer = load_tokenizer(model_path)
    found = load_data(cfg, reward, tokenizer)
    for line in found.log_lines:
        yield Finding("data", "warn" if line.startswith("warning") else "pass", line.removeprefix("warning: "))
    train = [prompt for prompts, _ in found.train for prompt in prompts]
    first = train[0]
    yield Finding("first prompt", "pass", f"{len(first.token_ids)} tokens: {tokenizer.decode(first.token_ids)!r:.200}")
    yield lengths(cfg.max_prompt_tokens, sorted(len(prompt.token_ids) for prompt in train))
    if found.count < prompts_per_step:
        said = f"{found.count} prompts, and a step takes rollout.prompts_per_step={prompts_per_step}"
        yield Finding("prompts", "fail", said, "lower that, or add prompts")
    yield from grading(reward, train[:: max(1, len(train) // GRADED)][:GRADED])


def lengths(limit: int, tokens: Sequence[int]) -> Finding:
    """Check the lengths of the prompts against the limit."""
    middle, most, longest = tokens[len(tokens) // 2], tokens[len(tokens) * 19 // 20], tokens[-1]
    said = f"{middle} tokens in the median, {most} at 95%, {longest} at most; data.max_prompt_tokens={limit}"
    if most > NEAR_LIMIT * limit:
        return Finding("prompt lengths", "warn", said, "the limit cuts into the prompts: raise data.max_prompt_tokens")
    return Finding("prompt lengths", "pass", said)


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
