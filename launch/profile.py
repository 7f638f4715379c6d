"""A cluster in one YAML file: what differs between sites, and nothing of a run. Examples: launch/profiles/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from launch.sections import KubeRayConfig, SkypilotConfig, SlurmConfig
from tepo_megatron.config.fields import NonNegative, Positive, config
from tepo_megatron.config_io import read_yaml, validate_as

_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$")
_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")  # NeMo-Run writes names in capitals, whatever they were


@config
class ContainerConfig:
    """What the tasks run in (Slurm with Pyxis; Kubernetes). With Pyxis the working directory is mounted at its own path.

    image: as Pyxis takes it, a registry's image or a .sqsh file, or as Kubernetes does. mounts: HOST:CONTAINER[:FLAGS]; Pyxis.
    """

    image: str
    mounts: list[str] = Field(default_factory=list)

    def __post_init__(self) -> None:
        for mount in self.mounts:
            if not re.fullmatch(r"/[^:,\s]*:/[^:,\s]*(:[\w+]+)?", mount):
                raise ValueError(f"mounts: {mount!r} is not /HOST/PATH:/CONTAINER/PATH[:FLAGS]")


@config
class NetworkConfig:
    """Between the machines. None leaves the choice to NCCL and Gloo.

    interface: of TCP traffic (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), `ib0` or `=eth0,eth1`; infiniband: the adapters of
    RDMA (NCCL_IB_HCA); port: where the first machine's torchrun listens.
    """

    interface: str | None = None
    infiniband: str | None = None
    port: Annotated[int, Field(ge=1024, le=65535)] = 29400

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that say so."""
        found = {"NCCL_SOCKET_IFNAME": self.interface, "GLOO_SOCKET_IFNAME": self.interface, "NCCL_IB_HCA": self.infiniband}
        return {name: value for name, value in found.items() if value is not None}


@config
class Cluster:
    """Where runs go.

    python: the interpreter of the training environment, on the machines or in the container; gpus_per_node: of every machine,
    0 without; ranks_per_node: training ranks, or GPUs' worth of servers, that fit on one; None: gpus_per_node, or any number
    without GPUs. environment: variables of all tasks; secrets: names of variables that have to be set where `launch` is called
    (of KubeRay, in a Secret of Kubernetes) and whose values stand in no file.
    """

    python: str = "python"
    gpus_per_node: NonNegative = 0
    ranks_per_node: Positive | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    secrets: list[str] = Field(default_factory=list)
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    container: ContainerConfig | None = None
    slurm: SlurmConfig | None = None
    skypilot: SkypilotConfig | None = None
    kuberay: KubeRayConfig | None = None

    def __post_init__(self) -> None:
        for name in (*self.environment, *self.secrets):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an environment variable in capitals")
        for name, value in self.environment.items():
            if _SECRET.search(name):
                raise ValueError(
                    f"environment.{name} looks like a secret, and scripts and logs would show it; export it where you call "
                    f"launch and put its name under secrets"
                )
            if "\n" in value:
                raise ValueError(f"environment.{name} has several lines; a script's `export` takes one")
        if twice := sorted(set(self.environment) & (set(self.network.variables) | set(self.secrets))):
            raise ValueError(f"environment.{twice[0]} is given twice, by network or secrets too; remove one of them")
        if self.skypilot is not None and (self.skypilot.gpu is None) != (self.gpus_per_node == 0):
            raise ValueError(
                f"skypilot.gpu={self.skypilot.gpu} and gpus_per_node={self.gpus_per_node} say different things; give both, or "
                "neither"
            )

    @property
    def slots(self) -> int | None:
        """Ranks that a machine has room for; None: any number."""
        return self.ranks_per_node or self.gpus_per_node or None


def load_cluster(path: str | Path) -> Cluster:
    """Read a profile. Raises ConfigError naming the file, the key and the mend."""
    return validate_as(Cluster, read_yaml(path), str(path))
