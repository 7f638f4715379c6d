"""Hugging Face checkpoints on disk: read tensor by tensor, write sharded, never leave half a one behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron.errors import CheckpointError, ConversionError

INDEX = "model.safetensors.index.json"
_CARRIED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")  # of safetensors


class HfReader:
    """The tensors of a HF directory, by name, read lazily (one tensor in memory at a time).

    Raises CheckpointError for a missing or truncated file, ConversionError for a missing tensor or one that is not floating
    point of 16 to 64 bits: a cast would take the integers of a quantized model for its weights.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file_of = self._index()

    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._file_of)

    def get(self, name: str) -> Tensor:
        """One tensor, on the host, in its stored dtype: a map of its file, which takes memory where it is touched."""
        if name not in self._file_of:
            raise ConversionError(f"{self.path}: tensor {name} is missing; the weights do not belong to this config.json")
        with self._open(self._file_of[name]) as f:
            dtype = f.get_slice(name).get_dtype()
            if dtype not in _WEIGHT_DTYPES:
                raise ConversionError(
                    f"{self._file_of[name]}: tensor {name} is {dtype}, not floating point of at least 16 bits; use the model "
                    "that was not quantized, or convert it to bfloat16 first"
                )
            return f.get_tensor(name)

    def shapes(self) -> dict[str, Tensor]:
        """All tensors on the meta device: their shapes and dtypes. No data are read."""
        found = {}
        for file in sorted(set(self._file_of.values())):
            with self._open(file) as f:
                tensors = f.keys()
                found.update({name: torch.empty_like(f.get_tensor(name), device="meta") for name in tensors})
        return found

    def _index(self) -> dict[str, Path]:
        index = self.path / INDEX
        if index.exists():
            try:
                files = sorted({self.path / f for f in json.loads(index.read_text())["weight_map"].values()})
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise CheckpointError(f"{index}: not a safetensors index ({e!r}); copy the file again") from None
        else:
            files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{self.path}: no *.safetensors found; model.path must be a Hugging Face model directory")
        names: dict[str, Path] = {}
        for file in files:
            with self._open(file) as f:
                here = f.keys()
            if twice := names.keys() & here:
                raise CheckpointError(
                    f"{file}: tensor {min(twice)} is also in {names[min(twice)].name}; remove the file that does not belong"
                )
            names.update(dict.fromkeys(here, file))
        return names

    @staticmethod
    def _open(file: Path) -> safe_open:
        try:
            return safe_open(file, framework="pt", device="cpu")
        except FileNotFoundError:
            raise CheckpointError(f"{file}: missing, though the index names it; copy the model directory again") from None
        except SafetensorError as e:
            raise CheckpointError(f"{file}: truncated or corrupt ({e}); copy the file again") from None


def write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path, prefix: str, limit: int) -> dict[str, list[str]]:
    """Write a stream of named tensors as `prefix-00000.safetensors`, ... of at most `limit` bytes each (or one tensor).

    Returns file name -> tensor names, in writing order. On the host, one file's tensors and the next one are held at a time.
    Raises CheckpointError naming the directory when a file cannot be written.
    """
    written: dict[str, list[str]] = {}
    for i, bucket in enumerate(_buckets(tensors, limit)):
        file = f"{prefix}-{i:05d}.safetensors"
        try:
            save_file(bucket, directory / file, {"format": "pt"})
            follow_umask(directory / file)
        except (OSError, SafetensorError) as e:
            wanted, free = sum(t.nbytes for t in bucket.values()), shutil.disk_usage(directory).free
            raise CheckpointError(
                f"{directory / file}: cannot be written ({e}): {wanted / 2**20:.0f} MiB wanted, {free / 2**20:.0f} MiB free; "
                "free some space (in a container, /dev/shm grows with --shm-size)"
            ) from None
        written[file] = list(bucket)
    return written


def _buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Dicts of at most `limit` bytes (one tensor may exceed it alone), copied to the host."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        # a storage of its own: safetensors refuses tensors that share one, and parameters change while files are written
        bucket[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if bucket:
        yield bucket


def follow_umask(path: Path) -> None:
    """Give a file the mode that any new file of this process has: safetensors makes its files 0600. Raises OSError."""
    status = Path("/proc/self/status").read_text()
    umask = int(status.split("Umask:")[1].split()[0], 8)  # `os.umask` would change it for a moment, for all threads
    path.chmod(0o666 & ~umask)


def write_index(directory: Path, written: dict[str, list[str]], total_bytes: int) -> None:
    """The index that makes several shards one HF checkpoint. total_bytes: of all tensors."""
    weight_map = {name: file for file, names in written.items() for name in names}
    text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    (directory / INDEX).write_text(text)


def carried_files() -> tuple[str, ...]:
    """Names of the files that accompany the weights: config, generation config, tokenizer."""
    return _CARRIED


def carry_over(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy config, generation config and tokenizer of the base model. dtype: of the weights, for the config; None: as it is."""
    for name in _CARRIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    if dtype is not None:
        config = json.loads((target / "config.json").read_text())
        set_config(target, {"dtype" if "dtype" in config else "torch_dtype": str(dtype).removeprefix("torch.")})


def set_config(directory: Path, changes: Mapping[str, Any]) -> None:
    """Change fields of config.json; what changes nothing leaves the file as it is, byte for byte."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if config | changes != config:
        path.write_text(json.dumps(config | changes, indent=2))


def publish(temporary: Path, final: Path) -> None:
    """Put a finished directory in its place: written to disk first, then renamed. A former one is moved aside, then removed."""
    for path in (*temporary.rglob("*"), temporary):
        _sync(path)
    former = final.with_name(final.name + ".former")
    shutil.rmtree(former, ignore_errors=True)
    if final.exists():
        final.rename(former)
    temporary.rename(final)
    shutil.rmtree(former, ignore_errors=True)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """A file's data, or a directory's entries, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
