"""Read Hugging Face checkpoints tensor by tensor, and write sharded ones that are complete or absent.

Loading, conversion, preflight and doctor share the checks that a model directory and a run fit its config.json.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron.base.errors import CheckpointError, ConfigError, ConversionError
from tepo_megatron.base.foreign_files import SNIFFED_BYTES, eos_token_ids, foreign_kind
from tepo_megatron.base.storage import sync
from tepo_megatron.base.tensor_files import follow_umask
from tepo_megatron.models.families.family import Family
from tepo_megatron.models.ops import Architecture

INDEX = "model.safetensors.index.json"
_CARRIED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"  # of a tokenizer that has several
_WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")  # names of safetensors


class HfReader:
    """Reads the tensors of a HF directory by name, lazily: only one tensor is in memory at a time.

    The constructor and every method raise CheckpointError for a missing or damaged file. `get` raises ConversionError for a
    missing tensor and for one that is not floating point of 16 to 64 bits: a cast would turn the integers of a quantized model
    into weights.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file_of = self._index()

    def names(self) -> set[str]:
        """Return all tensor names."""
        return set(self._file_of)

    def get(self, name: str) -> Tensor:
        """Return one tensor on the host in its stored dtype, as a memory map of its file: pages are read where they are
        touched.
        """
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
        """Return all tensors on the meta device, by name: their shapes and dtypes. No data are read."""
        shapes = {}
        for file in sorted(set(self._file_of.values())):
            with self._open(file) as f:
                tensors = f.keys()
                shapes.update({name: torch.empty_like(f.get_tensor(name), device="meta") for name in tensors})
        return shapes

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
        for file in sorted(set(self.path.glob("*-of-*.safetensors")) - set(files)):
            with self._open(file) as f:
                left_out = set(f.keys()) - names.keys()
            if left_out:
                raise CheckpointError(
                    f"{index}: leaves out {file.name}, which lies next to it and has {min(left_out)}; copy the index again, or "
                    "remove the file if it belongs to another model"
                )
        return names

    @staticmethod
    def _open(file: Path) -> safe_open:
        """Open a safetensors file. Raises CheckpointError when it is missing or damaged."""
        try:
            return safe_open(file, framework="pt", device="cpu")
        except FileNotFoundError:
            raise CheckpointError(f"{file}: missing, though the index names it; copy the model directory again") from None
        except SafetensorError as e:
            with file.open("rb") as opened:
                kind = foreign_kind(opened.read(SNIFFED_BYTES))
            fault = f"is {kind}" if kind else f"truncated or corrupt ({e}); copy the file again"
            raise CheckpointError(f"{file}: {fault}") from None


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether dtype, shape and all bits are equal, so that 0.0 differs from -0.0."""
    integers = {2: torch.int16, 4: torch.int32}.get(a.element_size(), torch.uint8)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(integers), b.view(integers))


def write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path, prefix: str, limit: int) -> dict[str, list[str]]:
    """Write a stream of named tensors to `prefix-00000.safetensors`, `prefix-00001.safetensors` and so on.

    Host memory holds the tensors of one file, and one more tensor.

    Args:
        limit: most bytes of tensors in a file; a single tensor may have more.
    Returns:
        The tensor names of each file, in the order of writing.

    Raises:
        CheckpointError: a file cannot be written; the message names it.
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
        bucket.clear()  # before the next is filled
    return written


def _buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Yield dicts of tensors, copied to the host, of at most `limit` bytes each or with a single larger tensor."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        # A copy, because safetensors refuses tensors that share a storage, and parameters change while files are written.
        bucket[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if bucket:
        yield bucket


def write_index(directory: Path, written: dict[str, list[str]], total_bytes: int) -> None:
    """Write the index that makes several files one HF checkpoint. `total_bytes`: bytes of all tensors."""
    weight_map = {name: file for file, names in written.items() for name in names}
    text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    (directory / INDEX).write_text(text)


def carried_files() -> tuple[str, ...]:
    """Return the names of the files that accompany the weights: config, generation config, tokenizer."""
    return (*_CARRIED, f"{_TEMPLATES}/*")


def carry_over(source: Path, target: Path, dtype: torch.dtype | None = None, stop_token_ids: Sequence[int] = ()) -> None:
    """Copy config, generation config and tokenizer of the base model, as far as they exist.

    Args:
        dtype: dtype of the weights, to be stated in config.json; None: config.json stays as it is.
        stop_token_ids: tokens that ended a response besides the model's; generation_config.json names them, for engines.
    """
    for name in _CARRIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, target / _TEMPLATES, dirs_exist_ok=True)
    if dtype is not None:
        config = json.loads((target / "config.json").read_text())
        set_config(target, {"dtype" if "dtype" in config else "torch_dtype": str(dtype).removeprefix("torch.")})
    if stop_token_ids:
        path = target / "generation_config.json"
        advice = json.loads(path.read_text()) if path.exists() else {}
        stops = {*stop_token_ids, *eos_token_ids(json.loads((target / "config.json").read_text())), *eos_token_ids(advice)}
        path.write_text(json.dumps(advice | {"eos_token_id": sorted(stops)}, indent=2))


class CarriedTensors:
    """The tensors of a HF directory that no model here has, and that exports copy unchanged (`Family.carries`).

    A directory without weights has none.
    """

    def __init__(self, directory: Path, carries: Callable[[str], bool]) -> None:
        stored = next(directory.glob("*.safetensors"), None) is not None
        self._reader = HfReader(directory) if stored else None
        self.names = sorted(filter(carries, self._reader.names())) if self._reader else []  # their names, sorted

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            yield name, self.get(name)

    def get(self, name: str) -> Tensor:
        """Return one tensor."""
        assert self._reader is not None, "a directory without weights carries no tensor"
        return self._reader.get(name)

    def shapes(self) -> dict[str, Tensor]:
        """Return the tensors on the meta device, by name."""
        shapes = self._reader.shapes() if self._reader else {}
        return {name: shapes[name] for name in self.names}


def set_config(directory: Path, changes: Mapping[str, Any]) -> None:
    """Change fields of config.json. If no value changes, the file stays as it is, byte for byte."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if config | changes != config:
        path.write_text(json.dumps(config | changes, indent=2))


def publish(temporary: Path, final: Path) -> None:
    """Sync a finished directory to disk, and rename it to its final path.

    A directory that is already there is moved aside first and removed afterwards. Raises OSError if a file cannot be synced or
    a directory cannot be renamed.
    """
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    former = final.with_name(final.name + ".former")
    shutil.rmtree(former, ignore_errors=True)
    if final.exists():
        final.rename(former)
    temporary.rename(final)
    shutil.rmtree(former, ignore_errors=True)
    sync(final.parent)


def check_tensors(reader: HfReader, family: Family, arch: Architecture) -> None:
    """Raise ConversionError if a tensor is missing or left over, or if a head contradicts tied embeddings."""
    expected = family.tensor_names(arch)
    if missing := expected - reader.names():
        raise ConversionError(
            f"{reader.path}: tensor {min(missing)} (and {len(missing) - 1} more) is missing; the weights do not belong to this "
            "config.json, or a file was not copied"
        )
    extra = {n for n in reader.names() - expected if not family.ignores(n)}
    if arch.tied_embeddings and "lm_head.weight" in extra:
        if not torch.equal(reader.get("lm_head.weight"), reader.get(family.embedding)):
            raise ConversionError(
                f"{reader.path}: lm_head.weight differs from {family.embedding}, but config.json has "
                "tie_word_embeddings=true; set it to false, or remove lm_head.weight"
            )
        extra.remove("lm_head.weight")
    if extra:
        raise ConversionError(
            f"{reader.path}: tensor {min(extra)} (and {len(extra) - 1} more) is in no row of family {family.name}; the weights "
            "do not belong to this config.json"
        )


def check_positions(family: Family, hf_config: Mapping[str, Any], lengths: Mapping[str, int]) -> None:
    """Raise ConfigError if a length, by the keys that add up to it, exceeds the positions of the model.

    YaRN and its kind scale the positions by their factor, as vLLM and SGLang count; Llama 3's are scaled already.
    """
    arch = family.architecture(hf_config)
    text = hf_config.get(family.text_config) if family.text_config is not None else hf_config
    rope = (text or {}).get("rope_parameters") or (text or {}).get("rope_scaling") or {}
    limit, kind = arch.max_positions, rope.get("rope_type", rope.get("type"))
    if kind in ("yarn", "linear", "dynamic"):
        original = rope.get("original_max_position_embeddings") or arch.max_positions
        limit = max(limit, int(original * float(rope.get("factor") or 1)))
    for keys, length in lengths.items():
        if length > limit:
            raise ConfigError(f"{keys} = {length} tokens, and the model has max_position_embeddings={limit}; lower them")
