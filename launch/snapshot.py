"""Take a snapshot of the checkout, so that all processes of a job import one version of the code. See docs/decisions/0032-*."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import shlex
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.preflight.inputs import functions
from launch.profile import Cluster
from tepo_megatron.base import scratch
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.scratch import PrivateFolder
from tepo_megatron.config import Config, CustomTermConfig

SOURCE = Path(__file__).resolve().parents[1]  # the checkout of this program
# Folders whose files all belong to the code. Elsewhere only files that Python imports do.
_CODE = ("tepo_megatron/", "launch/", "tools/")
_GIT_SECONDS = 600  # limit since a call of git: a repository on a cold file system takes minutes; then `did not end within`
_SHOWN = 3  # changed files in a message
_END_BYTES = 1 << 20  # of an image, which are read


@dataclass(frozen=True)
class CodeVersion:
    """The version of the code that a job imports."""

    source: Path
    version: str
    commit: str | None = None  # commit of the checkout. None: there is no git, and no snapshot is taken.
    changed: tuple[str, ...] = ()  # files of the code that differ from the commit
    tree: str | None = None  # git's hash of all files with these changes. None: nothing differs.

    @property
    def name(self) -> str | None:
        """Return the name of the snapshot's folder, which determines its content; None without git."""
        if self.commit is None:
            return None
        return self.commit[:12] if self.tree is None else f"{self.commit[:12]}-{self.tree[:12]}"

    def folder(self, home: Path) -> Path | None:
        """Return the path of the snapshot in the folder of a run's launch files; None without git."""
        return None if self.name is None else home / "code" / self.name

    def refuse_changes(self) -> None:
        """Raise ConfigError if files of the code differ from the commit."""
        if self.changed:
            shown = ", ".join(self.changed[:_SHOWN])
            more = f" and {len(self.changed) - _SHOWN} more" if len(self.changed) > _SHOWN else ""
            raise ConfigError(
                f"{self.source} differs from its commit: {shown}{more}; commit, stash or remove them, or give --allow-dirty, "
                "which puts them into the job's snapshot and records their diff"
            )

    def take(self, home: Path) -> Path | None:
        """Write the snapshot, and the diff of changed files next to it, and return its folder; None without git.

        A snapshot that exists is used again. Raise ConfigError if git fails, or the checkout changed meanwhile.
        """
        folder = self.folder(home)
        if folder is None:
            return None
        scratch.sweep(folder.parent)  # what a killed submission has left
        if folder.is_dir():
            return folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with PrivateFolder.create("code", folder.parent) as part:
                with _changed_tree(self.source, self.changed) as (environment, tree):
                    if self.tree is not None and tree != self.tree:
                        raise ConfigError(f"{self.source} was changed during the submission; submit again")
                    _extract(self.source, self.tree or str(self.commit), environment, part.path)
                    if self.tree is not None:
                        diff = _git(self.source, "diff", "--binary", str(self.commit), self.tree, environment=environment)
                        folder.with_name(f"{folder.name}.diff").write_text(diff, errors="surrogateescape")
                part.path.chmod(0o777 & ~_umask())  # processes of other users may read it
                with contextlib.suppress(OSError):  # another submission has made it, or it is missing below
                    part.path.rename(folder)
        except OSError as e:
            raise ConfigError(f"{folder}: the snapshot of the code cannot be written ({e}); choose another `output`") from None
        if not folder.is_dir():
            raise ConfigError(f"{folder}: the snapshot of the code cannot be written; choose another `output`")
        return folder

    def frozen(self, path: str, home: Path) -> str:
        """Return the path of a file in the snapshot; the path itself if the snapshot does not have the file."""
        folder, file = self.folder(home), Path(path).resolve()
        if folder is None or not file.is_relative_to(self.source):
            return path
        inside = folder / file.relative_to(self.source)
        return str(inside) if inside.is_file() else path


def read(source: Path = SOURCE) -> CodeVersion:
    """Return the version of the code in a checkout, or in an installation without git. Raise ConfigError if git fails."""
    version = _version()
    if not (source / ".git").exists():
        return CodeVersion(source, version)
    commit = _git(source, "rev-parse", "HEAD").strip()
    listed = _git(source, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").split("\0")
    changed = tuple(sorted(entry[3:] for entry in listed if entry and _is_code(entry[3:])))
    if not changed:
        return CodeVersion(source, version, commit)
    with _changed_tree(source, changed) as (_, tree):
        return CodeVersion(source, version, commit, changed, tree)


def shell_lines(code: Path | None) -> tuple[str, ...]:
    """Return the lines with which a script imports the snapshot and nothing else of this project; none without a snapshot.

    PYTHONSAFEPATH keeps the working directory, which may be a checkout, from being the first place where Python looks. The
    checkout itself is removed from PYTHONPATH, which Slurm hands on from the user's shell.
    """
    if code is None:
        return ()
    return (
        f'others="${{PYTHONPATH:+:$PYTHONPATH:}}"; checkout={shlex.quote(f":{SOURCE}:")}; others=${{others//"$checkout"/:}}',
        f"export PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(code))}${{others%:}}",
    )


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _is_code(path: str) -> bool:
    return path.startswith(_CODE) or path.endswith(".py")


def _version() -> str:
    try:
        return importlib.metadata.version("tepo-megatron")
    except importlib.metadata.PackageNotFoundError:  # an environment that has only the launcher
        return "not installed"


@contextlib.contextmanager
def _changed_tree(source: Path, changed: tuple[str, ...]) -> Iterator[tuple[dict[str, str], str | None]]:
    """Yield git's environment and the hash of the tree with changed files. Nothing is written into the checkout."""
    if not changed:
        yield {}, None
        return
    objects = _git(source, "rev-parse", "--path-format=absolute", "--git-path", "objects").strip()
    with PrivateFolder.create("launch") as private:
        (private.path / "objects").mkdir()
        environment = {
            "GIT_INDEX_FILE": f"{private.path}/index",
            "GIT_OBJECT_DIRECTORY": f"{private.path}/objects",
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
            "GIT_LITERAL_PATHSPECS": "1",
        }
        _git(source, "read-tree", "HEAD", environment=environment)
        words = ("add", "--all", "--pathspec-from-file=-", "--pathspec-file-nul")
        _git(source, *words, environment=environment, stdin="\0".join(changed))
        yield environment, _git(source, "write-tree", environment=environment).strip()


def _extract(source: Path, tree: str, environment: Mapping[str, str], folder: Path) -> None:
    """Write the files of a tree or commit into a folder."""
    words = ["git", "-C", str(source), "archive", "--format=tar", tree]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | dict(environment)) as git:
        assert git.stdout is not None and git.stderr is not None
        try:
            with tarfile.open(fileobj=git.stdout, mode="r|") as archive:
                archive.extractall(folder, filter="tar")
        except tarfile.TarError as e:
            raise ConfigError(f"{source}: git archive {tree}: {git.stderr.read().decode(errors='replace') or e}") from None
    if git.returncode:
        raise ConfigError(f"{source}: git archive {tree} ended with status {git.returncode}; try it yourself")


def _git(source: Path, *words: str, environment: Mapping[str, str] | None = None, stdin: str = "") -> str:
    """Run git in the checkout and return its output. Raise ConfigError if it fails, is missing or does not end."""
    try:
        done = subprocess.run(
            ["git", "-C", str(source), *words], input=stdin, env=os.environ | dict(environment or {}), capture_output=True,
            text=True, errors="surrogateescape", check=False, timeout=_GIT_SECONDS,
        )  # fmt: skip
    except FileNotFoundError:
        raise ConfigError(f"git is not installed here, and {source} is a checkout; install git") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{source}: git {words[0]} did not end within {_GIT_SECONDS} s; try it yourself") from None
    if done.returncode:
        raise ConfigError(
            f"{source}: git {words[0]} fails ({' '.join(done.stderr.split())}); the snapshot of the code needs it"
        )
    return done.stdout


def with_frozen_functions(cfg: Config, code: CodeVersion, home: Path) -> Config:
    """Return the config with each user function that is in the checkout replaced by the same one in the snapshot."""

    def frozen(function: str) -> str:
        file, colon, name = function.rpartition(":")
        return f"{code.frozen(file, home)}:{name}" if colon else function  # a row of the table of objectives

    terms = [
        dataclasses.replace(term, function=frozen(term.function)) if isinstance(term, CustomTermConfig) else term
        for term in cfg.reward.terms
    ]
    function = cfg.rollout.function
    rollout = dataclasses.replace(cfg.rollout, function=None if function is None else frozen(function))
    objective = dataclasses.replace(cfg.objective, name=frozen(cfg.objective.name))
    return dataclasses.replace(cfg, rollout=rollout, objective=objective, reward=dataclasses.replace(cfg.reward, terms=terms))


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
