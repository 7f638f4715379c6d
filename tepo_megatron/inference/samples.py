"""Turn an engine's answers into rollouts. Answers that do not match the request are rejected, whatever the engine."""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.errors import RolloutError
from tepo_megatron.inference.partial import ABORTED
from tepo_megatron.types import NO_EXPERT, Prompt, Rollout, Routing, SamplingParams
from tepo_megatron.utils.escaping import excerpt
from tepo_megatron.utils.exchange import CONTROL_BYTES

LARGEST_SEED = 2**63 - 1
TOKEN_BYTES = 512  # limit per token of prompt and response in an answer: ids, log-probs, texts
EXPERT_BYTES = 8  # limit per expert of one layer and token
# values with which an engine samples from the whole distribution
_WHOLE = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
RETURN_EXPERTS = "--enable-return-routed-experts"  # option of both engines' servers


def prompt_seed(seed: int, prompt_id: int, samples: int) -> int:
    """Return the seed of a prompt's first sample: a stable hash of (seed, prompt id), as a multiple of `samples`.

    Sample k has seed + k, so two prompts share a random stream only if their hashes are equal. vLLM on CPU uses only the low 32
    bits (torch's Mersenne twister), so these must differ between prompts. Shifting the hash to keep low bits free for k would
    waste them.

    Args:
        seed: Seed of the call.
        prompt_id: Id of the prompt.
        samples: Number of samples per prompt.

    Returns:
        A seed in [0, LARGEST_SEED).
    """
    digest = hashlib.blake2b(f"{seed}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (LARGEST_SEED // samples) * samples


def answer_bytes(prompt: Prompt, sampling: SamplingParams) -> int:
    """Return the size limit in bytes of an answer that holds a prompt's samples.

    Args:
        prompt, sampling: Of the request.
    """
    tokens = sampling.samples * (len(prompt.token_ids) + sampling.max_tokens)
    routing = sampling.routing
    experts = 0 if routing is None else EXPERT_BYTES * routing.num_layers * routing.per_token
    return CONTROL_BYTES + tokens * (TOKEN_BYTES + experts)


def engine_sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters of both engines.

    Whatever would change their distribution from the actor's is switched off.
    """
    return {"temperature": sampling.temperature, **_WHOLE, "stop_token_ids": list(sampling.stop_token_ids)}


def parsed(answer: Any, prompt: Prompt, engine: str, parse: Callable[[Any], list[Rollout]]) -> list[Rollout]:
    """Return `parse(answer)`, with errors of an unexpected answer turned into RolloutError.

    Args:
        answer: The JSON answer.
        prompt: Of the request, for the message.
        engine: Name of the engine, for the message.
        parse: Converts the answer.

    Raises:
        RolloutError: The answer has another shape or other values than were asked for.
    """
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
    """Return one sampled response as a rollout, after checking it. An aborted response may have no token yet.

    Args:
        prompt: The prompt.
        ids: Response token ids, including the stop token.
        logprobs: Log-prob of each response token, in nats.
        stop_reason: "stop", "length" or `partial.ABORTED`. ABORTED is corrected if the response is in fact complete.
        sampling: Of the request.
        version: Version of the weights that sampled it.
        experts: Integer [tokens that were an input, layers of the model, experts per token]. Dropped for an aborted response:
            the answer to its continuation gives the experts of all its tokens. None: the answer has none.

    Raises:
        ValueError: The response does not match the request.
        TypeError: A value is not a list.
    """
    if stop_reason == ABORTED and len(ids) == sampling.max_tokens:
        stop_reason = "length"
    if stop_reason == ABORTED and ids and ids[-1] in sampling.stop_token_ids:
        stop_reason = "stop"
    if not (stop_reason != ABORTED) <= len(ids) <= sampling.max_tokens:
        raise ValueError(f"{len(ids)} response tokens, max_tokens={sampling.max_tokens}")
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} tokens but {len(logprobs)} log-probs")
    if not all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in logprobs):
        raise ValueError("a log-prob is positive or not finite")
    if stop_reason not in ("stop", "length", ABORTED):
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
        experts_LKT=None if stop_reason == ABORTED else _checked_experts(experts, context + len(ids), sampling.routing),
    )


def _checked_experts(experts: Tensor | None, length: int, routing: Routing | None) -> Tensor | None:
    """Return int16 [length, K, T], only for layers with experts, NO_EXPERT for the last token. None if none were asked for."""
    if routing is None:
        return None
    if experts is None:
        raise ValueError(f"it lacks the experts that were chosen; start its server with {RETURN_EXPERTS}")
    shape = (length - 1, routing.num_layers, routing.per_token)
    if experts.shape != shape:
        raise ValueError(f"experts of shape {list(experts.shape)} instead of {list(shape)} (tokens, layers, per token)")
    known_LKT = experts[:, list(routing.sparse_layers)]
    experts_LKT = torch.cat((known_LKT, torch.full_like(known_LKT[:1], NO_EXPERT)))
    routing.check(experts_LKT)  # before the cast to int16, which would truncate large values
    return experts_LKT.to(torch.int16)
