"""`tepo ablate`: train several objectives with several seeds from one base model, and compare them with their noise.

The results of the runs are summarized in one row of figures per run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tepo_megatron.base.errors import ConfigError, DataError, RunStopped, TepoError, escaped
from tepo_megatron.base.processes import handlers_restored
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.evaluation import Scores, read_evaluation
from tepo_megatron.evaluation.results import NOTHING, ResultTable
from tepo_megatron.evaluation.statistics import MIN_SEEDS, NORMAL_95, Estimate, over_problems, paired_difference
from tepo_megatron.monitor.sinks import read_metrics
from tepo_megatron.report.ablation.plan import AblationPlan, read_plan
from tepo_megatron.report.run import Curves

FILE_WIDTH = 170  # width in characters if the output is no terminal


def cells(plan: AblationPlan, row: MethodRow) -> list[str]:
    """Return the cells of one run."""
    return [
        row.name,
        NOTHING if row.after is None else _with_error(row.after),
        NOTHING if row.after is None else _span(row.after, sign=""),
        NOTHING if row.steps_to_best is None else f"{row.steps_to_best:.1f}",
        NOTHING if row.entropy_at_end is None else f"{row.entropy_at_end:.3f}",
        NOTHING if row.difference is None else _with_interval(row.difference),
        NOTHING if row.difference is None else _over_seeds(row.difference),
        "; ".join([verdict(plan, row), *(f"seed {seed} failed: {_last_line(text)}" for seed, text in row.errors.items())]),
    ]


def verdict(plan: AblationPlan, row: MethodRow) -> str:
    """Return the strongest statement that the figures support about the difference to the baseline."""
    if row.name == plan.baseline:
        return "baseline"
    if row.difference is None:
        return "no comparison"
    if row.difference.covers_zero:
        return "within noise"
    if len(row.difference.by_seed) == 1:
        return "beyond problem noise, one seed"
    if (over_seeds := row.difference.over_seeds) is not None:
        return "beyond problem noise, within seed noise" if over_seeds[0] <= 0 <= over_seeds[1] else "beyond seed noise"
    return "beyond problem noise" + ("" if row.difference.seeds_agree_in_sign else ", seeds disagree")


def notes(plan: AblationPlan, table: Sequence[MethodRow]) -> list[str]:
    """Return sentences that define every figure and say what it does not include."""
    cfg, seeds = plan.any_config, ", ".join(map(str, plan.file.seeds))
    before = next((row.before for row in table if row.before is not None), None)
    problems = next((row.problems for row in table if row.problems), 0)
    samples = f"{cfg.evaluation.samples} sample{'s' if cfg.evaluation.samples > 1 else ''}"
    sets = "; ".join(f"{row.name}: {_keys(plan.file.runs[row.name])}" for row in table)
    comparisons = len(table) - 1
    sentences = [
        f"All runs start from {cfg.model.path}, accuracy {_with_error(before) if before else NOTHING}. They differ only in the "
        f"seed and in the keys that each sets. {sets}.",
        "Runs of one seed share prompts and random numbers: updates that hardly differ give the same samples and figures.",
        f"Accuracy: right answers, {problems} held-out problems x {samples} at temperature {cfg.evaluation.temperature:g}, "
        f"after the last step, mean over the seeds that ended well, of {seeds}.",
        "SE: standard error over problems, each averaged over seeds first. It does not include the effect of other seeds; for "
        "that, `by seed` shows the lowest and the highest accuracy.",
        f"Steps: the first at which the rollouts' accuracy (all samples, mean of the last {WINDOW} steps) reaches "
        f"{SHARE_OF_BEST:g} of its own maximum; per seed, then averaged. A run whose best is low may get there early.",
        f"Entropy: of the actor on the tokens it learned from, mean of the last {WINDOW} steps and over seeds.",
    ]
    if comparisons:
        sentences.append(
            f"Points over {plan.baseline}: paired, problem by problem, on the same seeds; interval: ± {NORMAL_95:.2f} SE over "
            f"problems. `over seeds`: from {MIN_SEEDS} seeds on the 95 % interval of the seeds' differences by Student's t, "
            "else the lowest and the highest. `within noise`: the interval over problems covers 0. `beyond problem noise` is "
            "no claim about other seeds; `beyond seed noise`: neither interval covers 0. Even where nothing "
            f"differs, some of {comparisons} such interval{'s' if comparisons > 1 else ''} may miss 0, with a chance of up to "
            f"{min(1, 0.05 * comparisons):.0%}."
        )
    return sentences


def to_json(plan: AblationPlan, table: Sequence[MethodRow]) -> dict[str, Any]:
    """Return every figure, unrounded, as plain JSON. Accuracies and differences are shares, not percent."""
    return {
        "name": plan.file.name,
        "baseline": plan.baseline,
        "seeds": plan.file.seeds,
        "notes": notes(plan, table),
        "rows": [_record(plan, row) for row in table],
    }


def result_table(plan: AblationPlan, table: Sequence[MethodRow]) -> ResultTable:
    """Return the table with its notes."""
    headings = [
        "run", "accuracy, % ± SE", "by seed", f"steps to {SHARE_OF_BEST:.0%} of own best", "entropy at end, nats",
        f"points over {plan.baseline} [95 %]", "over seeds", "",
    ]  # fmt: skip
    rows = [cells(plan, row) for row in table]
    return ResultTable(plan.file.name, headings, rows, notes(plan, table), texts=(0, 7), width=FILE_WIDTH, wraps=False)


def _record(plan: AblationPlan, row: MethodRow) -> Mapping[str, Any]:
    record = dataclasses.asdict(row)
    if row.difference is not None:
        record["difference"] |= {"interval_95": row.difference.interval, "interval_95_over_seeds": row.difference.over_seeds}
    return record | {"verdict": verdict(plan, row)}


def _keys(tree: Mapping[str, Any]) -> str:
    """Return nested settings as text: {a: {b: 1}} as "a.b=1"."""
    flat = []
    for key, value in tree.items():
        flat += [f"{key}.{rest}" for rest in _keys(value).split(" ")] if isinstance(value, dict) else [f"{key}={value}"]
    return " ".join(flat)


def _with_error(estimate: Estimate) -> str:
    error = "" if estimate.standard_error is None else f" ± {100 * estimate.standard_error:.1f}"
    return f"{100 * estimate.mean:.1f}{error}"


def _with_interval(estimate: Estimate) -> str:
    interval = estimate.interval
    bounds = "" if interval is None else f" [{100 * interval[0]:+z.1f}, {100 * interval[1]:+z.1f}]"
    return f"{100 * estimate.mean:+z.1f}{bounds}"


def _over_seeds(estimate: Estimate) -> str:
    bounds = estimate.over_seeds
    return _span(estimate, sign="+") if bounds is None else "[{:+z.1f}, {:+z.1f}]".format(*(100 * x for x in bounds))


def _span(estimate: Estimate, sign: str) -> str:
    low, high = (f"{100 * value:{sign}z.1f}" for value in (min(estimate.by_seed.values()), max(estimate.by_seed.values())))
    return low if len(estimate.by_seed) == 1 else f"{low} … {high}"


def _last_line(text: str) -> str:
    """Return the last line of a traceback, which says what was raised."""
    return text.strip().splitlines()[-1].strip()


def ablate(path: str | Path, words: list[str], check: Callable[[Config], None], train: Callable[[Config], None]) -> int:
    """Run `tepo ablate FILE [--key value ...]`; return the exit status, 1 if a run failed.

    Everything is checked before the first run starts. A finished run is kept, on the assumption that code, model and data have
    not changed. KeyboardInterrupt ends the current run and the command, as does RunStopped: that run was asked to end.
    """
    plan = read_plan(path, words, check)
    finished = _finished_runs(plan)
    outcomes: dict[str, dict[int, RunOutcome]] = {name: {} for name in plan.runs}
    errors: dict[str, dict[int, str]] = {name: {} for name in plan.runs}
    number = 0
    for name, by_seed in plan.runs.items():
        for seed, cfg in by_seed.items():
            number += 1
            kept = (name, seed) in finished
            state = "finished before, kept" if kept else "starts"
            print(f"run {number} of {len(plan.runs) * len(plan.file.seeds)}: {cfg.name} {state}", flush=True)
            try:
                if not kept:
                    with handlers_restored((signal.SIGINT, signal.SIGTERM)):  # a launcher leaves its own
                        train(cfg)
                outcomes[name][seed] = RunOutcome.of(cfg.run_dir)
            except RunStopped:  # it was the whole command that was asked to end
                raise
            except TepoError as e:
                errors[name][seed] = str(e)
                print(f"{cfg.name} failed: {escaped(str(e))}", flush=True)
    _write_results(plan, outcomes, errors)
    return 1 if any(errors.values()) else 0


def _finished_runs(plan: AblationPlan) -> set[tuple[str, int]]:
    """Return (run, seed) of the runs that have a summary and the same config as in the plan.

    Raises ConfigError for a finished run of another config, unless the plan may overwrite it.
    """
    finished = set()
    for name, by_seed in plan.runs.items():
        for seed, cfg in by_seed.items():
            if not (cfg.run_dir / "summary.json").exists():
                continue
            if _config_in(cfg.run_dir) == cfg:
                finished.add((name, seed))
            elif not plan.file.overwrite:
                raise ConfigError(
                    f"{cfg.run_dir} holds a finished run of another config; choose another `name` of the ablation, or replace "
                    "such runs with --overwrite true"
                )
    return finished


def _write_results(plan: AblationPlan, outcomes: dict[str, dict[int, RunOutcome]], errors: dict[str, dict[int, str]]) -> None:
    """Print the table, and write it as ablation.md and ablation.json. `tepo report` draws the runs' curves."""
    table = rows(outcomes, errors, plan.baseline)
    shown = result_table(plan, table)
    plan.folder.mkdir(parents=True, exist_ok=True)
    (plan.folder / "ablation.md").write_text(shown.markdown(level=1))
    (plan.folder / "ablation.json").write_text(json.dumps(to_json(plan, table), indent=2) + "\n")
    shown.print()
    print("written:", plan.folder / "ablation.md", plan.folder / "ablation.json")


def _config_in(run_dir: Path) -> Config | None:
    """Return the config of the run in a folder; None if it cannot be read."""
    try:
        return load_config(run_dir / "config.yaml")
    except ConfigError:
        return None


WINDOW = 5  # steps
SHARE_OF_BEST = 0.9


@dataclass(frozen=True)
class RunOutcome:
    """A run that ended without error."""

    curves: Curves
    scores: Scores  # scores of the held-out problems, before and after the run

    @classmethod
    def of(cls, run_dir: Path) -> Self:
        """Read a finished run. Raises DataError that names the file."""
        return cls(Curves.of(read_metrics(run_dir)), read_evaluation(run_dir))


@dataclass(frozen=True)
class MethodRow:
    """One run over all its seeds. A figure is None if it is missing for a seed that it needs, or if no seed succeeded."""

    name: str
    problems: int
    # before, after: accuracy before and after the run
    before: Estimate | None
    after: Estimate | None
    steps_to_best: float | None  # mean over seeds of `steps_to_share_of_best`
    entropy_at_end: float | None  # mean over seeds of the entropy at the end, in nats per token
    difference: Estimate | None  # paired difference of `after` to the baseline's; None for the baseline itself
    errors: Mapping[int, str]  # seed -> error of a failed run


def rows(
    outcomes: Mapping[str, Mapping[int, RunOutcome]], errors: Mapping[str, Mapping[int, str]], baseline: str
) -> list[MethodRow]:
    """Return one row per run. Raises DataError if two runs were evaluated on different problems."""
    reference = _after(outcomes[baseline])
    try:
        return [_row(name, runs, errors[name], None if name == baseline else reference) for name, runs in outcomes.items()]
    except ValueError as e:
        raise DataError(f"the runs cannot be compared: {e}; remove those made with another data.eval") from None


def _row(
    name: str, outcomes: Mapping[int, RunOutcome], errors: Mapping[int, str], baseline: Mapping[int, Mapping[int, float]] | None
) -> MethodRow:
    after = _after(outcomes)
    curves = [outcome.curves for outcome in outcomes.values()]
    return MethodRow(
        name=name,
        problems=len(next(iter(after.values()), ())),
        before=over_problems({seed: outcome.scores.before for seed, outcome in outcomes.items()}) if outcomes else None,
        after=over_problems(after) if outcomes else None,
        steps_to_best=_mean([steps_to_share_of_best(c["accuracy/mean"].tolist()) for c in curves]),
        entropy_at_end=_mean([mean_of_last(c["actor/entropy"].tolist()) for c in curves]),
        difference=None if baseline is None else paired_difference(after, baseline),
        errors=errors,
    )


def _after(outcomes: Mapping[int, RunOutcome]) -> dict[int, Mapping[int, float]]:
    return {seed: outcome.scores.after for seed, outcome in outcomes.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean over seeds; None if a seed lacks the value, since a mean over the others would not be comparable."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def steps_to_share_of_best(values: Sequence[float]) -> int | None:
    """Return the first step (from 1) at which the mean of the last WINDOW values reaches SHARE_OF_BEST of its own maximum.

    None for fewer than WINDOW steps, if a value is missing (NaN), or if the mean never exceeds 0. `values` has one value per
    step of a single run.
    """
    if any(math.isnan(value) for value in values):
        return None
    trailing = [statistics.fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]
    best = max(trailing, default=0.0)
    if best <= 0:
        return None
    return WINDOW + next(i for i, mean in enumerate(trailing) if mean >= SHARE_OF_BEST * best)


def mean_of_last(values: Sequence[float]) -> float | None:
    """Return the mean of those of the last WINDOW values that are not NaN; None if all of them are."""
    known = [value for value in values[-WINDOW:] if not math.isnan(value)]
    return statistics.fmean(known) if known else None
