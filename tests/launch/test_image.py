"""Both targets of the Dockerfile, unchanged, are built by buildah on a stand-in base (tests/launch/stand_in.py) and inspected.

Run by hand: make test-image. Every RUN step is executed, except that TEPO_IMAGE_COMPILE=0 leaves out what takes a C++ or CUDA
compiler. docs/launch.md lists what a stand-in cannot show.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launch import stand_in
from tests.launch.cases import ROOT

pytestmark = [
    pytest.mark.image,
    pytest.mark.full,
    pytest.mark.skipif("TEPO_IMAGE" not in os.environ, reason="takes hours and 48 GiB of disk: make test-image"),
    pytest.mark.skipif(stand_in.missing() is not None, reason=str(stand_in.missing())),
]
CANARY = "not-for-any-image-c0ffee"
# places of private files on the machine that builds
PRIVATE = (
    ".env",
    ".netrc",
    "id_rsa",
    ".git/config",
    "runs/demo/config.yaml",
    ".venv/pip.conf",
    "tepo_megatron/.env",
    "tools/.netrc",
)
COMPILE = os.environ.get("TEPO_IMAGE_COMPILE", "1")
COMPILED = {"transformer-engine-torch", "apex"}
GIB = 2**30
FREE = 48 * GIB
ENGINES = ("vllm", "sglang")
IN_THE_IMAGE = {
    "tepo_megatron",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "requirements",
    "tools",
    "examples",
    "tests",
    "benchmarks",
}


@pytest.fixture(scope="module")
def buildah() -> Iterator[stand_in.Store]:
    """A store of images with the stand-in, which is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tepo-image-", dir=os.environ.get("TMPDIR")))
    free = shutil.disk_usage(folder).free
    store = stand_in.Store(folder / "buildah")
    try:
        assert free >= FREE, f"{folder}: {free / GIB:.0f} GiB free, and {FREE / GIB:.0f} are needed; point TMPDIR elsewhere"
        stand_in.make(store, stand_in.pin("vllm", "cuda-toolkit"))
        yield store
    finally:
        store.close()
        shutil.rmtree(folder)


@dataclass
class Built:
    engine: str
    container: str
    root: Path
    config: dict[str, Any]
    history: list[str]
    base: set[str]
    run: Callable[..., str]


@pytest.fixture(scope="module", params=ENGINES)
def built(request: pytest.FixtureRequest, buildah: stand_in.Store) -> Iterator[Built]:
    engine, tag = request.param, f"localhost/tepo:{request.param}"
    arguments = {
        "BASE_IMAGE": stand_in.NAME,
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "MAX_JOBS": str(os.cpu_count()),
        "COMPILE": COMPILE,
    }
    if os.environ.get(stand_in.APEX):
        arguments["APEX"] = f"apex @ file://{stand_in.APEX_FOLDER}"
    words = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    log = Path(tempfile.gettempdir()) / f"tepo-image-{engine}.log"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=buildah.folder) as context:
        _context(Path(context))
        file = ["--file", Path(context) / "Dockerfile"]
        build = ["--format", "docker", "--pull-never", *words, "--target", f"train-{engine}", "--tag", tag, *file]
        buildah("bud", *build, context, log=log, HF_TOKEN=CANARY, WANDB_API_KEY=CANARY)
    seconds = time.monotonic() - began
    inspected = json.loads(buildah("inspect", "--type", "image", tag))
    base = json.loads(buildah("inspect", "--type", "image", stand_in.NAME))
    container = buildah("from", "--pull-never", tag)
    size = next(image["size"] for image in json.loads(buildah("images", "--json")) if tag in (image.get("names") or []))
    print(f"\ntrain-{engine}: {seconds:.0f} s, {size} with the stand-in; {log}")

    def run(*words: str, options: tuple[str, ...] = ()) -> str:
        return buildah("run", *options, container, "--", *words)

    history = [entry.get("created_by", "") for entry in inspected["Docker"]["history"]]
    known = set(base["Docker"]["config"]["Env"])
    yield Built(engine, container, Path(buildah("mount", container)), inspected["Docker"]["config"], history, known, run)
    buildah("rm", container)
    buildah("rmi", "--force", tag)


def _context(folder: Path) -> None:
    """Copy the files that git tracks, and add secrets where a person has them."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.rstrip("\0").split("\0"):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name in PRIVATE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(CANARY)


def test_the_commands_run_as_a_user_that_is_not_root(built: Built) -> None:
    assert built.run("tepo", "--version") == "0.1.0"
    assert "usage: tepo" in built.run(*built.config["Cmd"])
    assert "usage: tepo doctor" in built.run("tepo", "doctor", "--help")
    assert built.config["User"] == "10001" and built.run("id", "-u") == "10001"
    assert built.run("sh", "-c", "pwd && touch mine && ls") == "/workspace\nmine"
    assert built.run("sh", "-c", "test ! -w /opt/venv && test ! -w /opt/tepo_megatron && test ! -w /etc && echo kept") == "kept"
    assert built.run("python", "-c", "import sys; print(sys.prefix, sys.version_info[1])") == "/opt/venv 12"
    assert {path.name for path in (built.root / "opt/tepo_megatron").iterdir()} == IN_THE_IMAGE


def test_what_is_installed_is_what_is_pinned(built: Built) -> None:
    lines = {
        line
        for name in (f"gpu-{built.engine}", "gpu-build")
        for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    frozen = {line.partition(" @ ")[0] for line in built.run("uv", "pip", "freeze").splitlines()}
    left_out = COMPILED if COMPILE == "0" else set()
    assert {line.partition("==")[0] for line in lines - frozen} == left_out - {"apex"}
    assert {line.partition("==")[0] for line in frozen - lines} == {"pip", "uv", "tepo-megatron", "apex"} - left_out
    engine = f"import {built.engine}; print({built.engine}.__version__)"
    assert built.run("python", "-c", engine).splitlines()[-1] == stand_in.pin(built.engine, built.engine).partition("==")[2]


CUDNN = """
import re, torch, transformer_engine.common
files = set(re.findall(r"/\\S*/libcudnn[^/\\s]*", open("/proc/self/maps").read()))
print(sorted({file.rsplit("/", 1)[0] for file in files}))
"""


def test_one_cudnn_is_loaded_by_pytorch_and_transformer_engine(built: Built) -> None:
    """`transformer_engine.common` loads the core library, which is a wheel, and with it whichever cuDNN it prefers."""
    (folder,) = ast.literal_eval(built.run("python", "-c", CUDNN).splitlines()[-1])
    assert folder == "/opt/venv/lib/python3.12/site-packages/nvidia/cudnn/lib"
    assert "libcudnn" not in built.run("ldconfig", "-p")


def test_the_gpu_tests_and_sinks_are_in_it(built: Built) -> None:
    words = ["python", "-m", "pytest", "tests/gpu", "--confcutdir=tests/gpu", "--collect-only", "-p", "no:cacheprovider"]
    said = built.run("sh", "-c", f"cd /opt/tepo_megatron && {' '.join(words)} || test $? = 5")
    assert "no tests collected" in said  # without a GPU
    assert built.run("python", "-c", "import wandb, tensorboard; print('found')").splitlines()[-1] == "found"
    assert built.run("git", "--version").startswith("git version")


@pytest.mark.skipif(
    COMPILE == "0", reason="TEPO_IMAGE_COMPILE=0: neither Transformer Engine's part for PyTorch nor Apex was compiled"
)
def test_what_was_compiled_can_be_imported(built: Built) -> None:
    assert built.run("python", "-c", "import megatron.core; print('found')").splitlines()[-1] == "found"
    apex = "import torch, apex, amp_C, fused_layer_norm_cuda, fused_weight_gradient_mlp_cuda; print(torch.version.cuda)"
    assert built.run("python", "-c", apex).splitlines()[-1] == "13.0"
    assert list((built.root / "opt/venv/lib/python3.12/site-packages").rglob("transformer_engine_torch*.so"))


def test_the_health_check_asks_for_gpus_and_the_project(built: Built, tmp_path: Path) -> None:
    kind, *check = built.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    with pytest.raises(AssertionError, match="nvidia-smi"):
        built.run(*check)
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: a stand-in'\n")
    smi.chmod(0o755)
    said = built.run(*check, options=("--volume", f"{smi}:/usr/bin/nvidia-smi:ro"))
    assert said.splitlines() == ["GPU 0: a stand-in", "0.1.0"]


def test_nothing_private_is_in_it(built: Built, tmp_path: Path) -> None:
    """Files, settings and history hold neither files next to the build folder nor the machine's network settings."""
    words = {CANARY, *_own_network()}
    settings = "\n".join([*built.history, *(set(built.config["Env"]) - built.base), json.dumps(built.config.get("Labels"))])
    assert "uv pip install" in settings and "VIRTUAL_ENV=/opt/venv" in settings
    assert not [word for word in words if word in settings]
    assert not re.search(r"(?i)proxy|token|secret|password|index[-_]url|api_key", settings)
    (tmp_path / "words").write_text("\n".join(sorted(words)) + "\n")
    grep = ["grep", "-rlaF", "--devices=skip", "-f", tmp_path / "words", *_folders(built.root)]
    found = subprocess.run(grep, capture_output=True, text=True, timeout=3600, check=False)
    assert (found.returncode, found.stdout) == (1, ""), found.stderr[-2000:]
    names = {".netrc", ".git-credentials", ".env", "id_rsa", "auth.json", "pip.conf", ".pypirc"}
    held = [path for folder in _folders(built.root) for path in folder.rglob("*") if path.name in names]
    assert held == []


def _folders(root: Path) -> list[Path]:
    """Return the folders into which the Dockerfile's steps write: its own, the user's, and some of the base's."""
    return [
        root / name
        for name in ("opt/venv", "opt/requirements", "opt/tepo_megatron", "workspace", "home", "root", "etc", "tmp", "var")
    ]


def _own_network() -> set[str]:
    """The proxies and package indexes that this machine's settings name."""
    settings = [value for key, value in os.environ.items() if key.lower().endswith("_proxy") and "no_proxy" not in key.lower()]
    settings += [value for key, value in os.environ.items() if key.endswith("INDEX_URL") or key.endswith("_INDEX")]
    pip = subprocess.run([ROOT / ".venv" / "bin" / "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    settings += [
        value for line in pip.splitlines() if "index-url" in line for value in line.partition("=")[2].strip("'").split()
    ]
    return {setting for setting in settings if setting and "//pypi.org" not in setting}
