"""Import Megatron-Core without a GPU, fix what it gets wrong there, and give it Adam with the interface of a fused one.

The distributed optimizer expects the interface of Transformer Engine's and Apex's FusedAdam.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_GPU_PACKAGES = ("transformer_engine", "apex")
# Everything that is fixed below, and what nearly every caller needs next.
_MODULES = (
    "megatron.core", "megatron.core.dist_checkpointing", "megatron.core.models.gpt", "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer", "megatron.core.pipeline_parallel",
)  # fmt: skip


def load() -> None:
    """Import Megatron-Core."""
    for name in _MODULES:
        importlib.import_module(name)


def hide_gpu_packages() -> None:
    """Hide Transformer Engine and Apex. Megatron would use their kernels and optimizers if they are installed, GPU or not."""
    for name in _GPU_PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]  # the import system then reports that it is not found


@contextlib.contextmanager
def without_compilation() -> Iterator[None]:
    """Disable torch.compile within the block. Megatron's `jit_fuser`, a decorator of small functions, is bound to it at import.

    Compiling them needs a C++ compiler and costs seconds per function, which a CPU run does not need.
    """
    original = torch.compile
    torch.compile = _not_compiled
    try:
        yield
    finally:
        torch.compile = original


@contextlib.contextmanager
def without_import_warnings() -> Iterator[None]:
    """Suppress a dozen modules' warnings that Transformer Engine or Apex is missing: on this platform that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")
        yield


def provide_triton_to_paged_stash() -> None:
    """Let Megatron import `moe/**/paged_stash.py` without triton.

    Megatron 0.18 and later import triton there unconditionally, for kernels that only a GPU runs.
    """
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _PagedStashFinder())


def fix_missing_transformer_engine_names() -> None:
    """Define names that `moe_utils` uses but does not define without Transformer Engine (Megatron-Core 0.16).

    For example, it tests `te_general_gemm is not None`.
    """
    from megatron.core.transformer.moe import moe_utils

    for name in ("te_general_gemm", "fused_permute", "fused_unpermute"):
        if not hasattr(moe_utils, name):
            setattr(moe_utils, name, None)


def fix_host_copy_of_splits() -> None:
    """Make `maybe_move_tensor_to_cpu(as_numpy=True)` convert CPU tensors too; its callers rely on numpy arrays."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def use_host_adam() -> None:
    """Make both optimizer modules use HostAdam and treat it as a fused Adam (HostAdam says why torch's does not work)."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = HostAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def silence_generator_warning() -> None:
    """Suppress Megatron's warning that the CPU's random state changes while it tracks the GPU's."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()

    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(is_wanted)


def _not_compiled(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Replace torch.compile, as a function and as a decorator with arguments, without compiling anything."""
    return (lambda function: function) if model is None else model


class _PagedStashFinder:
    """Finds `megatron.core.**.paged_stash`, and provides an empty triton only while it is imported.

    An empty triton that stayed would make torch believe that triton is installed.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not (name.startswith("megatron.core.") and name.endswith(".paged_stash")):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _with_empty_triton(spec.loader.exec_module)  # type: ignore[assignment,method-assign]
        return spec


def _with_empty_triton(execute: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
    def execute_with_triton(module: types.ModuleType) -> None:
        triton: Any = types.ModuleType("triton")
        triton.language = types.ModuleType("triton.language")
        triton.language.constexpr = object
        triton.jit = _not_compiled
        sys.modules.update({"triton": triton, "triton.language": triton.language})
        try:
            execute(module)
        finally:
            del sys.modules["triton"], sys.modules["triton.language"]

    return execute_with_triton


class HostAdam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980) with decoupled weight decay (AdamW, arXiv:1711.05101), or with L2 regularisation.

    As in FusedAdam, the step count belongs to the parameter group and not to each parameter. Megatron's distributed optimizer
    relies on that: with torch.optim.AdamW it cannot load a checkpoint into a fresh optimizer (0.16: KeyError 'step', and one
    step tensor that all parameters share and that each of them advances).

    The state of a parameter is exp_avg and exp_avg_sq, of its shape and dtype. Gradients may have another dtype. Parameters
    without a gradient do not change. `closure` is not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if group["params"]:  # FusedAdam does not count the steps of an empty group either
                group["step"] = group.get("step", 0) + 1
                for p in group["params"]:
                    if p.grad is not None:
                        self._update(p, p.grad.to(p.dtype), group)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), lr, decay, step = group["betas"], group["lr"], group["weight_decay"], group["step"]
        if not (state := self.state[p]):
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        if self.adam_w_mode:
            p.mul_(1 - lr * decay)
        else:
            grad = grad.add(p, alpha=decay)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        p.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - beta1**step))
