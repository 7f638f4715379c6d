"""The words of `python -m launch`, which `--login` reads here as the login node will read them there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.executors import EXECUTORS

USAGE = """
  python -m launch CONFIG --executor slurm --cluster PROFILE [--dry-run] [--no-preflight] [--after FOLDER] [--section.key VALUE]
  python -m launch convert FOLDER --executor slurm --cluster PROFILE [--dry-run] [--after FOLDER] -- WORDS...
  python -m launch evaluate FOLDER ... -- WORDS...
  python -m launch doctor --cluster PROFILE [--nodes N] [--dry-run]
  python -m launch status|logs|cancel FOLDER [--job N]
  python -m launch save FOLDER
  python -m launch logs FOLDER [--job N] [--node NODE] [--rank R] [--lines N]
  python -m launch attach FOLDER [--job N] [--node NODE]
  python -m launch --login HOST:FOLDER WORDS...    # any of these from a laptop, with --executor slurm
  with --allow-dirty, files that differ from the commit are in the job's snapshot of the code"""


@dataclass(frozen=True)
class LaunchCall:
    """A call that starts a run or a command."""

    kind: str
    args: argparse.Namespace  # its options and its `target`, which is the CONFIG of a run or the FOLDER of a command
    overrides: list[str]  # other words of the launcher: for a run, keys of the config and their values
    rest: list[str]  # words of a command after `--`

    @property
    def words(self) -> list[str]:
        """Return words that are parsed to this call."""
        args = self.args
        words = [*([] if self.kind == "train" else [self.kind]), args.target, f"--executor={args.executor}"]
        words += [f"--{name}={value}" for name in ("cluster", "after") if (value := getattr(args, name)) is not None]
        words += [f"--{name.replace('_', '-')}" for name in ("dry_run", "no_preflight", "allow_dirty") if getattr(args, name)]
        return [*words, *self.overrides, *(["--", *self.rest] if self.rest else [])]


def parse(words: Sequence[str]) -> LaunchCall:
    """Return the call that words mean. Words with an error end this process, with argparse's message."""
    kind = words[0] if words and words[0] in ("convert", "evaluate") else "train"
    words, rest = (list(words), []) if kind == "train" else _split_words(words[1:])
    parser = argparse.ArgumentParser(prog="launch", usage=USAGE, allow_abbrev=False)
    parser.add_argument("target", metavar="CONFIG" if kind == "train" else "FOLDER")
    parser.add_argument("--executor", choices=list(EXECUTORS), default="local", help="(default: %(default)s)")
    parser.add_argument("--cluster", metavar="PROFILE", help="a YAML file; start from launch/profiles/")
    parser.add_argument("--dry-run", action="store_true", help="print the scripts that would run, and leave nothing behind")
    parser.add_argument("--after", type=Path, metavar="FOLDER", help="start when the newest job of that folder has succeeded")
    parser.add_argument("--no-preflight", action="store_true", help="submit without checking model, data, image and space")
    parser.add_argument("--allow-dirty", action="store_true", help="take files that differ from the commit into the snapshot")
    args, overrides = parser.parse_known_args(words)
    return LaunchCall(kind, args, overrides, rest)


def doctor_args(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of `doctor` in the words after it. Words with an error end this process, with argparse's message."""
    parser = argparse.ArgumentParser(prog="launch doctor", allow_abbrev=False)
    parser.add_argument(
        "--cluster", metavar="PROFILE", required=True, help="with a slurm section: a job; without: this machine"
    )
    parser.add_argument("--nodes", type=int, default=1, help="machines to check at once (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="expect no GPUs: a profile's ranks_per_node alone counts as GPUs")
    parser.add_argument("--folder", type=Path, default=Path("jobs/doctor"), help="for scripts and logs (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the scripts that would run, and leave nothing behind")
    return parser.parse_args(list(words))


def _split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after `--`."""
    if "--" not in words:
        return list(words), []
    at = words.index("--")
    return list(words[:at]), list(words[at + 1 :])
