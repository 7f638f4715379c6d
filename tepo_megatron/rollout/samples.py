"""From an engine's answer to rollouts: whatever engine it is, nothing passes that is not what was asked for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.errors import RolloutError
from tepo_megatron.escaping import excerpt
from tepo_megatron.exchange import CONTROL_BYTES
from tepo_megatron.rollout.cut import CUT
from tepo_megatron.types import NO_EXPERT, Prompt, Rollout, Routing, SamplingParams

LARGEST_SEED = 2**63 - 1
TOKEN_BYTES = 512  # that an answer may have for one token of a prompt or response: ids, log-probs, texts
EXPERT_BYTES = 8  # and for one expert of one layer
RETURN_EXPERTS = "--enable-return-routed-experts"  # of both engines' servers


def prompt_seed(seed: int, prompt_id: int, samples: int) -> int:
    """The seed of a prompt's first sample: a stable hash of (seed, prompt id), a multiple of `samples`; sample k has seed + k.

    So no two prompts share a stream unless their hashes are equal. vLLM on CPU looks at the low 32 bits alone (torch's Mersenne
    twister), so those must differ from prompt to prompt; room for k in the low bits of a shifted hash would waste them.
    """
    digest = hashlib.blake2b(f"{seed}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (LARGEST_SEED // samples) * samples


def answer_bytes(prompt: Prompt, sampling: SamplingParams) -> int:
    """The largest answer that is accepted for the samples of a prompt."""
    tokens = sampling.samples * (len(prompt.token_ids) + sampling.max_tokens)
    routing = sampling.routing
    experts = 0 if routing is None else EXPERT_BYTES * routing.num_layers * routing.per_token
    return CONTROL_BYTES + tokens * (TOKEN_BYTES + experts)


def neutral(sampling: SamplingParams) -> dict[str, Any]:
    """How both engines are asked to sample: whatever would make their distribution differ from the actor's is switched off."""
    return {
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def parsed(answer: Any, prompt: Prompt, engine: str, parse: Callable[[Any], list[Rollout]]) -> list[Rollout]:
    """`parse(answer)`. Raises RolloutError naming prompt and engine where the answer has another shape or other values."""
    try:
        return parse(answer)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError) as e:
        if isinstance(e, RolloutError):
            raise
        reason = excerpt(f"{type(e).__name__}: {e}" if isinstance(e, KeyError) else str(e))
        raise RolloutError(f"prompt {prompt.id}: the answer is not what was asked for ({reason}); is this {engine}?") from None


def checked_rollout(
    prompt: Prompt,
    ids: Sequence[int],
    logprobs: Sequence[float],
    stop_reason: str,
    sampling: SamplingParams,
    version: int,
    experts: Tensor | None = None,
) -> Rollout:
    """One sampled response, the token it stopped at included; one that was cut off may have none yet.

    experts: integer [tokens that were an input, layers of the model, experts of one token]; none of what was cut off: whoever
    samples its rest chooses for all its tokens. Raises ValueError (TypeError for what is no list).
    """
    if stop_reason == CUT and len(ids) == sampling.max_tokens:
        stop_reason = "length"
    if stop_reason == CUT and ids and ids[-1] in sampling.stop_token_ids:
        stop_reason = "stop"
    if not (stop_reason != CUT) <= len(ids) <= sampling.max_tokens:
        raise ValueError(f"{len(ids)} response tokens, max_tokens={sampling.max_tokens}")
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} tokens but {len(logprobs)} log-probs")
    if not all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in logprobs):
        raise ValueError("a log-prob is positive or not finite")
    if stop_reason not in ("stop", "length", CUT):
        raise ValueError(f"finish_reason={stop_reason!r}")
    if stop_reason == "stop" and sampling.stop_token_ids and ids[-1] not in sampling.stop_token_ids:
        raise ValueError(f"it stopped at token {ids[-1]}, which is none of the stop tokens {list(sampling.stop_token_ids)}")
    context = len(prompt.token_ids)
    return Rollout(
        prompt_id=prompt.id,
        token_ids_L=torch.tensor([*prompt.token_ids, *ids], dtype=torch.int64),
        response_mask_L=torch.arange(context + len(ids)) >= context,
        rollout_logprobs_L=torch.tensor([0.0] * context + list(logprobs), dtype=torch.float32),
        policy_version=version,
        stop_reason=stop_reason,
        answer=prompt.answer,
        experts_LKT=None if stop_reason == CUT else _checked_experts(experts, context + len(ids), sampling.routing),
    )


def _checked_experts(experts: Tensor | None, length: int, routing: Routing | None) -> Tensor | None:
    """int16 [length, K, T]: of the layers that have experts, and none of the last token. None where none are asked for."""
    if routing is None:
        return None
    if experts is None:
        raise ValueError(f"it lacks the experts that were chosen; start its server with {RETURN_EXPERTS}")
    shape = (length - 1, routing.num_layers, routing.per_token)
    if experts.shape != shape:
        raise ValueError(f"experts of shape {list(experts.shape)} instead of {list(shape)} (tokens, layers, per token)")
    known_LKT = experts[:, list(routing.sparse_layers)]
    experts_LKT = torch.cat((known_LKT, torch.full_like(known_LKT[:1], NO_EXPERT)))
    routing.check(experts_LKT)  # while no number was cut off
    return experts_LKT.to(torch.int16)
