"""What is asked of vLLM's `/v1/completions`, and what its answer must be. Facts about vLLM are of 0.32."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from tepo_megatron.errors import RolloutError
from tepo_megatron.types import Prompt, Rollout, SamplingParams

SERVED_NAME = "policy"
LARGEST_SEED = 2**63 - 1


def prompt_seed(seed: int, prompt_id: int, samples: int) -> int:
    """The seed of a prompt's request: a stable hash of (seed, prompt id), a multiple of `samples`.

    vLLM gives sample k the seed + k, so that no two prompts share a stream unless their hashes are equal. One request for
    several prompts would give all of them the same seed. On CPU only the low 32 bits of a seed count (torch's Mersenne
    twister), so those must differ from prompt to prompt: room for k in the low bits of a shifted hash would waste them.
    """
    digest = hashlib.blake2b(f"{seed}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (LARGEST_SEED // samples) * samples


def completion_request(prompt: Prompt, sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Body of `/v1/completions`; whatever would make the sampled distribution differ from the actor's is switched off."""
    return {
        "model": SERVED_NAME,
        "prompt": list(prompt.token_ids),
        "n": sampling.samples,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": prompt_seed(seed, prompt.id, sampling.samples),
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
    }


def parse_completion(answer: Any, prompt: Prompt, sampling: SamplingParams, version: int) -> list[Rollout]:
    """The rollouts in an answer of `/v1/completions`, by sample index. Raises RolloutError if it is not what was asked for."""
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        indices = [choice["index"] for choice in choices]
        if indices != list(range(sampling.samples)):
            raise ValueError(f"samples {indices} instead of {sampling.samples}")
        return [_rollout(choice, prompt, sampling, version) for choice in choices]
    except (KeyError, TypeError, ValueError) as e:
        reason = f"{type(e).__name__}: {e}" if isinstance(e, KeyError) else str(e)
        raise RolloutError(
            f"prompt {prompt.id}: vLLM's answer is not what was asked for ({reason}); is this vLLM 0.32?"
        ) from None


def _rollout(choice: dict[str, Any], prompt: Prompt, sampling: SamplingParams, version: int) -> Rollout:
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if choice["prompt_token_ids"] != list(prompt.token_ids):
        raise ValueError("it changed the prompt's tokens")
    if not 1 <= len(ids) <= sampling.max_tokens:
        raise ValueError(f"{len(ids)} response tokens, max_tokens={sampling.max_tokens}")
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} tokens but {len(logprobs)} log-probs")
    if not all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in logprobs):
        raise ValueError("a log-prob is positive or not finite")
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"finish_reason={choice['finish_reason']!r}")
    context = len(prompt.token_ids)
    return Rollout(
        prompt_id=prompt.id,
        token_ids_L=torch.tensor([*prompt.token_ids, *ids], dtype=torch.int64),
        response_mask_L=torch.arange(context + len(ids)) >= context,
        rollout_logprobs_L=torch.tensor([0.0] * context + logprobs, dtype=torch.float32),
        policy_version=version,
        stop_reason=choice["finish_reason"],
        answer=prompt.answer,
    )
