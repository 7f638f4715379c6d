"""Find out in the first second, before torch is imported: missing packages, no GPU, a GPU that `tepo plan` does not know."""

import importlib
import importlib.util
import subprocess
import sys

from benchmarks.results import ROOT
from tepo_megatron.base.hardware import GPUS, card_of

WHEELS = "requirements/gpu-check.txt"
NEEDED = ("torch", "numpy", "safetensors", "transformers", "yaml")
MODULES = {"megatron-core": "megatron.core", "antlr4-python3-runtime": "antlr4"}  # of wheels whose module is not their name
PEER_WHEELS = ("liger-kernel",)  # a missing one is only not measured
DRIVER_SECONDS = 30.0
# of an interpreter of its own, because a broken driver may hang or end it: the number of GPUs, and the first one's name
DRIVER = """
import ctypes
cuda, count, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(256)
for call, *words in (("cuInit", 0), ("cuDeviceGetCount", ctypes.byref(count)), ("cuDeviceGetName", name, 256, 0)):
    if status := getattr(cuda, call)(*words):
        raise SystemExit(f"{call} returns error {status}")
print(name.value.decode())
"""


def wheels() -> list[str]:
    """Return the names of the packages in requirements/gpu-check.txt."""
    lines = (line.strip() for line in (ROOT / WHEELS).read_text().splitlines())
    return [line.partition("==")[0] for line in lines if line and not line.startswith("#")]


def missing_packages(platform: str) -> str:
    """Return which packages the check lacks and where they are from; "" if none is missing."""
    needed = [name for name in wheels() if name not in PEER_WHEELS]
    from_wheels = [name for name in needed if not _found(MODULES.get(name, name.replace("-", "_")))]
    others = [name for name in (*NEEDED, *(("triton",) if platform == "cuda" else ())) if not _found(name)]
    words = [f"{', '.join(from_wheels)} not installed: see {WHEELS}"] if from_wheels else []
    words += [f"{', '.join(others)} not installed: they belong to the machine's image"] if others else []
    if not from_wheels:
        try:
            importlib.import_module("pydantic_core")
        except ImportError as e:  # for example made for another Python
            words.append(f"pydantic-core cannot be imported: {e}")
    return "; ".join(words)


def driver_gpu() -> tuple[str, str]:
    """Return the name of the first GPU that the CUDA driver sees, and "" or why there is none."""
    words = [sys.executable, "-I", "-S", "-c", DRIVER]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "", f"the CUDA driver did not answer in {DRIVER_SECONDS:.0f} s"
    if done.returncode:
        return "", f"the CUDA driver finds no GPU: {last_line(done.stderr)}"
    return done.stdout.strip(), ""


def unknown_card(device: str) -> str:
    """Return what is to be said of a GPU that `tepo plan` does not know; "" for one that it knows."""
    if card_of(device) is not None:
        return ""
    return (
        f"{device} is not in the table of `tepo plan` ({', '.join(GPUS)}): nothing is compared with a prediction of its seconds"
    )


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
