"""Shared by recipes and covering array: the reference's answer to a config, and the comparison."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from tepo_megatron.base.seeding import derive_seed, hash_rows
from tepo_megatron.base.types import Rollout, TrainBatch
from tepo_megatron.config import Config
from tepo_megatron.losses import build_objective
from tepo_megatron.report.audit.reference import Formula
from tests.gate import reference
from tests.gate.data import Material, masks_of, response_logprobs
from tests.gate.world import Outcome, distance
from tests.objective_cases import method_of
from tests.reference.rounding import ALONG, DRAWS, most_beyond_rounding, norm, relative

TOLERANCE = 1e-5
LEAST_MOVED = 0.01  # share of a tensor's norm; a smaller change says little about the update
MARGIN = 1e-5  # distance of a compared number to its threshold; closer, fp32 and fp64 may rightly differ
BF16_GRADIENT, BF16_CHANGE = 0.1, 0.9


def expectation(
    cfg: Config,
    material: Material,
    found: Sequence[Mapping[str, Tensor]] | None = None,
    method: Formula | None = None,
    dtype: torch.dtype = torch.float64,
    nudge: int = 0,
) -> reference.Trained:
    """Train the reference as the config says, on the rollouts of all steps; `nudge` as in `load`."""
    method = method or method_of(build_objective(cfg.objective))
    optimizer, adam = cfg.optimizer, cfg.megatron.known_optimizer
    settings = reference.Settings(
        optimizer.lr, adam.adam_eps, (adam.adam_beta1, adam.adam_beta2), adam.weight_decay, adam.clip_grad,
        cfg.rollout.temperature, cfg.training.old_logprobs, dtype,
    )  # fmt: skip
    ref = Path(cfg.objective.reference_path) if cfg.objective.reference_path else None
    if method.ref_beta and ref is None:
        ref = material.model
    trainer = reference.Trainer(material.model, method, settings, ref, found, nudge)
    for step, rollouts in enumerate(material.steps, 1):
        _step(trainer, cfg, rollouts, step)
    return trainer.trained()


def _step(trainer: reference.Trainer, cfg: Config, rollouts: tuple[Rollout, ...], step: int) -> None:
    """Draw minibatches and random keys by the product's own seeds; the choice of seeds is no part of the arithmetic."""
    if trainer.method.mask_truncated:  # overlong filtering: the response is context that nothing is learned from
        none = [torch.zeros_like(r.response_mask_L) for r in rollouts]
        pairs = zip(rollouts, none, strict=True)
        rollouts = tuple(replace(r, response_mask_L=mask) if r.stop_reason == "length" else r for r, mask in pairs)
    batch = TrainBatch.build(rollouts, torch.zeros(len(rollouts)))
    shuffle = derive_seed(cfg.seed, "minibatches", step)
    parts = list(batch.epochs(cfg.training.epochs, cfg.training.minibatch_prompts, shuffle))
    place = {id(r): i for i, r in enumerate(rollouts)}
    samples = [
        reference.Sample(r.token_ids_L, r.response_mask_L, r.prompt_id, r.reward, response_logprobs(r), masks_of(r))
        for r in rollouts
    ]

    def keys(update: int, chosen: object) -> Tensor:
        return hash_rows(derive_seed(cfg.seed, "weighting", step, update), parts[update].token_keys_N(torch.device("cpu")))

    trainer.step(samples, [[place[id(r)] for r in part.rollouts] for part in parts], keys)


def check_equal(found: Outcome, expected: reference.Trained, what: str, in_fp32: Callable[..., reference.Trained]) -> None:
    """Assert that loss and gradients of each update, and the change of the weights, are the reference's.

    Args:
        in_fp32: The reference in fp32, computed where a tensor is off by more than TOLERANCE: what is off as its draws are is
            rounding (reference/rounding.py), which the first update spreads and the later ones see.
    """
    assert len(found.gradients) == len(expected.updates), what
    for i, update in enumerate(expected.updates):
        assert update.margin >= MARGIN, f"{what}: update {i} compares numbers that fp32 cannot tell apart; take another seed"
    moved = {n: (c.norm() / (expected.weights[n] - c).norm()).item() for n, c in expected.change.items()}
    assert min(moved.values()) >= LEAST_MOVED, f"{what}: a weight moved by {min(moved.values()):.2%}"
    errors = _errors(found.gradients, _changes(found, expected), expected)
    worst = max(((name, norm(error), TOLERANCE) for group in errors for name, error in group.items()), key=itemgetter(1))
    rounding = TOLERANCE
    if not worst[1] <= TOLERANCE:
        lows = [in_fp32(nudge=nudge) for nudge in DRAWS]
        draws = [_errors([update.gradients for update in low.updates], low.change, expected) for low in lows]
        rounding = max(rounding, ALONG * max(norm(error) for draw in draws for group in draw for error in group.values()))
        each = [most_beyond_rounding(group, [draw[i] for draw in draws], TOLERANCE) for i, group in enumerate(errors)]
        worst = max(each, key=lambda group: group[1] / group[2])
    name, most, bound = worst
    assert most <= bound, f"{what}: the {name} is off by {most:.1e}, and the bound is {bound:.1e}"
    for i, update in enumerate(expected.updates):
        # From the second update on the weights may be off by `rounding` of their change, which moves the loss.
        along = sum((g.norm() * expected.change[name].norm()).item() for name, g in update.gradients.items()) if i else 0.0
        most, off = TOLERANCE * max(1.0, abs(update.loss)) + rounding * along, abs(found.losses[i] - update.loss)
        assert off <= most, f"{what}: the loss of update {i} is off by {off:.1e}, and the bound is {most:.1e}"


def check_near(found: Outcome, expected: reference.Trained, what: str) -> None:
    """Assert that bf16 is finite, its first gradient near the reference's, and the change of the weights in its direction."""
    gradients, changes = found.gradients[0], _changes(found, expected)
    for tensors in (*found.gradients, changes):
        assert all(torch.isfinite(t).all() for t in tensors.values()), what
    off = distance(_flat(gradients), _flat(expected.updates[0].gradients))
    assert off <= BF16_GRADIENT, f"{what}: bf16 gradients are off by {off:.2f}"
    alike = torch.nn.functional.cosine_similarity(_flat(changes), _flat(expected.change), dim=0).item()
    assert alike >= BF16_CHANGE, f"{what}: the change of the weights has cosine {alike:.3f} to the reference's"


def _changes(found: Outcome, expected: reference.Trained) -> dict[str, Tensor]:
    start = {n: w - expected.change[n] for n, w in expected.weights.items()}
    assert found.weights.keys() == start.keys()
    return {n: w.double() - start[n] for n, w in found.weights.items()}


def _errors(
    gradients: Sequence[Mapping[str, Tensor]], change: Mapping[str, Tensor], expected: reference.Trained
) -> list[dict[str, Tensor]]:
    """Return the relative errors of each update's gradients, and of the change of the weights."""
    pairs = [(f"gradient of {{}} in update {i}", gradients[i], update.gradients) for i, update in enumerate(expected.updates)]
    errors = []
    for form, tensors, right in [*pairs, ("change of {}", change, expected.change)]:
        assert tensors.keys() == right.keys()
        errors.append({form.format(name): relative(tensors[name], tensor) for name, tensor in right.items()})
    return errors


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])
