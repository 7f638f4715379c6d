"""`tepo resume RUN`: go on with a run under its own config, with the given keys changed."""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.command.ranks import newest_step
from tepo_megatron.config.io import differences, load_config, parse_overrides, plain
from tepo_megatron.monitor.run_dir import CONFIG_FILE

_OF_A_START = ("name", "output", "resume", "overwrite")
_PLACE = ("seed", "data.shuffle", "rollout.prompts_per_step", "sft.batch_sequences")  # they decide who is in which batch


def config_of(run_dir: Path) -> Path:
    """Return the path of the config of a run. Raises ConfigError with the runs of nearly this name if there is none."""
    if (saved := run_dir / CONFIG_FILE).is_file():
        return saved
    folders = [Path("runs"), run_dir.parent]
    runs = list(dict.fromkeys(path.parent for folder in folders for path in sorted(folder.glob(f"*/{CONFIG_FILE}"))))
    near = difflib.get_close_matches(run_dir.name, [run.name for run in runs], n=3)
    named = [str(run) for run in runs if run.name in near]
    fix = f"did you mean {' or '.join(named)}?" if named else f"the runs are: {', '.join(map(str, runs[-5:])) or 'none'}"
    raise ConfigError(f"{run_dir}: no run is there, because it has no {CONFIG_FILE}; {fix}")


def words_of(run_dir: Path, words: Sequence[str]) -> list[str]:
    """Return the overrides with which a run goes on in its folder, wherever that is now. Raises ConfigError for words that
    would have it go on elsewhere.
    """
    if own := [key for key, _ in parse_overrides(list(words)) if key in _OF_A_START]:
        raise ConfigError(f"--{own[0]}: tepo resume goes on in the folder of the run; remove it, or use tepo train")
    output = run_dir.parent if run_dir.name else run_dir.absolute().parent
    quoted = [json.dumps(text) for text in (run_dir.absolute().name, str(output))]
    return ["--name", quoted[0], "--output", quoted[1], "--resume", "true", "--overwrite", "false", *words]


def announcement(run_dir: Path, words: Sequence[str]) -> list[str]:
    """Return lines that say where a run goes on, and what `words` change. Raises ConfigError for what cannot be changed."""
    before, after = (plain(load_config(run_dir / CONFIG_FILE, list(changed))) for changed in ((), words))
    step = newest_step(run_dir / "checkpoints")
    place = f"goes on after step {step}" if step else "starts over, because no checkpoint is complete"
    lines = [f"{run_dir}: {place}"]
    shorter = after["training"]["steps"] < before["training"]["steps"]
    meanings = {"training.steps": ": the run becomes shorter" if shorter else "", "sft.data": ": the same rows are expected"}
    for change in differences(before, after):
        key = change.partition(" was ")[0]
        if step and key in _PLACE:
            raise ConfigError(f"{change}: its place in the data would be another one; leave it out, or start a new run")
        if key.startswith("parallel."):
            meanings[key] = ": another layout; numbers go on up to rounding"
        elif key.startswith("data.train"):
            meanings[key] = meanings["sft.data"]
        lines += [change + meanings.get(key, "")] if key not in _OF_A_START else []
    return lines
