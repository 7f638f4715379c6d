"""State of a weight update inside a process of an inference server: what was received, and the groups it is received over.

The same code runs in the servers of all engines. Weights come in files, in memory that the trainer shares, or by broadcast. A
broadcast round is received in full before the model is touched. Then each process reports it in the trainer's store, because an
engine's own answer says nothing about its single ranks, and some engines end on an error. Nothing is kept of a round that did
not arrive. The trainer sends it again in new groups, and the processes that have it already drop it.
"""

import json
import logging
import os
import re
import socket
import stat
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from tepo_megatron.wire.broadcast_group import BroadcastGroup, BrokenGroup, GroupSpec, UnchangedTensors, join_store, signal
from tepo_megatron.wire.bucket_format import Bucket, open_buffer

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


logger = logging.getLogger(__name__)
_CPU = torch.device("cpu")


class Membership:
    """Membership of one process in the groups of a spec, one group for each sender. A thread forms the groups."""

    def __init__(self, spec: GroupSpec, local_rank: int, device: torch.device) -> None:
        self.groups: dict[int, BroadcastGroup] = {}
        self.joined = threading.Event()
        self._left, self._closing = threading.Event(), threading.Lock()
        self._spec, self._rank, self._device = spec, spec.first + local_rank, device
        self._store: dist.Store | None = None

    def start(self) -> None:
        threading.Thread(target=self._form, name="join groups", daemon=True).start()

    def _form(self) -> None:
        until = time.monotonic() + self._spec.join_seconds
        try:
            self._store = join_store(self._spec)
            signal(self._store, self._spec.joining_key(self._rank))
            for sender in range(self._spec.senders):
                group = BroadcastGroup.form(self._spec, sender, self._rank, self._device, until, self._is_wanted)
                self.groups[sender] = group
            self.joined.set()
            signal(self._store, self._spec.joined_key(self._rank))
        except (BrokenGroup, RuntimeError) as e:
            logger.warning("tepo: could not join %s: %s", self._spec.name, e)
            self._left.set()
        if self._left.is_set():
            self._close()

    def _is_wanted(self) -> bool:
        assert self._store is not None
        return not self._left.is_set() and not self._store.check([self._spec.cancelled_key()])

    def report(self, number: int) -> None:
        """Report to rank 0 of the trainer, through the store, that a round arrived. Raises BrokenGroup."""
        assert self._store is not None
        signal(self._store, self._spec.arrived_key(number, self._rank))

    def leave(self) -> None:
        """Leave the groups, or give up forming them."""
        self._left.set()
        if self.joined.is_set():
            self._close()

    def _close(self) -> None:
        with self._closing:
            self.joined.clear()
            while self.groups:
                self.groups.popitem()[1].close()


class RankReceiver:
    """Receiver of weight updates, one per process of a server.

    `in_trainer_memory`: whether the last round lies in memory of the trainer, which overwrites it two rounds later.
    """

    def __init__(self) -> None:
        self.in_trainer_memory = False
        self._update: UpdateTracker | None = None
        self._next = 0  # number of the next round
        # Versions of the model now, before the current update, and after it. None where an update did not state its version
        # (only `keep_unchanged` states it).
        self._version: int | None = None
        self._before: int | None = None
        self._coming: int | None = None
        self._device = _CPU
        self.membership: Membership | None = None

    def begin(self, model: str | Path, tied_embeddings: bool, device: torch.device = _CPU) -> None:
        """Begin an update, and forget what an earlier one gave."""
        self._device = device
        self._update, self._next = UpdateTracker(model, tied_embeddings), 0
        self._before, self._version, self._coming = self._version, None, None

    def keep_unchanged(self, unchanged: UnchangedTensors) -> None:
        """Note the tensors that the update leaves unchanged."""
        assert self._update is not None, "the update has to begin first"
        if unchanged.names and unchanged.base != self._before:
            raise ValueError(
                f"{len(unchanged.names)} tensors are to stay as in version {unchanged.base}, but this process has version "
                f"{self._before if self._before is not None else 'unknown'}"
            )
        self._update.keep_unchanged(unchanged.names)
        self._coming = unchanged.version

    @property
    def unchanged(self) -> frozenset[str]:
        """Hugging Face names of the tensors that the update under way leaves unchanged."""
        assert self._update is not None, "the update has to begin first"
        return self._update.unchanged

    def join_groups(self, spec: GroupSpec, device: torch.device, local_rank: int | None = None) -> None:
        """Leave the old process groups and begin to form new ones.

        A thread forms them, so that the server answers health requests meanwhile. Errors are only logged: the trainer notices
        that the report of this rank is missing in its store. `local_rank`: rank of this process in its server. None: that in
        its default group.
        """
        self.leave()
        self._device = device
        if local_rank is None:
            local_rank = dist.get_rank() if dist.is_initialized() else 0
        self.membership = Membership(spec, local_rank, device)
        self.membership.start()

    def leave(self) -> None:
        """Leave all groups."""
        if self.membership is not None:
            self.membership.leave()
        self.membership = None

    def take(self, sources: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Receive one round, and return an iterator over its (name, tensor), which has to be used up before the next round.

        Collectives: for a broadcast round, one broadcast per bucket, in the same order on all ranks of the server.

        Returns:
            None if there is nothing to load, because the round did not arrive or was loaded already. The trainer learns
            which.

        Raises ValueError if the tensors are not the model's (see `UpdateTracker.add`), or the round is out of order. The
        iterator raises it for a tensor that was damaged.
        """
        assert self._update is not None, "the update has to begin first"
        buckets = [Bucket.from_json(source) for source in sources if source.startswith("{")]
        self.in_trainer_memory = bool(buckets) and buckets[0].handle is not None
        if not buckets:
            self._update.add(check_files(sources))
            return tensors(sources)
        if self.in_trainer_memory:
            self._note(buckets)
            return self._borrow(buckets)
        if (rows := self._receive(buckets)) is None:
            return None
        number = buckets[0].number
        if number == self._next - 1:
            self._report(number)
            return None
        if not self._report(number):
            return None
        self._note(buckets)
        return (item for bucket, row in zip(buckets, rows, strict=True) for item in bucket.tensors(row))

    def _note(self, buckets: Sequence[Bucket]) -> None:
        """Note that the tensors of this round were given. Raises ValueError; see `take`."""
        assert self._update is not None
        self._check_order(buckets[0].number)
        self._update.add([(c.name, list(c.shape)) for bucket in buckets for c in bucket.contents])
        self._next += 1

    def _check_order(self, number: int) -> None:
        if number != self._next:
            raise ValueError(f"round {number} of the update came when round {self._next} was due")

    def _borrow(self, buckets: Sequence[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of each bucket in turn."""
        for bucket in buckets:
            assert bucket.handle is not None
            with open_buffer(bucket.handle, self._device) as row:
                yield from bucket.tensors(row)

    def finish(self) -> None:
        """End the update. Raises ValueError if a tensor of the model was not given."""
        assert self._update is not None, "the update has to begin first"
        self._update.finish()
        self._version = self._coming

    def _receive(self, buckets: Sequence[Bucket]) -> list[torch.Tensor] | None:
        """Receive the buckets' rows of bytes (uint8), in the order that all ranks of the server follow.

        None: they did not arrive.
        """
        member = self.membership
        if member is None or not member.joined.is_set():
            return None
        rows = []
        try:
            for bucket in buckets:
                row = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
                member.groups[bucket.sender].start(row)
                member.groups[bucket.sender].wait()
                rows.append(row)
        except BrokenGroup as e:
            logger.warning("tepo: round %d did not arrive: %s", buckets[0].number, e)
            self.leave()
            return None
        return rows

    def _report(self, number: int) -> bool:
        """Report a round to the trainer; return whether the report arrived. Otherwise the groups are left."""
        assert self.membership is not None
        try:
            self.membership.report(number)
        except BrokenGroup as e:
            logger.warning("tepo: round %d could not be reported: %s", number, e)
            self.leave()
            return False
        return True
