"""The command `tepo audit`."""

import os
import sys
from pathlib import Path

from tepo_megatron.base.errors import CheckpointError, ConfigError, escaped
from tepo_megatron.config.io import load_config
from tepo_megatron.data import load_tokenizer
from tepo_megatron.report.audit.comparison import audit_step
from tepo_megatron.report.audit.tables import TokenName, step_lines, token_lines


def parse_token(text: str) -> tuple[int, int]:
    """Return (sequence, position) of SEQUENCE:POSITION. Raises ConfigError for another text."""
    sequence, _, position = text.partition(":")
    if not (sequence.isascii() and sequence.isdigit() and position.isascii() and position.isdigit()):
        raise ConfigError(f"--token {text}: two whole numbers, SEQUENCE:POSITION, such as 5:0")
    return int(sequence), int(position)


def audit_lines(run_dir: Path, step: int, token: str | None) -> tuple[list[str], bool]:
    """Audit a step; return the lines to print, and whether everything agrees.

    Args:
        token: The token to show, SEQUENCE:POSITION. None: the whole step.
    Raises:
        ConfigError: `token` is no such text.
        DataError: The run kept too little, its records are damaged, or it has no such token.
    """
    place = None if token is None else parse_token(token)
    audited = audit_step(run_dir, step)
    lines = step_lines(audited) if place is None else token_lines(audited, *place, _token_names(run_dir))
    verdict = "everything agrees" if audited.agrees else "training and audit DIFFER, see above"
    return [*map(escaped, lines), verdict], audited.agrees


def print_audit(run_dir: Path, step: int, token: str | None) -> int:
    """Print what `audit_lines` returns; return the exit status: 1 if something differs."""
    lines, agrees = audit_lines(run_dir, step, token)
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # the reader has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if agrees else 1


def _token_names(run_dir: Path) -> TokenName:
    """Return a function that shows a token's id and, if a tokenizer is found, its text."""
    try:
        tokenizer = load_tokenizer(load_config(run_dir / "config.yaml").model.path)
    except (CheckpointError, ConfigError):
        return lambda token: f"id {token}"
    return lambda token: f"id {token}, {tokenizer.decode([token])!r}"
