"""Sample with a model of transformers: one batch, which requests join between two tokens, with a KV cache. Runs in its server.

Prompts are padded on the left, so that the next token of all samples is in one column. Padding is never attended to. A prompt
is prefilled once, and its keys and values are copied to its samples. The noise of a sample comes from a generator of its own,
so the other samples of the batch change it by rounding alone.

Suffixes: B samples of the batch, L tokens in the cache, V vocabulary, N prompts, P tokens of the longest prompt.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from tepo_megatron.wire.receiver.binary_answer import Sample, ids_crc

PREFILL_PROMPTS, PREFILL_TOKENS = 64, 16384  # most prompts of one prefill, and their tokens with padding
FINISHED_SHARE = 1 / 8  # of the batch, from which on finished samples are removed from it
ABORTED = "abort"  # finish reason of a sample that is not complete
# constants of SplitMix64 (Steele, Lea and Flood 2014) as signed integers; products wrap around
_SPLITMIX = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


class SampleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for samples of one prompt. Sample k has seed + k. At temperature 0 the most likely token is taken."""

    prompt: list[int]
    samples: int
    seed: int
    max_tokens: int
    stop_token_ids: list[int]
    temperature: float
    top_k: int  # -1: no limit
    top_p: float
    masks: bool  # return the ids from which each token was sampled
    routing: None = None  # experts cannot be returned


@dataclass(eq=False)
class Row:
    """One sample of a job."""

    job: "Job"
    random: random.Random
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    reason: str = ABORTED

    @property
    def done(self) -> bool:
        """Return whether no further token is needed."""
        return self.reason != ABORTED or self.job.cancelled

    def add(self, token: int, logprob: float, mask: Tensor | None) -> None:
        """Append a token, unless the sample is complete."""
        if self.done:
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.masks += [] if mask is None else [mask]
        if token in self.job.request.stop_token_ids:
            self.reason = "stop"
        elif len(self.ids) == self.job.request.max_tokens:
            self.reason = "length"


class Job:
    """A request in progress."""

    def __init__(self, request: SampleRequest, label: str) -> None:
        self.request, self.label, self.cancelled = request, label, False
        self.rows = [Row(self, random.Random(request.seed + k)) for k in range(request.samples)]

    def samples(self) -> list[Sample]:
        """Return the samples as they are now."""
        prompt, crc, samples = len(self.request.prompt), ids_crc(self.request.prompt), []
        for row in self.rows:
            ids_T, logprobs_T = np.array(row.ids, np.int32), np.array(row.logprobs, np.float32)
            counts = np.array([mask.numel() for mask in row.masks], np.int32)
            masks = (torch.cat(row.masks).int().numpy(), counts) if row.masks else None
            samples.append(Sample(row.reason, self.label if row.ids else "", prompt, crc, ids_T, logprobs_T, masks=masks))
        return samples


class RunningBatch:
    """The batch. `waiting` takes jobs from any thread; all methods are called in one thread."""

    def __init__(self, model: PreTrainedModel, cache_tokens: int) -> None:
        self._model, self._cache_tokens = model, cache_tokens
        self.waiting: deque[Job] = deque()
        self._clear()

    def _clear(self) -> None:
        self._rows: list[Row] = []
        self._cache = DynamicCache()
        self._seen_BL = self._tensor([[]])[:0]  # 0 for padding

    def _tensor(self, values: list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._model.device)

    @property
    def busy(self) -> bool:
        """Return whether there is anything to sample."""
        return bool(self._rows or self.waiting)

    @torch.no_grad()
    def step(self) -> list[Job]:
        """Sample one token of every sample, after a prefill of new jobs. Return the jobs that are complete."""
        if jobs := self._admitted():
            self._prefill(jobs)
        if any(not row.done for row in self._rows):
            self._seen_BL = pad(self._seen_BL, (0, 1), value=1)
            logits_BV = self._logits(self._tensor([(row.ids or [0])[-1:] for row in self._rows]), self._seen_BL, self._cache)
            add_tokens(self._rows, logits_BV)
        jobs = [job for job in dict.fromkeys(row.job for row in self._rows) if all(row.done for row in job.rows)]
        self._remove_finished()
        return jobs

    def abort(self) -> list[Job]:
        """End all jobs with the tokens that they have, and return them."""
        jobs = [*dict.fromkeys(row.job for row in self._rows), *self.waiting]
        self.waiting.clear()
        self._clear()
        return jobs

    def _admitted(self) -> list[Job]:
        """Take the waiting jobs of one prefill, while the cache will hold all samples until their last tokens."""
        jobs: list[Job] = []
        count, width, longest = len(self._rows), self._seen_BL.size(1), 0
        remaining = max((row.job.request.max_tokens - len(row.ids) for row in self._rows), default=0)
        while self.waiting and len(jobs) < PREFILL_PROMPTS:
            request = self.waiting[0].request
            count, longest, remaining = (
                count + request.samples,
                max(longest, len(request.prompt)),
                max(remaining, request.max_tokens),
            )
            fits = (
                count * (max(width, longest) + remaining) <= self._cache_tokens and (len(jobs) + 1) * longest <= PREFILL_TOKENS
            )
            if count > request.samples and not fits:
                break
            jobs.append(self.waiting.popleft())
        return [job for job in jobs if not job.cancelled]

    def _logits(self, ids: Tensor, seen: Tensor, cache: DynamicCache) -> Tensor:
        """Return the logits [rows, V] after the newest tokens `ids`, whose keys and values go into the cache."""
        places = (seen.cumsum(1) - 1).clamp(min=0)[:, -ids.size(1) :]
        how = {"attention_mask": seen, "position_ids": places, "past_key_values": cache, "use_cache": True}
        logits: Tensor = self._model(ids, logits_to_keep=1, **how).logits
        return logits[:, -1]

    def _prefill(self, jobs: list[Job]) -> None:
        prompts, cache, rows = [job.request.prompt for job in jobs], DynamicCache(), [row for job in jobs for row in job.rows]
        width = max(map(len, prompts))
        ids_NP = self._tensor([[0] * (width - len(ids)) + ids for ids in prompts])
        seen_NP = self._tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        logits_NV = self._logits(ids_NP, seen_NP, cache)
        prompt_B = self._tensor([[i for i, job in enumerate(jobs) for _ in job.rows]])[0]
        cache.batch_select_indices(prompt_B)
        if self._rows:
            for new, old in zip(cache.layers, self._cache.layers, strict=True):
                new.keys, new.values = _joined(old.keys, new.keys), _joined(old.values, new.values)
        self._seen_BL = _joined(self._seen_BL[..., None], seen_NP[prompt_B, :, None])[..., 0]
        self._cache, self._rows = cache, [*self._rows, *rows]
        add_tokens(rows, logits_NV[prompt_B])

    def _remove_finished(self) -> None:
        """Remove finished samples, and the columns of padding alone, from the batch once they are many."""
        kept = [i for i, row in enumerate(self._rows) if not row.done]
        if not kept:
            self._clear()
        elif len(self._rows) - len(kept) >= FINISHED_SHARE * len(self._rows):
            kept_B = self._tensor([kept])[0]
            self._rows, self._seen_BL = [self._rows[i] for i in kept], self._seen_BL[kept_B]
            start = int(self._seen_BL.any(0).int().argmax())
            self._seen_BL = self._seen_BL[:, start:]
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[kept_B, :, start:], layer.values[kept_B, :, start:]


def _joined(old: Tensor, new: Tensor) -> Tensor:
    """Return two batches [B, ..., L, D] as one, the shorter one padded in front with zeros."""
    width = max(old.size(-2), new.size(-2))
    return torch.cat([pad(each, (0, 0, width - each.size(-2), 0)) for each in (old, new)])


def add_tokens(rows: Sequence[Row], logits_BV: Tensor) -> None:
    """Sample a token of each row, with its log-prob and, if it was asked for, its sampling mask."""
    logprobs_BV = distribution(logits_BV, [row.job.request for row in rows])
    key_B = torch.tensor([row.random.getrandbits(63) for row in rows], device=logits_BV.device)
    token_B = _choice(logprobs_BV, key_B)
    logprobs, tokens = logprobs_BV.gather(1, token_B[:, None])[:, 0].tolist(), token_B.tolist()
    for i, row in enumerate(rows):
        masked = row.job.request.masks and not row.done
        row.add(tokens[i], logprobs[i], (logprobs_BV[i] > -torch.inf).nonzero()[:, 0].cpu() if masked else None)


def distribution(logits_BV: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """Return the fp32 log-probs of the distribution that each row is sampled from; minus infinity where it is truncated.

    The logits are divided by the temperature. Top-k keeps exactly k of them, then top-p counts the probabilities that are left.
    `logits_BV`: logits in any precision.
    """

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=logits_BV.device)[:, None]

    logits_BV = logits_BV.float() / column([request.temperature or 1.0 for request in requests])
    limits = [request.top_k if request.temperature else 1 for request in requests]
    if any(limit > 0 for limit in limits) or any(request.top_p < 1 for request in requests):
        top_k_B1, top_p_B1 = column(limits), column([request.top_p for request in requests])
        sorted_BV, ids_BV = logits_BV.sort(dim=1, descending=True, stable=True)
        rank_V = torch.arange(logits_BV.size(1), device=logits_BV.device)
        sorted_BV = sorted_BV.masked_fill((rank_V >= top_k_B1) & (top_k_B1 > 0), -torch.inf)
        probs_BV = sorted_BV.softmax(1)
        before_BV = probs_BV.cumsum(1) - probs_BV  # a sum of rounded numbers may exceed 1
        cut_BV = (before_BV >= top_p_B1) & (top_p_B1 < 1) & (rank_V > 0)
        logits_BV = torch.empty_like(logits_BV).scatter_(1, ids_BV, sorted_BV.masked_fill(cut_BV, -torch.inf))
    return logits_BV.log_softmax(1)


def _choice(logprobs_BV: Tensor, key_B: Tensor) -> Tensor:
    """Return the token of each row with the largest sum of log-prob and Gumbel noise, in fp64.

    The noise is a hash of the row's key and the token's id, so that other rounding of the log-probs rarely changes the choice.
    """
    hash_BV = key_B[:, None] + torch.arange(logprobs_BV.size(1), device=key_B.device) * _SPLITMIX[0]
    for shift, factor in zip((30, 27, 31), (*_SPLITMIX[1:], 1), strict=True):
        hash_BV ^= (hash_BV >> shift) & (2 ** (64 - shift) - 1)
        hash_BV *= factor
    uniform_BV = ((hash_BV >> 12) & (2**52 - 1)).double().add_(0.5).mul_(2.0**-52)  # never 0 or 1
    return (logprobs_BV.double() - uniform_BV.log_().neg_().log_()).argmax(1)
