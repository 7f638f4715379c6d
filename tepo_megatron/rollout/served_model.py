"""The model's folder as a server sees it."""

from __future__ import annotations

import tempfile
from pathlib import Path

HIDDEN = "generation_config.json"  # sampling defaults and stop tokens of the model's author, which every server would obey


def without_generation_config(model: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder of links to the files of `model`, its advice on sampling left out; `cleanup()` removes the links."""
    folder = tempfile.TemporaryDirectory(prefix="tepo-served-")
    for file in model.iterdir():
        if file.name != HIDDEN:
            (Path(folder.name) / file.name).symlink_to(file.resolve())
    return folder
