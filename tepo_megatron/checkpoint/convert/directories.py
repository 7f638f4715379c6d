"""The directories of a conversion: find those that the user names, and create one that appears complete or not at all."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tepo_megatron.base.errors import CheckpointError, TepoError
from tepo_megatron.checkpoint.convert import HF_FOLDER
from tepo_megatron.models import hf_io
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


@contextlib.contextmanager
def new_directory(out: Path, expected_bytes: int) -> Iterator[Path]:
    """Yield a directory `out.partial` to fill. When the block ends without an exception, sync it to disk and rename it to
    `out`.

    What an earlier, killed run left in `out.partial` is replaced. After an exception nothing is left.

    Args:
        expected_bytes: bytes that will be written.
    Raises:
        CheckpointError: `out` exists, its file system has fewer than `expected_bytes` free, another process is filling
            `out.partial`, or the block raises OSError (a full disk).
    """
    if os.path.lexists(out):
        raise CheckpointError(f"{out}: exists already; remove it, or give another --out")
    partial = out.with_name(out.name + ".partial")
    with _own(partial):
        check_space(partial, expected_bytes)
        try:
            yield partial
            hf_io.publish(partial, out)
        except BaseException as e:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(e, OSError) and not isinstance(e, TepoError):
                raise CheckpointError(f"{out}: cannot be written ({e}); {_free(out.parent)} there") from None
            raise


def check_space(directory: Path, wanted: int) -> None:
    """Raise CheckpointError, and remove the directory, when its file system lacks the space.

    Args:
        wanted: bytes that will be written.
    """
    if shutil.disk_usage(directory).free < wanted:
        free = _free(directory)
        shutil.rmtree(directory, ignore_errors=True)
        raise CheckpointError(
            f"{directory}: {wanted / 2**30:.2f} GiB are needed, {free}; free some space, or give another --out"
        )


@contextlib.contextmanager
def _own(partial: Path) -> Iterator[None]:
    """Create an empty directory, locked within the block, so that no other conversion takes it for abandoned.

    The lock ends with the process at the latest.
    """
    try:
        partial.mkdir(parents=True, exist_ok=True)
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        raise CheckpointError(f"{partial}: cannot be made ({e}); give another --out") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{partial}: another conversion writes it; wait for it, or give another --out") from None
        except OSError:
            pass  # the file system has no locks
        for entry in partial.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        yield
    finally:
        os.close(handle)


def _free(directory: Path) -> str:
    return f"{shutil.disk_usage(directory).free / 2**30:.2f} GiB are free"


Advance = Callable[[int], object]


@contextlib.contextmanager
def progress_bar(title: str, total_bytes: int) -> Iterator[Advance]:
    """Show a progress bar on stderr within the block, if that is a terminal.

    Args:
        total_bytes: bytes of the whole conversion.
    Yields:
        A function to call with the number of bytes done since its last call.
    """
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda n: progress.advance(task, n)
