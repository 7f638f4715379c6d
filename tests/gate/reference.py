"""The fp64 reference of the gate: transformers, autograd, any method of `report/audit/reference.py`, AdamW with clipping.

No packing, no microbatches, no parallelism. It shares no code with the product except for the random keys of tokens, which are
an input (Clip-Cov and KL-Cov draw tokens by them).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tepo_megatron.report.audit.advantages import group_advantages
from tepo_megatron.report.audit.reference import Formula, evaluate
from tests.parallel.test_families import in_file_names
from tests.reference.minibatches import Batch, Response, shares
from tests.reference.rewards import reward_towards_reference
from tests.reference.tepo import load
from tests.truncated import reference as truncated

Masks = list[set[int]]
Statistics = tuple[Tensor, Tensor]  # log-probs and entropies of all response tokens, fp64 [N]


@dataclass(frozen=True)
class Sample:
    """One sample of a rollout batch.

    Attributes:
        ids: int64 [L], token ids.
        response: bool [L], response tokens.
        group: Number of its prompt.
        rollout: fp64 [|y|], the engine's log-probs.
        masks: Ids over which each response token's distribution is renormalized. None: the whole vocabulary.
    """

    ids: Tensor
    response: Tensor
    group: int
    reward: float
    rollout: Tensor
    masks: Masks | None = None


@dataclass(frozen=True)
class Settings:
    """Settings of optimizer and sampling.

    Attributes:
        clip: Bound on the 2-norm of the gradient; 0 never clips.
        temperature: Divisor of the logits.
        old: Source of the old log-probs.
        dtype: Type of the models; fp32 shows what rounding does to the reference itself.
    """

    lr: float
    eps: float
    betas: tuple[float, float]
    weight_decay: float
    clip: float
    temperature: float
    old: str = "actor"
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Update:
    """One optimizer step.

    Attributes:
        gradients: Gradients before clipping.
        margin: Distance of the closest comparison to its threshold.
        shares: Share of the tokens that each condition affected.
    """

    loss: float
    gradients: dict[str, Tensor]
    margin: float
    shares: dict[str, float]


@dataclass(frozen=True)
class Trained:
    """All updates, and their total change: weights after the last update minus those before the first."""

    updates: list[Update]
    change: dict[str, Tensor]
    weights: dict[str, Tensor]


def statistics(
    model: torch.nn.Module,
    ids: Sequence[Tensor],
    responses: Sequence[Tensor],
    temperature: float,
    masks: Sequence[Masks | None],
) -> Statistics:
    """Return log-prob and entropy of every response token, sequence after sequence, from softmax(logits / temperature).

    Sequences are padded on the right, which causal attention does not see.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True, padding_value=3)
    logits = model(padded).logits[:, :-1] / temperature
    logp = torch.log_softmax(logits, dim=-1)
    chosen = logp.gather(2, padded[:, 1:, None])[..., 0]
    entropy = -(logp.exp() * logp).sum(-1)
    found = []
    for i, (mask, kept) in enumerate(zip(responses, masks, strict=True)):
        rows = mask[1:].nonzero()[:, 0]
        labels = padded[i, 1:][rows]
        found.append((chosen[i, rows], entropy[i, rows]) if kept is None else truncated(logits[i, rows], labels, 1.0, kept))
    return torch.cat([logprob for logprob, _ in found]), torch.cat([entropy for _, entropy in found])


class Trainer:
    """Rollout batches and their updates on one model."""

    def __init__(
        self,
        path: Path,
        method: Formula,
        settings: Settings,
        ref: Path | None = None,
        found: Sequence[Mapping[str, Tensor]] | None = None,
        nudge: int = 0,
    ) -> None:
        """Load the model; `nudge` as in `load`."""
        self.model, self.method, self.settings = load(path, settings.dtype, nudge), method, settings
        self.ref = None if ref is None else load(ref, settings.dtype)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]  # norms and biases: never decayed
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, eps=settings.eps, betas=settings.betas)
        self.start = self._weights()
        self.updates: list[Update] = []
        self._found = found

    def step(
        self, samples: Sequence[Sample], minibatches: Sequence[Sequence[int]], keys: Callable[[int, Sequence[int]], Tensor]
    ) -> None:
        """Take the updates of one rollout batch."""
        responses = self._responses(samples)
        for number, chosen in enumerate(minibatches):
            drawn = keys(number, chosen).split([len(responses[i].old) for i in chosen])
            batch = [replace(responses[i], keys=k.tolist()) for i, k in zip(chosen, drawn, strict=True)]
            self._update([samples[i] for i in chosen], batch, number)

    def trained(self) -> Trained:
        weights = self._weights()
        return Trained(self.updates, {n: w - self.start[n] for n, w in weights.items()}, weights)

    def _weights(self) -> dict[str, Tensor]:
        return self._named({n: p.detach().clone() for n, p in self.model.named_parameters()})

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Name tensors as in the files of a checkpoint, in which every expert has tensors of its own."""
        return in_file_names(type(self.model).__name__.lower(), tensors)

    def _responses(self, samples: Sequence[Sample]) -> list[Response]:
        """Compute the inputs of the first update: old, rollout and reference statistics, and advantages."""
        lengths = [int(s.response.sum()) for s in samples]
        with torch.no_grad():
            old, entropy = (x.split(lengths) for x in self._statistics(self.model, samples))
            ref = self._statistics(self.ref or self.model, samples)[0].split(lengths)
        if self.settings.old == "rollout":
            old = tuple(s.rollout for s in samples)
        rows = zip(samples, old, entropy, ref, strict=True)
        responses = [Response(0.0, o.tolist(), h.tolist(), s.rollout.tolist(), r.tolist(), [0] * len(o)) for s, o, h, r in rows]
        rewards = [s.reward for s in samples]
        if self.method.ref_beta and self.method.ref_kl_in == "reward":
            rewards = [reward_towards_reference(self.method, x, r) for x, r in zip(rewards, responses, strict=True)]
        names = list(dict.fromkeys(s.group for s in samples))
        groups = [[x for x, s in zip(rewards, samples, strict=True) if s.group == name] for name in names]
        advantages = group_advantages(self.method.advantage, groups)
        prompts = [names.index(s.group) for s in samples]
        return [replace(r, advantage=a, prompt=p) for r, a, p in zip(responses, advantages, prompts, strict=True)]

    def _statistics(self, model: torch.nn.Module, samples: Sequence[Sample]) -> Statistics:
        ids, responses = [s.ids for s in samples], [s.response for s in samples]
        return statistics(model, ids, responses, self.settings.temperature, [s.masks for s in samples])

    def _exact_kl(self, samples: Sequence[Sample]) -> Tensor:
        """Return KL(policy || reference policy) of each response token, over the vocabulary."""
        found = []
        for sample in samples:
            rows = sample.response[1:].nonzero()[:, 0]
            log_p, log_q = (
                torch.log_softmax(model(sample.ids[None]).logits[0, rows] / self.settings.temperature, dim=-1)
                for model in (self.model, self.ref or self.model)
            )
            found.append((log_p.exp() * (log_p - log_q.detach())).sum(-1))
        return torch.cat(found)

    def _update(self, samples: Sequence[Sample], batch: list[Response], number: int) -> None:
        self.optimizer.zero_grad()
        logprob_N, entropy_N = self._statistics(self.model, samples)
        if self.settings.old == "rollout":  # the engine knows no entropy: that of the current pass replaces it
            entropies = entropy_N.detach().split([len(r.old) for r in batch])
            batch = [replace(r, old_entropy=h.tolist()) for r, h in zip(batch, entropies, strict=True)]
        elif number == 0:  # the old statistics are those of this pass
            logprobs, entropies = (x.detach().split([len(r.old) for r in batch]) for x in (logprob_N, entropy_N))
            batch = [
                replace(r, old=x.tolist(), old_entropy=h.tolist()) for r, x, h in zip(batch, logprobs, entropies, strict=True)
            ]
        kl_N = self._exact_kl(samples) if self.method.ref_kl == "full" else None
        outcome = evaluate(self.method, Batch(batch, logprob_N, entropy_N).inputs(logprob_N, entropy_N, kl_N))
        # if every token is clipped, the loss is a constant and its gradient 0
        (outcome.loss + 0 * logprob_N.sum()).backward()
        gradients = self._named({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})
        if self._found is not None:
            self._take(self._found[len(self.updates)])
        if self.settings.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.updates.append(Update(outcome.loss.item(), gradients, outcome.margin, shares(outcome)))

    def _take(self, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients of the parameters; they are named as in a checkpoint's files."""
        own = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        for name, view in self._named(own).items():
            view.copy_(gradients[name])
        assert all(torch.equal(g, gradients[n].to(g.dtype)) for n, g in self._named(own).items()), "a name is of a copy"
