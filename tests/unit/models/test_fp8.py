"""Blockwise FP8: the error bound that the format gives, for each value; its layout; edges; refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.base.errors import ConversionError
from tepo_megatron.models import fp8
from tests.dequantized import dequantize

# fp32 rounds the quotient and the product, each by 2^-24 of itself
ROUNDING = 2.0**-22


def check_bound(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each value within half a unit in the last place of e4m3: 2^-4 of itself, or 2^-10 scales below the smallest normal."""
    quantized, scale = fp8.quantize(weight)
    blocks = tuple(-(-n // 128) for n in weight.shape)
    assert quantized.dtype == torch.float8_e4m3fn and quantized.shape == weight.shape
    assert scale.dtype == torch.float32 and scale.shape == blocks
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            place = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            block, s = weight[place].double(), scale[i, j].double()
            back = quantized[place].double() * s
            bound = torch.maximum(2.0**-4 * block.abs(), 2.0**-10 * s) * (1 + ROUNDING)
            assert ((back - block).abs() <= bound).all()
            assert (dequantize(quantized, scale)[place].double() - back).abs().max() <= ROUNDING * back.abs().max()
    return quantized, scale


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (127, 129), (300, 200), (129, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_value_keeps_the_bound_of_the_format(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    # magnitudes over ten powers of two inside a block, so that normal and subnormal values of e4m3 both occur
    weight = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-10, 1, shape, generator=generator))
    quantized, _ = check_bound(weight.to(dtype))
    assert not quantized.float().isnan().any()


@settings(max_examples=60, deadline=None)
@given(st.integers(-133, 127), st.integers(0, 2**31), st.integers(1, 140), st.integers(1, 140))
def test_the_bound_holds_at_every_magnitude_of_bf16(exponent: int, seed: int, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(rows, columns, generator=generator, dtype=torch.float64) * 2 - 1
    check_bound((uniform * 2.0**exponent).to(torch.bfloat16))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    weight = torch.ones(130, 130, dtype=torch.bfloat16)
    weight[129, 129] = value
    with pytest.raises(ConversionError, match="infinite or not a number"):
        fp8.quantize(weight)
