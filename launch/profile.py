"""The profile of a cluster, one YAML file: everything that differs between sites, and nothing about a run.

Examples are in launch/profiles/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from launch.sections import KubeRayConfig, SkypilotConfig, SlurmConfig
from tepo_megatron.config.fields import NonNegative, Positive, config
from tepo_megatron.config.io import read_yaml, validate_as

_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$")
_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")  # NeMo-Run converts names to capitals


@config
class ContainerConfig:
    """The container of the tasks (Slurm with Pyxis; Kubernetes). Pyxis mounts the working directory at its own path.

    Attributes:
        image: For Pyxis an image of a registry or a .sqsh file; for Kubernetes an image name.
        mounts: HOST:CONTAINER[:FLAGS]; Pyxis only.
    """

    image: str
    mounts: list[str] = Field(default_factory=list)

    def __post_init__(self) -> None:
        for mount in self.mounts:
            if not re.fullmatch(r"/[^:,\s]*:/[^:,\s]*(:[\w+]+)?", mount):
                raise ValueError(f"mounts: {mount!r} is not /HOST/PATH:/CONTAINER/PATH[:FLAGS]")


@config
class NetworkConfig:
    """The network between the machines. None leaves the choice to NCCL and Gloo.

    Attributes:
        interface: Interface of TCP traffic (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME): `ib0` or `=eth0,eth1`.
        infiniband: RDMA adapters (NCCL_IB_HCA).
        port: Port on which torchrun listens on the first machine.
    """

    interface: str | None = None
    infiniband: str | None = None
    port: Annotated[int, Field(ge=1024, le=65535)] = 29400

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables for these settings."""
        found = {"NCCL_SOCKET_IFNAME": self.interface, "GLOO_SOCKET_IFNAME": self.interface, "NCCL_IB_HCA": self.infiniband}
        return {name: value for name, value in found.items() if value is not None}


@config
class Cluster:
    """A cluster on which runs are launched.

    Attributes:
        python: Interpreter of the training environment, on the machines or in the container.
        gpus_per_node: GPUs of every machine; 0: none.
        ranks_per_node: Training ranks, or GPUs of servers, that fit on one machine. None: gpus_per_node; any number without
            GPUs.
        environment: Environment variables of all tasks.
        secrets: Names of variables whose values are in no file. They must be set where `launch` is called (KubeRay: in a
            Kubernetes Secret).
        network: Network between the machines.
        container: Container of the tasks; None: no container.
        slurm, skypilot, kuberay: Sections of individual executors.
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
                f"skypilot.gpu={self.skypilot.gpu} and gpus_per_node={self.gpus_per_node} contradict each other; give both, or "
                "neither"
            )

    @property
    def slots(self) -> int | None:
        """Return the number of ranks that fit on a machine; None: any number."""
        return self.ranks_per_node or self.gpus_per_node or None


def load_cluster(path: str | Path) -> Cluster:
    """Read a profile. Raise ConfigError naming the file, the key and the fix."""
    return validate_as(Cluster, read_yaml(path), str(path))
