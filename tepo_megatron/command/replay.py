"""Repeat a run from its recordings, or from engines with its seeds, and compare step by step.

A run that was resumed with other settings is repeated in parts, each with the config of its start, and from the checkpoint of
the part before.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.command.start import preflight, start
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config, parse_overrides, plain, resolved_today, set_key, validate
from tepo_megatron.models.hf_io import HfReader, bitwise_equal
from tepo_megatron.monitor.sinks import read_metrics
from tepo_megatron.rollout import decisions, record
from tepo_megatron.service.method import Method, resolve

# Numbers of the machine and of the engine that sampled, which a repetition has of its own.
_OWN = ("seconds/", "memory/", "alert/", "gate/", "sync/", "server/", "tokens_per_second", "rollout/server_restarts")
# Keys that say where a run starts and ends, and not how its steps are computed.
_NOT_COMPUTED = {"resume", "overwrite", "output", "name", "logging", "checkpoint"}


@dataclass(frozen=True)
class ReplayRequest:
    """One call of `tepo replay`."""

    run_dir: Path
    until: int | None = None  # the last step to repeat. None: the last one that the run has taken.
    engine: bool = False  # whether the engine samples again. Otherwise the run's recordings are used.
    name: str | None = None  # name of the new run, in the folder in which the run lies. None: the run's name and "-replay".
    overrides: tuple[str, ...] = ()  # keys to change, as `--section.key VALUE`


@dataclass(frozen=True)
class Part:
    """Steps that one start of the run has taken."""

    first: int
    last: int
    config: Mapping[str, Any]  # the config of the start, as plain JSON


def replay(request: ReplayRequest, say: Callable[[str], object], make_run: Callable[[Config], object] = start) -> int:
    """Repeat a run and compare.

    Returns:
        The exit status: 0 if every number and weight that can be compared is equal bit for bit, else 1.

    Raises:
        ConfigError, DataError: The run cannot be repeated as asked for. Nothing was started.
    """
    taken = read_metrics(request.run_dir)[-1]["step"]
    assert isinstance(taken, int)
    until = taken if request.until is None else request.until
    if not 1 <= until <= taken:
        raise ConfigError(f"--until {until}: {request.run_dir} has taken the steps 1 to {taken}; give one of them")
    if not request.engine and (faults := record.faults(request.run_dir / record.FOLDER, until)):
        raise DataError(
            f"{request.run_dir}: {faults[0]}; a run that is to be repeated without an engine needs rollout.record=true. "
            "With --engine the engine samples again, with the seeds of the run"
        )
    parts = parts_of(request.run_dir, until)
    configs = [_config_of(part, request, is_first=part is parts[0], is_only=len(parts) == 1) for part in parts]
    for cfg in configs:
        if cfg.run_dir.resolve() == request.run_dir.resolve():
            raise ConfigError(f"name={cfg.name}: the repetition would replace the run; give it another name with --name")
        preflight(cfg)
    for part, cfg in zip(parts, configs, strict=True):
        say(f"steps {part.first} to {part.last} of {request.run_dir}, {_source(request)}, into {cfg.run_dir}")
        if (objective := _other_objective(part, cfg.objective.name)) and (replaced := _replaced(part)):
            say(f"{objective}; what the run replaces in {part.config['objective']['name']} is left out: {', '.join(replaced)}")
        make_run(cfg)
    again, exported = configs[-1].run_dir, _exported(request.run_dir) == until
    if objective := next(filter(None, map(_other_objective, parts, (cfg.objective.name for cfg in configs))), None):
        of_run = validate(deepcopy(dict(parts[0].config)), str(request.run_dir))
        old_pass = _has_same_old_pass(resolve(of_run), resolve(configs[0]))
        later = "later log-probs" if old_pass else "log-probs"
        comparison = compare(
            request.run_dir,
            again,
            1 if request.engine else until,  # an engine samples the later steps with other weights
            compares_weights=False,
            comparable=partial(_of_rollouts, old_pass),
            left_out=f"{objective}: not compared are losses, gradients, ratios, weights and {later}",
        )
    else:
        comparison = compare(request.run_dir, again, until, compares_weights=exported)
    for line in comparison.lines():
        say(line)
    return 0 if comparison.equal else 1


def parts_of(run_dir: Path, until: int) -> list[Part]:
    """Return the parts of a run up to a step. Starts that compute alike are one part."""
    if not (run_dir / decisions.FILE).exists():
        return [Part(1, until, plain(load_config(run_dir / "config.yaml")))]
    history = decisions.read_history(run_dir)
    if history.lost_start is not None:
        raise DataError(f"{run_dir / decisions.FILE}: {history.lost_start}; with it the config of a start is lost")
    starts = [(after, config) for after, config in history.starts if after < until]
    if not starts or starts[0][0] != 0:
        raise DataError(f"{run_dir / decisions.FILE}: the start of the run is missing; the file was changed")
    parts: list[Part] = []
    for (after, config), end in zip(starts, [*(after for after, _ in starts[1:]), until], strict=True):
        config = dict(resolved_today(config))
        if parts and computed(parts[-1].config) == computed(config):
            parts[-1] = replace(parts[-1], last=end)
        else:
            parts.append(Part(after + 1, end, config))
    return parts


def computed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config that decide how steps are computed."""
    tree = {name: deepcopy(value) for name, value in config.items() if name not in _NOT_COMPUTED}
    tree["training"].pop("steps")
    return tree


def _config_of(part: Part, request: ReplayRequest, *, is_first: bool, is_only: bool) -> Config:
    tree = deepcopy(dict(part.config))
    folder = request.run_dir.absolute()
    name = request.name or f"{folder.name}-replay"
    tree |= {"name": name, "output": str(folder.parent), "resume": not is_first, "overwrite": False}
    tree["training"]["steps"] = part.last
    tree["export_hf"] = (folder / "hf").is_dir()
    if request.engine:
        tree["rollout"]["record"] = True
    else:
        tree["rollout"] |= {"replay": str(folder / record.FOLDER), "record": False, "colocate": False}
        tree["evaluation"] |= {"every": 0, "benchmarks": [], "patience": None}
        tree["data"]["eval"] = None
    tree["checkpoint"] |= {"every": 0 if is_only else part.last, "keep_best": False}
    tree["logging"] |= {"tensorboard": False, "wandb_project": None}
    overrides = parse_overrides(list(request.overrides))
    if dict(overrides).get("objective.name", tree["objective"]["name"]) != tree["objective"]["name"]:
        tree["objective"] = {}  # its parts replace those of another row
    for key, value in overrides:
        set_key(tree, key, value)
    if not is_first:
        tree["overwrite"] = False
    return validate(tree, str(request.run_dir))


def _other_objective(part: Part, name: str) -> str | None:
    """Say which objective a part is repeated with; None if it is the run's own, perhaps with other parts."""
    of_run = part.config["objective"]["name"]
    return None if name == of_run else f"the objective is {name} and was {of_run}"


def _replaced(part: Part) -> list[str]:
    objective = part.config["objective"]
    return [f"{key}={objective[key]}" for key in objective if key != "name" and objective[key] is not None]


def _of_rollouts(old_pass: bool, step: int, key: str) -> bool:
    """Return whether a number is the same whatever is learned; `old_pass`: log-probs of the first step are."""
    if key.startswith("rollout/logprob_diff"):
        return old_pass and step == 1
    return key.startswith(("reward/", "accuracy/", "grading/", "rollout/")) and key != "reward/ref_kl"


def _has_same_old_pass(*methods: Method) -> bool:
    """Return whether the old log-probs of the first step are of the same tokens and the same kind of pass."""
    objectives = [method.objective for method in methods]
    return len({(o.mask_truncated, o.needs_batch_statistics, o.ref_kl is None) for o in objectives}) == 1


def _exported(run_dir: Path) -> int | None:
    """Return the step whose weights a run has exported; None if it has not ended."""
    try:
        steps = json.loads((run_dir / "summary.json").read_text())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def _source(request: ReplayRequest) -> str:
    return "sampled again" if request.engine else "from its recordings"


@dataclass(frozen=True)
class Comparison:
    """The outcome."""

    steps: int  # number of the steps that were compared
    difference: str | None  # the first number of a step that differs, as a sentence. None: all are equal.
    # The first decision that differs, as a sentence. It explains a difference, and is none by itself: groups arrive in another
    # order each time. None: all are equal, or the repetition made none.
    decision: str | None
    tensors: int | None  # number of compared weights; None if there were none to compare
    other_tensors: tuple[str, ...]
    left_out: str | None = None  # what another objective changes by design, as a sentence. None: everything was compared.

    @property
    def equal(self) -> bool:
        """Return whether everything that was compared is equal, bit for bit."""
        return self.difference is None and not self.other_tensors

    def lines(self) -> Iterator[str]:
        """Yield lines for the user."""
        if self.decision is not None and not self.equal:
            yield f"the first decision that differs: {self.decision}"
        what = "every number" if self.left_out is None else "every number of the rollouts and rewards"
        yield self.difference or f"{what} of the steps 1 to {self.steps} is equal"
        if self.left_out is not None:
            yield self.left_out
            return
        if self.tensors is None:
            yield "weights: not compared, because not both of the runs have exported those of this step"
        elif self.other_tensors:
            yield f"weights: {len(self.other_tensors)} of {self.tensors} tensors differ, the first: {self.other_tensors[0]}"
        else:
            yield f"weights: {self.tensors} tensors are equal bit for bit"


def compare(
    first: Path,
    again: Path,
    until: int,
    *,
    compares_weights: bool,
    comparable: Callable[[int, str], bool] = lambda step, key: True,
    left_out: str | None = None,
) -> Comparison:
    """Compare the steps of two runs up to one of them: the numbers that are `comparable`, given the step and the key."""
    rows = {row["step"]: row for row in read_metrics(first)}
    rows_again = {row["step"]: row for row in read_metrics(again)}
    differences = (
        _difference(step, rows.get(step, {}), rows_again.get(step, {}), partial(comparable, step))
        for step in range(1, until + 1)
    )
    tensors, other = None, tuple[str, ...]()
    if compares_weights and all((folder / "hf").is_dir() for folder in (first, again)):
        tensors, other = _weights(first / "hf", again / "hf")
    difference, decision = next(filter(None, differences), None), _decision(first, again, until)
    return Comparison(until, difference, decision, tensors, other, left_out)


def _difference(step: int, row: dict[str, Any], row_again: dict[str, Any], comparable: Callable[[str], bool]) -> str | None:
    for key in [*row, *(key for key in row_again if key not in row)]:
        if comparable(key) and not key.startswith(_OWN) and row.get(key) != row_again.get(key):
            return f"step {step}: {key} was {row.get(key)} and is {row_again.get(key)}"
    return None


def _decision(first: Path, again: Path, until: int) -> str | None:
    try:
        steps, steps_again = decisions.read_history(first).steps, decisions.read_history(again).steps
    except DataError:  # a run of a version that logged none
        return None
    if not steps_again:
        return None
    for step in range(1, until + 1):
        line, line_again = steps.get(step, {}), steps_again.get(step, {})
        for name in ("asked", "arrived", "left", "minibatches"):
            was, now = line.get(name, []), line_again.get(name, [])
            if name == "arrived":  # whatever their order and their servers, which do not change what is sampled
                was, now = (sorted((group[:3] for group in groups), key=lambda group: group[0]) for groups in (was, now))
            for place in range(max(len(was), len(now))):
                pair = [rows[place] if place < len(rows) else "nothing" for rows in (was, now)]
                if pair[0] != pair[1]:
                    return f"step {step}: entry {place} of {name!r} was {pair[0]} and is {pair[1]}"
    return None


def _weights(first: Path, again: Path) -> tuple[int, tuple[str, ...]]:
    """Return the number of tensors and the names of those that differ. One tensor of each is in memory at a time."""
    readers = HfReader(first), HfReader(again)
    names, names_again = (reader.names() for reader in readers)
    other = names ^ names_again
    other |= {name for name in names & names_again if not bitwise_equal(*(reader.get(name) for reader in readers))}
    return len(names | names_again), tuple(sorted(other))
