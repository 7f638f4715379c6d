"""Each limit of time says what it counts from, why it is long enough, and what happens then."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.lint.docs.test_docs import is_said
from tools import limits_reference
from tools.config_reference import all_keys
from tools.limits_reference import KEY, OF_LAUNCH, durations

STARTS = 1200.0  # seconds that a start has at least: an import of 10 minutes and as long for what it loads


def test_the_page_is_that_of_the_code() -> None:
    assert limits_reference.PAGE.read_text() == limits_reference.page(), "run `python -m tools.limits_reference`"


def test_every_constant_of_seconds_is_a_limit_or_says_that_it_is_none() -> None:
    bare = [f"{each.path.name}:{each.line}: {each.name}" for each in durations() if each.facts is None and not each.is_interval]
    assert bare == [], "say above it: # Limit since EVENT: WHY IT IS ENOUGH; then WHAT HAPPENS; or: # Not a limit: WHAT IT IS"
    assert sum(each.facts is not None for each in durations()) >= 60


def test_the_keys_and_messages_of_limits_exist() -> None:
    keys = {
        *all_keys(),
        *(f"{section}.{each.name.rpartition('.')[2]}" for section in OF_LAUNCH.values() for each in durations()),
    }
    limits = [(each, facts) for each in durations() if (facts := each.facts) is not None]
    assert [(each.name, facts["key"]) for each, facts in limits if facts["key"] and facts["key"] not in keys] == []
    quoted = [(each.name, message) for each, facts in limits for message in facts["then"].split("`")[1::2]]
    assert len(quoted) >= 12 and [row for row in quoted if not is_said(row[1])] == []


def test_a_start_on_a_cold_file_system_is_not_cut_off() -> None:
    starts = {each.name: each.default for each in durations() if (facts := each.facts) is not None and facts["start"]}
    assert len(starts) >= 5
    assert {name: default for name, default in starts.items() if float(default.split()[0]) < STARTS} == {}


def bare_seconds(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that are given a time limit as a number."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        words = {word.arg or "": word.value for word in call.keywords}
        times = [value for key, value in words.items() if KEY.fullmatch(key)]
        if name == "timedelta":
            times = [*words.values(), *call.args]
        elif name in ("settimeout", "timeout", "time_limit"):
            times += call.args
        if any(isinstance(t, ast.Constant) and type(t.value) in (int, float) and t.value > 0 for t in times):
            yield call


def test_limits_are_named_constants() -> None:
    files = [path for place in ("tepo_megatron", "launch") for path in sorted(Path(place).rglob("*.py"))]
    calls = [(str(f), call.lineno, ast.unparse(call)) for f in files for call in bare_seconds(ast.parse(f.read_text()))]
    assert [row for row in calls if "_LIMIT" not in Path(row[0]).read_text().splitlines()[row[1] - 1]] == []
