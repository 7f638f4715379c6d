"""Record the packages of the environment in which a job runs: `python packages.py FILE.json`.

A copy of this file lies in the folder of the job. It needs only the standard library. At a later start of the job it prints
what differs from the record.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

_SHOWN = 10  # differences that are printed


def installed() -> dict[str, str]:
    """Return the version of Python and of each installed distribution, by name."""
    found = {d.name: d.version for d in importlib.metadata.distributions() if d.name}  # an unfinished installation has no name
    return {"python": platform.python_version(), **dict(sorted(found.items(), key=lambda item: item[0].lower()))}


def record(path: Path) -> list[str]:
    """Write the versions into a JSON file and return what differs from its former content, one line for each difference."""
    now = installed()
    before = json.loads(path.read_text()) if path.exists() else now
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(now, indent=1) + "\n")
    part.replace(path)
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [f"{name} {before.get(name, 'absent')} -> {now.get(name, 'absent')}" for name in names]


if __name__ == "__main__":
    if differences := record(Path(sys.argv[1])):
        shown = ", ".join(differences[:_SHOWN])
        print(f"launch: packages changed since the job's last start: {shown} ({len(differences)} in all)", flush=True)
