"""What a server inherits of this process's environment."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping

import torch

# What torchrun tells its workers is not meant for a server that one of them starts.
_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TEPO_WORLD_FOLDER", "TEPO_ERROR_FILE", "TEPO_LAUNCHER_PID"),  # our launcher
}


# Nor is what the launcher and a rank set for Megatron-Core: with one hardware queue an engine's streams run one after the
# other, and both engines choose the number of their threads themselves.
_RANKS = {"CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS"}


def without_torchrun(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what is meant for ranks.

    Args:
        inherited: environment of this process. Where it is no rank (`tepo serve`), the user's own variables are kept.
    """
    removed = _TORCHRUN | (_RANKS if "RANK" in inherited else set())
    return {name: value for name, value in inherited.items() if name not in removed and not name.startswith("TORCHELASTIC_")}


def on_this_machine(inherited: Mapping[str, str], is_loopback: bool) -> dict[str, str]:
    """Return what keeps the process groups of a server, all of whose ranks run on this machine, on its loopback interface.

    gloo binds to whatever this machine's name resolves to otherwise, and takes every connection that comes.

    Args:
        inherited: environment of this process.
        is_loopback: the server listens there too. NCCL then stays there if all ranks of the run are on this machine: the groups
            of `sync.transport=group` span them.
    """
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    if is_loopback and "RANK" in inherited and inherited.get("LOCAL_WORLD_SIZE") == inherited.get("WORLD_SIZE"):
        env["NCCL_SOCKET_IFNAME"] = "lo"
    return env


def new_file(inherited: Mapping[str, str], name: str) -> str:
    """Return a path below TMPDIR, which `LocalServer` sets to a folder of mode 0700, that no other start of a server has."""
    return f"{inherited.get('TMPDIR', tempfile.gettempdir())}/{name}-{secrets.token_hex(8)}"


def devices(inherited: Mapping[str, str], first: int, count: int, others: bool = False) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES with `count` of the GPUs that this process sees, from the `first` on (or what is left).

    others: after them the rest, which a server computes nothing on and whose memory it may map.
    """
    seen = inherited.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(i) for i in range(max(first + count, torch.cuda.device_count() if others else 0))]
    taken = names[first : first + count]
    rest = [name for name in names if name not in taken] if others else []
    return {"CUDA_VISIBLE_DEVICES": ",".join([*taken, *rest])}
