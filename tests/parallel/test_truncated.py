"""Truncated token statistics over tensor-parallel ranks: values, gradients, the same bits, and one collective."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.types import Truncation
from tests.parallel.test_statistics import counting
from tests.truncated import kept, reference, rows
from tests.worlds import run_world

ROWS, VOCAB, TRUNCATION = 23, 70, Truncation(20, 0.9)


def given() -> tuple[torch.Tensor, torch.Tensor, list[set[int]]]:
    """Logits, labels, masks. The second row's mask is on one rank alone, and its label is outside of what is recomputed."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * 4
    logits[0] += 1000
    logits[1, 15:] -= 500
    labels = torch.where(torch.arange(ROWS) % 2 == 0, logits.argmax(1), torch.randint(0, VOCAB, (ROWS,), generator=generator))
    return logits, labels, [kept(z, 0.7, TRUNCATION) | {int(y)} for z, y in zip(logits, labels, strict=True)]


def on_rank(rank: int, size: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    from tepo_megatron.ops.vocab_parallel import token_stats
    from tepo_megatron.weights.ops import padded_vocab_size

    logits, labels, masks = given()
    padded = torch.nn.functional.pad(logits, (0, padded_vocab_size(VOCAB, size) - VOCAB), value=float("nan"))
    leaf = padded.chunk(size, dim=1)[rank].clone().requires_grad_()
    local, out = leaf * 1, {}
    counts: Counter = Counter()
    with pytest.MonkeyPatch.context() as patch:
        counting(counts, patch)
        stats = token_stats(local, labels, 0.7, dist.group.WORLD, VOCAB, mask_RK=rows(masks), recompute=TRUNCATION)
        out["forward"] = dict(counts)
        counts.clear()
        (stats.logprob_R.sum() - 2 * stats.entropy_R.square().sum()).backward()
        out["backward"] = dict(counts)
    assert stats.recomputed is not None and leaf.grad is not None
    out |= {"stats": (stats.logprob_R.detach(), stats.entropy_R.detach(), *stats.recomputed), "grad": leaf.grad}
    return out | {"in_place": torch.equal(local, leaf.grad), "differ": stats.recomputed.differ(rows(masks)).tolist()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_truncated_statistics_over_tensor_parallel_ranks(size: int) -> None:
    ranks = run_world(size, on_rank, size)
    logits, labels, masks = given()
    z = logits.clone().requires_grad_()
    logprob, entropy = reference(z, labels, 0.7, masks)
    (logprob.sum() - 2 * entropy.square().sum()).backward()
    for r in ranks:
        assert all(torch.equal(a, b) for a, b in zip(r["stats"], ranks[0]["stats"], strict=True))
        assert r["forward"] == ({"all_gather_into_tensor": 1} if size > 1 else {})
        assert r["backward"] == {} and r["in_place"] and not any(r["differ"])
    ours = ranks[0]["stats"]
    assert (ours[0] - logprob).abs().max() <= 1e-10 and (ours[1] - entropy).abs().max() <= 1e-10
    grad = torch.cat([r["grad"] for r in ranks], dim=1)
    assert z.grad is not None and (grad[:, :VOCAB] - z.grad).abs().max() <= 1e-10
    assert torch.equal(grad[:, VOCAB:], torch.zeros_like(grad[:, VOCAB:]))
    outside = [int(y) not in kept(row, 0.7, TRUNCATION) for row, y in zip(logits, labels, strict=True)]
    assert ours[3].tolist() == outside and any(outside) and not all(outside)
