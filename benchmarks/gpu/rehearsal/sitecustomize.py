"""Make every Python process believe in one H200: `make gpu-rehearsal` puts this folder on PYTHONPATH.

Requests for CUDA tensors get the CPU, NCCL groups are gloo's, and torch.compile compiles nothing. `platform: cuda` itself is
unchanged: PyTorch's optimizer instead of the CPU's, both overlaps, the fused gradient accumulation. CUDA IPC, Triton and real
streams fail or do nothing. The check's own sizes are those of `--parts cpu`.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

NAME = "NVIDIA H200"
GIB = 2**30
MEMORY = 140 * GIB
CHECK = "benchmarks.gpu.check."


class PatchingFinder:
    """Runs a patch after a module was imported: torch, which few processes need, and the modules of the check."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec that patches after loading; None for all other modules."""
        patch: Callable[[Any], None] | None = fake_cuda if name == "torch" else shrink if name.startswith(CHECK) else None
        spec = importlib.machinery.PathFinder.find_spec(name, path) if patch else None
        if patch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: types.ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def shrink(module: types.ModuleType) -> None:
    """Give a module of the check the CPU's sizes, limits and models."""
    for value in vars(module).values():
        if isinstance(value, dict) and value.keys() == {"cpu", "cuda"}:
            value["cuda"] = value["cpu"]


def fake_cuda(torch: Any) -> None:
    """Replace torch.cuda, the factories of tensors, and the backend of groups."""
    from tepo_megatron.dist.platform import cuda_api

    cuda_api.redirect_factories()
    cuda_api.redirect_tensor_methods()
    cuda_api.redirect_device_queries()
    cuda_api.redirect_streams_and_events()
    cuda_api.redirect_memory_statistics()
    cuda_api.redirect_random_state()
    cuda_api.silence_nvtx()
    show_device(torch)
    put_on_host(torch)
    if torch.distributed.is_available():
        use_gloo(torch.distributed)
    torch.compile = lambda model=None, **_: (lambda function: function) if model is None else model


def show_device(torch: Any) -> None:
    """Answer queries about the device as an H200 does."""
    properties = types.SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, L2_cache_size=60 * 2**20, warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, uuid="GPU-0", gcnArchName="",
    )  # fmt: skip
    answers = {
        "is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": 1, "current_device": 0,
        "get_device_name": NAME, "get_device_capability": (9, 0), "get_device_properties": properties,
        "get_arch_list": ["sm_90"], "mem_get_info": (MEMORY - 2 * GIB, MEMORY), "host_memory_stats": {},
        "can_device_access_peer": True, "cudart": types.SimpleNamespace(cudaHostRegister=_zero, cudaHostUnregister=_zero),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.accelerator.is_available = lambda: False


def put_on_host(torch: Any) -> None:
    """Let `with torch.device("cuda")` and generators use the CPU."""
    context, generator = torch.utils._device.DeviceContext, torch.Generator
    enter = context.__init__

    def init(self: Any, device: Any) -> None:
        enter(self, torch.device("cpu") if torch.device(device).type == "cuda" else device)

    class HostGenerator:
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator("cpu")

    context.__init__, torch.Generator = init, HostGenerator
    torch.Tensor.is_pinned = lambda self, *_: True


def use_gloo(dist: Any) -> None:
    """Form gloo groups where NCCL is asked for."""
    from tepo_megatron.dist.platform import cpu

    init_process_group, new_group, barrier = dist.init_process_group, dist.new_group, dist.barrier

    def init(backend: Any = None, *args: Any, **options: Any) -> Any:
        return init_process_group(_host(backend), *args, **_without_device(options))

    def new(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **options: Any) -> Any:
        return new_group(ranks, timeout, _host(backend), **_without_device(options))

    for module in (dist, dist.distributed_c10d):
        module.init_process_group, module.new_group = init, new
    cpu.add_uneven_collectives()
    cpu.shorten_groups_of_one()
    dist.barrier = lambda group=None, async_op=False, **_: barrier(group=group, async_op=async_op)


def _host(backend: Any) -> Any:
    return "gloo" if "nccl" in str(backend) else backend


def _without_device(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("device_id", "pg_options")}


def _zero(*_: Any) -> int:
    return 0


sys.meta_path.insert(0, PatchingFinder())
