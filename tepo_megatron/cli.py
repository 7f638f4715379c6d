"""The `tepo` command."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_megatron import __version__
from tepo_megatron.errors import ConfigError, TepoError

if TYPE_CHECKING:  # everything heavy is imported where an interrupt is already told in one line
    from tepo_megatron.config import Config

# What a run directory can hold: `overwrite` removes these and nothing else.
_OF_A_RUN = (
    "config.yaml",
    "metrics.jsonl",
    "summary.json",
    "log.txt",
    "server.log",
    "report.png",
    "hf",
    "hf.partial",
    "tensorboard",
    "wandb",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 for an error (told in one message), 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="tepo", description="Token-level policy optimization on Megatron-Core.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "train",
        help="train as a config says",
        usage="tepo train CONFIG [--section.key VALUE ...]",
        epilog="Every key can be given, as --section.key VALUE; they are listed in tepo_megatron/config.py.",
    )
    run.add_argument("config", metavar="CONFIG", help="a YAML file; start from examples/template.yaml")
    report = commands.add_parser("report", help="draw the curves of a run, finished or under way")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory, runs/NAME")
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) > 1 and words[0] == "train" and words[1].startswith("--") and words[1] != "--help":
        parser.error("tepo train CONFIG [--section.key VALUE ...]: the config file comes first")
    args, overrides = parser.parse_known_args(words)
    try:
        if args.command == "train":
            return train(args.config, overrides)
        if overrides:
            raise ConfigError(f"tepo report takes no {overrides[0]}")
        from tepo_megatron.report import write_report

        print(write_report(args.run_dir))
        return 0
    except TepoError as e:
        print(f"tepo: error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as e:
        print(f"tepo: interrupted {e}".rstrip(), file=sys.stderr)
        return 130


def train(config_path: str, overrides: list[str]) -> int:
    """`tepo train CONFIG [--key value ...]`."""
    from tepo_megatron.config_io import load_config
    from tepo_megatron.launcher import RanksFailed, inside_torchrun, launch, run_rank

    cfg = load_config(config_path, overrides)
    if inside_torchrun():
        if os.environ["RANK"] == "0":
            preflight(cfg)
            prepare_run_dir(cfg)
        return run_rank(cfg)
    preflight(cfg)
    resolved = prepare_run_dir(cfg)
    try:
        launch(cfg, resolved)
    except RanksFailed as e:
        with (cfg.run_dir / "log.txt").open("a") as log:
            log.write(f"error: {e}\n")
        raise
    return 0


def preflight(cfg: Config) -> None:
    """Everything that can be refused before a process is started. Raises a TepoError."""
    from tepo_megatron.actor.layout import check_layout
    from tepo_megatron.losses import build_objective
    from tepo_megatron.weights.families import find_family, read_config
    from tepo_megatron.weights.hf_io import HfReader

    build_objective(cfg.objective)
    hf_config = read_config(cfg.model.path)
    check_layout(find_family(hf_config).architecture(hf_config), cfg.parallel)
    HfReader(cfg.model.path)


def prepare_run_dir(cfg: Config) -> Path:
    """Create output/name with the resolved config.yaml; returns its path.

    A directory holds a run once there are metrics, a summary or a model in it; what a start that failed before left there is
    replaced. Raises ConfigError if a run is there already and `overwrite` is false, if the model or the data lie in what would
    be removed, or if the directory cannot be written.
    """
    from tepo_megatron.config_io import to_yaml

    metrics = cfg.run_dir / "metrics.jsonl"
    holds_a_run = (metrics.exists() and metrics.stat().st_size) or any(
        (cfg.run_dir / n).exists() for n in ("summary.json", "hf")
    )
    if holds_a_run and not cfg.overwrite:
        raise ConfigError(f"{cfg.run_dir} holds a run already; choose another `name`, or replace it with --overwrite true")
    removed = [cfg.run_dir / name for name in _OF_A_RUN]
    for key, used in (("model.path", cfg.model.path), ("data.train", cfg.data.train), ("data.eval", cfg.data.eval)):
        if used is not None and any(Path(used).resolve().is_relative_to(path.resolve()) for path in removed):
            raise ConfigError(f"{key}={used} lies in the run that would be replaced; choose another `name`")
    try:
        for path in removed:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        cfg.run_dir.mkdir(parents=True, exist_ok=True)
        resolved = cfg.run_dir / "config.yaml"
        resolved.write_text(to_yaml(cfg))
    except OSError as e:
        raise ConfigError(f"output={cfg.output}: {cfg.run_dir} cannot be written ({e}); choose another directory") from None
    return resolved


if __name__ == "__main__":
    sys.exit(main())
