"""SDPA with masks on a GPU, as a context-parallel rank calls it: memory far below that of all scores; values."""

import pytest
import torch

from tepo_megatron.actor.attention_layout import AttentionBucket

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, CHANNELS = 32, 8, 128
PIECES, TOTAL = (0, 3), 4  # chunks of the first of two context-parallel ranks


def bucket_of(chunks: list[int], device: torch.device) -> AttentionBucket:
    """Sequences of 4 chunks each, padded to the longest."""
    return AttentionBucket.of(torch.tensor(chunks), PIECES, TOTAL, device)


def inputs_of(bucket: AttentionBucket, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value, and the gradient that comes back to the output."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = ((bucket.query_rows, HEADS), (bucket.key_rows, KV_HEADS), (bucket.key_rows, KV_HEADS), (bucket.query_rows, HEADS))
    *leaves, grad = (torch.randn(*n, CHANNELS, device=DEVICE, generator=generator).to(dtype) for n in rows)
    return leaves, grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_of_16k_tokens_is_far_below_that_of_their_scores(dtype: torch.dtype) -> None:
    bucket = bucket_of([4096], DEVICE)
    leaves, grad = inputs_of(bucket, dtype)
    leaves = [x.requires_grad_() for x in leaves]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cat(bucket.attend(leaves[0], leaves[1], leaves[2], None)).backward(grad)
    extra = torch.cuda.max_memory_allocated() - before
    scores = HEADS * bucket.chunk * bucket.total * bucket.chunk * dtype.itemsize  # scores of the last piece, stored once
    assert extra < scores / 2, (extra, scores)
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("chunks", [[96], [65, 61]], ids=["one mask", "a mask for each sequence"])
def test_values_and_gradients_against_fp64(chunks: list[int], dtype: torch.dtype, tolerance: float) -> None:
    leaves, grad = inputs_of(bucket_of(chunks, DEVICE), dtype)
    results = []
    for device, kind in ((DEVICE, dtype), (torch.device("cpu"), torch.float64)):
        copies = [x.detach().to(device, kind).requires_grad_() for x in leaves]
        output = torch.cat(bucket_of(chunks, device).attend(copies[0], copies[1], copies[2], None))
        output.backward(grad.to(device, kind))
        results.append([output.detach(), *(x.grad for x in copies if x.grad is not None)])
    ours, exact = results
    assert len(ours) == len(exact) == 4
    for a, b in zip(ours, exact, strict=True):
        assert (a.cpu().double() - b).norm() <= tolerance * b.norm()
