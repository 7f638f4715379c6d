"""Read the file of an ablation and derive its training runs."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tepo_megatron.base.errors import ConfigError, TepoError
from tepo_megatron.config import Config, DataConfig, EvaluationConfig, ModelConfig
from tepo_megatron.config.fields import NonNegative, config
from tepo_megatron.config.io import parse_overrides, read_layers, read_yaml, set_key, validate_as

SET_BY_THE_RUNNER = {"name": "`runs` and `seeds`", "seed": "`seeds`", "output": "`output`", "overwrite": "`overwrite`"}


def _named(runs: Any) -> Any:
    """Expand the short forms: [a, b] and {a: null} mean {a: {objective: {name: a}}}, the objective of that name."""
    if isinstance(runs, list):
        if len(set(map(str, runs))) < len(runs):
            raise ValueError("a name is listed twice")
        runs = dict.fromkeys(runs)
    if not isinstance(runs, dict):
        return runs
    return {name: {"objective": {"name": name}} if parts is None else parts for name, parts in runs.items()}


@config
class AblationFile:
    """Contents of the file that `tepo ablate` reads. Results go to output/name/.

    An `objective` section that names a method replaces the section before it, whose keys belong to another method. All other
    sections are merged as `config_layers` says.
    """

    name: str  # name of the ablation, a plain folder name
    base: str  # training config, relative to this file
    # Name -> keys of that run alone. A list of objectives is short for runs of these names.
    runs: Annotated[dict[str, dict[str, Any]], BeforeValidator(_named), Field(min_length=1)]
    # Seeds; each run is trained once with each
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(default_factory=lambda: [0, 1])
    baseline: str | None = None  # run that the others are compared with. None: the first run.
    overrides: dict[str, Any] = Field(default_factory=dict)
    output: str = "runs"
    overwrite: bool = False  # replace finished runs that were made with another config

    def __post_init__(self) -> None:
        if Path(self.name).name != self.name or self.name.startswith("."):
            raise ValueError(f"name={self.name!r} must be a plain folder name")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={self.seeds}: a seed is listed twice")
        if self.baseline is not None and self.baseline not in self.runs:
            raise ValueError(f"baseline={self.baseline!r} is none of the runs; use one of {', '.join(self.runs)}")
        for where, parts in (("overrides", self.overrides), *((f"runs.{name}", parts) for name, parts in self.runs.items())):
            for key in SET_BY_THE_RUNNER.keys() & parts.keys():
                raise ValueError(f"{where}.{key}: the runner sets this key; use {SET_BY_THE_RUNNER[key]}")


@dataclass(frozen=True)
class AblationPlan:
    """The runs of an ablation in the order of training: all seeds of the first run, then of the next."""

    file: AblationFile
    runs: Mapping[str, Mapping[int, Config]]  # name -> seed -> complete training config

    @property
    def folder(self) -> Path:
        """Folder of the results and of all runs."""
        return Path(self.file.output) / self.file.name

    @property
    def baseline(self) -> str:
        """Run that the others are compared with."""
        return self.file.baseline or next(iter(self.runs))

    @property
    def any_config(self) -> Config:
        """One of the configs, for settings that all runs share (model and evaluation)."""
        return self.runs[self.baseline][self.file.seeds[0]]


def read_plan(path: str | Path, words: list[str], check: Callable[[Config], None]) -> AblationPlan:
    """Read an ablation's file, apply `--key value` words, and check every run.

    A key of the file itself (`--seeds [0]`) changes the file; any other key (`--training.steps 3`) is set in every run. Raises
    ConfigError if the file or a run is invalid. The message names file, run and key.
    """
    tree = read_yaml(path)
    for_every_run: list[tuple[str, Any]] = []
    for key, value in parse_overrides(words):
        if key.partition(".")[0] in {field.name for field in dataclasses.fields(AblationFile)}:
            set_key(tree, key, value)
        elif key == "seed":
            raise ConfigError("--seed: the runner sets this key; use --seeds '[0, 1]'")
        else:
            for_every_run.append((key, value))
    file = validate_as(AblationFile, tree, str(path))

    runs: dict[str, dict[int, Config]] = {}
    for name in file.runs:
        runs[name] = {seed: _config(file, path, name, seed, for_every_run) for seed in file.seeds}
        try:
            check(runs[name][file.seeds[0]])
        except TepoError as e:
            raise ConfigError(f"{path}: runs.{name}: {e}") from None
    plan = AblationPlan(file, runs)
    _check_comparable(plan, path)
    return plan


def _config(file: AblationFile, path: str | Path, run: str, seed: int, words: list[tuple[str, Any]]) -> Config:
    """Return the complete config of one run. Raises ConfigError that names the source of the faulty key."""
    layers = read_layers(Path(path).parent / file.base)
    for values in (file.overrides, file.runs[run]):
        objective = values.get("objective")
        if isinstance(objective, dict) and "name" in objective:
            layers.add({"objective": None}, f"{path}: runs.{run}")  # the base's keys belong to its own method
    layers.add(file.overrides, f"{path}: overrides")
    layers.add(file.runs[run], f"{path}: runs.{run}")
    for key, value in words:
        word: dict[str, Any] = {}
        set_key(word, key, value)
        layers.add(word, "command line")
    folder = {"name": f"{run}-seed{seed}", "output": str(Path(file.output) / file.name)}
    # overwrite: an interrupted run starts over; a finished run is never started again
    layers.add(folder | {"seed": seed, "overwrite": True}, f"{path}: runs.{run}")
    return validate_as(Config, layers.tree, f"{path}: runs.{run}", layers)


def _check_comparable(plan: AblationPlan, path: str | Path) -> None:
    """Raise ConfigError unless all runs share base model and evaluation: the comparison is made problem by problem."""
    expected = _shared_settings(plan.any_config.model, plan.any_config.data, plan.any_config.evaluation)
    if expected["data.eval"] is None:
        raise ConfigError(f"{path}: data.eval is missing: an ablation compares accuracies on held-out problems; give it a file")
    for name, by_seed in plan.runs.items():
        cfg = by_seed[plan.file.seeds[0]]
        for key, value in _shared_settings(cfg.model, cfg.data, cfg.evaluation).items():
            if value != expected[key]:
                raise ConfigError(
                    f"{path}: runs.{name}: {key}={value} is not that of {plan.baseline} ({expected[key]}); all runs start from "
                    "one base model and are evaluated alike"
                )


def _shared_settings(model: ModelConfig, data: DataConfig, evaluation: EvaluationConfig) -> dict[str, Any]:
    fields = {f"data.{field.name}": getattr(data, field.name) for field in dataclasses.fields(data)}
    of_training = ("data.train", "data.shuffle")
    keys = {"model.path": model.path, "evaluation": evaluation}
    return keys | {key: value for key, value in fields.items() if key not in of_training}
