"""The profile of a cluster, one YAML file: everything that differs between sites, and nothing about a run.

Examples are in launch/profiles/.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from launch.sections import NodeCheckConfig, SlurmConfig
from tepo_megatron.config.fields import NonNegative, Positive, config
from tepo_megatron.config.io import read_yaml, texts_of, validate_as

# Variable -> folder below the folder of caches. Without XDG_CACHE_HOME, Hugging Face's cache would be in the home as well.
CACHES = {
    "XDG_CACHE_HOME": "",
    "TRITON_HOME": "",
    "TRITON_CACHE_DIR": "/triton",
    "TORCHINDUCTOR_CACHE_DIR": "/inductor",
    "VLLM_CACHE_ROOT": "/vllm",
    "SGLANG_CACHE_DIR": "/sglang",
    "FLASHINFER_WORKSPACE_BASE": "/flashinfer",
    "CUDA_CACHE_PATH": "/cuda",
}
_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")  # NeMo-Run converts names to capitals
# No script and no log gets a secret: these are in the names of variables, and the values.
_SECRET_WORDS = {"SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS"}
_LAST_WORDS = {"TOKEN", "PASS", "AUTH", "PAT", "COOKIE", "PWD"}  # of MY_PASS, HF_AUTH, GITHUB_PAT
_PLACES = {"FILE", "PATH", "DIR", "FOLDER", "URL"}  # where a secret is, unless the value shows it
_VALUE = re.compile(
    r"\w://[^\s/:@]*:[^\s/@]+@"  # a password in a URL
    r"|(?<![\w-])(hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ya29\.|eyJ[\w-]+\.eyJ)[\w-]{8}"  # well-known keys
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|\bBearer\s+\S{8}"
)
_ASSIGNMENT = re.compile(r"(?<![\w-])([A-Za-z_]\w*)=(?![\s\"']*[$`])[\"']?[^\s\"';]")


def is_secret_name(name: str) -> bool:
    """Return whether a variable of that name usually holds a secret."""
    words = name.upper().strip("_").split("_")
    if words[-1] in _PLACES or words == ["PWD"]:
        return False
    return bool(_SECRET_WORDS.intersection(words)) or words[-1] in _LAST_WORDS or words[-1].endswith("KEY")


def has_secret(text: str) -> bool:
    """Return whether a text holds what looks like a secret."""
    return _VALUE.search(text) is not None


def assigns_secret(line: str) -> bool:
    """Return whether a line of bash sets a variable of a secret's name to a literal value."""
    return any(map(is_secret_name, _ASSIGNMENT.findall(line)))


@config
class ContainerConfig:
    """The container of the tasks (Slurm with Pyxis). Pyxis mounts the working directory at its own path."""

    image: str  # an image of a registry or a .sqsh file
    mounts: list[str] = Field(default_factory=list)  # HOST:CONTAINER[:FLAGS]. HOST must exist where `launch` is called.
    # The same for folders that only the machines have, such as a local disk
    node_mounts: list[str] = Field(default_factory=list)

    @property
    def all_mounts(self) -> list[str]:
        """Return mounts and node_mounts."""
        return [*self.mounts, *self.node_mounts]

    def __post_init__(self) -> None:
        for mount in self.all_mounts:
            if not re.fullmatch(r"/[^:,\s]*:/[^:,\s]*(:[\w+]+)?", mount):
                raise ValueError(f"mounts: {mount!r} is not /HOST/PATH:/CONTAINER/PATH[:FLAGS]")


@config
class NetworkConfig:
    """The network between the machines."""

    # Interfaces of TCP traffic by their whole names: `ib0` or `eth0,eth1`. NCCL gets all of them and Gloo the first. None:
    # under Slurm each machine's interface towards the head; elsewhere NCCL and Gloo choose.
    interface: str | None = None
    infiniband: str | None = None  # RDMA adapters (NCCL_IB_HCA). None: NCCL chooses.
    # Port of the ranks' store on the first machine. None: one that is free there.
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None

    def __post_init__(self) -> None:
        for name in self.interfaces:
            if not re.fullmatch(r"[\w.-]{1,15}", name):
                raise ValueError(f"interface: {name!r} is no whole name of an interface; give names as `ip link` prints them")
            if name == "lo":
                raise ValueError("interface: lo reaches no other machine; name another one, or set null to have one found")

    @property
    def interfaces(self) -> list[str]:
        """Return the names in `interface`; a leading "=", NCCL's sign for whole names, is accepted."""
        return [] if self.interface is None else self.interface.removeprefix("=").split(",")

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables for these settings.

        NCCL takes a list of prefixes, or after "=" of whole names. Gloo takes whole names, and fails where one is missing.
        """
        found = {}
        if self.interfaces:
            found = {"NCCL_SOCKET_IFNAME": f"={','.join(self.interfaces)}", "GLOO_SOCKET_IFNAME": self.interfaces[0]}
        return found if self.infiniband is None else found | {"NCCL_IB_HCA": self.infiniband}


@config
class Cluster:
    """A cluster on which runs are launched."""

    python: str = "python"  # interpreter of the training environment, on the machines or in the container
    # GPUs that the scheduler is asked for on every machine. 0 or None: none is asked for. Where a Slurm has no GRES of GPUs,
    # set this to null and ranks_per_node to the GPUs of a machine.
    gpus_per_node: NonNegative | None = 0
    gpu: str | None = None  # name of the GPU in `tepo plan`, for the preflight. None: H100.
    # Training ranks, or GPUs of servers, that fit on one machine. None: gpus_per_node; any number without GPUs.
    ranks_per_node: Positive | None = None
    # Folder for compiled kernels and other caches of Triton, PyTorch, vLLM, SGLang and FlashInfer, on the machines or in the
    # container. None: `launch/cache` in the job's folder with a container, where home may be read-only; otherwise the caches
    # stay in the user's home.
    cache: str | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    # Names of variables whose values are in no file. They must be set where `launch` is called.
    secrets: list[str] = Field(default_factory=list)
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    container: ContainerConfig | None = None
    node_check: NodeCheckConfig = Field(default_factory=NodeCheckConfig)
    slurm: SlurmConfig | None = None

    def __post_init__(self) -> None:
        for name in (*self.environment, *self.secrets):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an environment variable in capitals")
        for name, value in self.environment.items():
            if is_secret_name(name) or has_secret(value):
                raise ValueError(
                    f"environment.{name} looks like a secret, and scripts and logs would show it; export it where you call "
                    f"launch and put its name under secrets"
                )
            if "\n" in value:
                raise ValueError(f"environment.{name} has several lines; a script's `export` takes one")
        if twice := sorted(set(self.environment) & (set(self.network.variables) | set(self.secrets))):
            raise ValueError(f"environment.{twice[0]} is given twice, by network or secrets too; remove one of them")
        if self.cache is not None:
            if not re.fullmatch(r"(/[\w.-]+)+", self.cache):
                raise ValueError(f"cache={self.cache!r} is no absolute path of letters, digits, _ . -")
            if twice := sorted(set(self.environment) & set(CACHES)):
                raise ValueError(f"environment.{twice[0]} is given twice, by cache too; remove one of them")
        for key, text in texts_of(dataclasses.asdict(self)):
            if has_secret(text) or (key == "slurm.setup" and assigns_secret(text)):
                raise ValueError(
                    f"{key} holds what looks like a secret, and scripts and logs would show it; put it into a variable, export "
                    "that where you call launch, and put its name under secrets"
                )
            if re.search(r"[\x00-\x1f\x7f]", text):
                raise ValueError(f"{key}={text!r:.80} has a line break or another control character; remove it")
            if text.startswith("~") and key != "slurm.setup":
                raise ValueError(f"{key}={text}: no shell replaces ~ there; write the whole path")

    @property
    def slots(self) -> int | None:
        """Return the number of ranks that fit on a machine; None: any number."""
        return self.ranks_per_node or self.gpus_per_node or None

    @property
    def gpus(self) -> int:
        """Return the GPUs of a machine of a run on GPUs: those asked for, else ranks_per_node, else 0."""
        return self.gpus_per_node or self.ranks_per_node or 0

    def cache_variables(self, home: Path) -> dict[str, str]:
        """Return the environment variables that move caches out of the user's home, without those of `environment`."""
        if self.cache is None and self.container is None:
            return {}
        folder = self.cache or str(home / "cache")
        return {name: f"{folder}{below}" for name, below in CACHES.items() if name not in self.environment}


def this_machine() -> Cluster:
    """Return the profile of a call without one: this machine, with the environment of `make` if it is in this folder."""
    python = Path(".venv", "bin", "python")
    return Cluster(python=str(python)) if python.exists() else Cluster()


def load_cluster(path: str | Path) -> Cluster:
    """Read a profile. Raise ConfigError naming the file, the key and the fix."""
    return validate_as(Cluster, read_yaml(path), str(path))
