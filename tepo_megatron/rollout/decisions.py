"""Log what each step was made of: which prompts were asked for, how their groups arrived, and what became of each.

`decisions.jsonl` in the folder of a run is only appended to. A line is either a start of the run, with its config, or a step:

    {"step": 4, "start": {...}}      the run starts, or goes on after step 4; lines of later steps above it no longer count
    {"step": 5, "asked": [[3, 8]], "left": [5],
     "arrived": [[8, "kept", 4, "server 1"], [3, "stale", [[[0, 3], [9, 4]], [[0, 4]]], "server 0"]]}

"asked" has the prompt ids of each request in order. "arrived" has the groups in the order of their arrival: prompt id, verdict,
versions of the weights, and servers. A version or a server is one value if it is that of the whole group, else a list of
[index of the first token, value] for each sample; so an interruption is there with its position. "left" are the prompts that
were still being sampled. They are sampled again, or go on in the next step (`rollout.on_weight_update: continue`).
With `training.stream`, "minibatches" has the prompt ids of each minibatch in the order in which they were trained on.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tepo_megatron.base import records
from tepo_megatron.base.errors import DataError
from tepo_megatron.base.storage import writing
from tepo_megatron.base.types import Rollout
from tepo_megatron.monitor.log_file import append_line, end_line, open_for_appending

FILE = "decisions.jsonl"
FIRST_KEY = "step"
# What became of a group: trained on; dropped because all samples are right or all wrong; too old, so sampled again;
# fewer than two of its samples were not lost.
Verdict = Literal["kept", "uniform", "stale", "lost"]


@dataclass
class StepDecisions:
    """The decisions of one step, in their order."""

    asked: list[list[int]] = field(default_factory=list)  # prompt ids of each request to the engine
    arrived: list[list[Any]] = field(default_factory=list)  # [prompt id, verdict, versions, servers] of each group
    left: list[int] = field(default_factory=list)  # prompt ids that were still being sampled at the end
    # Prompt ids of each minibatch that was trained on while others were sampled. None: there were none.
    minibatches: list[list[int]] | None = None

    def arrive(self, group: Sequence[Rollout], stale: bool, lost: bool = False) -> None:
        """Note a group's arrival. Its verdict is "stale", "lost" or, until it is kept, "uniform"."""
        versions = _shared([((0, r.policy_version), *r.later_versions) for r in group])
        verdict: Verdict = "stale" if stale else "lost" if lost else "uniform"
        self.arrived.append([group[0].prompt_id, verdict, versions, _shared([r.servers for r in group])])

    def keep(self, prompts: set[int]) -> None:
        """Change the verdict on the last group of each of these prompts to "kept". A group before it was dropped."""
        for group in reversed(self.arrived):
            if group[0] in prompts:
                group[1] = "kept"
                prompts = prompts - {group[0]}

    def line(self, step: int) -> str:
        """Return the line of the file."""
        line = {FIRST_KEY: step, "asked": self.asked, "arrived": self.arrived, "left": self.left}
        if self.minibatches is not None:
            line["minibatches"] = self.minibatches
        return json.dumps(line, separators=(",", ":"))


def _shared(changes: Sequence[Sequence[tuple[int, Any]]]) -> Any:
    """Return the value of all tokens of all samples; the changes of each sample if there are several values."""
    first = changes[0]
    if all(len(of_sample) == 1 for of_sample in changes) and len({of_sample[0][1] for of_sample in changes}) == 1:
        return first[0][1]
    return [list(map(list, of_sample)) for of_sample in changes]


def append(run_dir: Path, line: str) -> None:
    """Append a line to the file of a run. Raise StorageError, naming the file, if it cannot be written."""
    with writing(run_dir / FILE):
        file = open_for_appending(run_dir / FILE)
        try:
            end_line(file, run_dir / FILE)
            append_line(file, line + "\n")
        finally:
            os.close(file)


def start_line(after: int, config: Mapping[str, Any]) -> str:
    """Return the line of a start."""
    return json.dumps({FIRST_KEY: after, "start": config}, separators=(",", ":"))


@dataclass
class History:
    """The decisions that count, from the file."""

    # (last step before it, config) of each start after which at least one step counts, ascending
    starts: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)  # what is wrong with the file, one sentence each
    # The fault of a start that cannot be read and after which steps were taken; None if there is none
    lost_start: str | None = None


def read_history(run_dir: Path) -> History:
    """Return the decisions of a run; of steps that were taken again, those that count. Damaged lines are reported as faults.

    Raises DataError if there is no such file, or it cannot be read.
    """
    path = run_dir / FILE
    try:
        lines = records.read_lines(path)
    except OSError as e:
        raise DataError(
            f"{path}: cannot read the decisions ({e.strerror}); the run was made by a version without them"
        ) from None
    history, damaged = History(), None
    for line in lines:
        step = None if line.value is None else line.value.get("step")
        if line.value is None or not isinstance(step, int) or isinstance(step, bool):
            history.faults.append(f"line {line.number} cannot be read: {line.fault or 'it has no step'}")
            damaged = history.faults[-1] if b'"start"' in line.raw else damaged
        elif isinstance(config := line.value.get("start"), dict):
            history.starts = [(after, former) for after, former in history.starts if after < step] + [(step, config)]
            history.steps = {number: line for number, line in history.steps.items() if number <= step}
            damaged = None  # that start was killed before its first step
        else:
            history.steps[step] = line.value
            history.lost_start = history.lost_start or damaged
    return history
