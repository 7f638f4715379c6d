"""Check the environment of the tasks: interpreter, image, mounts, and values of the example profiles that were not changed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from launch.profile import Cluster, ContainerConfig

_REFERENCE = re.compile(r"[a-z0-9]+([._/:-]+[A-Za-z0-9_]+)*(@sha256:[0-9a-f]{64})?")  # of Docker
_EXAMPLE = "my-account"


def faults(cluster: Cluster) -> Iterator[str]:
    """Yield the faults of the tasks' environment."""
    yield from _examples(cluster)
    container = cluster.container
    if shutil.which("sbatch") is None:
        yield "sbatch is not on PATH; call launch on a login node of the cluster"
    yield from _interpreter(cluster.python) if container is None else _pyxis(container)


def _interpreter(python: str) -> Iterator[str]:
    if shutil.which(python) is None:
        yield (
            f"python={python} is not a program here; run `make` for .venv/bin/python, or name the interpreter of the training "
            "environment in the profile"
        )


def _pyxis(container: ContainerConfig) -> Iterator[str]:
    """Yield the faults of image and mounts for Pyxis, which takes a path that begins with / or . for a file."""
    image = container.image
    if image.startswith(("/", ".")):
        if not Path(image).is_file():
            yield f"container.image={image} is no file here; import it (`enroot import -o {image} docker://...`) or correct it"
    elif image.endswith(".sqsh"):
        yield f"container.image={image}: Pyxis takes it for an image of a registry; write {Path(image).absolute()}"
    else:
        bare = image.removeprefix("docker://").rpartition("@")[2]
        _, sign, name = bare.rpartition("#")
        first = name.partition("/")[0]
        if not sign and "/" in name and ("." in first or ":" in first):
            right = bare.replace(f"{first}/", f"{first}#", 1)
            yield f"container.image={image}: Pyxis takes {first} for a folder of Docker Hub; write {right}"
        elif not _REFERENCE.fullmatch(name):
            yield f"container.image={image} is no image; write [REGISTRY#]NAME[:TAG] or the path of a .sqsh file"
    for mount in container.mounts:
        source = mount.split(":")[0]
        if not Path(source).exists():
            yield (
                f"container.mounts: {source} does not exist here; correct it, or move the mount to container.node_mounts "
                "if the folder is on the machines only"
            )


def _examples(cluster: Cluster) -> Iterator[str]:
    """Yield the values that the example profiles mark as to be changed."""
    found = {} if cluster.container is None else {"container.image": cluster.container.image}
    if cluster.slurm is not None:
        found["slurm.account"] = cluster.slurm.account
    for key, value in found.items():
        if value.startswith("registry.example.com") or value == _EXAMPLE:
            yield f"{key}={value} is the value of the example profile; change it to your cluster's"
