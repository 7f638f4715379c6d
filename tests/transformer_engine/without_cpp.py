"""Import the real Python of Transformer Engine where its compiled parts cannot be: on a machine without a GPU.

Transformer Engine is three wheels. `transformer-engine` is pure Python; `transformer-engine-cu13` is its CUDA library, and
`transformer-engine-torch` the C++ module `transformer_engine_torch`. `make test-te` unpacks the first into the environment of
`make test-pins`, in a folder of its own (FOLDER), where no other test finds it. The C++ module is replaced by Stub, in which
every function that computes raises NotImplementedError.

So what is tested is what Transformer Engine's and Megatron's Python do before the first kernel: which modules and parameters
there are, how they are marked, which optimizer steps them, what checkpoints hold. No value that a kernel computes is tested.
"""

import enum
import importlib.machinery
import importlib.util
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.transformer_engine import host_kernels

FOLDER = Path(sys.prefix) / "transformer_engine_python"
MISSING = f"Transformer Engine's Python is not in {FOLDER}, where `make test-te` unpacks it"
# What transformer_engine/pytorch/constants.py and Megatron-Core ask of the C++ module at import, with the values of 2.20.2
_DTYPES = {
    "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10
}  # fmt: skip
_FORWARD = [f"GEMM{i}_{part}" for i in (1, 2, 3) for part in ("INPUT", "WEIGHT", "OUTPUT")]
_BACKWARD = [f"GRAD_{part}{i}" for i in (1, 2, 3) for part in ("OUTPUT", "INPUT")]
_ATTENTION = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that Transformer Engine and Megatron-Core read before they compute: those of an H100."""

    name: str = "NVIDIA H100 80GB HBM3"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = 80 * 2**30


class Stub(types.ModuleType):
    """A module with any name in it: a capitalised one is an empty class, another a function that raises NotImplementedError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = _Names(name, (), {}) if name[0].isupper() else self._refusing(name)
        setattr(self, name, made)
        return made

    def _refusing(self, function: str) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{function} is compiled code, which is not there")

        refuse.__name__ = function
        return refuse


class Anything(Stub):
    """A module of a package that is imported and never used: any name, call and operator in it gives another one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> "Anything":
        return self


class _Names(type):
    """A class with any attribute, as an enumeration whose members only differ."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = len(vars(cls))
        setattr(cls, name, value)
        return value


def is_there() -> bool:
    """Return whether this environment holds Transformer Engine's Python."""
    return (FOLDER / "transformer_engine" / "pytorch" / "__init__.py").is_file()


def import_it() -> None:
    """Import Transformer Engine over the stub, and Megatron-Core with it, on the CPU platform. Lasts as long as the process."""
    tex: Any = _put(Stub("transformer_engine_torch"))
    tex.DType = enum.IntEnum("DType", _DTYPES)
    tex.NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", _ATTENTION)
    tex.FP8FwdTensors = enum.IntEnum("FP8FwdTensors", _FORWARD, start=0)
    tex.FP8BwdTensors = enum.IntEnum("FP8BwdTensors", _BACKWARD, start=0)
    tex.FP8TensorMeta = type("FP8TensorMeta", (), {})
    tex.get_cudnn_version = lambda: 92000
    tex.get_cublasLt_version = lambda: 130101
    tex.get_num_cublas_streams = lambda: 4
    tex.get_stream_priority_range = lambda *_: (0, 0)
    tex.device_supports_multicast = lambda *_: True
    tex.ubuf_built_with_mpi = lambda: False
    host_kernels.install(tex)
    tex.__all__ = [name for name in vars(tex) if not name.startswith("__")]
    for name in ("onnx", "onnxscript"):  # for exports, imported unguarded
        if importlib.util.find_spec(name) is None:
            _put(Anything(name))
    sys.path.insert(0, str(FOLDER))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch: do not load the CUDA libraries
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # likewise: scales of fp8-delayed in Python
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # likewise: small functions are not compiled
    os.environ["NVTE_MASKED_SOFTMAX_FUSION"] = "0"  # likewise: PyTorch's softmax instead of a kernel
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    from tepo_megatron.dist.platform import activate

    activate("cpu", transformer_engine=True)
    _answer_as(Device())


def _put(module: types.ModuleType) -> types.ModuleType:
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    module.__all__ = []  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return module


def _answer_as(device: Device) -> None:
    """Let `torch.cuda` describe this GPU. Tensors made on it live in host memory, as everywhere on the CPU platform."""
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda _=None: (device.major, device.minor)
    torch.cuda.get_device_properties = lambda _=None: device
    torch.cuda.get_device_name = lambda _=None: device.name
    torch.Tensor.is_cuda = property(_is_cuda)  # type: ignore[assignment,misc]


def _is_cuda(tensor: torch.Tensor) -> bool:
    """Transformer Engine refuses tensors that are not on a GPU. Only its modules see this answer."""
    return sys._getframe(1).f_globals.get("__name__", "").startswith("transformer_engine.")
