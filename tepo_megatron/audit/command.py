"""The command `tepo audit`."""

from collections.abc import Callable
from pathlib import Path

from tepo_megatron.audit.comparison import audit_step
from tepo_megatron.audit.tables import TokenName, step_lines, token_lines
from tepo_megatron.config.io import load_config
from tepo_megatron.data import load_tokenizer
from tepo_megatron.errors import CheckpointError, ConfigError


def parse_token(text: str) -> tuple[int, int]:
    """Return (sequence, position) of SEQUENCE:POSITION. Raises ConfigError for another text."""
    sequence, _, position = text.partition(":")
    if not (sequence.isascii() and sequence.isdigit() and position.isascii() and position.isdigit()):
        raise ConfigError(f"--token {text}: two whole numbers, SEQUENCE:POSITION, such as 5:0")
    return int(sequence), int(position)


def run(run_dir: Path, step: int, token: tuple[int, int] | None, write: Callable[[str], object]) -> bool:
    """Audit a step and write the tables; return whether everything agrees.

    Args:
        run_dir: Folder of the run.
        step: Number of the step.
        token: Sequence and position of the token to show. None: the whole step.
        write: Writes one line.

    Raises:
        DataError: The run kept too little, its records are damaged, or it has no such token.
    """
    audited = audit_step(run_dir, step)
    for line in step_lines(audited) if token is None else token_lines(audited, *token, _token_names(run_dir)):
        write(line)
    write("everything agrees" if audited.agrees else "training and audit DIFFER, see above")
    return audited.agrees


def _token_names(run_dir: Path) -> TokenName:
    """Return a function that shows a token's id and, if a tokenizer is found, its text."""
    try:
        tokenizer = load_tokenizer(load_config(run_dir / "config.yaml").model.path)
    except (CheckpointError, ConfigError):
        return lambda token: f"id {token}"
    return lambda token: f"id {token}, {tokenizer.decode([token])!r}"
