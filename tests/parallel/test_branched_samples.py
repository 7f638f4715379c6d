"""Samples of several turns, branches and rewritten histories train to the fp64 reference, with one advantage each."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tepo_megatron.config import LimitsConfig
from tepo_megatron.data import text_functions
from tepo_megatron.inference.samples import checked_rollout
from tepo_megatron.losses.advantages import group_advantages
from tepo_megatron.rollout.agent import AgentSample, ChatRequest
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.types import Prompt, Rollout, SamplingParams, TrainBatch
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.cases import LAYOUTS, VOCAB
from tests.reference import tepo as reference
from tests.worlds import run_world

LETTERS = [chr(ord("!") + i) for i in range(VOCAB)]
SINGLE, TURNS, BRANCHED = "single", "turns", "branched"
SEQUENCES = {SINGLE: 1, TURNS: 1, BRANCHED: 3}
GROUPS = [[(SINGLE, 1.0), (BRANCHED, 0.0), (TURNS, 0.25)], [(BRANCHED, 1.0), (BRANCHED, 0.5), (SINGLE, 0.0), (TURNS, 0.0)]]


def chat_format() -> ChatFormat:
    """Return a format without a template, whose tokens are the letters."""
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="!"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)
    return ChatFormat(tokenizer, *text_functions(tokenizer))


async def sequences_of(kind: str, prompt: Prompt, chat: ChatFormat, generator: torch.Generator) -> list[Rollout]:
    """Return the sequences of a sample that an agent makes with the requests of its kind."""

    async def turn(context: Prompt, sampling: SamplingParams, seed: int) -> Rollout:
        ids = torch.randint(1, VOCAB, (sampling.max_tokens,), generator=generator).tolist()
        return checked_rollout(context, ids, [-1.0] * len(ids), "length", sampling, 0)

    sample = AgentSample(prompt, SamplingParams(1, 1.0, 30, ()), 0, sample_turn=turn, chat=chat, limits=LimitsConfig())

    async def ask(tokens: int, *messages: dict) -> dict:
        return (await sample.complete(ChatRequest(messages, max_tokens=tokens))).message

    first = {"role": "user", "content": chat.decode(prompt.token_ids)}
    answer = await ask(5, first)
    if kind != SINGLE:
        await ask(7, first, answer, {"role": "user", "content": "AB"})
    if kind == BRANCHED:
        await ask(4, first, answer, {"role": "user", "content": "CDE"})
        await ask(9, {"role": "user", "content": "FGHI"})
        assert (sample.counts["branches"], sample.counts["rewrites"]) == (1, 1)
    return sample.finish()


def rollouts_of(step: int) -> tuple[list[Rollout], list[float]]:
    """Return the graded sequences of a step and, from the rewards alone, the advantage of each."""
    chat, generator = chat_format(), torch.Generator().manual_seed(11 + step)
    found, expected = [], []
    for number, group in enumerate(GROUPS):
        ids = torch.randint(1, VOCAB, (4 + number,), generator=generator).tolist()
        mean = sum(reward for _, reward in group) / len(group)
        deviation = math.sqrt(sum((reward - mean) ** 2 for _, reward in group) / (len(group) - 1))
        for k, (kind, reward) in enumerate(group):
            made = asyncio.run(sequences_of(kind, Prompt(number, tuple(ids), ""), chat, generator))
            assert len(made) == SEQUENCES[kind]
            found += [replace(r, reward=reward, score=reward, status="given", sample=k) for r in made]
            expected += [(reward - mean) / (deviation + 1e-6)] * len(made)
    return found, expected


def old_statistics(
    model: torch.nn.Module, rollouts: Sequence[Rollout], advantages: Sequence[float], generator: torch.Generator
) -> tuple[list, list]:
    """Return old log-probs and entropies. Most ratios are beyond the clip range, on the side that the sign of A clips.

    The loss is then far from 0. Near 0 its relative error would show the cancellation of fp32 terms.
    """
    logprobs, entropies = [], []
    with torch.no_grad():
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            logprob, entropy = reference.statistics(model, rollout.token_ids_L, rollout.response_mask_L, cases.TEMPERATURE)
            noise = 0.1 * torch.randn(logprob.shape, generator=generator, dtype=logprob.dtype)
            logprobs.append(logprob - math.copysign(0.35, advantage) + noise)
            entropies.append(entropy + 0.05)
    return logprobs, entropies


@pytest.fixture(scope="module")
def batches(case: cases.Case) -> tuple[tuple[TrainBatch, ...], tuple[reference.Step, ...]]:
    """The product's batches, with its own advantages, and the reference's steps, with those computed here."""
    model, generator = reference.load(case.model), torch.Generator().manual_seed(3)
    made, independent = [], []
    for step in range(cases.STEPS):
        rollouts, advantages = rollouts_of(step)
        old = [torch.cat(part).float() for part in old_statistics(model, rollouts, advantages, generator)]
        made.append(TrainBatch(tuple(rollouts), group_advantages(rollouts, "std"), *old, update=step + 1))
        independent.append(replace(made[-1], advantages_B=torch.tensor(advantages)))
    steps = cases.reference_steps(case.model, tuple(independent))
    assert steps[0].clipped_high > 0 and steps[0].clipped_low > 0
    return tuple(made), steps


@pytest.mark.parametrize("name", full_but(["1 rank", "CP2 TP2"], [], LAYOUTS))
def test_branched_samples_train_to_the_reference(case: cases.Case, batches: tuple, name: str) -> None:
    given, steps = batches
    cfg = cases.run_config(case.model, LAYOUTS[name], 80)
    cases.compare(run_world(cfg.parallel.world_size, cases.train_steps, cfg, given), steps)
