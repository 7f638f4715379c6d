"""Importing Megatron-Core without a GPU, and mending what it gets wrong there."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tepo_megatron.platform.adam import HostAdam

_GPU_PACKAGES = ("transformer_engine", "apex")
# All that is mended below, and what nearly every caller needs next.
_MODULES = (
    "megatron.core",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)


def load() -> None:
    """Import Megatron-Core."""
    for name in _MODULES:
        importlib.import_module(name)


def hide_gpu_packages() -> None:
    """Megatron takes Transformer Engine's and Apex's kernels and optimizers wherever they are installed, GPU or not."""
    for name in _GPU_PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]  # the import system's own way to say: not to be found


@contextlib.contextmanager
def without_compilation() -> Iterator[None]:
    """Megatron's `jit_fuser`, which it decorates small functions with, is whatever `torch.compile` is at its import.

    Compiling them needs a C++ compiler, costs seconds per function, and is not what is wanted of a CPU run.
    """
    original = torch.compile
    torch.compile = _not_compiled
    try:
        yield
    finally:
        torch.compile = original


@contextlib.contextmanager
def without_import_warnings() -> Iterator[None]:
    """A dozen modules warn that Transformer Engine or Apex is missing: on this platform they are missing on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")
        yield


def lend_triton_to_paged_stash() -> None:
    """0.18 and later import triton unguarded in `moe/**/paged_stash.py`, for kernels that only a GPU runs."""
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _PagedStashFinder())


def mend_missing_transformer_engine_names() -> None:
    """0.16 without Transformer Engine: `moe_utils` never defines what it tests with `te_general_gemm is not None`."""
    from megatron.core.transformer.moe import moe_utils

    for name in ("te_general_gemm", "fused_permute", "fused_unpermute"):
        if not hasattr(moe_utils, name):
            setattr(moe_utils, name, None)


def mend_host_copy_of_splits() -> None:
    """`maybe_move_tensor_to_cpu(as_numpy=True)` converts only what comes from a GPU; its callers count on numpy arrays."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def use_host_adam() -> None:
    """Both optimizer modules treat `Adam` as a fused one: see HostAdam for why torch's does not do."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = HostAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def silence_generator_warning() -> None:
    """Megatron warns when the CPU's random state moves while it tracks the GPU's: here they are one generator."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()

    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(is_wanted)


def _not_compiled(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """torch.compile, as a function and as a decorator with arguments, that compiles nothing."""
    return (lambda function: function) if model is None else model


class _PagedStashFinder:
    """Finds `megatron.core.**.paged_stash` and gives it an empty triton for the time of its import only.

    A lasting one would make torch believe that triton is installed.
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
