"""Check this machine without starting anything: packages, the kernels that compute, processors, memory, disk."""

import importlib.metadata
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from tepo_megatron.actor.kernels import choose, choose_linear
from tepo_megatron.actor.kernels import installed as computing
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.memory_kills import usable_cores
from tepo_megatron.base.scratch import PrivateFolder
from tepo_megatron.config import CheckpointConfig, MegatronConfig, ModelConfig, RolloutConfig, SyncConfig
from tepo_megatron.config.megatron import untested_fields
from tepo_megatron.doctor.findings import Finding
from tepo_megatron.models.families import find_family, read_config
from tepo_megatron.models.hf_io import HfReader

DISTRIBUTION = "tepo-megatron"
SHOWN = ("torch", "megatron-core", "transformers", "math-verify")
WRITTEN_BYTES = 64 * 2**20
SLOW_DISK = 50e6  # bytes per second
STATE_BYTES = 12  # bytes per parameter in a checkpoint in addition to the weight: fp32 master and both moments
WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
WRITTEN_AT_ONCE = 1  # checkpoints in addition to the kept ones

# Transformer Engine looks for cuDNN there before it uses the wheel's, which PyTorch loads (2.20.2, common/__init__.py).
_CUDNN_VARIABLES = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")


def packages() -> Iterator[Finding]:
    """Check that the installed packages are those that this package requires."""
    wrong = []
    for text in importlib.metadata.requires(DISTRIBUTION) or ():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is not installed")
            continue
        if not wanted.specifier.contains(version.partition("+")[0], prereleases=True):
            wrong.append(f"{wanted.name} {version} is not {wanted.specifier}")
    if wrong:
        yield Finding("packages", "fail", "; ".join(wrong), "install what requirements/ pins")
    else:
        yield Finding("packages", "pass", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in SHOWN))


def kernels(
    model: ModelConfig, megatron: MegatronConfig, platform: str, cp: int, offload_activations: bool = False
) -> Iterator[Finding]:
    """Report which implementation runs layers, norms, the optimizer step and sums of gradients (`actor/kernels.py`)."""
    try:
        chosen = choose(model, megatron, platform, computing(), cp=cp, offload_activations=offload_activations)
    except ConfigError as e:
        yield Finding("kernels", "fail", str(e), "install what is missing, or change that key")
        return
    if platform == "cpu" or chosen.layers == "te":
        yield Finding("kernels", "pass", str(chosen))
    else:
        fix = "it works, and is slower; install the extra `te` and use model.attention=auto"
        yield Finding("kernels", "warn", str(chosen), fix)


def linear_kernels(model: ModelConfig, platform: str) -> Iterator[Finding]:
    """Report which implementation runs the gated delta rule; nothing for a model without it."""
    config = read_config(model.path)
    if find_family(config).architecture(config).linear_attention is None:
        return
    chosen = choose_linear(model, platform, computing())
    if "torch" in (chosen.delta_rule, chosen.convolution) and platform == "cuda" and model.dtype == "bf16":
        yield Finding("linear kernels", "warn", str(chosen), "it works; install flash-linear-attention and causal-conv1d")
    else:
        yield Finding("linear kernels", "pass", str(chosen))


def passed_fields(megatron: MegatronConfig) -> Iterator[Finding]:
    """List the fields that the config passes to Megatron-Core and that no test of this project trains with."""
    for line in untested_fields(megatron):
        yield Finding("megatron", "warn", line, "compare a few steps with and without them")


def cudnn(platform: str, environment: Mapping[str, str], toolkit: Path = Path("/usr/local/cuda")) -> Iterator[Finding]:
    """Report a cuDNN that Transformer Engine would load in addition to PyTorch's."""
    if platform == "cpu":
        return
    folders = [Path(environment[name]) for name in _CUDNN_VARIABLES if environment.get(name)]
    for folder in (*folders, toolkit):
        if libraries := sorted(folder.glob("**/libcudnn.so*")):
            yield Finding(
                "cuDNN",
                "warn",
                f"{libraries[-1]}: Transformer Engine prefers it to that of the wheel nvidia-cudnn-cu13, which PyTorch loads "
                "in the same process; two versions in one process are reported to fail",
                "remove it, or use a CUDA image without cuDNN (nvidia/cuda:...-devel, not -cudnn-devel)",
            )
            return
    yield Finding("cuDNN", "pass", "none besides that of the wheels")


def enough_devices(platform: str, ranks: int, rollout: RolloutConfig) -> bool:
    """Return whether this machine alone has the devices for the ranks and for the servers that the run starts."""
    return platform == "cpu" or _gpus() >= _wanted(ranks, rollout)


def processors(platform: str, ranks: int, rollout: RolloutConfig) -> Iterator[Finding]:
    """Check that there are GPUs, or cores, for the ranks and for the servers that are started here."""
    if platform == "cuda":
        present, wanted = _gpus(), _wanted(ranks, rollout)
        if present >= wanted:
            yield Finding("GPUs", "pass", f"{present}, {wanted} of which are used")
        else:
            yield Finding(
                "GPUs", "fail", f"{wanted} are used, and this machine has {present}",
                "run this inside the allocation, or lower parallel.* and rollout.servers",
            )  # fmt: skip
        return
    cores = usable_cores()
    busy = max(ranks, rollout.servers * rollout.server.tp)
    if busy > cores:
        yield Finding("cores", "warn", f"{cores}, for {busy} processes that compute at once", "it works, and is slow")
    else:
        yield Finding("cores", "pass", f"{cores}, for {ranks} ranks and {rollout.servers} servers")


def memory(model: ModelConfig, sync: SyncConfig, *, replays: bool) -> Iterator[Finding]:
    """Check that host memory suffices for the weights in transfer."""
    free, files = psutil.virtual_memory().available, sync.transport.type == "shm" and sync.shared_folder is None
    yield Finding("memory", "pass" if free > 4 * 2**30 else "warn", f"{free / 2**30:.1f} GiB available on this machine")
    if files and not replays:
        two_rounds, available = 2 * sync.bucket_mib * 2**20, shutil.disk_usage("/dev/shm").free
        wanted = min(two_rounds, _parameters(model.path) * WEIGHT_BYTES[model.dtype])
        if available < wanted:
            yield Finding(
                "shared memory", "fail",
                f"{available / 2**30:.2f} GiB free in /dev/shm, and two rounds take {wanted / 2**30:.2f}",
                "lower sync.bucket_mib, enlarge /dev/shm, or set sync.transport.folder",
            )  # fmt: skip
        else:
            yield Finding("shared memory", "pass", f"{available / 2**30:.1f} GiB free in /dev/shm")


def disk(output: Path, model: ModelConfig, checkpoint: CheckpointConfig, *, exports: bool) -> Iterator[Finding]:
    """Check free space and speed of the disk for checkpoints and the trained model."""
    folder, parameters = _existing(output), _parameters(model.path)
    free, weight = shutil.disk_usage(folder).free, WEIGHT_BYTES[model.dtype]
    kept = checkpoint.keep_last + WRITTEN_AT_ONCE if checkpoint.every else 0
    wanted = parameters * (kept * (STATE_BYTES + weight) + (weight if exports else 0))
    state = f"{free / 1e9:.0f} GB free in {folder}; the run keeps about {wanted / 1e9:.2g} GB"
    if free < wanted:
        yield Finding("disk", "fail", state, "free some, lower checkpoint.keep_last, or give another output")
    else:
        yield Finding("disk", "pass", state)
    try:
        speed = _write_speed(folder)
    except OSError as e:
        yield Finding("disk speed", "fail", f"{folder} cannot be written ({e.strerror})", "give another output")
        return
    state = f"{speed / 1e6:.0f} MB/s, written and synced"
    if checkpoint.every:
        state += f"; a checkpoint takes {parameters * (STATE_BYTES + weight) / speed:.2g} s at least, were it one stream"
    if speed < SLOW_DISK:
        yield Finding("disk speed", "warn", state, "put output on a faster file system, or save less often: checkpoint.every")
    else:
        yield Finding("disk speed", "pass", state)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _wanted(ranks: int, rollout: RolloutConfig) -> int:
    """Return the GPUs of the ranks, and of the servers that are started here."""
    servers = 0 if rollout.server.remote or rollout.replay is not None else rollout.servers * rollout.server.tp
    return max(ranks, servers) if rollout.colocate else ranks + servers


def _parameters(model_path: str) -> int:
    return sum(tensor.numel() for tensor in HfReader(model_path).shapes().values())


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    while not folder.exists():
        folder = folder.parent
    return folder


def _write_speed(folder: Path) -> float:
    with PrivateFolder.create("doctor", folder) as private, (private.path / "written").open("wb") as file:
        start = time.perf_counter()
        file.write(os.urandom(2**20) * (WRITTEN_BYTES // 2**20))
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN_BYTES / (time.perf_counter() - start)
