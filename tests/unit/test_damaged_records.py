"""Damaged records: whatever became of a file, a resume and every reader keep each readable record once, and say so."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.jobs import progress
from tepo_megatron.base.records import StepRecords, parse_lines, steps_of
from tepo_megatron.config import LoggingConfig
from tepo_megatron.monitor.sinks import LOST_FILE, METRICS_FILE, RunLog, read_metrics

WRITTEN, CHECKPOINT = 6, 4  # recorded steps; step of the checkpoint from which the run continues
RECORDS = [{"step": s, "reward/mean": s / 8, "loss/kl": None, "actor/grad_norm": 1e-3 * s} for s in range(1, WRITTEN + 1)]
LINES = [json.dumps(record).encode() + b"\n" for record in RECORDS]
WHOLE = b"".join(LINES)
MISSING = r"metrics\.jsonl: no record of steps? "

Damage = Callable[[bytes], bytes]


def without(*steps: int) -> Damage:
    return lambda data: b"".join(line for s, line in enumerate(LINES, start=1) if s not in steps)


def with_line(place: int, line: bytes) -> Damage:
    return lambda data: b"".join([*LINES[:place], line, *LINES[place:]])


def instead(step: int, line: bytes) -> Damage:
    return lambda data: b"".join([*LINES[: step - 1], line, *LINES[step:]])


def cut(size: int) -> Damage:
    return lambda data: data[:size]


STEP_2 = len(LINES[0])  # where its line begins
ALL = {1, 2, 3, 4}
# name -> (what became of the file, the steps up to the checkpoint that can still be read, what the log must say)
DAMAGES: dict[str, tuple[Damage, set[int], str]] = {
    "last byte cut": (cut(len(WHOLE) - 1), ALL, "2 recorded steps are taken again"),
    "half of the last line cut": (cut(len(WHOLE) - 20), ALL, "line 6 cannot be read: not valid JSON"),
    "cut in a record of the checkpoint": (cut(STEP_2 + 9), {1}, "line 2 cannot be read"),
    "cut before the end of a line": (cut(STEP_2 + len(LINES[1]) - 1), {1, 2}, MISSING + "3 to 4"),
    "cut behind the end of a line": (cut(STEP_2), {1}, MISSING + "2 to 4"),
    "cut in the first byte": (cut(1), set(), MISSING + "1 to 4"),
    "cut in the middle of the first line": (cut(20), set(), "line 1 cannot be read"),
    "truncated to zero": (cut(0), set(), MISSING + "1 to 4"),
    "first line removed": (without(1), {2, 3, 4}, MISSING + "1,"),
    "middle line removed": (without(3), {1, 2, 4}, MISSING + "3,"),
    "several lines removed": (without(1, 3, 4), {2}, MISSING + "1, 3 to 4"),
    "line of the checkpoint removed": (without(4), {1, 2, 3}, MISSING + "4,"),
    "later line removed": (without(5), ALL, "1 recorded steps are taken again"),
    "all but later lines removed": (without(1, 2, 3, 4), set(), MISSING + "1 to 4"),
    "line doubled": (with_line(2, LINES[1]), ALL, "recorded more than once .*: step 2"),
    "line doubled elsewhere": (with_line(6, LINES[1]), ALL, "recorded more than once .*: step 2"),
    "all lines doubled": (lambda data: data + data, ALL, "recorded more than once .*: steps 1, 2, 3, 4"),
    "garbage text": (with_line(3, b"what is this\n"), ALL, "line 4 cannot be read: not valid JSON"),
    "garbage bytes": (with_line(0, bytes(range(128, 256)) + b"\n"), ALL, r"line 1 cannot be read: not UTF-8 \(128 bytes\)"),
    "garbage without an end": (lambda data: data + b"\x00\xff{", ALL, "line 7 cannot be read"),
    "another object": (with_line(1, b'{"loss": 3}\n'), ALL, 'line 2 cannot be read: not an object with an integer "step"'),
    "a list": (with_line(1, b"[1, 2]\n"), ALL, "line 2 cannot be read: not an object"),
    "NUL bytes at the end": (lambda data: data + b"\0" * 4096, ALL, "line 7 cannot be read"),
    "NUL bytes in a line": (instead(3, b'{"step": 3, \0\0"x": 1}\n'), {1, 2, 4}, "line 3 cannot be read"),
    "empty lines": (lambda data: data.replace(b"\n", b"\n\n \n"), ALL, "2 recorded steps"),
    "step 0": (with_line(0, b'{"step": 0}\n'), ALL, 'not an object with an integer "step"'),
    "a step as text": (instead(2, b'{"step": "2"}\n'), {1, 3, 4}, 'not an object with an integer "step"'),
    "a value that is text": (instead(2, b'{"step": 2, "x": "\\u001b[31m"}\n'), {1, 3, 4}, "its 'x' is no number"),
}  # fmt: skip


def resumed(folder: Path) -> list[str]:
    with RunLog(folder, LoggingConfig(), steps=9) as log:
        return log.rewind(CHECKPOINT)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_resume_keeps_each_readable_record_once(name: str, tmp_path: Path) -> None:
    damage, readable, words = DAMAGES[name]
    data, path, lost = damage(WHOLE), tmp_path / METRICS_FILE, tmp_path / LOST_FILE
    path.write_bytes(data)
    said = resumed(tmp_path)
    assert re.search(words, "\n".join(said)), said
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [RECORDS[s - 1] for s in sorted(readable)]

    moved = lost.read_bytes() if lost.exists() else b""
    after = path.read_bytes() + moved
    for line in LINES:  # each line of the file is in one of the two, as often as before
        assert after.count(line) == data.replace(b"\r\n", b"\n").count(line) or line not in data
    missing = [line for line in said if re.search(MISSING, line)]
    assert len(missing) == (readable != ALL)

    again = resumed(tmp_path)
    assert again == missing and (lost.read_bytes() if lost.exists() else b"") == moved
    with RunLog(tmp_path, LoggingConfig(), steps=9) as log:
        log.write(5, {"reward/mean": 0.5})
    assert [record["step"] for record in read_metrics(tmp_path)] == [*sorted(readable), 5]


def test_of_two_records_of_a_step_the_later_attempts_stays() -> None:
    other = json.dumps(RECORDS[1] | {"reward/mean": 9.0}).encode() + b"\n"
    for lines, kept in (([*LINES[:3], other, *LINES[3:]], 9.0), ([LINES[0], other, *LINES[1:]], RECORDS[1]["reward/mean"])):
        found = steps_of(parse_lines(b"".join(lines)))
        assert [line.value["reward/mean"] for line in found.kept if line.value and line.value["step"] == 2] == [kept]


@pytest.mark.parametrize("name", DAMAGES)
def test_every_reader_of_a_run_goes_on(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage, readable, _ = DAMAGES[name]
    (tmp_path / METRICS_FILE).write_bytes(damage(WHOLE))
    found = steps_of(parse_lines(damage(WHOLE)))
    assert {record["step"] for record in found.records if record["step"] <= CHECKPOINT} == readable
    shown = progress(tmp_path)
    assert shown[0] == f"{len(found.kept)} steps recorded" and len(shown) == 1 + len(found.faults)
    if found.kept:
        assert read_metrics(tmp_path) == found.records
        assert [record.getMessage() for record in caplog.records] == [f"{tmp_path / METRICS_FILE}: {f}" for f in found.faults]


KINDS = st.sampled_from(["cut", "remove", "double", "garbage", "swap", "glue"])
OPERATIONS = st.lists(st.tuples(KINDS, st.integers(0, 2**16), st.binary(max_size=9)), max_size=5)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(OPERATIONS)
def test_damage_at_random(operations: list[tuple[str, int, bytes]]) -> None:
    """No intact line is lost, no step is kept twice, and every step that is missing is named."""
    lines, half = list(LINES), b""
    for what, place, garbage in operations:
        i = place % max(1, len(lines))
        if what == "cut" and lines:
            half = lines[i][: place % len(lines[i])]
            lines = lines[:i]
        elif what == "remove" and lines:
            del lines[i]
        elif what == "double" and lines:
            lines.insert(place % 7, lines[i])
        elif what == "garbage":
            lines.insert(i, garbage.replace(b"\n", b"") + b"\n")
        elif what == "swap" and lines:
            lines[i], lines[-1] = lines[-1], lines[i]
        elif what == "glue" and lines:
            lines[i] = lines[i].removesuffix(b"\n")
    data = b"".join(lines) + half
    found = steps_of(parse_lines(data), last=CHECKPOINT)
    kept = [record["step"] for record in found.records]
    assert kept == sorted(set(kept)) and all(record == RECORDS[record["step"] - 1] for record in found.records)
    whole = [line.strip() for line in data.split(b"\n") if line.strip() in {intact.strip() for intact in LINES}]
    sorted_out = [line.raw.strip() for line in (*found.kept, *found.later, *found.rest)]
    assert all(sorted_out.count(line) >= whole.count(line) for line in whole)
    assert _named(found) == ALL - set(kept)


def _named(found: StepRecords) -> set[int]:
    """The steps that the faults call missing."""
    named: set[int] = set()
    for fault in found.faults:
        if match := re.match("no record of steps? (.*), and", fault):
            for part in match[1].split(", "):
                first, _, last = part.partition(" to ")
                named |= set(range(int(first), int(last or first) + 1))
    return named


def _damaged(data: bytes, what: str) -> bytes:
    """Return a damaged version of a file of several lines."""
    lines = data.splitlines(keepends=True)
    return {
        "cut": data[:-7],
        "removed": b"".join(lines[:1] + lines[2:]),
        "doubled": b"".join(lines[:2] + lines[1:]),
        "garbage": b"".join([lines[0], b"\0garbage\xff\n", *lines[1:]]),
        "windows": data.replace(b"\n", b"\r\n"),
        "empty": b"",
    }[what]


@pytest.mark.parametrize("what", ["cut", "removed", "doubled", "garbage", "windows", "empty"])
def test_scores_of_an_evaluation(what: str, tmp_path: Path) -> None:
    from tepo_megatron.evaluation.held_out import EVALUATION_FILE, read_scores, write_evaluation

    measured = _accuracy({p: p / 4 for p in range(4)})
    path = write_evaluation(tmp_path, measured, measured)
    path.write_bytes(_damaged(path.read_bytes(), what))
    scores, faults = read_scores(tmp_path)
    left = {"cut": {0, 1, 2}, "removed": {0, 2, 3}, "empty": set()}.get(what, {0, 1, 2, 3})
    assert scores.after == {p: p / 4 for p in left} == scores.before
    assert bool(faults) == (what not in ("windows", "empty")) and path.name == EVALUATION_FILE


def _accuracy(scores: dict[int, float]) -> Any:
    import torch

    from tepo_megatron.base.types import Rollout
    from tepo_megatron.evaluation.held_out import accuracy

    return accuracy(
        [
            Rollout(p, torch.tensor([1, 2]), torch.tensor([False, True]), torch.zeros(2), 0, "stop", score=score)
            for p, score in scores.items()
        ]
    )


@pytest.mark.parametrize("what", ["cut", "removed", "doubled", "garbage", "windows"])
def test_samples_of_a_benchmark(what: str, tmp_path: Path) -> None:
    from tepo_megatron.evaluation.samples import BenchmarkSample, load_samples, read_samples, to_lines

    made = [BenchmarkSample(p, i, 1.0, "exact", "7", "7", 3, "stop", f"{p} \u2028") for p in range(3) for i in range(2)]
    path = tmp_path / "amc.jsonl"
    path.write_bytes(_damaged(to_lines(made).replace(b"\n", b"\n"), what))
    found, faults = load_samples(path)
    gone = {"cut": [made[5]], "removed": [made[1]]}.get(what, [])
    assert found == [sample for sample in made if sample not in gone]
    assert bool(faults) == (what in ("cut", "doubled", "garbage"))
    whole = {sample.problem for sample in made} - {sample.problem for sample in gone}
    assert read_samples(path) == [sample for sample in made if sample.problem in whole], "every mean is over as many"


def test_recorded_rollouts(tmp_path: Path) -> None:
    import torch

    from tepo_megatron.base.errors import DataError
    from tepo_megatron.base.types import Rollout
    from tepo_megatron.monitor.metrics import Metrics
    from tepo_megatron.rollout import record

    rollouts = [Rollout(7, torch.tensor([1, 2]), torch.tensor([False, True]), torch.zeros(2), 0, "stop", score=1.0)]
    for step in range(1, 7):
        record.write(tmp_path, step, rollouts, Metrics())
    files = {step: record.file_of(tmp_path, step) for step in range(1, 7)}
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-5])
    files[3].write_bytes(b"")
    (tmp_path / "step-what.safetensors").write_bytes(b"foreign")
    (tmp_path / "step-000004.partial").write_bytes(b"half")
    said = record.set_aside(tmp_path, after=4)
    assert said == ["2 rollout files of steps that are repeated were renamed to *.lost"]
    assert record.steps(tmp_path) == [2, 3, 4] and record.set_aside(tmp_path, after=4) == []
    faults = record.faults(tmp_path, last=4)
    assert [str(files[2]) in faults[1], str(files[3]) in faults[2]] == [True, True] and len(faults) == 3
    assert faults[0].endswith("no recording of step 1")
    assert record.read(tmp_path, 4)[0][0].score == 1.0
    with pytest.raises(DataError, match="step-000002"):
        record.read(tmp_path, 2)
