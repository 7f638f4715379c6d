"""The output layer's weight gradient, summed in fp32 from products of bf16: values on a CPU, operations as on a GPU."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tepo_megatron.ops import output_layer


class Operations(TorchDispatchMode):
    """Records each operation, and the elements of the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.names.append(str(func))
            if not any(result is x for x in (*args, (kwargs or {}).get("out"))):
                self.largest = max(self.largest, result.numel())
        return result


def test_one_operation_adds_bf16_products_to_the_fp32_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of CUDA, on the meta device: PyTorch checks the signature, and nothing as large as the sum is made."""
    total = torch.zeros(9000, 32, device="meta")
    gradient, hidden = (torch.zeros(50, n, device="meta", dtype=torch.bfloat16) for n in (9000, 32))
    assert output_layer.ADDS_WITHIN_PRODUCT
    with Operations() as found:
        output_layer.add_on_tensor_cores(total, gradient.t(), hidden)
    assert found.names == ["aten.addmm.dtype_out"] and found.largest == 0
    monkeypatch.setattr(output_layer, "ADDS_WITHIN_PRODUCT", False)
    with Operations() as found:
        output_layer.add_on_tensor_cores(total, gradient.t(), hidden)
    assert found.names == 3 * ["aten.mm.dtype", "aten.add_.Tensor"] and found.largest == 4096 * 32


@pytest.mark.parametrize(
    ("version", "expected"), [("2.9.1+cu128", False), ("2.10.0", True), ("2.13.0+cpu", True), ("3.0", True)]
)
def test_the_pytorch_that_adds_within_the_product(version: str, expected: bool) -> None:
    assert output_layer.adds_within_product(version) is expected


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


@pytest.mark.parametrize("shape", [(1, 32), (32, 1)])
def test_a_sum_that_looks_like_a_bias_is_added_to_afterwards(shape: tuple[int, int]) -> None:
    """PyTorch's condition for cuBLASLt, `self.squeeze().dim() == 1`, holds for it, and that call ignores what the sum holds."""
    total = torch.zeros(shape, device="meta")
    gradient, hidden = (torch.zeros(50, n, device="meta", dtype=torch.bfloat16) for n in shape)
    with Operations() as found:
        output_layer.add_on_tensor_cores(total, gradient.t(), hidden)
    assert found.names == ["aten.mm.dtype", "aten.add_.Tensor"]
