"""Go on with fewer data-parallel ranks where devices of this machine were lost (`parallel.min_dp`)."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from tepo_megatron.config import ParallelConfig, RolloutConfig
from tepo_megatron.errors import ConfigError, TepoError

_PROBE = "import torch; torch.ones(1 << 20, device='cuda').sum().item()"
_PROBE_SECONDS = 120.0
FindWorking = Callable[[Sequence[str]], list[str]]


class Devices(NamedTuple):
    """The devices of a run on this machine, as in CUDA_VISIBLE_DEVICES.

    Attributes:
        ranks: Those of the ranks, in their order.
        servers: Those behind them, which the servers may have.
    """

    ranks: tuple[str, ...]
    servers: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment in which ranks see these devices alone, those of the ranks first."""
        return {"CUDA_VISIBLE_DEVICES": ",".join([*self.ranks, *self.servers])}


class SmallerMesh(NamedTuple):
    """A mesh for the devices that are left.

    Attributes:
        parallel: The section, with a smaller `dp`.
    """

    parallel: ParallelConfig
    devices: Devices
    line: str


def visible_devices(parallel: ParallelConfig, rollout: RolloutConfig, seen: str | None) -> Devices:
    """Return the devices of a run's ranks and servers on this machine.

    Args:
        seen: CUDA_VISIBLE_DEVICES; None: not set.
    """
    ranks, servers = parallel.world_size, rollout.servers * rollout.server.tp
    names = seen.split(",") if seen else [str(i) for i in range(ranks + servers)]
    return Devices(tuple(names[:ranks]), tuple(names[ranks:]))


def working(devices: Sequence[str]) -> list[str]:
    """Return those of the CUDA devices on which a process can compute, in their order."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": name},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in devices
    ]
    return [name for name, process in zip(devices, started, strict=True) if _succeeds(process)]


def _succeeds(process: "subprocess.Popen[bytes]") -> bool:
    try:
        return process.wait(_PROBE_SECONDS) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_PROBE_SECONDS)
        return False


def smaller_mesh(
    parallel: ParallelConfig, devices: Devices, find_working: FindWorking, check: Callable[[ParallelConfig], object]
) -> SmallerMesh | None:
    """Return what to go on with if devices of ranks were lost; None if all work, or `parallel.min_dp` is not set.

    Raises:
        ConfigError: The devices that are left are too few for `parallel.min_dp`.
    """
    fewest = parallel.min_dp
    if fewest is None:
        return None
    left = find_working(devices.ranks)
    lost = [name for name in devices.ranks if name not in left]
    if not lost:
        return None
    text = f"devices of this machine that no longer work: {', '.join(lost)}"
    size = parallel.world_size // parallel.dp
    for dp in range(len(left) // size, fewest - 1, -1):
        try:
            smaller = replace(parallel, dp=dp)
            check(smaller)
        except (ValueError, TepoError):  # such as parallel.ep, which has to divide dp x cp
            continue
        line = f"{text}; the ranks go on with parallel.dp={dp} instead of {parallel.dp}"
        return SmallerMesh(smaller, Devices(tuple(left[: dp * size]), devices.servers), line)
    raise ConfigError(f"{text}; the {len(left)} that are left are too few for parallel.min_dp={fewest} of {size} ranks each")
