"""A clock that jumps must not end a wait, nor prolong one: every deadline is on the monotonic clock."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tepo_megatron"
# what comes from the wall clock -> the files that may ask for it, none of which waits or decides by it
WALL_CLOCK: dict[str, set[str]] = {
    # the form in which torchrun's agent wants a message; `created` of OpenAI's answers; times that people and Prometheus read
    "time.time": {"launcher/ranks.py", "rollout/gateway.py", "controller/live_metrics.py", "report/live/run.py"},
    "time.time_ns": set(),
    "time.localtime": set(),
    "time.gmtime": set(),
    "time.ctime": set(),
    "time.strftime": {"utils/run_lock.py", "inference/servers/process.py", "inference/servers/guard.py"},  # labels for people
    "time.CLOCK_REALTIME": set(),
    "datetime.now": set(),
    "datetime.utcnow": set(),
    "datetime.today": set(),
    "date.today": set(),
    # times of files: they are of the clock of whoever wrote them, perhaps another machine's
    "st_mtime": set(),
    "st_mtime_ns": {"report/live/run.py"},  # whether a file has changed, and when, for people
    "st_ctime": set(),
    "st_ctime_ns": set(),
    "st_atime": set(),
    "getmtime": set(),
    "getctime": set(),
    "create_time": set(),  # psutil's: seconds since the epoch
}


def test_nothing_but_labels_comes_from_the_wall_clock() -> None:
    found: dict[str, set[str]] = {name: set() for name in WALL_CLOCK}
    words = {name.rpartition(".")[2] for name in WALL_CLOCK}
    hidden = words | {"datetime", "date"}
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        if not any(word in source for word in words):  # most files, which need not be parsed
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime", "os.path"):
                assert not {alias.name for alias in node.names} & hidden, path
            name = ast.unparse(node) if isinstance(node, ast.Attribute) and node.attr in words else ""
            for call in WALL_CLOCK:
                if name == call or name.endswith(f".{call}"):
                    found[call].add(str(path.relative_to(PACKAGE)))
    for call, files in found.items():
        assert files <= WALL_CLOCK[call], f"{call} in {files - WALL_CLOCK[call]}: use time.monotonic() for whatever waits"
    assert found["time.time"] and found["time.strftime"], "the search finds nothing any more"
