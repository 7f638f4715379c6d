"""Inputs of the training-step benchmarks: models, configs and graded rollouts, the same in every process."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.checkpoint import SHAPES
from examples.arithmetic import base_model, task
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config, validate
from tepo_megatron.types import Rollout

DEMO = Path(__file__).parents[1] / "examples/demo.yaml"
CASES = ("demo", "100m")
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 2, 4, 64, (64, 256)  # of `100m`


def write_model(case: str, folder: Path, seed: int = 0, scale: float = 4.0) -> None:
    """Write an untrained model."""
    torch.manual_seed(seed)
    if case == "demo":
        model = base_model.build_model(task.build_tokenizer())
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(scale if weight.ndim > 1 else 1.0)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[case], max_position_embeddings=512, tie_word_embeddings=True))
    model.save_pretrained(folder)


def config(case: str, model: Path, tp: int = 1) -> Config:
    """Return the config: examples/demo.yaml for `demo`; two updates of one group each, otherwise alike, for `100m`."""
    if case == "demo":
        return load_config(DEMO, ["--model.path", str(model), "--parallel.tp", str(tp)])
    return validate({
        "name": "step", "platform": "cpu", "model": {"path": str(model), "precision": "fp32"}, "parallel": {"tp": tp},
        "data": {"train": "unused", "max_prompt_tokens": PROMPT_TOKENS},
        "rollout": {
            "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "temperature": 1.0,
            "max_response_tokens": RESPONSE_TOKENS[1],
        },
        "objective": {"name": "tepo", "beta": 0.01},
        "optimizer": {"lr": 3e-5, "warmup_steps": 5},
        "megatron": {"optimizer": {"adam_beta2": 0.99}},
        "training": {"epochs": 1, "minibatch_prompts": 1, "max_tokens_per_microbatch": 8192},
    })  # fmt: skip


def rollouts(case: str, cfg: Config, seed: int = 0) -> list[Rollout]:
    """Return graded rollouts, in groups that are neither all right nor all wrong, so none is dropped.

    No engine sampled them: their log-probs are 0.
    """
    return _arithmetic(cfg, seed) if case == "demo" else _random(SHAPES[case]["vocab_size"], seed)


def _arithmetic(cfg: Config, seed: int) -> list[Rollout]:
    """Return rollouts of examples/arithmetic; half of the responses are worked solutions, half guesses, as in mid-training."""
    rng, tokenizer = random.Random(seed), task.build_tokenizer()
    out: list[Rollout] = []
    for i, problem in enumerate(task.distinct_problems(rng, cfg.rollout.prompts_per_step)):
        prompt = tokenizer(problem.prompt).input_ids
        scores: list[float] = []
        while len(set(scores)) < 2:
            texts = [task.hasty_demonstration(rng, problem, share=0.5) for _ in range(cfg.rollout.samples_per_prompt)]
            scores = [float(task.boxed_answer(text) == str(problem.answer)) for text in texts]
        for text, score in zip(texts, scores, strict=True):
            out.append(_rollout(i, prompt, tokenizer(text + task.END).input_ids, score))
    return out


def _random(vocabulary: int, seed: int) -> list[Rollout]:
    """Return rollouts of random tokens; every other sample is right."""
    rng = random.Random(seed)

    def draw(tokens: int) -> list[int]:
        return [rng.randrange(1, vocabulary) for _ in range(tokens)]

    out: list[Rollout] = []
    for i in range(PROMPTS):
        prompt = draw(PROMPT_TOKENS)
        out += [_rollout(i, prompt, draw(rng.randint(*RESPONSE_TOKENS)), float(j % 2)) for j in range(SAMPLES)]
    return out


def _rollout(prompt_id: int, prompt: list[int], response: list[int], score: float) -> Rollout:
    ids = torch.tensor(prompt + response)
    mask = torch.arange(ids.numel()) >= len(prompt)
    return Rollout(prompt_id, ids, mask, torch.zeros(ids.numel()), 0, "stop", reward=score, score=score)
