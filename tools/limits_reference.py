"""Write docs/limits.md, the table of all limits of time: `python -m tools.limits_reference`.

A limit is a constant or a key of seconds. Its facts are in the comment above it or on its line:

    # Limit since EVENT: WHY THE DEFAULT IS ENOUGH; then WHAT HAPPENS[; key KEY][; a start]

Pauses and intervals are no limits. Their names or comments say so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.base.limits import START_SECONDS
from tools.config_reference import sections

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "limits.md"
HEAD = """# Limits of time

Made by `python -m tools.limits_reference` from the comments of the constants and keys; a test compares. Each default fits a run
of a 14B model with responses of 32k tokens on 64 GPUs, whose start and whose steps take half an hour each, on a cold network
file system. `Then` names the message or what happens. **A start** is given up earlier only when its process ends or, for
servers, graders and the rollout service, makes no progress; its limit is an upper bound. A collective of training waits for
`parallel.start_seconds` at least, but `parallel.timeout_seconds` ends the run first.

| limit | counted from | default | why it is enough | key | then |
|---|---|---|---|---|---|
"""
SECONDS = re.compile(r"_?[A-Z_]*(SECONDS|TIMEOUT|LIMIT)")
KEY = re.compile(r"(\w+_)?(seconds|timeout)(_\w+)?")
FACTS = re.compile(
    r"[Ll]imit since (?P<event>.+?): (?P<why>.+?); then (?P<then>.+?)(; key (?P<key>[\w.]+))?(?P<start>; a start)?$"
)
INTERVAL = re.compile(r"POLL|LOOK|PING|BEAT|BACKOFF|RETRY|REMINDER|AGAIN|OWNER_CHECK")
PAUSE = re.compile(r"(?i)(between|pause|before|interval|poll interval|not a limit)\b")
OF_LAUNCH = {"NodeCheckConfig": "node_check", "SlurmConfig": "slurm"}  # section of a profile by class


@dataclass(frozen=True)
class Duration:
    """A constant or key of seconds: `name` as the page shows it, `default` as code, and its comment."""

    path: Path
    line: int
    name: str
    default: str
    comment: str
    is_key: bool = False

    @property
    def facts(self) -> dict[str, str] | None:
        """Return the facts of a limit; None if its comment has none."""
        facts = FACTS.search(self.comment)
        return None if facts is None else {name: text or "" for name, text in facts.groupdict().items()}

    @property
    def is_interval(self) -> bool:
        """Return whether it is a pause or an interval."""
        return bool(PAUSE.match(self.comment) or INTERVAL.search(self.name))


def durations() -> list[Duration]:
    """Return all constants and keys of seconds of the package and of launch/, constants first."""
    files = [path for place in ("tepo_megatron", "launch") for path in sorted((ROOT / place).rglob("*.py"))]
    each_file = [duration for path in files for duration in _of_file(path)]
    return sorted(each_file, key=lambda each: each.is_key, reverse=True)


def _of_file(path: Path) -> Iterator[Duration]:
    text = path.read_text()
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("tepo_megatron.")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and KEY.fullmatch(field.target.id):
                    if field.value is None:
                        continue
                    for key in _keys(node.name, field.target.id):
                        yield Duration(path, field.lineno, key, _value(field.value), _comment(text, field), is_key=True)
        elif isinstance(node, ast.Assign):
            targets = [t for t in ast.walk(node.targets[0]) if isinstance(t, ast.Name) and SECONDS.fullmatch(t.id)]
            for target in targets if _is_time(node.value, targets) else ():
                yield Duration(path, node.lineno, f"{module}.{target.id}", _value(node.value), _comment(text, node))


def _is_time(value: ast.expr, targets: list[ast.Name]) -> bool:
    """Return whether a constant is a time: one named `..._LIMIT` may be of something else."""
    return not all(target.id.endswith("LIMIT") for target in targets) or "timedelta" in ast.unparse(value)


def _keys(cls: str, field: str) -> list[str]:
    """Return the key of a field of a section, with dots; none for classes that are no sections."""
    if cls in OF_LAUNCH:
        return [f"{OF_LAUNCH[cls]}.{field}"]
    return [s.prefix + field for s in sections() if any(base.__name__ == cls for base in s.cls.__mro__)][:1]


def _comment(text: str, node: ast.stmt) -> str:
    """Return the comment on the line of a statement, or the comment above it from "Limit since" on."""
    lines, above, at = text.splitlines(), list[str](), node.lineno - 2
    if comment := re.search(r"  # (.*)$", lines[(node.end_lineno or node.lineno) - 1]):
        return comment[1]
    while lines[at].strip().startswith("# "):
        above.insert(0, lines[at].strip().removeprefix("# "))
        at -= 1
    joined = " ".join(above)
    return joined[joined.index("Limit since") :] if "Limit since" in joined else joined


def _value(node: ast.expr) -> str:
    text = ast.unparse(node)
    if both := re.match(r"PlatformDefault\(([\d.]+), ([\d.]+)", text):
        return f"{float(both[1]):g} s (CPU), {float(both[2]):g} s (CUDA)"
    if days := re.match(r"datetime.timedelta\(days=(\d+)\)", text):
        return f"{days[1]} days"
    text = str(START_SECONDS) if text == "START_SECONDS" else text
    return f"{float(text):g} s" if re.fullmatch(r"[\d.]+", text) else f"`{text}`"


def page() -> str:
    """Return the whole page."""
    rows = []
    for each in durations():
        if (facts := each.facts) is not None:
            key = f"`{each.name if each.is_key else facts['key']}`" if each.is_key or facts["key"] else "none"
            event = f"**a start**: {facts['event']}" if facts["start"] else facts["event"]
            cells = [f"`{each.name}`", event, each.default, facts["why"], key, facts["then"]]
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    pauses = ", ".join(f"`{each.name}`" for each in durations() if each.facts is None)
    return HEAD + "".join(rows) + f"\nPauses, intervals and other durations, which limit nothing: {pauses}.\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print("written:", PAGE)
