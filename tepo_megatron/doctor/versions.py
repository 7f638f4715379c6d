"""Versions that do not work together, as far as they are known; what computes on a GPU."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.requirements import Requirement

from tepo_megatron.actor.kernels import choose
from tepo_megatron.actor.kernels import installed as computing
from tepo_megatron.config import Config
from tepo_megatron.doctor.findings import Finding, Verdict
from tepo_megatron.errors import ConfigError


@dataclass(frozen=True)
class KnownBad:
    """together: what is wrong where all of it is installed ("python" is the interpreter); source: where that is known from."""

    together: tuple[str, ...]
    verdict: Verdict
    why: str
    mend: str
    source: str


KNOWN_BAD = (
    KnownBad(
        ("nemo-run==0.11.1", "leptonai>=0.47"),
        "fail",
        "nemo-run imports leptonai.api.v1, which leptonai 0.47 dropped: the launcher cannot start",
        "install requirements/launch.txt into an environment of its own",
        "requirements/overrides.txt",
    ),
    KnownBad(
        ("vllm", "sglang"),
        "warn",
        "they pin contradicting versions of torch and xgrammar, so that one of the two was installed over its pins",
        "give each an environment of its own (rollout.server.python)",
        "requirements/gpu-vllm.txt, requirements/gpu-sglang.txt",
    ),
    KnownBad(
        ("apex>=0.9,<1",),
        "fail",
        "PyPI's apex is another project than NVIDIA's, and shadows it",
        "uninstall it; NVIDIA's Apex is built from source (Dockerfile)",
        "the metadata of both",
    ),
    KnownBad(
        ("python<3.12", "megatron-core>=0.19"),
        "warn",
        "megatron-core 0.19 asks for Python 3.12; the fast tests pass on 3.11 all the same",
        "use Python 3.12",
        "Requires-Python of its wheel; make test-pins",
    ),
)


def installed() -> dict[str, str]:
    """Distribution -> version, without the local part, of all that any entry of KNOWN_BAD names."""
    found = {"python": platform.python_version()}
    for name in {Requirement(text).name for bad in KNOWN_BAD for text in bad.together} - {"python"}:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def combinations(there: Mapping[str, str]) -> Iterator[Finding]:
    """What KNOWN_BAD says of these versions."""
    bad = [known for known in KNOWN_BAD if all(_has(there, Requirement(text)) for text in known.together)]
    for known in bad:
        versions = ", ".join(f"{name} {there[name]}" for name in (Requirement(text).name for text in known.together))
        yield Finding("versions", known.verdict, f"{versions}: {known.why} ({known.source})", known.mend)
    if not bad:
        yield Finding("versions", "pass", f"none of {len(KNOWN_BAD)} combinations that are known not to work")


def kernels(cfg: Config) -> Iterator[Finding]:
    """Whose code computes layers, norms, the optimizer's step and sums of gradients (`actor/kernels.py`)."""
    try:
        chosen = choose(cfg.model, cfg.training, cfg.platform, computing())
    except ConfigError as e:
        yield Finding("kernels", "fail", str(e), "install what is missing, or change that key")
        return
    if cfg.platform == "cpu" or chosen.layers == "te":
        yield Finding("kernels", "pass", str(chosen))
    else:
        mend = "it works, and is slower; install the extra `te` and use model.attention=auto"
        yield Finding("kernels", "warn", str(chosen), mend)


def _has(there: Mapping[str, str], wanted: Requirement) -> bool:
    return wanted.name in there and wanted.specifier.contains(there[wanted.name], prereleases=True)
