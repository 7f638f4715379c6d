"""Token statistics over tensor-parallel ranks and sequence ratios over context-parallel ranks: values, bits, collectives."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.token_statistics import BACKENDS, INTERPRETED
from tests.worlds import run_world

ROWS, VOCAB = 23, 70


def counting(counts: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every collective of torch.distributed from here on."""
    for name in ("all_reduce", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "broadcast", "gather"):
        real = getattr(dist, name)

        def wrapper(*args: Any, _real=real, _name=name, **kwargs: Any) -> Any:
            counts[_name] += 1
            return _real(*args, **kwargs)

        monkeypatch.setattr(dist, name, wrapper)


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=generator) * 4
    logits[0] += 1000  # a row far from zero
    logits[1, 40:] -= 500  # one rank holds next to no probability
    return logits, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def statistics_on_rank(rank: int, size: int, backend: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    from tepo_megatron.models.ops import padded_vocab_size
    from tepo_megatron.ops.vocab_parallel import token_stats

    logits, labels = logits_and_labels()
    # the third of four ranks has six real columns, the last none
    padded = torch.nn.functional.pad(logits, (0, padded_vocab_size(VOCAB, size) - VOCAB), value=float("nan"))
    leaf = padded.chunk(size, dim=1)[rank].clone().requires_grad_()
    local = leaf * 1  # not a leaf, so that backward writes in its place
    counts: Counter = Counter()
    with pytest.MonkeyPatch.context() as patch:
        counting(counts, patch)
        stats = token_stats(local, labels, 0.7, dist.group.WORLD, VOCAB, backend=backend)
        forward = dict(counts)
        counts.clear()
        (stats.logprob_R.sum() - 2 * stats.entropy_R.square().sum()).backward()
    return {
        "logprob": stats.logprob_R.detach(),
        "entropy": stats.entropy_R.detach(),
        "grad": leaf.grad,
        "in_place": torch.equal(local, leaf.grad),
        "forward": forward,
        "backward": dict(counts),
    }


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b == "torch" or INTERPRETED])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_token_stats_over_tensor_parallel_ranks(size: int, backend: str) -> None:
    ranks = run_world(size, statistics_on_rank, size, backend)
    logits, labels = logits_and_labels()
    z = logits.double().requires_grad_()
    logp = torch.log_softmax(z / 0.7, dim=-1)
    logprob, entropy = logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    (logprob.sum() - 2 * entropy.square().sum()).backward()
    for r in ranks:
        assert torch.equal(r["logprob"], ranks[0]["logprob"]) and torch.equal(r["entropy"], ranks[0]["entropy"])
        assert r["forward"] == ({"all_gather_into_tensor": 1} if size > 1 else {})
        assert r["backward"] == {} and r["in_place"]
    # row 0: z/T near 1400, where one ulp of an fp32 logit is 1.2e-4
    assert (ranks[0]["logprob"][1:] - logprob[1:]).abs().max() <= 5e-6 * logprob[1:].abs().max()
    assert (ranks[0]["entropy"][1:] - entropy[1:]).abs().max() <= 2e-6
    grad = torch.cat([r["grad"] for r in ranks], dim=1)
    assert (grad[1:, :VOCAB] - z.grad[1:]).norm() / z.grad[1:].norm() <= 1e-5
    assert torch.equal(grad[:, VOCAB:], torch.zeros_like(grad[:, VOCAB:])) if grad.size(1) > VOCAB else True


def ratio_on_rank(rank: int, size: int, constant_factors: bool) -> dict[str, Any]:
    dist.init_process_group("gloo")
    from tepo_megatron.losses.ratio import sequence_ratio
    from tepo_megatron.ops.context_parallel import Segments

    log_ratio, owner, sequence, factor = rows(size)
    mine = owner == rank
    lengths = torch.bincount(sequence).to(log_ratio.dtype)
    x = log_ratio[mine].clone().requires_grad_()
    per_token = factor[mine] if not constant_factors else factor[mine].sign()
    counts: Counter = Counter()
    with pytest.MonkeyPatch.context() as patch:
        counting(counts, patch)
        ratio = sequence_ratio(x, Segments(sequence[mine], lengths, dist.group.WORLD), constant_factors)
        forward = dict(counts)
        counts.clear()
        (ratio * per_token).sum().backward()
    return {"ratio": ratio.detach(), "grad": x.grad, "mine": mine, "forward": forward, "backward": dict(counts)}


def rows(size: int) -> tuple[torch.Tensor, ...]:
    """Rows of 5 sequences dealt to the ranks; of four, the last gets none. factor: its sign is constant over a sequence."""
    generator = torch.Generator().manual_seed(3)
    sequence = torch.repeat_interleave(torch.tensor([1, 9, 4, 17, 2]))
    log_ratio = torch.randn(sequence.numel(), generator=generator, dtype=torch.float64) * 0.3
    owner = torch.arange(sequence.numel()) % min(size, 3)
    factor = (0.5 + torch.rand(sequence.numel(), generator=generator, dtype=torch.float64)) * (1 - 2 * (sequence % 2))
    return log_ratio, owner, sequence, factor


@pytest.mark.parametrize("constant_factors", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sequence_ratio_over_context_parallel_ranks(size: int, constant_factors: bool) -> None:
    log_ratio, _, sequence, factor = rows(size)
    x = log_ratio.clone().requires_grad_()
    expected = torch.stack([torch.exp(x[sequence == s].mean()) for s in range(5)])[sequence]
    (expected * (factor.sign() if constant_factors else factor)).sum().backward()
    ranks = run_world(size, ratio_on_rank, size, constant_factors)
    grad = torch.zeros_like(log_ratio)
    for r in ranks:
        mine = r["mine"]
        torch.testing.assert_close(r["ratio"], expected.detach()[mine], rtol=1e-12, atol=0)
        grad[mine] = r["grad"]
        one = {"all_reduce": 1} if size > 1 else {}
        assert r["forward"] == one
        assert r["backward"] == ({} if constant_factors else one)
    torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-14)


def zigzag_rows(size: int) -> tuple[torch.Tensor, ...]:
    """Rows of sequences cut into 2 cp chunks of unequal length, some empty: sequence, position, chunk and owner of each."""
    chunks = 2 * size if size > 1 else 1
    lengths = [1, 9, 4, 17, 2]
    sequence = torch.repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])
    chunk = torch.cat([torch.arange(n) * chunks // (n + s) for s, n in enumerate(lengths)])
    owner = torch.minimum(chunk, chunks - 1 - chunk)
    return sequence, position, chunk, owner


def prefix_on_rank(rank: int, size: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    from tepo_megatron.losses.ratio import prefix_ratio
    from tepo_megatron.ops.context_parallel import Segments

    log_ratio, _, _, factor = rows(size)
    sequence, position, chunk, owner = zigzag_rows(size)
    mine = owner == rank
    lengths = torch.bincount(sequence).to(log_ratio.dtype)
    chunks = 2 * size if size > 1 else 1
    segments = Segments(sequence[mine], lengths, dist.group.WORLD, position[mine], chunk[mine], chunks)
    x = log_ratio[mine].clone().requires_grad_()
    counts: Counter = Counter()
    with pytest.MonkeyPatch.context() as patch:
        counting(counts, patch)
        ratio = prefix_ratio(x, segments, False)
        forward = dict(counts)
        counts.clear()
        (ratio * factor[mine]).sum().backward()
    return {"ratio": ratio.detach(), "grad": x.grad, "mine": mine, "forward": forward, "backward": dict(counts)}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_prefix_ratio_over_context_parallel_ranks(size: int) -> None:
    log_ratio, _, sequence, factor = rows(size)
    x = log_ratio.clone().requires_grad_()
    prefixes = []
    for s in range(5):
        own = x[sequence == s]
        prefixes += [torch.exp(own[: t + 1].mean()) for t in range(own.numel())]
    expected = torch.stack(prefixes)
    (expected * factor).sum().backward()
    ranks = run_world(size, prefix_on_rank, size)
    grad = torch.zeros_like(log_ratio)
    for r in ranks:
        torch.testing.assert_close(r["ratio"], expected.detach()[r["mine"]], rtol=1e-12, atol=0)
        grad[r["mine"]] = r["grad"]
        assert r["forward"] == r["backward"] == ({"all_reduce": 1} if size > 1 else {})
    torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-14)
