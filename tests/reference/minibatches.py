"""Random minibatches for comparisons with the reference, and the reference's answer to them; needs torch alone.

All numbers are representable in fp32, so that fp32 and fp64 see the same case. Log-ratios are exactly 0 or at least 0.05 apart
from 0 (except those that are requested as tiny): nearer to it 1 - exp(-x) has lost more digits in fp32 than the tests allow.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.report.audit.reference import Formula, Outcome, ReferenceBatch, evaluate

LENGTHS = (1, 5, 17, 2, 0, 30, 1, 8, 3, 12)  # |y|; one response without any token
MARGIN = 1e-4  # cases with a number closer to its threshold are left out


@dataclass(frozen=True)
class Response:
    """One sampled response of |y| >= 0 tokens: advantage, prompt, and of each token nats under the other policies and a key."""

    advantage: float
    old: list[float]
    old_entropy: list[float]
    rollout: list[float]
    ref: list[float]
    keys: list[int]
    prompt: int = 0


@dataclass(frozen=True)
class Batch:
    """Responses, and the current log-probs and entropies of their tokens (fp64 [N])."""

    responses: list[Response]
    logprob: Tensor
    entropy: Tensor

    def flat(self, name: str) -> Tensor:
        """Return a field of all responses, one after another (fp64 [N])."""
        return torch.tensor([x for r in self.responses for x in getattr(r, name)], dtype=torch.float64)

    @property
    def keys(self) -> Tensor:
        """Return the random keys, int64 [N]."""
        return torch.tensor([k for r in self.responses for k in r.keys], dtype=torch.int64)

    def inputs(self, logprob: Tensor, entropy: Tensor, teacher_kl: Tensor | None = None) -> ReferenceBatch:
        """Return the minibatch for the reference, with these current statistics; the weighting uses them too."""
        lengths, old = torch.tensor([len(r.old) for r in self.responses]), self.flat("old")
        advantages = torch.tensor([r.advantage for r in self.responses], dtype=torch.float64)
        inputs = {
            "logprob": logprob, "entropy": entropy, "old_logprob": old, "old_entropy": self.flat("old_entropy"),
            "rollout_logprob": self.flat("rollout"), "ref_logprob": self.flat("ref"),
            "group_advantage": advantages.repeat_interleave(lengths),
            "weighting_logprob": logprob.detach(), "weighting_entropy": entropy.detach(),
            "weighting_log_ratio": logprob.detach() - old, "weighting_key": self.keys,
        }  # fmt: skip
        inputs |= {} if teacher_kl is None else {"teacher_kl": teacher_kl}
        return ReferenceBatch(lengths, torch.tensor([r.prompt for r in self.responses]), inputs)


def draw(seed: int, lengths: tuple[int, ...] = LENGTHS, *, extreme: bool = False, tiny: bool = False) -> Batch:
    """Draw a minibatch whose responses stay, move a little or drift off.

    Advantages of both signs and zero, and entropies that rise, fall and stay equal occur.
    """
    g = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, n: int) -> Tensor:
        return low + (high - low) * torch.rand(n, generator=g)

    def sign(n: int) -> Tensor:
        return 1.0 - 2.0 * torch.randint(0, 2, (n,), generator=g)

    def differences(n: int) -> Tensor:
        kind = int(torch.randint(0, 6, (), generator=g))
        if kind == 0:
            return torch.zeros(n)
        if kind == 1:
            return sign(n) * (uniform(1e-4, 1e-3, n) if tiny else uniform(0.05, 0.15, n))
        x = sign(1) * uniform(0.15, 0.7, 1) + uniform(-0.5, 0.5, n)
        return torch.where(x.abs() < 0.05, torch.copysign(torch.tensor(0.05), x), x)

    responses, logprobs, entropies = [], [], []
    for i, n in enumerate(lengths):
        old = -uniform(0.02, 3.5, n)
        logprob, rollout, ref = old + differences(n), old + differences(n) * uniform(0.003, 1.5, 1), old + differences(n)
        if extreme:
            old, logprob, rollout, ref = _torn_apart(g, old, logprob, rollout, ref)
        entropy = uniform(0.05, 3.0, n)
        change = uniform(-0.5, 0.5, n) * torch.randint(0, 6, (n,), generator=g).clamp(max=1)
        advantage = torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0])[torch.randint(0, 5, (1,), generator=g)] * uniform(0.3, 1.6, 1)
        keys = torch.randint(-(2**62), 2**62, (n,), generator=g)
        per_token = [x.tolist() for x in (old, entropy - change, rollout, ref, keys)]
        responses.append(Response(advantage.item(), *per_token, prompt=i // 3))
        logprobs.append(logprob.double())
        entropies.append(entropy.double())
    return Batch(responses, torch.cat(logprobs), torch.cat(entropies))


def _torn_apart(g: torch.Generator, *logprobs: Tensor) -> list[Tensor]:
    """The policies' log-probs, on a grid of 2^-6 nats; on a third of the tokens, each of them 60 nats lower or not."""
    here = torch.rand(logprobs[0].numel(), generator=g) < 1 / 3
    return [(x * 64).round() / 64 - 60.0 * (here & (torch.rand(x.numel(), generator=g) < 0.5)) for x in logprobs]


def gradient(x: Tensor) -> Tensor:
    """Return the gradient of a leaf; zeros where nothing depended on it."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def shares(outcome: Outcome) -> dict[str, float]:
    """Return the share of the tokens that each condition affects."""
    terms, one = outcome.terms, torch.ones_like(outcome.terms["share"])
    touched = {
        "clipped": terms["clipped"],
        "masked": terms["kl_mask"],
        "weighted": (terms.get("weight", one) < 0.99) | (terms.get("penalty", 0 * one) > 0),
        "corrected": (terms.get("correction", one) - 1).abs() > 0.01,
    }
    return {name: float(x.sum()) / max(1, x.numel()) for name, x in touched.items()}


def expected(method: Formula, batch: Batch) -> tuple[Outcome, Tensor, Tensor]:
    """Return the reference's answer, and its gradients with respect to the log-probs and to the entropies."""
    x, h = batch.logprob.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    outcome = evaluate(method, batch.inputs(x, h))
    if outcome.loss.requires_grad:
        outcome.loss.backward()
    return outcome, gradient(x), gradient(h)


def fair_cases(
    method: Formula, count: int, drawn: Callable[[int], Batch]
) -> Iterator[tuple[Batch, tuple[Outcome, Tensor, Tensor]]]:
    """Return the first `count` batches, by seed, with nothing within MARGIN of its threshold, and their expected answers."""
    for seed in itertools.count():
        batch = drawn(seed)
        theirs = expected(method, batch)
        if theirs[0].margin >= MARGIN:
            yield batch, theirs
            count -= 1
        if count == 0:
            return
        assert seed < 1000, f"no case of {method} keeps clear of its thresholds"
