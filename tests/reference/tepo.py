"""TEPO in fp64 with transformers and plain autograd, written from the paper's formulas; shares no code with the product.

One sequence at a time, no packing, no padding, no parallelism: the loss as Section 3 prints it, its gradient by autograd, and
AdamW (torch's) with global-norm clipping.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.reference.hybrid import widen
from tests.truncated import reference as truncated


@dataclass
class Sequence:
    """A sequence with its old statistics.

    Attributes:
        ids: int64 [L].
        response: bool [L].
        old_logprob: fp64 over the response tokens.
        old_entropy: fp64 over the response tokens.
        masks: Ids over which the distribution of each response token is renormalized. None: the whole vocabulary.
    """

    ids: Tensor
    response: Tensor
    advantage: float
    old_logprob: Tensor
    old_entropy: Tensor
    masks: list[set[int]] | None = None


@dataclass
class Step:
    """One optimizer step: loss, gradients before clipping, their norm, weights after it, and measures of coverage."""

    loss: float
    gradients: dict[str, Tensor]
    grad_norm: float
    weights: dict[str, Tensor]
    clipped_high: float
    clipped_low: float
    mask_share: float


def load(path: Path, dtype: torch.dtype = torch.float64, nudge: int = 0) -> torch.nn.Module:
    """Return the HF model, with eager attention and experts (grouped products take no fp64), in fp64 by default.

    `nudge` is the seed of a change of its weights by at most half an ulp of fp32; 0 for none.
    """
    widen()
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **eager).to(dtype)
    generator = torch.Generator().manual_seed(nudge)
    with torch.no_grad():
        for p in model.parameters() if nudge else ():
            p *= 1 + 2.0**-24 * (2 * torch.rand(p.shape, generator=generator, dtype=torch.float64) - 1)
    return model


def statistics(
    model: torch.nn.Module, ids: Tensor, response: Tensor, temperature: float, masks: list[set[int]] | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy of each response token, from softmax(logits / temperature)."""
    logits = model(ids[None]).logits[0, :-1] / temperature
    if masks is not None:
        return truncated(logits[response[1:]], ids[1:][response[1:]], 1.0, masks)
    logp = torch.log_softmax(logits, dim=-1)
    chosen = logp.gather(1, ids[1:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    keep = response[1:]
    return chosen[keep], entropy[keep]


def tepo_loss(
    model: torch.nn.Module, batch: list[Sequence], temperature: float, eps: float, beta: float, form: str
) -> tuple[Tensor, dict[str, float]]:
    """Return -J of Eq. 4 over a minibatch."""
    total = sum(int(s.response.sum()) for s in batch)
    objective = torch.zeros((), dtype=torch.float64)
    high = low = masked = 0
    for s in batch:
        logprob, entropy = statistics(model, s.ids, s.response, temperature, s.masks)
        x = logprob - s.old_logprob
        log_w = x.sum() / x.numel()
        w = torch.exp(torch.clamp(log_w, -20, 20))
        clipped = torch.clamp(w, 1 - eps, 1 + eps)
        if form == "tepo":
            surrogate = torch.minimum(w * s.advantage, clipped * s.advantage)
        elif form == "eq4":
            surrogate = torch.minimum(w, clipped) * s.advantage
        else:
            surrogate = w * s.advantage
        high += s.advantage > 0 and w.item() > 1 + eps
        low += s.advantage < 0 and w.item() < 1 - eps
        objective = objective + surrogate * x.numel()
        if form != "alg1":
            mask = torch.logical_and(torch.tensor(s.advantage > 0), entropy.detach() - s.old_entropy < 0)
            y = torch.clamp(x, -20, 20)
            kl = torch.exp(y) * y - torch.exp(y) + 1
            objective = objective - beta * (kl * mask).sum()
            masked += int(mask.sum())
    shares = {"high": high / len(batch), "low": low / len(batch), "mask": masked / total}
    return -objective / total, shares


class Trainer:
    """Consecutive optimizer steps on one model."""

    def __init__(
        self,
        path: Path,
        lr: float,
        eps: float,
        betas: tuple[float, float],
        weight_decay: float,
        clip: float,
        dtype: torch.dtype = torch.float64,
        nudge: int = 0,
    ) -> None:
        self.model = load(path, dtype, nudge)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]  # norms: never decayed
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, eps=eps, betas=betas)
        self.clip = clip

    def step(self, batch: list[Sequence], temperature: float, eps: float, beta: float, form: str = "tepo") -> Step:
        """Take one step; return loss, gradients, and the weights after it."""
        loss, shares = tepo_loss(self.model, batch, temperature, eps, beta, form)
        return self.take(loss, (shares["high"], shares["low"], shares["mask"]))

    def take(self, loss: Tensor, shares: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Step:
        self.optimizer.zero_grad()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in self.model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        weights = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        return Step(loss.item(), gradients, float(norm), weights, *shares)
