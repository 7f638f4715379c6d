"""Keys and values of grouped heads repeated for all query heads, as CUDA's masked attention needs them; and when."""

import pytest
import torch
import torch.nn.functional as F

from tepo_megatron.actor import attention_layout
from tepo_megatron.actor.attention_layout import AttentionBucket

SEQUENCES, CHUNK, CHANNELS = 2, 5, 8


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_both_forms_of_a_bucket_are_equal(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Outputs and gradients of a rank of two under CP: its first chunk without a mask, its last one with."""
    heads, pieces, total = 4, (0, 3), 4
    bucket = AttentionBucket.of(torch.tensor([CHUNK, CHUNK - 1]), pieces, total, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    rows = ((bucket.query_rows, heads), (bucket.key_rows, kv_heads), (bucket.key_rows, kv_heads))
    inputs = [torch.randn(*n, CHANNELS, generator=generator, dtype=dtype) for n in rows]
    grad = torch.randn(bucket.query_rows, heads, CHANNELS, generator=generator, dtype=dtype)
    real, seen = F.scaled_dot_product_attention, []

    def attention(q: torch.Tensor, k: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.append((k.size(1), kwargs["enable_gqa"]))
        return real(q, k, *args, **kwargs)  # type: ignore[arg-type]

    def run(repeats: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(attention_layout, "repeats_keys", lambda *_: repeats)
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = torch.cat(bucket.attend(*leaves, None))
        output.backward(grad)
        return [output.detach(), *(x.grad for x in leaves if x.grad is not None)]

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    grouped, repeated = run(False), run(True)
    assert seen == 2 * [(kv_heads, kv_heads != heads)] + 2 * [(heads, False)]
    assert len(grouped) == len(repeated) == 4
    for a, b in zip(grouped, repeated, strict=True):
        assert (a - b).norm() <= tolerance * a.norm()
