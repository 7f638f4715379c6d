"""Find the directories that the user names on the command line."""

import re
from pathlib import Path

from tepo_megatron.base.errors import CheckpointError
from tepo_megatron.checkpoint.convert import HF_FOLDER
from tepo_megatron.models.hf_io import carried_files

# a checkpoint in the folder of a run of this package
_STEP = re.compile(r"step-(\d{8,})")
# Megatron-LM: this file names the newest of the directories iter_0000123
_LATEST = "latest_checkpointed_iteration.txt"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def hf_directory(name: str) -> Path:
    """Return `name` if it is a directory, else the directory of the hub's model of that id, from the local cache or downloaded.

    Raises CheckpointError when `name` is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"{path}: no such directory; give a Hugging Face model directory, or an id such as Qwen/Qwen3-0.6B"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.safetensors.index.json", *carried_files()]))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, ValueError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise CheckpointError(
            f"{name}: neither a directory nor a model that can be fetched from the Hugging Face hub ({reason}); "
            "download it where there is a network, and give the directory"
        ) from None


def megatron_directory(path: Path) -> Path:
    """Return the directory of one checkpoint: `path` itself or the newest checkpoint in it. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; give a Megatron checkpoint (a directory with .metadata)")
    latest = path / _LATEST
    if (path / ".metadata").exists():
        return path
    if steps := sorted((int(m[1]), p) for p in path.iterdir() if (m := _STEP.fullmatch(p.name))):
        return steps[-1][1]
    if not latest.exists():
        return path
    text = latest.read_text().strip()
    if not re.fullmatch(r"\d+|release", text):
        raise CheckpointError(f"{latest}: holds {text!r}, which is no iteration; give the directory of one checkpoint")
    newest = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not newest.is_dir():
        raise CheckpointError(f"{newest}: no such directory, though {latest} names it; give the directory of one checkpoint")
    return newest


def carried_folder(checkpoint: Path, base: Path | None) -> Path:
    """Return the folder with config and tokenizer for a Megatron checkpoint.

    Args:
        base: a HF directory to use instead of what the checkpoint carries; None: the checkpoint's own folder.
    Raises:
        CheckpointError: the folder has no config.json.
    """
    folder = base or checkpoint / HF_FOLDER
    if not (folder / "config.json").exists():
        option = "" if base else " with --hf"
        raise CheckpointError(f"{folder / 'config.json'}: not found; give the model's Hugging Face directory{option}")
    return folder
