"""Compare every rollout with log-probs under the weights that sampled it, before or together with the update that uses it.

A server merely echoes the version that it was given; its samples show which weights it really has. The actor computes the
log-probs of the same tokens under the same version. If the two differ too much, the run ends. Every server is judged
separately, because a mean over several servers would dilute a stale one. `docs/decisions/0027-*` gives the reasons for this
design.

    tokens of                 | are compared
    the newest version        | with the old statistics, which the step computes anyway
    an older version          | in a separate pass, with that version's weights, kept in host memory since their delivery
    training.old_logprobs:    | in a separate pass if a batch takes several updates, because there is no pass for old statistics
      rollout                 |
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.actor.actor import Actor
from tepo_megatron.actor.reference import HostWeights
from tepo_megatron.base.errors import SyncError
from tepo_megatron.base.types import Rollout, TrainBatch
from tepo_megatron.config import RolloutConfig, SyncConfig, TrainingConfig
from tepo_megatron.dist.parallel import ParallelDims


def allowed_difference(tokens: int, cfg: SyncConfig) -> float:
    """Return the mean |log-prob difference|, in nats, that a server's sample of tokens may have.

    It is `cfg.max_logprob_diff` with a margin for chance that shrinks with the number of tokens n: 4 / sqrt(n) for the spread
    of a mean, and 20 / n because in bf16 a single token may differ by a nat. At 1,000 tokens it is 1.15 times the limit.
    """
    return cfg.max_logprob_diff * (1 + 4 / math.sqrt(tokens) + 20 / tokens)


def check_mismatch(
    mean_logprob_diff: float, version: int, cfg: SyncConfig, server: str = "", tokens: int | None = None
) -> None:
    """Raise SyncError if the engine's log-probs show that it serves other weights than the version it echoes.

    Args:
        mean_logprob_diff: Mean |rollout - actor| in nats, under the weights of `version`.
        tokens: Number of tokens, all of one server (see `allowed_difference`); None: all tokens of a step, without that margin.
    """
    limit = cfg.max_logprob_diff if tokens is None else allowed_difference(tokens, cfg)
    if not mean_logprob_diff <= limit:  # nan too
        where = "" if tokens is None else f" over {tokens} tokens{f' of {server}' if server else ''}"
        raise SyncError(
            f"mean |rollout - actor| log-prob difference is {mean_logprob_diff:.2e} nats at version {version}{where}, above "
            f"sync.max_logprob_diff={cfg.max_logprob_diff}: {server or 'the engine'} does not serve the weights that were sent "
            f"(or, in low precision, the gate is too tight: raise sync.max_logprob_diff)"
        )


Source = tuple[int, str]  # (version, name of the server or "" if unknown)


@dataclass
class LogprobDifference:
    """Sum of |engine log-prob - actor log-prob| in nats over response tokens."""

    total: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float:
        """Return the mean in nats per token; 0 without tokens."""
        return self.total / max(1, self.tokens)

    def add(self, other: "LogprobDifference") -> None:
        """Add the sum and the tokens of another difference."""
        self.total, self.tokens = self.total + other.total, self.tokens + other.tokens


class WeightsGate:
    """The comparison over a run. All ranks must call every method, with the same rollouts."""

    def __init__(
        self, rollout: RolloutConfig, training: TrainingConfig, sync: SyncConfig, actor: Actor, groups: ParallelDims
    ) -> None:
        self._rollout, self._training, self._sync, self._actor, self._groups = rollout, training, sync, actor, groups
        # Another run's weights sampled replayed rollouts; only those recorded as of the newest version can be compared.
        self._keeps = rollout.max_staleness if rollout.replay is None else 0
        self._streams = training.streams
        self._kept: dict[int, HostWeights] = {}  # version -> weights
        self._compared: dict[Source, LogprobDifference] = {}  # differences of the current step
        self._step_tokens = 0
        self._newest_too = False  # whether `before_updates` compared the tokens of the newest version
        self._first = 0  # tokens of versions before it cannot be compared

    def begin_after(self, step: int) -> None:
        """Leave out tokens of versions before `step`: the ranks that delivered them have failed, and nobody has the weights."""
        self._first = step

    def delivered(self, version: int) -> None:
        """Keep a copy of the actor's weights, delivered to the engine as `version`, as long as its rollouts may be used."""
        if self._keeps or self._streams:
            self._keep(version)

    def start_step(self, step: int) -> None:
        """Begin a step. With `training.stream`, keep a copy of the actor's weights, those of version `step` - 1."""
        self._compared, self._step_tokens = {}, 0
        if self._streams:
            self._keep(step - 1)

    def _keep(self, version: int) -> None:
        if version in self._kept:
            return
        unused = [self._kept.pop(v) for v in self.versions if v < version - self._keeps]
        if unused:  # reuse the buffer, because allocating page-locked memory is slow
            self._kept[version] = unused[0]
            unused[0].capture()
        else:
            self._kept[version] = self._actor.host_copy()

    @property
    def versions(self) -> list[int]:
        """Return the versions of which a copy is kept, ascending."""
        return sorted(self._kept)

    def before_updates(self, batch: TrainBatch, step: int) -> None:
        """Compare, in separate passes, the tokens whose log-probs no other pass of the step computes.

        Raises SyncError if a server serves other weights than it reports, or rollouts have a version that was never delivered.
        """
        training, newest = self._training, step - 1
        self._step_tokens, self._newest_too = self._step_tokens + batch.num_tokens, False
        if self._rollout.replay is not None:
            return
        several = self._streams or batch.updates(training.epochs, training.minibatch_prompts) > 1
        self._newest_too = training.old_logprobs == "rollout" and several
        compared: dict[Source, LogprobDifference] = {}
        versions = {version for r in batch.rollouts for _, (version, _) in pieces(r)}
        for version in sorted(version for version in versions if not 0 <= version < self._first):
            if version != newest or self._newest_too:
                part = batch.select(chosen(batch.rollouts, version, self._sync.compared_tokens), update=0)
                with contextlib.nullcontext() if version == newest else self.weights_of(version):
                    logprobs_N = self._actor.logprobs(part)
                compared |= self._differences(part, logprobs_N, version)
        self._judge(compared)

    def with_old_stats(self, batch: TrainBatch, step: int) -> None:
        """Compare the tokens of the newest version with the batch's old log-probs, which the actor computed.

        `batch`: the rollout batch, or the minibatch of its only update; `old_logprobs_N` is valid on the last pipeline stage.
        """
        assert batch.old_logprobs_N is not None, "the batch has no old statistics"
        if self._newest_too:
            return
        self._judge(self._differences(batch, batch.old_logprobs_N, step - 1))

    def values(self) -> dict[str, float | None]:
        """Return the step's metrics: mean and worst server's mean in nats, and the share of compared tokens."""
        whole = self._whole()
        if not whole.tokens:
            return {}
        return {
            "gate/logprob_diff_mean": whole.mean,
            "gate/logprob_diff_worst": max(difference.mean for difference in self._compared.values()),
            "gate/compared_share": whole.tokens / self._step_tokens,
        }

    @contextlib.contextmanager
    def weights_of(self, version: int) -> Iterator[None]:
        """Give the actor the kept weights of `version` inside the block; afterwards its own are restored bit for bit."""
        if version not in self._kept:
            known = ", ".join(map(str, self.versions)) or "none"
            raise SyncError(
                f"rollouts were sampled with version {version} of the weights, which this run did not deliver (it keeps "
                f"{known}), so they cannot be compared with the actor; end the servers and start them again"
            )
        self._actor.require_loaded("weights of another version", "parameters")
        with self._kept[version].in_place():
            yield

    def _differences(self, batch: TrainBatch, logprobs_N: Tensor, version: int) -> dict[Source, LogprobDifference]:
        """Return the difference of each server's tokens of `version`. Collectives: one broadcast over pp."""
        sources, counts = _layout(batch.rollouts)
        sums = torch.zeros(len(sources), dtype=torch.float64, device=self._groups.device)
        if self._groups.is_last_stage:
            owner_N = torch.repeat_interleave(*counts).to(sums.device)
            diff_N = (batch.rollout_logprobs_N.to(sums.device) - logprobs_N).abs().double()
            sums.index_add_(0, owner_N, diff_N)
        totals = self._groups.broadcast_from_last_stage(sums).tolist()
        tokens = torch.zeros(len(sources), dtype=torch.int64).index_add_(0, *counts).tolist()
        by_source = {s: LogprobDifference(total, n) for s, total, n in zip(sources, totals, tokens, strict=True)}
        return {source: difference for source, difference in by_source.items() if source[0] == version and difference.tokens}

    def _judge(self, compared: Mapping[Source, LogprobDifference]) -> None:
        """Add to the step's differences. Raise SyncError if one server, or all together, differ too much.

        Replayed rollouts are another run's, whose weights go another way with any other setting: they only are measured.
        """
        for source, difference in compared.items():
            self._compared.setdefault(source, LogprobDifference()).add(difference)
        if not compared or self._rollout.replay is not None:
            return
        limit = self._sync
        # first the server that exceeds the limit for its number of tokens the most, because it best identifies the fault
        worst = sorted(compared.items(), key=lambda item: -item[1].mean / allowed_difference(item[1].tokens, limit))
        for (version, server), difference in worst:
            check_mismatch(difference.mean, version, limit, server, difference.tokens)
        check_mismatch(self._whole().mean, max(version for version, _ in compared), limit)

    def _whole(self) -> LogprobDifference:
        whole = LogprobDifference()
        for difference in self._compared.values():
            whole.add(difference)
        return whole


def pieces(rollout: Rollout) -> list[tuple[int, Source]]:
    """Return (response tokens, source) of each part of a sequence that one version on one server sampled, in order."""
    versions, servers = dict(rollout.later_versions), dict(rollout.servers)
    version, server, parts = rollout.policy_version, "", []
    bounds = [*sorted({0, *versions, *servers}), rollout.token_ids_L.numel()]
    for start, end in itertools.pairwise(bounds):
        version, server = versions.get(start, version), servers.get(start, server)
        if tokens := int(rollout.response_mask_L[start:end].sum()):
            parts.append((tokens, (version, server)))
    return parts


def chosen(rollouts: Sequence[Rollout], version: int, most_tokens: int | None) -> list[int]:
    """Return the indices of the sequences to compare for `version`, among those with tokens of that version.

    `most_tokens`: token limit per server; once reached, no further sequence is chosen for that server. None: no limit.
    """
    counted: dict[str, int] = {}
    places = []
    for place, rollout in enumerate(rollouts):
        of_it = [(tokens, server) for tokens, (its, server) in pieces(rollout) if its == version]
        if any(most_tokens is None or counted.get(server, 0) < most_tokens for _, server in of_it):
            places.append(place)
            for tokens, server in of_it:
                counted[server] = counted.get(server, 0) + tokens
    return places


def _layout(rollouts: Sequence[Rollout]) -> tuple[list[Source], tuple[Tensor, Tensor]]:
    """Return the sources, and (source index, number of tokens) of each piece in the order of the _N tensors."""
    numbers: dict[Source, int] = {}
    owners, counts = [], []
    for rollout in rollouts:
        for tokens, source in pieces(rollout):
            owners.append(numbers.setdefault(source, len(numbers)))
            counts.append(tokens)
    return list(numbers), (torch.tensor(owners, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64))
