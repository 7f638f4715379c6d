"""Results of benchmarks: measures with their targets, the file that keeps them, and the table for readers."""

import importlib.metadata
import json
import operator
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS = "ours"
ROWS = {
    1: "Log-prob + entropy, forward + backward: memory",
    2: "Log-prob + entropy, forward + backward: time",
    3: "Log-prob + entropy: error against fp64",
    4: "Collectives of log-prob + entropy",
    6: "Packing and balance",
    7: "Training step without generation",
    11: "Saving checkpoints",
    12: "Delivery of the weights to the engine",
    13: "Rollouts one step ahead",
    15: "Rollout data path: per million response tokens of a step of 67 million",
}
PACKAGES = ("torch", "megatron-core", "transformers", "triton", "trl", "verl", "liger-kernel")
_SENSES = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}
Object = dict[str, Any]  # one measure as it is written to JSON


@dataclass(frozen=True)
class SuiteOptions:
    """Options of all suites."""

    peers: Path | None = None
    quick: bool = False
    rows: Set[int] = frozenset(ROWS)


@dataclass(frozen=True)
class Target:
    """A bound on a value or on a quotient of two: Target("ours", "<=", 0.1), Target("trl / ours", ">=", 1.5)."""

    what: str
    sense: str
    bound: float

    def met(self, values: Mapping[str, float]) -> bool | None:
        """Return whether the values meet the target; None if one of its values was not measured."""
        above, _, below = self.what.partition(" / ")
        if above not in values or (below and below not in values):
            return None
        if below:  # multiplied out: the divisor may be 0
            return bool(_SENSES[self.sense](values[above], self.bound * values[below]))
        return bool(_SENSES[self.sense](values[above], self.bound))

    def __str__(self) -> str:
        return f"{self.what} {self.sense} {self.bound:g}"

    @classmethod
    def of(cls, text: str) -> "Target":
        """Parse the text that `str` returns."""
        what, sense, bound = text.rsplit(maxsplit=2)
        return cls(what, sense, float(bound))


@dataclass(frozen=True)
class Measure:
    """One figure of ours next to the same figure of others."""

    row: int
    name: str  # title, unique within the row
    unit: str  # unit of all values; "" for a count or a ratio
    ours: float | None  # our value; None: not measured, for the reason `why`
    peers: Mapping[str, float] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    # Whether the value is the same on every machine, and therefore a gate (tests/unit/benches/test_bench.py)
    deterministic: bool = False
    higher_is_better: bool = False
    why: str = ""  # reason that ours was not measured
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """True if all targets are met; None if a value was not measured or there is no target."""
        values = {} if self.ours is None else {**self.peers, OURS: self.ours}
        found = [target.met(values) for target in self.targets]
        return None if not found or None in found else all(found)

    @property
    def ratio(self) -> dict[str, float | None]:
        """The factor by which ours is better than each peer, by name; None if the divisor is 0."""
        pairs = {name: (self.ours, x) if self.higher_is_better else (x, self.ours) for name, x in self.peers.items()}
        return {name: a / b if a is not None and b else None for name, (a, b) in pairs.items()}

    def as_object(self) -> Object:
        """Return the measure as it is written to JSON, without machine, versions and commit."""
        return {
            "id": f"{self.row}/{self.name}", "row": self.row, "title": self.name, "unit": self.unit,
            "ours": self.ours, "peers": dict(self.peers), "ratio": self.ratio,
            "target": " and ".join(map(str, self.targets)) or None, "met": self.met, "why": self.why,
            "higher_is_better": self.higher_is_better, "deterministic": self.deterministic, **self.more,
        }  # fmt: skip


def surroundings() -> Object:
    """Return machine, versions and commit of a measure; call it when the measure begins."""
    return {"machine": machine(), "versions": versions(), "commit": commit()}


def machine() -> Object:
    """Return the cores that this process may use, the processor, the memory, and the load."""
    processor = next((line.split(":")[1] for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)), "cpu": processor.strip() or platform.machine(),
        "memory_gib": round(memory / 2**30, 1), "load": [round(x, 2) for x in os.getloadavg()[:2]],
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, the peers included as `sys.path` finds them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str:
    """Return HEAD, and whether files other than results differ from it; without git, that it is unknown."""
    asked = (["rev-parse", "HEAD"], ["status", "--porcelain", "--", ".", ":!benchmarks/results"])
    try:
        head, changed = (subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True) for words in asked)
    except OSError:
        return "unknown: git is not installed"
    if head.returncode:
        return "unknown: not a git checkout"
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


def merged(old: Sequence[Object], new: Sequence[Object]) -> list[Object]:
    """Return every measure of `new`, and those of `old` whose row `new` lacks, sorted by row."""
    rows = {x["row"] for x in new}
    return sorted([*new, *(x for x in old if x["row"] not in rows)], key=lambda x: x["row"])


def save(path: Path, objects: Sequence[Object]) -> None:
    """Write the measures as JSON and, next to it, their table as Markdown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(objects, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(objects) + "\n")


def load(path: Path) -> list[Object]:
    """Return what `save` wrote; [] if the file does not exist."""
    objects: list[Object] = json.loads(path.read_text()) if path.exists() else []
    return objects


def table(objects: Iterable[Object]) -> str:
    """Return a Markdown table with aligned columns, so that it is readable as plain text."""
    lines = [("measure", OURS, "others (times ours is better)", "target", "")]
    row = None
    for x in objects:
        if x["row"] != row:
            row = x["row"]
            lines.append((f"**{row}. {ROWS[row]}**", "", "", "", ""))
        peers = ", ".join(f"{k} {v:.3g}" + (f" ({r:.3g}x)" if (r := x["ratio"][k]) else "") for k, v in x["peers"].items())
        ours = "not measured" if x["ours"] is None else f"{x['ours']:.3g} {x['unit']}".strip()
        lines.append((x["title"], ours, peers, x["target"] or "", verdict(x)))
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    rows = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rows.insert(1, " | ".join("-" * max(3, width) for width in widths))
    return "\n".join(f"| {row} |" for row in rows)


def verdict(x: Object) -> str:
    """Return the outcome of a measure in a word."""
    if x["ours"] is None:
        return x["why"] or "not measured"
    if x["target"] is None:
        return "reported"
    return "not measured" if x["met"] is None else "met" if x["met"] else "MISSED"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
