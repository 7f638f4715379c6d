"""Check which tensors an update has to give, and read tensors that come in files. Runs inside the servers."""

import json
import os
import re
import socket
import stat
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import torch
from safetensors import safe_open

# The output layer's name in every Hugging Face causal language model; with tied embeddings it may be there or not.
OUTPUT_LAYER = "lm_head.weight"
NEVER_SENT = re.compile(r"(mtp|model\.visual|visual)\.")  # tensors next to a text model, which the trainer does not load
# tensors of one module that vLLM 0.32 loads together: of an update with one of them alone, it serves undefined numbers
PAIR = ("A_log", "dt_bias")


class UpdateTracker:
    """Bookkeeping of one update: which of the model's tensors were given so far.

    A cast to the served dtype is no error. The check is needed because the engines' own loaders silently keep the old value of
    a missing weight, drop an unknown one, and crop one that is too large.
    """

    def __init__(self, model: str | Path, tied_embeddings: bool) -> None:
        self._expected = {
            name: shape
            for path in sorted(Path(model).glob("*.safetensors"))
            for name, shape in tensor_shapes(path).items()
            if not NEVER_SENT.match(name)
        }
        self._optional = {OUTPUT_LAYER} if tied_embeddings else set()
        self._given: set[str] = set()
        self.unchanged: frozenset[str] = frozenset()  # unchanged by the update

    def keep_unchanged(self, names: Sequence[str]) -> None:
        """Mark tensors that the update leaves unchanged. Raises ValueError if the model does not have one of them."""
        _refuse({"unknown": set(names) - self._expected.keys() - self._optional})
        self.unchanged = frozenset(names)

    def add(self, shapes: Sequence[tuple[str, list[int]]]) -> None:
        """Mark these (name, shape) as given; they are not loaded yet.

        Raises ValueError for a tensor that the model does not have, that has another shape, that was given before, or that was
        to stay unchanged.
        """
        names = Counter(name for name, _ in shapes)
        known = self._expected.keys() | self._optional
        partners = {_partner(name) for name in names.keys() - self.unchanged}
        _refuse({
            "given twice": {name for name, count in names.items() if count > 1 or name in self._given},
            "unknown": names.keys() - known,
            "given that were to stay": names.keys() & self.unchanged,
            "of another shape": {name for name, shape in shapes if shape != self._expected.get(name, shape)},
            "that were to stay without the other of their pair": partners & self.unchanged,
        })  # fmt: skip
        self._given |= names.keys()

    def finish(self) -> None:
        """Raise ValueError if a tensor of the model was neither given nor unchanged."""
        _refuse({"missing": self._expected.keys() - self._given - self.unchanged - self._optional})


def _partner(name: str) -> str:
    """Return the tensor that has to be given with this one; the name itself: none."""
    module, _, kind = name.rpartition(".")
    return f"{module}.{PAIR[1 - PAIR.index(kind)]}" if kind in PAIR else name


def check_files(paths: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return (name, shape) of the tensors in these files."""
    try:
        for path in paths:
            _check_owner(Path(path))
        return [item for path in paths for item in tensor_shapes(path).items()]
    except FileNotFoundError as e:
        raise ValueError(
            f"{e.filename} is not seen on {socket.gethostname()}: shared memory reaches servers on the machines of the "
            "ranks, in containers with the same /dev/shm; for others set sync.transport.folder to a folder that all of "
            "them see, or use sync.transport=group"
        ) from None


def tensors(paths: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, CPU tensor) of each file in turn. Files are memory-mapped: their memory is in use while the tensors are.

    Raises ValueError for a tensor whose CRC-32 differs from the one in the file's header, if there is one (see
    `sync/push.py`).
    """
    for path in paths:
        with safe_open(path, framework="pt") as file:
            checksums = json.loads((file.metadata() or {}).get("crc32", "{}"))
            for name in file.offset_keys():
                tensor = file.get_tensor(name)
                if name in checksums and zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy()) != checksums[name]:
                    raise ValueError(f"{path}: tensor {name} was damaged on its way: its CRC-32 is not that of the sender")
                yield name, tensor


def _check_owner(path: Path) -> None:
    """Raise ValueError unless `path` is a file in a folder of this user with mode 0700. Root may read any user's folder."""
    folder, file = path.parent.lstat(), path.lstat()
    if not stat.S_ISDIR(folder.st_mode) or not stat.S_ISREG(file.st_mode):
        raise ValueError(f"{path}: is a link, or lies in one; weights are read from where their sender wrote them")
    if folder.st_mode & 0o077 or file.st_uid != folder.st_uid or os.geteuid() not in (0, folder.st_uid):
        raise ValueError(
            f"{path}: a file of user {file.st_uid} in a folder of user {folder.st_uid} with mode "
            f"{stat.S_IMODE(folder.st_mode):04o}; user {os.geteuid()} reads weights from folders of its own with mode 0700 "
            "alone: run the trainer and the servers as one user"
        )


def _refuse(faults: Mapping[str, Set[str]]) -> None:
    if texts := [f"{len(them)} {fault}: {', '.join(sorted(them)[:5])}" for fault, them in faults.items() if them]:
        raise ValueError(f"what was sent are not the tensors of the model ({'; '.join(texts)})")


def tensor_shapes(path: str | Path) -> dict[str, list[int]]:
    """Return name -> shape of the tensors in a safetensors file, from its header: 8 bytes of length, then JSON."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
