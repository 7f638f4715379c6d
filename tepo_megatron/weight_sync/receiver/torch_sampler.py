"""Sample with a model of transformers: one batch, which requests join between two tokens, with a KV cache. Runs in its server.

Prompts are padded on the right and prefilled once for all their samples. Their keys and values are then moved to the right end,
so that the next token of all samples is in one column. Padding is never attended to. A sample takes one random number of its
own for each token, so the other samples of the batch change it by rounding alone.

Suffixes: B samples of the batch, L tokens in the cache, V vocabulary, N prompts, P tokens of the longest prompt.
"""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from tepo_megatron.weight_sync.receiver.binary_answer import Sample, ids_crc

PREFILL_PROMPTS, PREFILL_TOKENS = 16, 16384  # most prompts of one prefill, and their tokens with padding
FINISHED_SHARE = 1 / 8  # of the batch, from which on finished samples are removed from it
ABORTED = "abort"  # finish reason of a sample that is not complete


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


@dataclass(eq=False)
class _Row:
    """One sample of a job."""

    job: "Job"
    random: random.Random
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    reason: str = ABORTED

    @property
    def done(self) -> bool:
        return self.reason != ABORTED or self.job.cancelled

    @property
    def remaining(self) -> int:
        return self.job.ask.max_tokens - len(self.ids)

    def add(self, token: int, logprob: float, mask: Tensor | None) -> None:
        if self.done:
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if mask is not None:
            self.masks.append(mask)
        if token in self.job.ask.stop_token_ids:
            self.reason = "stop"
        elif not self.remaining:
            self.reason = "length"


class Job:
    """A request in progress.

    Attributes:
        label: Label of the weights that sample.
        first: `time.monotonic` of the first token; None before it.
        cancelled: Nobody waits for the samples.
    """

    def __init__(self, ask: Ask, label: str) -> None:
        self.ask, self.label = ask, label
        self.first: float | None = None
        self.cancelled = False
        self.rows = [_Row(self, random.Random(ask.seed + k)) for k in range(ask.samples)]

    @property
    def done(self) -> bool:
        """Return whether all samples are complete."""
        return all(row.done for row in self.rows)

    def samples(self) -> list[Sample]:
        """Return the samples as they are now."""
        prompt, crc = len(self.ask.prompt), ids_crc(self.ask.prompt)
        return [
            Sample(
                row.reason,
                self.label if row.ids else "",
                prompt,
                crc,
                np.array(row.ids, np.int32),
                np.array(row.logprobs, np.float32),
                masks=_joined_masks(row.masks) if row.masks else None,
            )
            for row in self.rows
        ]


class Sampler:
    """The batch. `waiting` takes jobs from any thread; all methods are called in one thread.

    Args:
        model: The model; its forward takes `logits_to_keep`.
        cache_tokens: Most tokens of the KV cache, padding included. A single larger job is sampled alone.
    """

    def __init__(self, model: PreTrainedModel, cache_tokens: int) -> None:
        self._model, self._cache_tokens = model, cache_tokens
        self.waiting: deque[Job] = deque()
        self._clear()

    def _clear(self) -> None:
        self._rows: list[_Row] = []
        self._cache = DynamicCache()
        self._seen_BL = torch.zeros(0, 0, dtype=torch.long, device=self._model.device)

    @property
    def busy(self) -> bool:
        """Return whether there is anything to sample."""
        return bool(self._rows or self.waiting)

    @torch.no_grad()
    def step(self) -> list[Job]:
        """Sample one token of every sample, after the prefill of new jobs. Return the jobs that it completed."""
        jobs = sorted(self._admitted(), key=lambda job: len(job.ask.prompt))
        while jobs:
            count = 1
            while count < min(PREFILL_PROMPTS, len(jobs)) and (count + 1) * len(jobs[count].ask.prompt) <= PREFILL_TOKENS:
                count += 1
            self._prefill(jobs[:count])
            jobs = jobs[count:]
        if any(not row.done for row in self._rows):
            self._decode()
        return self._without_finished()

    def abort(self) -> list[Job]:
        """End all jobs with the tokens that they have, and return them."""
        jobs = list(dict.fromkeys(row.job for row in self._rows)) + list(self.waiting)
        self.waiting.clear()
        self._clear()
        return jobs

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob of each token but the first at temperature 1, for each sequence."""
        scores = []
        for ids in sequences:
            ids_L = torch.tensor(ids, device=self._model.device)
            logprobs = self._model(ids_L[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            scores.append(logprobs.gather(1, ids_L[1:, None])[:, 0].tolist())
        return scores

    def _admitted(self) -> list[Job]:
        """Take the waiting jobs whose samples the cache will hold until their last tokens."""
        jobs: list[Job] = []
        count, width = len(self._rows), self._seen_BL.size(1)
        remaining = max((row.remaining for row in self._rows if not row.done), default=0)
        while self.waiting:
            ask = self.waiting[0].ask
            count, width = count + ask.samples, max(width, len(ask.prompt))
            remaining = max(remaining, ask.max_tokens)
            if count > ask.samples and count * (width + remaining) > self._cache_tokens:
                break
            jobs.append(self.waiting.popleft())
        return [job for job in jobs if not job.cancelled]

    def _prefill(self, jobs: list[Job]) -> None:
        """Sample the first token of each sample of these jobs, and add the samples to the batch."""
        device, rows = self._model.device, [row for job in jobs for row in job.rows]
        lengths = [len(job.ask.prompt) for job in jobs]
        width = max(lengths)
        ids_NP = torch.tensor([[*job.ask.prompt, *[0] * (width - len(job.ask.prompt))] for job in jobs], device=device)
        ends = sorted({length - 1 for length in lengths})  # columns whose logits are needed
        cache = DynamicCache()
        out = self._model(ids_NP, past_key_values=cache, use_cache=True, logits_to_keep=torch.tensor(ends, device=device))
        prompt_B = torch.tensor([i for i, job in enumerate(jobs) for _ in job.rows], device=device)
        end_B = torch.tensor([ends.index(len(row.job.ask.prompt) - 1) for row in rows], device=device)
        padding_B1 = width - torch.tensor([len(row.job.ask.prompt) for row in rows], device=device)[:, None]
        column_P = torch.arange(width, device=device)
        source_BP = (column_P - padding_B1) % width

        def joined(old: Tensor | None, new: Tensor) -> Tensor:
            new = new.transpose(1, 2)[prompt_B[:, None], source_BP].transpose(1, 2)
            return new if old is None else torch.cat(_widened(old, new))

        running = self._cache.layers if self._rows else [None] * len(cache.layers)
        for layer, before in zip(cache.layers, running, strict=True):
            layer.keys = joined(before and before.keys, layer.keys)
            layer.values = joined(before and before.values, layer.values)
        seen_BP = (column_P >= padding_B1).long()
        self._seen_BL = torch.cat(_widened(self._seen_BL[..., None], seen_BP[..., None], 1))[..., 0] if self._rows else seen_BP
        self._cache, self._rows = cache, [*self._rows, *rows]
        add_tokens(rows, out.logits[prompt_B, end_B])
        for job in jobs:
            job.first = time.monotonic()

    def _decode(self) -> None:
        """Sample the next token of every sample in the batch."""
        last_B1 = torch.tensor([row.ids[-1:] for row in self._rows], device=self._model.device)
        self._seen_BL = pad(self._seen_BL, (0, 1), value=1)
        out = self._model(
            last_B1,
            attention_mask=self._seen_BL,
            position_ids=self._seen_BL.sum(1, keepdim=True) - 1,
            past_key_values=self._cache,
            use_cache=True,
        )
        add_tokens(self._rows, out.logits[:, -1])

    def _without_finished(self) -> list[Job]:
        """Remove finished samples and their columns from the batch once they are many; return the jobs that are complete."""
        jobs = [job for job in dict.fromkeys(row.job for row in self._rows) if job.done]
        kept = [i for i, row in enumerate(self._rows) if not row.done]
        if not kept:
            self._clear()
        elif len(self._rows) - len(kept) >= FINISHED_SHARE * len(self._rows):
            kept_B = torch.tensor(kept, device=self._model.device)
            self._rows = [self._rows[i] for i in kept]
            self._seen_BL = self._seen_BL[kept_B]
            start = int(self._seen_BL.any(0).int().argmax())
            self._seen_BL = self._seen_BL[:, start:]
            for layer in self._cache.layers:
                layer.keys, layer.values = (each[kept_B, :, start:] for each in (layer.keys, layer.values))
        return jobs


def add_tokens(rows: Sequence[_Row], logits_BV: Tensor) -> None:
    """Sample a token of each row, with its log-prob and, if it was asked for, its sampling mask."""
    logprobs_BV = distribution(logits_BV, [row.job.ask for row in rows])
    greedy_B = torch.tensor([row.job.ask.temperature == 0 for row in rows], device=logits_BV.device)
    uniform_B = torch.tensor([row.random.random() for row in rows], dtype=torch.float64, device=logits_BV.device)
    token_B = torch.where(greedy_B, logprobs_BV.argmax(1), choice(logprobs_BV, uniform_B))
    logprobs = logprobs_BV.gather(1, token_B[:, None])[:, 0].tolist()
    for i, (row, token) in enumerate(zip(rows, token_B.tolist(), strict=True)):
        mask = (logprobs_BV[i] > -torch.inf).nonzero()[:, 0].cpu() if row.job.ask.masks and not row.done else None
        row.add(token, logprobs[i], mask)


def distribution(logits_BV: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Return the fp32 log-probs of the distribution that each row is sampled from; minus infinity where it is truncated.

    The logits are divided by the temperature. Top-k keeps exactly k of them, then top-p counts the probabilities that are left.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits_BV.device)[:, None]

    logits_BV = logits_BV.float() / column([ask.temperature or 1.0 for ask in asks])
    if any(ask.temperature and (ask.top_k > 0 or ask.top_p < 1) for ask in asks):
        everything = logits_BV.size(1)
        top_k_B1 = column([ask.top_k if ask.top_k > 0 and ask.temperature else everything for ask in asks])
        top_p_B1 = column([ask.top_p if ask.temperature else 1.0 for ask in asks])
        sorted_BV, ids_BV = logits_BV.sort(dim=1, descending=True, stable=True)
        sorted_BV = sorted_BV.masked_fill(torch.arange(everything, device=logits_BV.device) >= top_k_B1, -torch.inf)
        probs_BV = sorted_BV.softmax(1)
        cut_BV = (probs_BV.cumsum(1) - probs_BV >= top_p_B1) & (top_p_B1 < 1)  # a sum of rounded numbers may exceed 1
        cut_BV[:, 0] = False
        logits_BV = torch.empty_like(logits_BV).scatter_(1, ids_BV, sorted_BV.masked_fill(cut_BV, -torch.inf))
    return logits_BV.log_softmax(1)


def choice(logprobs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the token of each row at which the distribution function, in fp64, exceeds the row's number in [0, 1)."""
    cumulative_BV = logprobs_BV.double().exp().cumsum(1)
    total_B = cumulative_BV[:, -1]
    target_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0]


def _widened(old: Tensor, new: Tensor, dim: int = 2) -> tuple[Tensor, Tensor]:
    """Pad the shorter of two tensors of 3 or 4 dimensions with zeros in front of dimension `dim`, the last but one."""
    width = max(old.size(dim), new.size(dim))
    return pad(old, (0, 0, width - old.size(dim), 0)), pad(new, (0, 0, width - new.size(dim), 0))


def _joined_masks(masks: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    return torch.cat(list(masks)).numpy().astype(np.int32), np.array([mask.numel() for mask in masks], np.int32)
