"""What the user names as a checkpoint, as a Hugging Face directory that an engine can load."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tepo_megatron.errors import CheckpointError


@contextlib.contextmanager
def hf_model(path: Path, scratch: Path, tell: Callable[[str], None]) -> Iterator[Path]:
    """The model: `path` itself, the `hf` folder in it (of a run, or of a checkpoint with checkpoint.hf), or what a Megatron
    checkpoint (a run's newest) is converted to, in a folder of `scratch` that is gone afterwards.

    Raises CheckpointError naming what is missing, and as `weights.convert.exporting`.
    """
    for folder in (path, path / "hf"):
        if is_model(folder):
            yield folder
            return
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such directory; give a Hugging Face model, a run, or a Megatron checkpoint "
            "(`hf download REPO --local-dir DIR` fetches a model)"
        )
    from tepo_megatron.weights.convert.places import megatron_directory

    checkpoint = megatron_directory(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if not (checkpoint / ".metadata").exists():
        raise CheckpointError(
            f"{checkpoint}: neither a Hugging Face model (config.json and *.safetensors) nor a Megatron checkpoint (.metadata)"
        )
    if is_model(checkpoint / "hf"):
        yield checkpoint / "hf"
        return
    with tempfile.TemporaryDirectory(dir=scratch, prefix="converted-") as converted:
        tell(f"{checkpoint} is converted to a Hugging Face model")
        _convert(checkpoint, Path(converted) / "hf")
        yield Path(converted) / "hf"


def is_model(folder: Path) -> bool:
    """Whether it holds a config and weights."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _convert(checkpoint: Path, out: Path) -> None:
    """On the CPU, whatever the machine has."""
    from tepo_megatron.platform import activate
    from tepo_megatron.quiet import quiet_upstream

    quiet_upstream()
    activate("cpu")
    from tepo_megatron.weights.convert.exporting import export_hf

    export_hf(checkpoint, out)
