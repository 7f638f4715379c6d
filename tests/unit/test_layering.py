"""Rooms import downwards only, and each foreign package has the owners that the design gives it. Read from the syntax trees."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tepo_megatron"

# From the bottom up: a room may import rooms of its own row only where `BESIDE` says so, and any row above it in this list.
ROWS = [
    [
        "errors",
        "types",
        "config",
        "config_io",
        "config_layers",
        "metrics",
        "histogram",
        "escaping",
        "records",
        "storage",
        "memory_kills",
        "exchange",
        "seeding",
        "timing",
        "watch",
        "beside",
        "processes",
        "private",
        "run_lock",
        "heartbeats",
        "scratch",
        "user_file",
        "quiet",
        "channel",
        "ipc",
        "meeting_store",
        "own_peers",
        "restricted_pickle",
        "host_sizes",
        "safety",
        "platform",
        "__init__",
    ],
    ["ops", "parallel", "run_dir", "grading", "open_files"],
    [
        "losses",
        "advantages",
        "rewards",
        "data",
        "weights.ops",
        "weights.families",
        "weights.hf_io",
        "weights.fp8",
        "weights.__init__",
    ],
    [
        "method",
        "actor",
        "checkpoint",
        "rollout",
        "weights.gather",
        "weights.rounds",
        "weights.delta",
        "weights.sync",
        "weights.stores",
        "weights.relay",
        "weights.meeting",
        "weights.broadcast",
        "weights.convert",
        "evaluation",
        "sinks",
        "report",
    ],
    ["step_log", "driver", "colocation", "memory_report", "gate", "schedule", "train"],
    ["launcher", "ranks", "worker", "ablation", "doctor", "plan", "cli", "__main__"],
]
BESIDE = {
    ("records", "escaping"), ("exchange", "escaping"),
    ("types", "errors"), ("config", "errors"), ("config_io", "config"), ("config_io", "errors"),
    ("config_io", "config_layers"), ("config_layers", "errors"), ("safety", "config"),
    ("timing", "watch"), ("platform", "errors"), ("platform", "host_sizes"), ("user_file", "errors"),
    ("private", "errors"), ("private", "scratch"), ("run_lock", "errors"), ("run_lock", "storage"), ("storage", "errors"),
    ("watch", "run_lock"), ("watch", "escaping"),
    ("parallel", "ops"),
    ("weights.families", "weights.ops"), ("weights.fp8", "weights.ops"),
    ("weights.sync", "weights.gather"), ("weights.sync", "weights.rounds"),
    ("weights.sync", "weights.delta"), ("weights.sync", "weights.stores"), ("weights.stores", "weights.rounds"),
    ("weights.sync", "weights.relay"), ("weights.relay", "weights.stores"), ("weights.relay", "weights.rounds"),
    ("channel", "ipc"), ("restricted_pickle", "errors"), ("channel", "meeting_store"), ("channel", "own_peers"),
    ("weights.meeting", "weights.stores"), ("weights.broadcast", "weights.meeting"),
    ("weights.delta", "weights.gather"), ("weights.delta", "weights.rounds"),
    ("weights.rounds", "weights.gather"), ("weights.broadcast", "weights.gather"), ("weights.broadcast", "weights.rounds"),
    ("actor", "weights.gather"), 
    ("losses", "advantages"), ("data", "rewards"), ("evaluation", "rollout"),
    ("evaluation", "sinks"), ("evaluation", "weights.convert"),
    ("report", "sinks"), ("report", "rollout"), ("report", "evaluation"),
    ("driver", "step_log"), ("schedule", "driver"), ("schedule", "colocation"), ("schedule", "memory_report"),
    ("train", "schedule"), ("train", "colocation"), ("train", "memory_report"),
    ("schedule", "gate"), ("train", "gate"),
    ("train", "driver"), ("train", "step_log"), ("worker", "launcher"), ("launcher", "ranks"), ("cli", "launcher"),
    ("doctor", "launcher"), ("cli", "doctor"), ("cli", "plan"),
    ("checkpoint", "actor"), ("weights.convert", "actor"), ("weights.convert", "weights.gather"), ("cli", "ablation"),
    ("__main__", "cli"),
}  # fmt: skip
# foreign package -> the files that may import it
OWNERS = {
    "vllm": {"weight_sync/receiver/vllm_plugin.py"},
    "sglang": {"weight_sync/receiver/sglang_server.py"},
    "triton": {"ops/token_statistics/triton_kernels.py"},
    "nemo_run": set(),
    "math_verify": {"grading/equality.py"},
    "wandb": {"sinks.py"},
    "matplotlib": {
        "ablation/picture.py", "report/benchmarks.py", "report/charts.py", "report/comparison.py", "report/drawing.py",
        "report/held_out.py", "report/panels.py", "report/picture.py", "report/svg.py",
    },
    "jinja2": {"report/page.py"},
    "httpx": {"exchange.py"},
    "pyarrow": {"data/arrow.py", "data/parquet_bombs.py"},
    "datasets": {"data/arrow.py"},
}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """`weights` is several rooms; every other folder, and every file at the top, is one."""
    first, *rest = path.relative_to(PACKAGE).with_suffix("").parts
    return f"{first}.{rest[0]}" if first == "weights" else first


@functools.cache
def imports(path: Path) -> set[str]:
    """Modules that a file imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "tepo_megatron" or len(parts) == 1:
            continue
        for depth in (3, 2):  # a module, or a name inside one
            candidate = PACKAGE.joinpath(*parts[1:depth])
            if candidate.with_suffix(".py").exists():
                rooms.add(room_of(candidate.with_suffix(".py")))
                break
            if candidate.is_dir():
                rooms.add(room_of(candidate / "__init__.py"))
                break
    return rooms


def height(room: str) -> int:
    return next(i for i, row in enumerate(ROWS) if room in row)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    for other in imported_rooms(path) - {room, "__init__", "weights.__init__"}:
        down = height(other) < height(room)
        beside = height(other) == height(room) and (room, other) in BESIDE
        assert down or beside, f"{path.name} ({room}) imports {other}"


@pytest.mark.parametrize("package", OWNERS)
def test_owners(package: str) -> None:
    users = {str(p.relative_to(PACKAGE)) for p in FILES if any(n.split(".")[0] == package for n in imports(p))}
    assert users == OWNERS[package]


def test_losses_know_neither_megatron_nor_collectives() -> None:
    for path in (PACKAGE / "losses").glob("*.py"):
        names = imports(path)
        assert not any(n.startswith(("megatron", "torch.distributed", "tepo_megatron.distributed.parallel")) for n in names), (
            path
        )
        assert len(path.read_text().splitlines()) <= 200, path


def test_platform_alone_names_backends() -> None:
    for path in FILES:
        if "platform" not in path.parts:
            tree = ast.parse(path.read_text())
            strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            assert not strings & {"gloo", "nccl"}, path


@pytest.mark.parametrize("path", sorted((PACKAGE / "rollout" / "in_server").glob("*.py")), ids=lambda p: p.name)
def test_what_runs_in_servers_imports_little(path: Path) -> None:
    """Never a platform, nor what an engine's environment lacks."""
    names = imports(path)
    ours = {name.removeprefix("tepo_megatron.") for name in names if name.startswith("tepo_megatron.")}
    assert {
        name for name in ours if not name.startswith(("channel", "ipc", "meeting_store", "own_peers", "rollout.in_server"))
    } == set()
    assert not any(name.split(".")[0] in ("megatron", "transformer_engine") for name in names)
