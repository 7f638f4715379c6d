"""Inputs of the training-step benchmark: the demo's model, untrained, its config and graded rollouts, the same everywhere."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from examples.arithmetic import base_model, task
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.types import Rollout

DEMO = Path(__file__).parents[1] / "examples/demo.yaml"
SCALE = 4.0  # of the untrained weights


def write_model(folder: Path) -> None:
    """Write the model."""
    torch.manual_seed(0)
    model = base_model.build_model(task.build_tokenizer())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(SCALE if weight.ndim > 1 else 1.0)
    model.save_pretrained(folder)


def config(model: Path, tp: int = 1) -> Config:
    """Return the config."""
    return load_config(DEMO, ["--model.path", str(model), "--parallel.tp", str(tp)])


def rollouts(cfg: Config) -> list[Rollout]:
    """Return graded rollouts, in groups that are neither all right nor all wrong, so none is dropped.

    Half of the responses are worked solutions, half guesses, as in mid-training. No engine sampled them: their log-probs are 0.
    """
    rng, tokenizer = random.Random(0), task.build_tokenizer()
    out: list[Rollout] = []
    for i, problem in enumerate(task.distinct_problems(rng, cfg.rollout.prompts_per_step)):
        prompt = tokenizer(problem.prompt).input_ids
        scores: list[float] = []
        while len(set(scores)) < 2:
            texts = [task.hasty_demonstration(rng, problem, share=0.5) for _ in range(cfg.rollout.samples_per_prompt)]
            scores = [float(task.boxed_answer(text) == str(problem.answer)) for text in texts]
        for text, score in zip(texts, scores, strict=True):
            ids = torch.tensor(prompt + tokenizer(text + task.END).input_ids)
            mask = torch.arange(ids.numel()) >= len(prompt)
            out.append(Rollout(i, ids, mask, torch.zeros(ids.numel()), 0, "stop", reward=score, score=score))
    return out
