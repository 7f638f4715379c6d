"""Turn the checkpoint that a user names into a Hugging Face directory that an engine can load."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from tepo_megatron.errors import CheckpointError
from tepo_megatron.utils.scratch import PrivateFolder


@contextlib.contextmanager
def hf_model(path: Path, scratch: Path, tell: Callable[[str], None]) -> Iterator[Path]:
    """Yield a Hugging Face directory of the model.

    This is `path` itself, the `hf` folder in it (of a run, or of a checkpoint saved with checkpoint.hf), or the result of
    converting the Megatron checkpoint (the newest one of a run). A converted model is deleted on exit.

    Raises:
        CheckpointError: Something is missing, which the message names; or as `weights.convert.exporting`.
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
    from tepo_megatron.convert.places import megatron_directory

    checkpoint = megatron_directory(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if not (checkpoint / ".metadata").exists():
        raise CheckpointError(
            f"{checkpoint}: neither a Hugging Face model (config.json and *.safetensors) nor a Megatron checkpoint (.metadata)"
        )
    if is_model(checkpoint / "hf"):
        yield checkpoint / "hf"
        return
    with PrivateFolder.create("converted", scratch) as converted:
        tell(f"{checkpoint} is converted to a Hugging Face model")
        _convert(checkpoint, converted.path / "hf")
        yield converted.path / "hf"


def is_model(folder: Path) -> bool:
    """Return whether the folder holds a config and weights."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def weights_digest(folder: Path) -> str:
    """Return a digest of the weights in a Hugging Face directory, whose files it reads once."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _convert(checkpoint: Path, out: Path) -> None:
    """Convert the checkpoint on the CPU, even if the machine has a GPU."""
    from tepo_megatron.platform import activate
    from tepo_megatron.utils.quiet import quiet_upstream

    quiet_upstream()
    activate("cpu")
    from tepo_megatron.convert.exporting import export_hf

    export_hf(checkpoint, out)
