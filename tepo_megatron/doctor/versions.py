"""Check for known bad combinations of versions, and report which kernels compute on a GPU."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from tepo_megatron.actor.kernels import choose, choose_linear
from tepo_megatron.actor.kernels import installed as computing
from tepo_megatron.config import MegatronConfig, ModelConfig
from tepo_megatron.config.megatron import untested_fields
from tepo_megatron.doctor.findings import Finding, Verdict
from tepo_megatron.errors import ConfigError
from tepo_megatron.weights.families import find_family, read_config


@dataclass(frozen=True)
class KnownBad:
    """A combination of versions that does not work."""

    together: tuple[str, ...]  # the combination is bad if all of these requirements are installed ("python" is the interpreter)
    verdict: Verdict
    why: str
    fix: str
    source: str
    variable: str | None = None  # the combination is bad only if this environment variable is set. None: always.


KNOWN_BAD = (
    KnownBad(
        ("nemo-run==0.11.1", "leptonai>=0.47"), "fail",
        "nemo-run imports leptonai.api.v1, which leptonai 0.47 dropped: the launcher cannot start",
        "install requirements/launch.txt into an environment of its own", "requirements/overrides.txt",
    ),
    KnownBad(
        ("vllm", "sglang"), "warn",
        "they pin contradicting versions of torch and xgrammar, so that one of the two was installed over its pins",
        "give each an environment of its own (rollout.server.python)", "requirements/gpu-vllm.txt, requirements/gpu-sglang.txt",
    ),
    KnownBad(
        ("apex>=0.9,<1",), "fail",
        "PyPI's apex is another project than NVIDIA's, and shadows it",
        "uninstall it; NVIDIA's Apex is built from source (Dockerfile)", "the metadata of both",
    ),
    KnownBad(
        ("python<3.12", "megatron-core>=0.19"), "warn",
        "megatron-core 0.19 asks for Python 3.12; the fast tests pass on 3.11 all the same", "use Python 3.12",
        "Requires-Python of its wheel; make test-pins",
    ),
    KnownBad(
        ("transformer-engine-cu13>=2.20,<2.21", "nvidia-cublas<13.2"), "fail",
        "with LD_BIND_NOW set Transformer Engine cannot be imported: its library names "
        "cublasLtGroupedMatrixLayoutInit_internal, which this cuBLAS lacks, and which is never called with it",
        "unset LD_BIND_NOW", "both wheels, loaded on a CPU with and without it", "LD_BIND_NOW",
    ),
)  # fmt: skip
# Transformer Engine looks for cuDNN there before it uses the wheel's, which PyTorch loads (2.20.2, common/__init__.py).
_CUDNN_VARIABLES = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")


def installed() -> dict[str, str]:
    """Return distribution -> version, without the local part, for all distributions that KNOWN_BAD names."""
    found = {"python": platform.python_version()}
    for name in {Requirement(text).name for bad in KNOWN_BAD for text in bad.together} - {"python"}:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def combinations(there: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the entries of KNOWN_BAD that apply to these versions."""
    bad = [
        known
        for known in KNOWN_BAD
        if all(_has(there, Requirement(text)) for text in known.together)
        and (known.variable is None or known.variable in os.environ)
    ]
    for known in bad:
        versions = ", ".join(f"{name} {there[name]}" for name in (Requirement(text).name for text in known.together))
        yield Finding("versions", known.verdict, f"{versions}: {known.why} ({known.source})", known.fix)
    if not bad:
        yield Finding("versions", "pass", f"none of {len(KNOWN_BAD)} combinations that are known not to work")


def kernels(
    model: ModelConfig, megatron: MegatronConfig, platform: str, cp: int, offload_activations: bool = False
) -> Iterator[Finding]:
    """Report which implementation runs layers, norms, the optimizer step and sums of gradients (`actor/kernels.py`)."""
    try:
        chosen = choose(model, megatron, platform, computing(), cp=cp, offload_activations=offload_activations)
    except ConfigError as e:
        yield Finding("kernels", "fail", str(e), "install what is missing, or change that key")
        return
    if platform == "cpu" or chosen.layers == "te":
        yield Finding("kernels", "pass", str(chosen))
    else:
        fix = "it works, and is slower; install the extra `te` and use model.attention=auto"
        yield Finding("kernels", "warn", str(chosen), fix)


def linear_kernels(model: ModelConfig, platform: str) -> Iterator[Finding]:
    """Report which implementation runs the gated delta rule; nothing for a model without it."""
    config = read_config(model.path)
    if find_family(config).architecture(config).linear_attention is None:
        return
    chosen = choose_linear(model, platform, computing())
    if "torch" in (chosen.delta_rule, chosen.convolution) and platform == "cuda" and model.dtype == "bf16":
        yield Finding("linear kernels", "warn", str(chosen), "it works; install flash-linear-attention and causal-conv1d")
    else:
        yield Finding("linear kernels", "pass", str(chosen))


def passed_fields(megatron: MegatronConfig) -> Iterator[Finding]:
    """List the fields that the config passes to Megatron-Core and that no test of this project trains with."""
    for line in untested_fields(megatron):
        yield Finding("megatron", "warn", line, "compare a few steps with and without them")


def cudnn(platform: str, environment: Mapping[str, str], toolkit: Path = Path("/usr/local/cuda")) -> Iterator[Finding]:
    """Report a cuDNN that Transformer Engine would load in addition to PyTorch's."""
    if platform == "cpu":
        return
    folders = [Path(environment[name]) for name in _CUDNN_VARIABLES if environment.get(name)]
    for folder in (*folders, toolkit):
        if found := sorted(folder.glob("**/libcudnn.so*")):
            yield Finding(
                "cuDNN",
                "warn",
                f"{found[-1]}: Transformer Engine prefers it to that of the wheel nvidia-cudnn-cu13, which PyTorch loads in "
                "the same process; two versions in one process are reported to fail",
                "remove it, or use a CUDA image without cuDNN (nvidia/cuda:...-devel, not -cudnn-devel)",
            )
            return
    yield Finding("cuDNN", "pass", "none besides that of the wheels")


def _has(there: Mapping[str, str], wanted: Requirement) -> bool:
    return wanted.name in there and wanted.specifier.contains(there[wanted.name], prereleases=True)
