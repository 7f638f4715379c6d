"""A log file of its own for each rank, for jobs of `python -m launch`."""

import contextlib
import os

FOLDER = "TEPO_RANK_LOGS"  # environment variable that names the folder


def redirect_output() -> None:
    """Append the output of this rank to rank-N.log in the folder that TEPO_RANK_LOGS names; rank 0 keeps its output.

    Without the variable, or if the file cannot be written, nothing changes.
    """
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK", "0")
    if not folder or rank == "0":
        return
    with contextlib.suppress(OSError):  # the output is then in the log of the machine
        file = os.open(os.path.join(folder, f"rank-{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
