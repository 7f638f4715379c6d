"""Turn an engine's answers into rollouts. Answers that do not match the request are rejected, whatever the engine."""

import hashlib
from collections.abc import Callable, Set
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from tepo_megatron.base.errors import RolloutError, excerpt
from tepo_megatron.base.exchange import CONTROL_BYTES, BadAnswer, HttpAnswer
from tepo_megatron.base.types import MASK_TIES, Prompt, Rollout, Routing, SamplingMask, SamplingParams, no_expert
from tepo_megatron.engines.engine import ABORTED, GenerationRequest
from tepo_megatron.engines.engine_api import StaleWeights, served_label
from tepo_megatron.monitor.tracer import tracer
from tepo_megatron.wire.receiver.binary_answer import CONTENT_TYPE, TIMED, WITH_EXPERTS, decode, ids_crc

Answer = TypeVar("Answer")

LARGEST_SEED = 2**63 - 1
TOKEN_BYTES = 512  # limit per token of prompt and response in an answer: ids, log-probs, texts
# Limit per token of values in a JSON answer: an id, log-probs, texts. The commas and brackets in the texts are counted, too.
TOKEN_VALUES = 64
EXPERT_BYTES = 8  # limit per expert of one layer and token
MASK_BYTES, MASK_VALUES = 16, 2  # limits per token and id of a sampling mask in an answer
# values with which an engine does not change the distribution otherwise
_UNCHANGED = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
RETURN_EXPERTS = "--enable-return-routed-experts"  # option of vLLM's and SGLang's servers


def prompt_seed(seed: int, prompt_id: int, samples: int) -> int:
    """Return the seed of a prompt's first sample: a stable hash of (seed, prompt id), as a multiple of `samples`.

    Sample k has seed + k, so two prompts share a random stream only if their hashes are equal. vLLM on CPU uses only the low 32
    bits (torch's Mersenne twister), so these must differ between prompts. Shifting the hash to keep low bits free for k would
    waste them. Returns a seed in [0, LARGEST_SEED).
    """
    digest = hashlib.blake2b(f"{seed}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (LARGEST_SEED // samples) * samples


def answer_bytes(prompt: Prompt, sampling: SamplingParams) -> int:
    """Return the size limit in bytes of an answer that holds a prompt's samples."""
    tokens = _most_tokens(prompt, sampling)
    routing = sampling.routing
    experts = 0 if routing is None else EXPERT_BYTES * routing.num_layers * routing.per_token
    return CONTROL_BYTES + tokens * (TOKEN_BYTES + experts + MASK_BYTES * _most_masked(sampling))


def answer_values(prompt: Prompt, sampling: SamplingParams) -> int:
    """Return the number of values in a JSON answer that holds a prompt's samples, at most; see `HttpAnswer.json_body`."""
    return _most_tokens(prompt, sampling) * (TOKEN_VALUES + MASK_VALUES * _most_masked(sampling))


def _most_masked(sampling: SamplingParams) -> int:
    return sampling.top_k + MASK_TIES if sampling.returns_masks else 0


def _most_tokens(prompt: Prompt, sampling: SamplingParams) -> int:
    return sampling.samples * (len(prompt.token_ids) + sampling.max_tokens)


def engine_sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters of all engines."""
    truncation = {"top_p": sampling.top_p, "top_k": sampling.top_k}
    return {"temperature": sampling.temperature, **truncation, **_UNCHANGED, "stop_token_ids": list(sampling.stop_token_ids)}


def accepted(sampling: SamplingParams) -> str:
    """Return the content type in which a client prefers the answer: binary, with experts if they are asked for."""
    return (CONTENT_TYPE if sampling.routing is None else WITH_EXPERTS) + (TIMED if tracer.active else "")


def binary_rollouts(answer: HttpAnswer, ask: GenerationRequest, version: int, engine: str) -> list[Rollout]:
    """Return the rollouts in a binary answer, by sample index.

    Raises RolloutError if the answer is not what was asked for. StaleWeights if other weights were served.
    """
    prompt, sampling = ask.prompt, ask.sampling

    def rollouts(answer: HttpAnswer) -> list[Rollout]:
        samples, crc = decode(answer.body, sampling.samples, sampling.max_tokens), ids_crc(prompt.token_ids)
        if any(s.ids_T.size and (s.prompt_tokens != len(prompt.token_ids) or s.prompt_crc not in (None, crc)) for s in samples):
            raise ValueError("it changed the prompt's tokens")
        check_label({s.label for s in samples if s.label or s.ids_T.size}, version, engine)
        return [
            checked_rollout(prompt, s.ids_T, s.logprobs_T, s.finish_reason, sampling, version, s.experts, s.masks)
            for s in samples
        ]

    return parsed(answer, prompt, engine, rollouts)


def require_masks(rollouts: list[Rollout], ask: GenerationRequest, engine: str) -> list[Rollout]:
    """Return the rollouts. Raise RolloutError if sampling masks were asked for and one lacks them."""
    if ask.sampling.returns_masks and any(rollout.sampling_mask is None for rollout in rollouts):
        raise RolloutError(
            f"prompt {ask.prompt.id}: the answer lacks the sampling masks of rollout.top_k={ask.sampling.top_k}, without which "
            f"the log-probs of {engine} are not those of the distribution that was sampled; serve with this version of tepo"
        )
    return rollouts


def check_label(served: Set[object], version: int, engine: str) -> None:
    """Raise StaleWeights if samples have another label than that of the weights of `version`."""
    if not served <= {served_label(version)}:
        labels = excerpt(str(sorted(map(str, served))))
        raise StaleWeights(f"{engine} served the weights of {labels} when it should have served those of version {version}")


def parsed(answer: Answer, prompt: Prompt, engine: str, parse: Callable[[Answer], list[Rollout]]) -> list[Rollout]:
    """Return `parse(answer)`, with errors of an unexpected answer turned into RolloutError.

    Raises RolloutError if the answer has another shape or other values than were asked for.
    """
    try:
        return parse(answer)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError, BadAnswer) as e:
        if isinstance(e, RolloutError):
            raise
        reason = excerpt(f"{type(e).__name__}: {e}" if isinstance(e, KeyError) else str(e))
        raise RolloutError(f"prompt {prompt.id}: the answer is not what was asked for ({reason}); is this {engine}?") from None


def checked_rollout(
    prompt: Prompt,
    ids: ArrayLike,
    logprobs: ArrayLike,
    stop_reason: str,
    sampling: SamplingParams,
    version: int,
    experts: NDArray[Any] | None = None,
    masks: tuple[ArrayLike, ArrayLike] | None = None,
) -> Rollout:
    """Return one sampled response as a rollout, after checking it. An aborted response may have no token yet.

    Args:
        ids: Integer response token ids, including the stop token, [T].
        logprobs: Log-prob of each response token, in nats, [T].
        experts: Integer [tokens that were an input, layers of the model, experts per token], or flat. Dropped for an aborted
            response: the answer to its continuation gives the experts of all its tokens. None: the answer has none.
        masks: Ids of all sampling masks, one token after the other, and number of ids of each token. None: the answer has none.
    """
    with np.errstate(over="ignore"):  # what fp32 does not hold becomes infinite, and is refused
        ids_T, logprobs_T = np.asarray(ids, np.int64), np.asarray(logprobs, np.float32)
    count, context = ids_T.size, len(prompt.token_ids)
    stops = count > 0 and int(ids_T[-1]) in sampling.stop_token_ids
    if stop_reason == ABORTED and (stops or count == sampling.max_tokens):
        stop_reason = "stop" if stops else "length"
    if not (stop_reason != ABORTED) <= count <= sampling.max_tokens:
        raise ValueError(f"{count} response tokens, max_tokens={sampling.max_tokens}")
    if not ids_T.shape == logprobs_T.shape == (count,):
        raise ValueError(f"{count} tokens but {logprobs_T.size} log-probs")
    if count and ids_T.min() < 0:
        raise ValueError(f"token id {ids_T.min()}")
    if not (logprobs_T <= 1e-6).all() or not np.isfinite(logprobs_T).all():
        raise ValueError("a log-prob is positive or not finite")
    if stop_reason not in ("stop", "length", ABORTED):
        raise ValueError(f"finish_reason={stop_reason!r}")
    if stop_reason == "stop" and sampling.stop_token_ids and not stops:
        raise ValueError(f"it stopped at token {ids_T[-1]}, which is none of the stop tokens {list(sampling.stop_token_ids)}")
    token_ids_L, mask_L = np.empty(context + count, np.int64), np.zeros(context + count, np.bool_)
    logprobs_L = np.zeros(context + count, np.float32)
    token_ids_L[:context], token_ids_L[context:] = prompt.token_ids, ids_T
    mask_L[context:], logprobs_L[context:] = True, logprobs_T
    return Rollout(
        prompt_id=prompt.id,
        token_ids_L=torch.from_numpy(token_ids_L),
        response_mask_L=torch.from_numpy(mask_L),
        rollout_logprobs_L=torch.from_numpy(logprobs_L),
        policy_version=version,
        stop_reason=stop_reason,
        answer=prompt.answer,
        row=prompt.meta,
        experts_LKT=None if stop_reason == ABORTED else _checked_experts(experts, context + count, sampling.routing),
        sampling_mask=_checked_masks(masks, ids_T, sampling),
    )


def _checked_masks(
    masks: tuple[ArrayLike, ArrayLike] | None, ids_T: NDArray[np.int64], sampling: SamplingParams
) -> SamplingMask | None:
    """Return the sampling masks of the response's tokens. None if none were asked for, or the answer has none."""
    if not sampling.returns_masks or (masks is None and ids_T.size):
        return None
    ids, counts = masks or ([], [])
    mask = SamplingMask(torch.from_numpy(np.array(ids, np.int32)), torch.from_numpy(np.array(counts, np.int32)))
    mask.check(torch.from_numpy(ids_T), _most_masked(sampling) + 1)  # the sampled token may be one more
    return mask


def _checked_experts(experts: NDArray[Any] | None, length: int, routing: Routing | None) -> Tensor | None:
    """Return `Routing.dtype` [length, K, T], only for layers with experts. None if none were asked for."""
    if routing is None:
        return None
    if experts is None:
        raise ValueError(f"it lacks the experts that were chosen; start its server with {RETURN_EXPERTS}")
    shape = (length - 1, routing.num_layers, routing.per_token)
    experts = experts.reshape(-1, *shape[1:]) if experts.ndim == 1 else experts
    if experts.shape != shape:
        raise ValueError(f"experts of shape {list(experts.shape)} instead of {list(shape)} (tokens, layers, per token)")
    known_LKT = experts[:, list(routing.sparse_layers)]
    if known_LKT.size:  # before the cast, which would truncate large values
        routing.check_range(int(known_LKT.min()), int(known_LKT.max()))
    experts_LKT = torch.full((length, *known_LKT.shape[1:]), no_expert(routing.dtype), dtype=routing.dtype)
    experts_LKT.numpy()[:-1] = known_LKT
    routing.check(experts_LKT)
    return experts_LKT
