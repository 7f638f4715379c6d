"""Build the environment variables of a server from those of this process."""

import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from tepo_megatron.base.memory_kills import cpu_threads
from tepo_megatron.base.processes import LAUNCHER, RANK_THREADS, without_proxy

# Variables that describe the world to ranks; a server must not see them.
_WORLD = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TEPO_WORLD_FOLDER", "TEPO_ERROR_FILE", LAUNCHER, "TEPO_ATTEMPT", "TEPO_START_ID"),  # our launcher
}


def without_torchrun(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that are meant for ranks."""
    removed = set(_WORLD)
    if inherited.keys() & {"RANK", LAUNCHER}:
        # A rank sets it for Megatron-Core. With one hardware queue an engine's streams would run one after the other.
        removed.add("CUDA_DEVICE_MAX_CONNECTIONS")
    if RANK_THREADS in inherited or ("RANK" in inherited and LAUNCHER not in inherited):  # ours or torchrun's, not the user's
        removed |= {"OMP_NUM_THREADS", RANK_THREADS}
    return {name: value for name, value in inherited.items() if name not in removed and not name.startswith("TORCHELASTIC_")}


def server_threads(env: Mapping[str, str], model: Path, processes: int) -> dict[str, str]:
    """Return the variables of a server's threads on CPUs, for `processes` of all servers on this machine.

    The servers share all cores, because the ranks wait while they sample. What the user's environment says takes precedence.
    """
    threads = env.get("OMP_NUM_THREADS") or str(cpu_threads(model, processes))
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}


def on_this_machine(inherited: Mapping[str, str], is_loopback: bool) -> dict[str, str]:
    """Return variables that keep a server's process groups on the loopback interface, and its requests there without a proxy.

    All ranks of the server run on this machine.

    Otherwise gloo binds to whatever address this machine's name resolves to, and accepts every connection.
    """
    env = {"GLOO_SOCKET_IFNAME": "lo"} | without_proxy(inherited)
    if is_loopback and "RANK" in inherited and inherited.get("LOCAL_WORLD_SIZE") == inherited.get("WORLD_SIZE"):
        env["NCCL_SOCKET_IFNAME"] = "lo"
    return env


def new_file(inherited: Mapping[str, str], name: str) -> str:
    """Return a path in TMPDIR that no other start of a server uses. `LocalServer` sets TMPDIR to a folder of mode 0700."""
    return f"{inherited.get('TMPDIR', tempfile.gettempdir())}/{name}-{secrets.token_hex(8)}"


def devices(inherited: Mapping[str, str], first: int, count: int, others: bool = False) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with the GPUs of one server."""
    seen = inherited.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(i) for i in range(max(first + count, torch.cuda.device_count() if others else 0))]
    taken = names[first : first + count]
    rest = [name for name in names if name not in taken] if others else []
    return {"CUDA_VISIBLE_DEVICES": ",".join([*taken, *rest])}
