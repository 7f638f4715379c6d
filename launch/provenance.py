"""Record the code, image and user functions of a job, and make it read functions of the checkout from its snapshot."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from launch.preflight.inputs import functions
from launch.profile import Cluster
from launch.snapshot import CodeVersion
from tepo_megatron.config import Config, CustomTermConfig

_END_BYTES = 1 << 20


def with_frozen_functions(cfg: Config, code: CodeVersion, home: Path) -> Config:
    """Return the config with each user function that is in the checkout replaced by the same one in the snapshot."""

    def frozen(function: str) -> str:
        file, _, name = function.rpartition(":")
        return f"{code.frozen(file, home)}:{name}"

    terms = [
        dataclasses.replace(term, function=frozen(term.function)) if isinstance(term, CustomTermConfig) else term
        for term in cfg.reward.terms
    ]
    function = cfg.rollout.function
    rollout = dataclasses.replace(cfg.rollout, function=None if function is None else frozen(function))
    return dataclasses.replace(cfg, rollout=rollout, reward=dataclasses.replace(cfg.reward, terms=terms))


def describe(code: CodeVersion, cluster: Cluster, cfg: Config | None, home: Path) -> dict[str, Any]:
    """Return the content of a job's code.json, and print what of the job's code can still change."""
    files = {} if cfg is None else {key: function.rpartition(":")[0] for key, function in functions(cfg)}
    outside = {key: file for key, file in files.items() if code.frozen(file, home) == file}
    if code.commit is None:
        print(f"launch: {code.source} is no git checkout: the job imports what is there or installed when it runs")
    for key, file in outside.items():
        print(f"launch: {key}: {file} is in no snapshot: the job reads it as it is when it runs")
    folder = code.folder(home)
    return {
        "commit": code.commit,
        "changed": list(code.changed),
        "version": code.version,
        "snapshot": str(folder) if folder is not None and folder.is_dir() else None,
        "functions_outside": {key: {"file": file, "sha256": _checksum(Path(file))} for key, file in outside.items()},
        "image": None if cluster.container is None else _image(cluster.container.image),
    }


def _image(image: str) -> dict[str, Any]:
    """Return what identifies an image: its digest if the reference has one; size, time and checksum of a file."""
    file = Path(image)
    if not file.is_file():
        digest = image.rpartition("@")[2] if "@sha256:" in image else None
        return {"reference": image, "digest": digest}
    size, end = file.stat().st_size, _END_BYTES
    with file.open("rb") as data:  # a squashfs has its header at the start and its tables at the end
        checksum = hashlib.sha256(data.read(end))
        data.seek(max(0, size - end))
        checksum.update(data.read(end))
    return {
        "file": image,
        "bytes": size,
        "modified": file.stat().st_mtime,
        "sha256_of_both_ends": checksum.hexdigest(),
    }


def _checksum(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
