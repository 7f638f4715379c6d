"""The folder of one server: the model as it sees it, and room for what it would leave in /tmp when it is killed."""

from __future__ import annotations

import tempfile
from pathlib import Path

HIDDEN = "generation_config.json"  # sampling defaults and stop tokens of the model's author, which every server would obey


class ServedModel:
    """path: links to the files of `model`, its advice on sampling left out; scratch: for the server's sockets and the like."""

    def __init__(self, model: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tepo-served-")
        self.path, self.scratch = Path(self._folder.name) / "model", Path(self._folder.name) / "tmp"
        self.path.mkdir()
        self.scratch.mkdir()
        for file in model.iterdir():
            if file.name != HIDDEN:
                (self.path / file.name).symlink_to(file.resolve())

    def remove(self) -> None:
        """All of it, the model's own files excepted."""
        self._folder.cleanup()
