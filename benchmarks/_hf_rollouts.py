"""Graded rollouts that Transformers samples from given weights, for benchmarks that train without an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from examples.arithmetic import task
from tepo_megatron.types import Rollout

SAMPLES, DEMO_TOKENS, RANDOM_TOKENS, PROMPT_TOKENS = 8, 48, 24, 8
Grade = Callable[[Sequence[int]], float]


class HfRollouts:
    """Samples graded rollouts from given weights with Transformers."""

    def __init__(self, model: Path, prompts: Callable[[], tuple[list[int], Grade]], tokens: int, stop: int | None) -> None:
        """Load the model.

        Args:
            stop: Token that ends a response. None: there is none.
        """
        self._policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._prompts, self._tokens, self._stop = prompts, tokens, stop

    def sample(self, weights: dict[str, torch.Tensor], groups: int) -> list[Rollout]:
        """Return groups that are neither all right nor all wrong."""
        self._policy.load_state_dict(weights, strict=False)
        out: list[Rollout] = []
        while len(out) < groups * SAMPLES:
            prompt, grade = self._prompts()
            ids = self._policy.generate(
                torch.tensor([prompt]), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=self._tokens,
                num_return_sequences=SAMPLES, eos_token_id=self._stop, pad_token_id=0,
            )[:, len(prompt) :].tolist()  # fmt: skip
            responses = [row[: row.index(self._stop) + 1] if self._stop in row else row for row in ids]
            scores = [grade(response) for response in responses]
            if len(set(scores)) > 1:
                group = len(out) // SAMPLES
                out += [_rollout(group, prompt, r, s) for r, s in zip(responses, scores, strict=True)]
        return out


def _rollout(prompt_id: int, prompt: list[int], response: list[int], score: float) -> Rollout:
    ids = torch.tensor(prompt + response)
    mask = torch.arange(ids.numel()) >= len(prompt)
    return Rollout(prompt_id, ids, mask, torch.zeros(ids.numel()), 0, "stop", reward=score, score=score)


def arithmetic_rollouts(model: Path) -> HfRollouts:
    """Return a source of rollouts of the demo's model."""
    rng, tokenizer = random.Random(0), task.build_tokenizer()

    def prompt() -> tuple[list[int], Grade]:
        problem = task.make_problem(rng)

        def grade(response: Sequence[int]) -> float:
            return float(task.boxed_answer(tokenizer.decode(response)) == str(problem.answer))

        return tokenizer(problem.prompt).input_ids, grade

    return HfRollouts(model, prompt, DEMO_TOKENS, tokenizer.convert_tokens_to_ids(task.END))


def even_rollouts(model: Path, vocabulary: int) -> HfRollouts:
    """Return a source of rollouts that are right if most of their token ids are even."""
    rng = random.Random(0)

    def prompt() -> tuple[list[int], Grade]:
        ids = [rng.randrange(1, vocabulary) for _ in range(PROMPT_TOKENS)]
        return ids, lambda response: float(sum(i % 2 == 0 for i in response) > len(response) / 2)

    return HfRollouts(model, prompt, RANDOM_TOKENS, None)
