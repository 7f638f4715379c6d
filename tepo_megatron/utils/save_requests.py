"""Requests to save a checkpoint: files in a run's folder. Whoever may write there may make one, with `touch`.

    save.request      save a checkpoint after the running step, and go on
    stop.request      save a checkpoint as soon as possible, and end the run
    stop.done         the answer to stop.request: the checkpoint is complete and the run ends
    restart.request   save a checkpoint as soon as possible, and start the ranks again. It holds a JSON list of
                      `--section.key VALUE` words, or nothing (`launcher/restart_request.py`)
    restart.done      the answer to restart.request, as text for the user

Rank 0's machine looks for them, so a client of NFS elsewhere may be noticed up to a minute later. A start removes what is left.
"""

from pathlib import Path

from tepo_megatron.utils.atomic import replace_file

SAVE, STOP, STOPPED, RESTART, RESTARTED = "save.request", "stop.request", "stop.done", "restart.request", "restart.done"
FILES = (SAVE, STOP, STOPPED, RESTART, RESTARTED)
LOOK_SECONDS = 1.0  # interval at which a run looks for a request while it waits


def ask(run_dir: Path, name: str) -> None:
    """Make a request.

    Args:
        run_dir: Folder of the run.
        name: SAVE or STOP.
    """
    (run_dir / name).touch()


def asked(run_dir: Path, name: str) -> bool:
    """Return whether there is a request.

    Args:
        run_dir: Folder of the run.
        name: SAVE, STOP or RESTART.
    """
    return (run_dir / name).exists()


def take_save(run_dir: Path) -> bool:
    """Return whether there was a request to save; it is removed."""
    try:
        (run_dir / SAVE).unlink()
    except OSError:
        return False
    return True


def answer_stop(run_dir: Path) -> None:
    """Replace the request to end by its answer."""
    (run_dir / STOPPED).touch()
    (run_dir / STOP).unlink(missing_ok=True)


def answer_restart(run_dir: Path, text: str) -> None:
    """Replace the request to restart the ranks by its answer.

    Args:
        run_dir: Folder of the run.
        text: What was done, or why nothing was done.
    """
    replace_file(run_dir / RESTARTED, text.encode(), durable=False)
    (run_dir / RESTART).unlink(missing_ok=True)


def clear(run_dir: Path) -> None:
    """Remove all requests and answers, because they were made to an earlier start."""
    for name in FILES:
        (run_dir / name).unlink(missing_ok=True)
