"""Part `environment`: the device, its driver, and the versions of what the other parts use."""

import importlib.metadata
import importlib.util
import shutil
import subprocess

import torch

from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.machine import unknown_card

PACKAGES = (
    "torch", "triton", "numpy", "transformers", "megatron-core", "pydantic", "transformer-engine", "apex", "vllm", "sglang",
    "trl", "verl", "liger-kernel", "pytest", "psutil", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas",
)  # fmt: skip
PROGRAMS = ("cc", "git", "nvcc", "nvidia-smi")  # Triton builds its launchers with a C compiler


def run(check: Check) -> None:
    """Report the device, the driver and the versions."""
    if check.on_gpu:
        found = torch.cuda.get_device_properties(0)
        capability = f"{found.major}.{found.minor}"
        memory = found.total_memory / 2**30
        name = f"{found.name}, compute capability {capability}, {memory:.1f} GiB, {torch.cuda.device_count()} visible"
        unknown = unknown_card(found.name)
        check.report("device", "failed" if unknown else "measured", name, why=unknown)
        check.report("driver", "measured", driver())
    else:
        check.report("device", "measured", "CPU")
        check.report("driver", "skipped", why="no GPU is used")
    cudnn = torch.backends.cudnn.version() if check.on_gpu else None
    check.report("torch", "measured", f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn}")
    there, missing = {}, []
    for name in PACKAGES:
        try:
            there[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    programs = [name for name in PROGRAMS if shutil.which(name)]
    packages = ", ".join(f"{name} {version}" for name, version in there.items())
    check.report(
        "packages", "measured", packages, why=f"missing: {', '.join(missing)}; programs: {', '.join(programs) or 'none'}"
    )


def driver() -> str:
    """Return the driver's version as `nvidia-smi` reports it."""
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        return f"unknown ({type(e).__name__})"
    return done.stdout.split()[0]
