"""`tepo ablate`: train several objectives with several seeds from one base model, and compare them with their noise."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

from tepo_megatron.ablation.plan import AblationPlan, read_plan
from tepo_megatron.ablation.results import RunOutcome, rows
from tepo_megatron.ablation.table import result_table, to_json
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.errors import ConfigError, RunStopped, TepoError
from tepo_megatron.utils.escaping import escaped
from tepo_megatron.utils.processes import handlers_restored


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
    found = set()
    for name, by_seed in plan.runs.items():
        for seed, cfg in by_seed.items():
            if not (cfg.run_dir / "summary.json").exists():
                continue
            if _config_in(cfg.run_dir) == cfg:
                found.add((name, seed))
            elif not plan.file.overwrite:
                raise ConfigError(
                    f"{cfg.run_dir} holds a finished run of another config; choose another `name` of the ablation, or replace "
                    "such runs with --overwrite true"
                )
    return found


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
