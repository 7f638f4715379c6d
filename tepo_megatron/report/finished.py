"""Say what a finished run has left."""

import json
from pathlib import Path

from tepo_megatron.utils.escaping import escaped
from tepo_megatron.utils.run_lock import RunLock


def print_results(folder: Path, steps: int) -> None:
    """Print the results of a finished run; write its page and picture if it was killed before it did."""
    names = ("summary.json", "report.html", "report.png", "hf")
    if not (folder / "report.png").exists():  # a run removes the picture before it writes its summary
        from tepo_megatron.report import write_report

        with RunLock(folder):
            write_report(folder)
    results = ", ".join(name for name in names if (folder / name).exists())
    made = json.loads((folder / "summary.json").read_text())["steps"]
    print(f"{escaped(str(folder))}: this run is finished, with {made} steps; its results: {results}")
    print(f"only {'--evaluation.patience null' if made < steps else 'a higher training.steps'} makes it go on")
