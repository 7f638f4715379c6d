"""A base for the Dockerfile, for machines that cannot fetch NVIDIA's: Debian, this machine's Python 3.12, CUDA from PyPI.

Debian 12 by debootstrap with g++; the compiler, headers and libraries of CUDA as NVIDIA publishes them on PyPI, laid
out as a toolkit in /usr/local/cuda; empty packages under the names of Ubuntu's Python 3.12. No driver and no `nvidia-smi`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.launch.cases import ROOT

PYTHON = "python3.12"
TOOLS = ("buildah", "debootstrap", "dpkg-deb")
SYSTEM = "ca-certificates,g++,libssl3,libffi8,libsqlite3-0,zlib1g,libbz2-1.0,liblzma5,libreadline8"
STAND_INS = ("python3.12-dev", "python3.12-venv")  # Debian 12 has 3.11
CUDA_PARTS = "cccl,crt,cublas,cudart,cufft,cupti,curand,cusolver,cusparse,nvcc,nvjitlink,nvrtc,nvtx,nvvm,profiler"
NAME = "localhost/stand-in"
PATHS = "/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
ENVIRONMENT = {"PATH": PATHS, "SSL_CERT_FILE": CERTIFICATES, "PIP_CERT": CERTIFICATES}
APEX = "TEPO_IMAGE_APEX"  # a git repository with Apex's pinned commit, for a machine that does not reach GitHub
APEX_FOLDER = "/opt/apex"  # path of the repository in the stand-in


def missing() -> str | None:
    """Return why no image can be built here; None if one can."""
    if lacking := [name for name in TOOLS if shutil.which(name) is None]:
        return f"{', '.join(lacking)} not installed (Debian: buildah debootstrap)"
    if os.geteuid() != 0:
        return "debootstrap needs root"
    return None if prefix() is not None else f"no {PYTHON} outside of /usr that could be copied into the stand-in"


def prefix() -> Path | None:
    """Return the prefix of a Python 3.12 of this machine; None if there is none."""
    for path in (shutil.which(PYTHON), *Path.home().glob(f".pyenv/versions/3.12*/bin/{PYTHON}")):
        words = [str(path), "-c", "import sys; print(sys.base_prefix)"]
        done = subprocess.run(words, capture_output=True, text=True, check=False) if path else None
        if done is not None and done.returncode == 0 and (found := Path(done.stdout.strip())) != Path("/usr"):
            return found
    return None


def call(words: Sequence[str | Path], *, log: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """Run a command and return its output.

    Raises:
        AssertionError: The command failed. The message holds the end of its output.
    """
    done = subprocess.run(
        [str(w) for w in words], capture_output=True, text=True, timeout=4 * 3600, check=False, env=environment
    )
    if log is not None:
        log.write_text(done.stdout + done.stderr)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


class Store:
    """buildah with its own images and containers below a folder, which `close` removes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "BUILDAH_ISOLATION": "chroot",
        }

    def __call__(self, command: str, *words: str | Path, log: Path | None = None, **variables: str) -> str:
        where = ["--storage-driver", "overlay", "--root", self.folder / "store", "--runroot", self.folder / "run"]
        return call(["buildah", *where, command, *words], log=log, environment=self._environment | variables).strip()

    def close(self) -> None:
        self("rm", "--all")
        self("rmi", "--all", "--force")
        for layers in (self.folder / "store" / "overlay", self.folder / "store"):
            subprocess.run(["umount", layers], capture_output=True, check=False)  # buildah mounts it over itself
        shutil.rmtree(self.folder)


def make(buildah: Store, cuda: str) -> None:
    container = buildah("from", "scratch")
    root = Path(buildah("mount", container))
    inside = ["chroot", root, "env", "-i", *(f"{key}={value}" for key, value in ENVIRONMENT.items())]
    call(["debootstrap", "--variant=minbase", f"--include={SYSTEM}", "bookworm", root])
    python = prefix()
    assert python is not None
    shutil.copytree(python, root / "usr/local", symlinks=True, dirs_exist_ok=True)
    own = Path("/usr/local/share/ca-certificates")  # certificates of a network that has its own authority
    if own.is_dir():
        shutil.copytree(own, root / own.relative_to("/"), dirs_exist_ok=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    for command in ("ldconfig", "update-ca-certificates"):
        call([*inside, command])
    pip = [PYTHON, "-m", "pip", "install", "--no-cache-dir", "--target", "/opt/cuda"]
    call([*inside, *pip, cuda.replace("==", f"[{CUDA_PARTS}]==")])
    _toolkit(root)
    _packages(root)
    if repository := os.environ.get(APEX):
        _apex(root, Path(repository))
    call([*inside, "ldconfig"])
    variables = [word for key, value in ENVIRONMENT.items() for word in ("--env", f"{key}={value}")]
    buildah("config", *variables, container)
    buildah("commit", "--rm", "--format", "docker", container, NAME)


def _toolkit(root: Path) -> None:
    """Lay out the folders of the packages as /usr/local/cuda, with the names that a linker looks for."""
    toolkit = root / "opt/cuda/nvidia/cu13"
    (root / "usr/local/cuda").symlink_to("/opt/cuda/nvidia/cu13")
    (toolkit / "lib64").symlink_to("lib")
    for library in (toolkit / "lib").glob("*.so.*"):
        link = library.with_name(re.sub(r"\.so\..*", ".so", library.name))
        if not link.exists() and not link.is_symlink():
            link.symlink_to(library.name)
    (root / "etc/ld.so.conf.d/cuda.conf").write_text("/usr/local/cuda/lib64\n")


def _apex(root: Path, repository: Path) -> None:
    found = re.search(r"apex\.git@([0-9a-f]{40})", (ROOT / "Dockerfile").read_text())
    assert found is not None
    folder = root / APEX_FOLDER.lstrip("/")
    folder.mkdir()
    archive = root / "opt/apex.tar"
    call(["git", "-C", repository, "archive", "--output", archive, found[1]])
    call(["tar", "-x", "-C", folder, "-f", archive])
    archive.unlink()


def _packages(root: Path) -> None:
    packages = root / "opt/packages"
    packages.mkdir()
    (packages / "Packages").write_text("\n".join(_package(packages, name) for name in STAND_INS))
    (root / "etc/apt/sources.list.d/stand-in.list").write_text("deb [trusted=yes] file:/opt/packages ./\n")


def _package(packages: Path, name: str) -> str:
    """Write an empty package; return its paragraph of the index."""
    control = f"Package: {name}\nVersion: 3.12\nArchitecture: all\nMaintainer: nobody\nDescription: a stand-in\n"
    built = packages / name / "DEBIAN"
    built.mkdir(parents=True)
    (built / "control").write_text(control)
    file = packages / f"{name}.deb"
    call(["dpkg-deb", "--build", built.parent, file])
    data = file.read_bytes()
    return f"{control}Filename: ./{file.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"


def pin(engine: str, name: str) -> str:
    pins = (ROOT / "requirements" / f"gpu-{engine}.txt").read_text()
    return next(line for line in pins.splitlines() if line.startswith(f"{name}=="))
