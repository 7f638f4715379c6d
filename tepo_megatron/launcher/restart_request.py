"""`tepo restart`: end the ranks of a run at the next step and start them again, perhaps with another layout.

The rollout service and its servers live on. So only keys that they do not use can be changed. Keys change the config with which
the run was started, which is config.yaml in its folder, and not that of an earlier restart.
"""

import json
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config, parse_overrides, plain, set_key, validate
from tepo_megatron.errors import ConfigError, TepoError
from tepo_megatron.launcher.preflight import preflight
from tepo_megatron.utils.atomic import replace_file
from tepo_megatron.utils.run_lock import is_under_way
from tepo_megatron.utils.save_requests import RESTART, RESTARTED, answer_restart

SECTIONS = ("parallel", "megatron")  # whose keys can be changed
_POLL_SECONDS = 0.5


def restart(run_dir: Path, words: Sequence[str], seconds: float) -> str:
    """Ask a run to start its ranks again, and wait for the answer of its launcher. Return the answer.

    Args:
        seconds: Limit of the wait. The request remains after it.
    Raises:
        ConfigError: A key cannot be changed, nothing is under way in the folder, or it ended or did not answer in time.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: no config.yaml; give the folder of a run, runs/NAME")
    started = load_config(run_dir / "config.yaml")
    if not started.restarts_ranks:
        raise ConfigError(
            f"{run_dir}: its rollout service ends with its ranks (checkpoint.every={started.checkpoint.every}, "
            f"checkpoint.max_restarts={started.checkpoint.max_restarts}); end it with SIGTERM, and start it with --resume true"
        )
    preflight(changed(plain(started), words))
    _check_under_way(run_dir)
    (run_dir / RESTARTED).unlink(missing_ok=True)
    replace_file(run_dir / RESTART, json.dumps(list(words)).encode(), durable=False)
    until = time.monotonic() + seconds
    while not (run_dir / RESTARTED).exists():
        if time.monotonic() > until:
            raise ConfigError(f"no answer within {seconds:g} s; the request remains until {run_dir / RESTART} is removed")
        time.sleep(_POLL_SECONDS)
        _check_under_way(run_dir)
    text = (run_dir / RESTARTED).read_text()
    if text.startswith("refused"):
        raise ConfigError(f"{run_dir}: {text}")
    return text


def changed(started: Mapping[str, Any], words: Sequence[str]) -> Config:
    """Return the config with other keys.

    Raises:
        ConfigError: A key is of another section, does not exist, contradicts another one, or needs devices of the servers.
    """
    tree, before = deepcopy(dict(started)), validate(dict(started)).parallel.world_size
    for key, value in parse_overrides(list(words)):
        if key.partition(".")[0] not in SECTIONS:
            raise ConfigError(
                f"--{key}: next to a living rollout service only {' and '.join(f'{s}.*' for s in SECTIONS)} can be changed; "
                "for other keys end the run with SIGTERM, and start it with --resume true"
            )
        set_key(tree, key, value)
    cfg = validate(tree)
    if cfg.parallel.world_size > before and cfg.platform == "cuda":
        raise ConfigError(
            f"parallel.*: {cfg.parallel.world_size} ranks are more than the {before} of the start; servers have the next ones"
        )
    return cfg


def take(run_dir: Path, started: Mapping[str, Any], most_ranks: int | None = None) -> tuple[Config | None, str]:
    """Answer a request. Return the config of the next ranks, None if it is refused, and a line for the log.

    Args:
        most_ranks: Number of the ranks' devices that are left after some were lost. None: none were.
    """
    try:
        text = (run_dir / RESTART).read_text()
        words = json.loads(text or "[]")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ConfigError(f"{RESTART}: not a JSON list of words")
        cfg = changed(started, words)
        if most_ranks is not None and cfg.parallel.world_size > most_ranks:
            raise ConfigError(f"parallel.*: {cfg.parallel.world_size} ranks, and {most_ranks} devices are left for them")
        preflight(cfg)
    except (OSError, ValueError, TepoError) as e:
        answer_restart(run_dir, f"refused: {e}")
        return None, f"the ranks are restarted as they were, because the request was refused: {e}"
    line = " ".join(["the ranks are restarted on request", *(["with", *words] if words else [])])
    answer_restart(run_dir, line)
    return cfg, line


def _check_under_way(run_dir: Path) -> None:
    if not is_under_way(run_dir):
        raise ConfigError(f"{run_dir}: no run is under way in this folder; start it with --resume true")
