"""SDPACoreAttention against attention written out for each sequence in fp64: values, gradients, collectives."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.actor import attention
from tepo_megatron.actor.attention import SDPACoreAttention
from tepo_megatron.ops.flash_attention import PackedCall, PackedFlash
from tests.worlds import run_world
from tests.zigzag import shard_zigzag_packed

HEADS, KV_HEADS, CHANNELS = 4, 2, 8
# in units of 2 cp tokens, so that every context-parallel size divides them: the shortest, equal ones, and several buckets
UNITS = (1, 1, 3, 1, 20, 4, 3, 60, 25, 7, 2)
# (units, padding tokens in them) of a shared prompt, with the units of its responses; and of sequences alone
FAMILIES = (((3, 1), (2, 20, 5, 2)), ((4, 0), ()), ((1, 0), (1, 7)), ((30, 2), (9, 0, 3)), ((2, 0), (0,)), ((1, 0), (1,)))


def one_shard(x: torch.Tensor, cp: int, rank: int) -> torch.Tensor:
    """A rank's part of one sequence that lies along dimension 0."""
    return shard_zigzag_packed(x, torch.tensor([0, x.size(0)]), cp, rank, dim=0)


def merged(parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole sequence from the parts of all ranks."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)])


def inputs(rows: tuple[int, ...]) -> list[Tensor]:
    """Query, key, value, and the gradient that comes back to the output."""
    generator = torch.Generator().manual_seed(5)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(*rows, h, CHANNELS, generator=generator, dtype=torch.float64) for h in heads]


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[L, H, D], [P + L, K, D] twice -> [L, H D], one softmax per query: its token is the P + i-th."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) / math.sqrt(CHANNELS)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + key.size(0) - query.size(0))
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -math.inf).softmax(-1), value).flatten(1)


def expected(tensors: list[Tensor], cu: list[int], starts: list[int] | None = None) -> list[Tensor]:
    """Return the output and the gradients of query, key and value, all packed."""
    query, key, value = leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    outputs, prompt = [], 0
    for (a, b), start in zip(itertools.pairwise(cu), starts or [0] * len(cu), strict=False):
        prompt = prompt if start else a
        seen = (torch.cat((x[prompt : prompt + start], x[a:b])) for x in (key, value))
        outputs.append(plain_attention(query[a:b], *seen))
    torch.cat(outputs).backward(tensors[3].flatten(1))
    return [torch.cat(outputs).detach(), *(x.grad for x in leaves)]


class Written(PackedFlash):
    """The contract of `PackedFlash`, written out for each sequence in fp64."""

    def scores(self, q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
        scores = torch.einsum("ihd,jhd->hij", q, k) * (q.size(-1) ** -0.5 if scale is None else scale)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.size(0) - q.size(0))
        return scores.masked_fill(future, -math.inf) if causal else scores

    def parts(self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall) -> Iterator[tuple[slice, slice, list[Tensor]]]:
        assert (call.cu_q[-1], call.cu_k[-1]) == (q.size(0), k.size(0))
        assert (call.longest_q, call.longest_k) == (call.cu_q.diff().max(), call.cu_k.diff().max())
        for (a, b), (c, d) in zip(itertools.pairwise(call.cu_q.tolist()), itertools.pairwise(call.cu_k.tolist()), strict=True):
            assert b > a and d > c
            repeated = (x[c:d].repeat_interleave(q.size(1) // k.size(1), dim=1).double() for x in (k, v))
            yield slice(a, b), slice(c, d), [q[a:b].double(), *repeated]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall, scale: float | None) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(q)
        lse = torch.zeros(q.size(1), q.size(0), dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, _, (query, keys, values) in self.parts(q, k, v, call):
            lse[:, rows] = (scores := self.scores(query, keys, call.causal, scale)).logsumexp(-1)
            out[rows] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values).to(q.dtype)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: PackedCall, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad, out = grad.double(), out.double()
        factor, each = q.size(-1) ** -0.5 if scale is None else scale, q.size(1) // k.size(1)
        for rows, keys, (query, key, value) in self.parts(q, k, v, call):
            chance = (self.scores(query, key, call.causal, scale) - lse[:, rows, None]).exp()
            of_chance = torch.einsum("ihd,jhd->hij", grad[rows], value) - (grad[rows] * out[rows]).sum(-1).T[:, :, None]
            of_scores = chance * of_chance * factor
            found[0][rows] = torch.einsum("hij,jhd->ihd", of_scores, key).to(q.dtype)
            for total, parts in ((found[1], (of_scores, query)), (found[2], (chance, grad[rows]))):
                total[keys] = torch.einsum("hij,ihd->jhd", *parts).unflatten(1, (-1, each)).sum(2).to(q.dtype)
        return found


def core_attention(cp: int, **changes: Any) -> SDPACoreAttention:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * CHANNELS, num_attention_heads=HEADS, num_query_groups=KV_HEADS,
        context_parallel_size=cp, **({"attention_dropout": 0.0} | changes),
    )  # fmt: skip
    return SDPACoreAttention(config, 1, AttnMaskType.causal, "self")


def run_packed(
    rank: int, cp: int, cu: list[int], packs: bool, starts: list[int] | None = None, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import mappings

    core = core_attention(cp)
    cu_seqlens = torch.tensor(cu, dtype=torch.int32)
    tensors = [shard_zigzag_packed(x, cu_seqlens, cp, rank, dim=0).to(dtype) for x in inputs((cu[-1],))]
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        if packs:
            patch.setattr(attention, "packed_flash_of", lambda _: Written())
        for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
            real = getattr(mappings, name)
            patch.setattr(mappings, name, lambda *a, r=real, n=name, **k: (calls.append(n), r(*a, **k))[1])
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        params.starts = starts
        output = core(*leaves, None, packed_seq_params=params)
        output.backward(tensors[3].flatten(1))
    return {"tensors": [output.detach(), *(x.grad for x in leaves)], "calls": calls}


@pytest.mark.parametrize("packs", [False, True], ids=["in buckets", "packed"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_packed_sequences_match_plain_attention(cp: int, packs: bool) -> None:
    unit = 1 if cp == 1 else 2 * cp
    cu = [0, *torch.tensor(UNITS).mul(unit).cumsum(0).tolist()]
    ranks = run_world(cp, run_packed, cp, cu, packs)
    for rank, got in enumerate(ranks):
        for ours, whole in zip(got["tensors"], expected(inputs((cu[-1],)), cu), strict=True):
            theirs = shard_zigzag_packed(whole, torch.tensor(cu), cp, rank, dim=0)
            assert (ours - theirs).norm() <= 1e-12 * theirs.norm()
        assert got["calls"] == (["dist_all_gather_func", "dist_reduce_scatter_func"] if cp > 1 else [])


@pytest.mark.parametrize("packs", [False, True], ids=["in buckets", "packed"])
@pytest.mark.parametrize(
    ("cp", "dtype", "tolerance"),
    [(1, torch.float64, 1e-12), (2, torch.float64, 1e-12), (4, torch.float64, 1e-12), (1, torch.float32, 1e-6),
     (1, torch.bfloat16, 1.03e-2)],  # sqrt(7) 2^-8: q, k, v, the gradient, P, dS and the result are rounded, by at most 2^-8
)  # fmt: skip
def test_responses_see_the_prompt_that_they_share(cp: int, dtype: torch.dtype, tolerance: float, packs: bool) -> None:
    """Several families, with padding behind the prompt, among sequences of their own; one response, and none."""
    unit = 1 if cp == 1 else 2 * cp
    sizes, starts = [], []
    for (units, padding), responses in FAMILIES:
        sizes += [units, *responses]
        starts += [0, *[units * unit - padding] * len(responses)]
    cu = [0, *torch.tensor(sizes).mul(unit).cumsum(0).tolist()]
    ranks = run_world(cp, run_packed, cp, cu, packs, starts, dtype)
    for rank, got in enumerate(ranks):
        for ours, whole in zip(got["tensors"], expected(inputs((cu[-1],)), cu, starts), strict=True):
            theirs = shard_zigzag_packed(whole, torch.tensor(cu), cp, rank, dim=0)
            assert ours.dtype == dtype
            assert (ours - theirs).norm() <= tolerance * theirs.norm()
        assert got["calls"] == (["dist_all_gather_func", "dist_reduce_scatter_func"] if cp > 1 else [])


def test_zigzag_layout() -> None:
    x = torch.arange(8)
    parts = [one_shard(x, 2, rank) for rank in range(2)]
    assert [p.tolist() for p in parts] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert torch.equal(merged(parts), x)
    two = torch.arange(12).view(1, 12)
    packed = [shard_zigzag_packed(two, torch.tensor([0, 8, 12]), 2, rank, dim=1).tolist() for rank in range(2)]
    assert packed == [[[0, 1, 6, 7, 8, 11]], [[2, 3, 4, 5, 9, 10]]]
    with pytest.raises(ValueError, match=r"has 6 tokens.*multiple of 4"):
        one_shard(torch.arange(6), 2, 0)
