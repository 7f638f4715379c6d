"""The steps of the Dockerfile that need neither CUDA's compiler nor NVIDIA's base, for real: built by buildah on a stand-in.

The stand-in is a Debian made on the spot, with this machine's Python 3.12 under the names of Ubuntu's packages. What is left
out are the stages `packages-*`: gigabytes of CUDA wheels, Transformer Engine and Apex. Run by hand: make test-image.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.launch.cases import ROOT

PYTHON = "python3.12"
LIBRARIES = "ca-certificates,libssl3,libffi8,libsqlite3-0,zlib1g,libbz2-1.0,liblzma5,libreadline8"
STAND_INS = ("python3.12-dev", "python3.12-venv")  # Debian 12 has 3.11
FROM_ROOT = """FROM scratch
ADD root.tar /
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_CERT=/etc/ssl/certs/ca-certificates.crt
"""


def prefix() -> Path | None:
    """Of a Python 3.12 of this machine."""
    for path in (shutil.which(PYTHON), *Path.home().glob(f".pyenv/versions/3.12*/bin/{PYTHON}")):
        words = [str(path), "-c", "import sys; print(sys.base_prefix)"]
        done = subprocess.run(words, capture_output=True, text=True, check=False) if path else None
        if done is not None and done.returncode == 0 and (found := Path(done.stdout.strip())) != Path("/usr"):
            return found
    return None


def missing() -> str | None:
    """Why no image can be built here."""
    if lacking := [name for name in ("buildah", "debootstrap", "dpkg-deb") if shutil.which(name) is None]:
        return f"{', '.join(lacking)} not installed (Debian: buildah debootstrap)"
    if os.geteuid() != 0:
        return "debootstrap needs root"
    return None if prefix() is not None else f"no {PYTHON} outside of /usr that could be copied into the stand-in"


pytestmark = [pytest.mark.image, pytest.mark.full, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
Buildah = Callable[..., str]


def call(words: Sequence[str | Path], **options: object) -> str:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=1200, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return str(done.stdout)


@pytest.fixture
def buildah(tmp_path: Path) -> Buildah:
    """Its own store, below this test's folder."""
    store = ["--storage-driver", "vfs", "--root", tmp_path / "store", "--runroot", tmp_path / "run"]
    return lambda command, *words, **options: call(["buildah", *store, command, *words], **options)


def stand_in(folder: Path) -> Path:
    """A root file system as a tar file."""
    root = folder / "root"
    call(["debootstrap", "--variant=minbase", f"--include={LIBRARIES}", "bookworm", root])
    python = prefix()
    assert python is not None
    shutil.copytree(python, root / "usr/local", symlinks=True, dirs_exist_ok=True)
    own = Path("/usr/local/share/ca-certificates")  # of a network that has its own authority
    if own.is_dir():
        shutil.copytree(own, root / own.relative_to("/"), dirs_exist_ok=True)
    packages = root / "opt/packages"
    packages.mkdir()
    index = [_package(packages, name) for name in STAND_INS]
    (packages / "Packages").write_text("\n".join(index))
    (root / "etc/apt/sources.list.d/stand-in.list").write_text("deb [trusted=yes] file:/opt/packages ./\n")
    for command in ("ldconfig", "update-ca-certificates"):
        call(["chroot", root, command])
    call(["tar", "-C", root, "-cf", folder / "root.tar", "."])
    shutil.rmtree(root)
    return folder / "root.tar"


def _package(packages: Path, name: str) -> str:
    """An empty one; returns its paragraph of the index."""
    control = f"Package: {name}\nVersion: 3.12\nArchitecture: all\nMaintainer: nobody\nDescription: a stand-in\n"
    built = packages / name / "DEBIAN"
    built.mkdir(parents=True)
    (built / "control").write_text(control)
    file = packages / f"{name}.deb"
    call(["dpkg-deb", "--build", built.parent, file])
    data = file.read_bytes()
    return f"{control}Filename: ./{file.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"


def test_what_can_be_built_without_cuda_is_built_and_runs(buildah: Buildah, tmp_path: Path) -> None:
    stand_in(tmp_path)
    (tmp_path / "Base").write_text(FROM_ROOT)
    buildah("bud", "--isolation", "chroot", "--tag", "localhost/stand-in", "--file", tmp_path / "Base", tmp_path)
    text = (ROOT / "Dockerfile").read_text()
    text, stages = re.subn(r"^FROM system AS packages-(\w+)\n.*?^FROM packages-\1 ", "FROM system ", text, flags=re.M | re.S)
    assert stages == 2 and "packages-" not in text
    (tmp_path / "Dockerfile").write_text(text)
    build = ["--isolation", "chroot", "--format", "docker", "--pull-never", "--build-arg", "BASE_IMAGE=localhost/stand-in"]
    for engine in ("vllm", "sglang"):
        of_engine = ["--layers", "--target", f"train-{engine}", "--tag", f"localhost/tepo:{engine}"]
        buildah("bud", *build, *of_engine, "--file", tmp_path / "Dockerfile", ROOT)
        container = buildah("from", "--pull-never", f"localhost/tepo:{engine}").strip()

        def run(*words: str, container: str = container) -> str:
            return buildah("run", "--isolation", "chroot", container, "--", *words).strip()

        assert run("tepo", "--version") == "0.1.0"
        assert run("id", "-u") == "10001" and run("pwd") == "/workspace"
        assert run("python", "-c", "import sys; print(sys.prefix, sys.version_info[1])") == "/opt/venv 12"
        assert "usage: tepo" in run("tepo", "--help")
        assert run("sh", "-c", "touch mine && ls") == "mine"
        held = run("find", "/opt/tepo_megatron", "-maxdepth", "1", "-printf", "%f ").split()
        assert set(held) == {"tepo_megatron", "pyproject.toml", "README.md", "LICENSE", "requirements", "tools", "examples"}
