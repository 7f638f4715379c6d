"""The output layer's weight gradient, summed in fp32 from products of bf16: values on a CPU, operations as on a GPU."""

import pytest
import torch

from tepo_megatron.ops import output_layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_product_is_added_in_the_type_of_the_sum(dtype: torch.dtype) -> None:
    """A CPU adds bf16 in three pieces of columns; the sum equals fp64 and is never rounded to bf16."""
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(9000, 8, generator=generator).to(torch.promote_types(dtype, torch.float32))
    exact = total.double()
    for _ in range(3):
        gradient, hidden = (torch.randn(50, n, generator=generator).to(dtype) for n in (9000, 8))
        output_layer.add_product(total, gradient, hidden)
        exact += gradient.double().t() @ hidden.double()
    assert ((total - exact).norm() / exact.norm()).item() <= (1e-6 if total.dtype == torch.float32 else 1e-14)
