"""The trainer's side of canaries: make them, score them under each version before it is delivered, and announce the scores."""

from typing import Self

import numpy as np
import torch

from tepo_megatron.actor.actor import Actor
from tepo_megatron.distributed.objects import broadcast_result
from tepo_megatron.distributed.parallel import ParallelDims
from tepo_megatron.inference.engine import CanaryChecked
from tepo_megatron.limits import CANARY_MARGIN
from tepo_megatron.types import Canaries, Rollout, TrainBatch
from tepo_megatron.utils.seeding import derive_seed
from tepo_megatron.weight_sync.sync import WeightSync

CANARY_TOKENS = 48
LONG_CANARY_TOKENS = 160  # vLLM's prefix cache has blocks of 128 tokens on a CPU
CACHED_SHARE = 5 / 6  # share of a canary that is also used as a cached prefix


def make_canaries(count: int, most_tokens: int, vocab_size: int, seed: int) -> Canaries:
    """Return canaries: all of CANARY_TOKENS tokens, but for a last one of LONG_CANARY_TOKENS.

    Their ids are spread evenly over the vocabulary, so that each of its shards is an input and a target. The last id of the
    vocabulary is left out, because SGLang reports it as 0.
    """
    lengths = [min(CANARY_TOKENS, most_tokens)] * (count - 1) + [min(LONG_CANARY_TOKENS, most_tokens)]
    random, total = np.random.default_rng(derive_seed(seed, "canaries")), sum(lengths)
    places = (np.arange(total) + random.random(total)) / total
    ids = random.permutation((places * (vocab_size - 1)).astype(np.int64))
    sequences = np.split(ids, np.cumsum(lengths)[:-1])
    return Canaries(
        tuple(tuple(sequence.tolist()) for sequence in sequences),
        tuple(max(1, int(length * CACHED_SHARE)) for length in lengths),
    )


class CanarySync:
    """Delivers weights as `WeightSync` does, after the actor has scored the canaries under them. See `WeightSync.push`."""

    def __init__(
        self, sync: WeightSync, actor: Actor, engine: CanaryChecked | None, canaries: Canaries, groups: ParallelDims
    ) -> None:
        self._sync, self._actor, self._engine, self._canaries, self._groups = sync, actor, engine, canaries, groups
        self._batch = canary_batch(canaries)
        self._scored: int | None = None  # version of the last scores

    @classmethod
    def open(cls, sync: WeightSync, actor: Actor, engine: CanaryChecked | None, groups: ParallelDims) -> Self:
        """Make the canaries of the actor's config, and have the engine ask about them. All ranks call it."""
        cfg = actor.cfg
        canaries = make_canaries(cfg.sync.canaries, cfg.sequence_tokens - CANARY_MARGIN, actor.arch.vocab_size, cfg.seed)
        served, fp8 = cfg.rollout.server.precision or cfg.model.dtype, cfg.model.fp8 or cfg.sync.quantize == "fp8"
        same = served == cfg.model.dtype and not fp8
        broadcast_result(lambda: None if engine is None else engine.use_canaries(canaries, cfg.sync, same), groups.host)
        return cls(sync, actor, engine, canaries, groups)

    def push(self, version: int) -> None:
        """Score the canaries, unless this version's scores are known, and deliver the weights. All ranks call it.

        Collectives: those of a forward pass, one broadcast over pp, one over the host group, and those of `WeightSync.push`.

        Raises:
            SyncError: As `WeightSync.push`; or servers serve other weights, and restarts do not help.
        """
        if version != self._scored:
            self._announce(version)
            if self._scored is None:
                self._announce(version)  # again, for the jitter of the actor's own log-probs
            self._scored = version
        self._sync.push(version)

    def _announce(self, version: int) -> None:
        scores, engine = self.scores(), self._engine
        broadcast_result(lambda: None if engine is None else engine.expect_scores(version, scores), self._groups.host)

    def scores(self) -> list[float]:
        """Return the actor's log-probs of the canaries' targets, nats. Collectives: a forward pass, one broadcast over pp."""
        logprobs_N = torch.zeros(self._batch.num_tokens, dtype=torch.float32, device=self._groups.device)
        computed_N = self._actor.logprobs(self._batch, replays=False, temperature=1.0)
        if self._groups.is_last_stage:
            logprobs_N.copy_(computed_N)
        found: list[float] = self._groups.broadcast_from_last_stage(logprobs_N).tolist()
        return found

    def metrics(self) -> dict[str, float]:
        """See `WeightSync.metrics`."""
        return self._sync.metrics()

    def __enter__(self) -> Self:
        self._sync.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._sync.__exit__(*exc_info)


def canary_batch(canaries: Canaries) -> TrainBatch:
    """Return the canaries as a batch in which every token except the first is a response token."""
    rollouts = []
    for number, ids in enumerate(canaries.sequences):
        mask_L = torch.arange(len(ids)) > 0
        rollouts.append(Rollout(number, torch.tensor(ids, dtype=torch.int64), mask_L, torch.zeros(len(ids)), 0, "length"))
    return TrainBatch.build(rollouts, torch.zeros(len(rollouts)))
