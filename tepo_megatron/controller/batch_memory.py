"""The rollouts of a step as flat arrays in shared memory, which every rank of the machine maps.

The service writes a batch into a memory file without a name (memfd), which ends with the processes that hold it open. The ranks
of its machine open it below /proc of the service. To every other machine rank 0 broadcasts it once; there the lowest rank makes
such a file for the others. A token takes 9 bytes: int32 id, fp32 log-prob, bool mask; its experts come on top.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.distributed.objects import all_gather_object
from tepo_megatron.observability.metrics import Pair
from tepo_megatron.types import Rollout

if TYPE_CHECKING:  # the service imports no Megatron-Core
    from tepo_megatron.distributed.parallel import ParallelDims

_TOKEN_FIELDS = {
    "token_ids_L": np.dtype(np.int32),
    "rollout_logprobs_L": np.dtype(np.float32),
    "response_mask_L": np.dtype(np.bool_),
}
_COLUMNS = ("prompt_id", "policy_version", "stop_reason", "reward", "score", "status", "later_versions", "servers", "terms")
_PID_NAMESPACE, _BOOT = Path("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class BatchHeader:
    """The small part of a step's rollouts.

    Attributes:
        path: File with the flat arrays, on the machine of the service.
        lengths: Tokens of each sequence, prompt and response.
        columns: Field of `Rollout` -> its value for each sequence. The gold answers are left out: no rank needs them.
        experts: (dtype, MoE layers, experts per token) if the experts are there; else None.
        metrics: Pairs of `Metrics` over everything that the step sampled.
        seconds: Seconds of sampling and grading, by phase.
    """

    path: str
    lengths: tuple[int, ...]
    columns: Mapping[str, tuple[Any, ...]]
    experts: tuple[np.dtype[Any], int, int] | None
    metrics: Mapping[str, Pair]
    seconds: Mapping[str, float]

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all sequences."""
        return sum(self.lengths)

    @property
    def nbytes(self) -> int:
        """Return the size of the file in bytes."""
        per_token = sum(dtype.itemsize for dtype in _TOKEN_FIELDS.values())
        if self.experts is not None:
            dtype, layers, chosen = self.experts
            per_token += dtype.itemsize * layers * chosen
        return self.tokens * per_token


class BatchMemory:
    """The batches that the service has written and the ranks have not read yet."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}  # path -> file descriptor

    def write(self, rollouts: Sequence[Rollout], metrics: Mapping[str, Pair], seconds: Mapping[str, float]) -> BatchHeader:
        """Write graded rollouts into a new file and return the header. Experts are written if every rollout has them.

        Args:
            rollouts: Of one step, contiguous by prompt.
            metrics, seconds: See `BatchHeader`.
        """
        experts = [r.experts_LKT for r in rollouts if r.experts_LKT is not None]
        shape = None
        if experts and len(experts) == len(rollouts):
            narrowest = min((x.dtype for x in experts), key=lambda dtype: dtype.itemsize)
            experts = [x.to(narrowest) for x in experts]
            shape = (experts[0].numpy().dtype, *experts[0].shape[1:])
        columns = {name: tuple(getattr(r, name) for r in rollouts) for name in _COLUMNS}
        lengths = tuple(r.token_ids_L.numel() for r in rollouts)
        file, path = _new_file()
        self._files[path] = file
        header = BatchHeader(path, lengths, columns, shape, metrics, seconds)
        if header.nbytes:
            os.ftruncate(file, header.nbytes)
            arrays = _arrays(header, mmap.mmap(file, header.nbytes))
            for name in _TOKEN_FIELDS:
                arrays[name].copy_(torch.cat([getattr(r, name) for r in rollouts]))
            if shape is not None:
                arrays["experts_LKT"].copy_(torch.cat(experts))
        return header

    def release(self, path: str) -> None:
        """Close a file that all ranks have mapped. A second call does nothing."""
        if (file := self._files.pop(path, None)) is not None:
            os.close(file)


def read(header: BatchHeader, path: str) -> list[Rollout]:
    """Return the rollouts. Their log-probs and masks lie in the shared file; a write to them stays in this process.

    Args:
        header: The header.
        path: The file on this machine.
    """
    if not header.lengths:
        return []
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), header.nbytes, access=mmap.ACCESS_COPY)
    arrays = _arrays(header, memory)
    arrays["token_ids_L"] = arrays["token_ids_L"].long()
    per_token = {name: array.split(header.lengths) for name, array in arrays.items()}
    fields = {**header.columns, **per_token}
    return [Rollout(**{name: values[i] for name, values in fields.items()}) for i in range(len(header.lengths))]


def _new_file() -> tuple[int, str]:
    file = os.memfd_create("rollouts", os.MFD_CLOEXEC)
    return file, f"/proc/{os.getpid()}/fd/{file}"


def _arrays(header: BatchHeader, memory: mmap.mmap) -> dict[str, Tensor]:
    """Return the flat arrays of a file, by field of `Rollout`; they share its memory."""
    found, offset, tokens = {}, 0, header.tokens
    for name, dtype in _TOKEN_FIELDS.items():
        found[name] = torch.from_numpy(np.frombuffer(memory, dtype, tokens, offset))
        offset += tokens * dtype.itemsize
    if header.experts is not None:
        dtype, *shape = header.experts
        found["experts_LKT"] = torch.from_numpy(np.frombuffer(memory, dtype, -1, offset).reshape(tokens, *shape))
    return found


class BatchReceiver:
    """Brings batches from the service to all ranks. Make one with `open`; all ranks make the same calls."""

    def __init__(self, groups: "ParallelDims", machines: Sequence[Sequence[int]], leaders: dist.ProcessGroup | None) -> None:
        """Store the machines.

        Args:
            groups: The mesh of this run.
            machines: The ranks of each machine, that of rank 0 first.
            leaders: The lowest ranks of all machines; None if there is only one machine.
        """
        self._groups, self._leaders = groups, leaders
        self._leader = next(ranks[0] for ranks in machines if groups.rank in ranks)

    @classmethod
    def open(cls, groups: "ParallelDims", machine: object | None = None) -> "BatchReceiver":
        """Find out which ranks share a machine. Collectives: one all-gather over the host group, one new group.

        Args:
            groups: The mesh of this run.
            machine: Equal for the ranks that see each other's files below /proc. None: found out.
        """
        machines: dict[object, list[int]] = {}
        mine = (_BOOT.read_text(), os.readlink(_PID_NAMESPACE)) if machine is None else machine
        for rank, its in enumerate(all_gather_object(mine, groups.host)):
            machines.setdefault(its, []).append(rank)
        leaders = [ranks[0] for ranks in machines.values()]
        group = dist.new_group(leaders, backend=dist.get_backend(groups.host)) if len(leaders) > 1 else None
        return cls(groups, list(machines.values()), group if groups.rank in leaders else None)

    def receive(self, header: BatchHeader) -> list[Rollout]:
        """Return the rollouts of a header that every rank has.

        When it returns on any rank, the service may release the file. Collectives: one all-gather over the host group; with
        several machines one broadcast over their lowest ranks.

        Args:
            header: The same on every rank.
        """
        groups, copy = self._groups, None
        path = header.path if self._leader == 0 else ""
        if self._leaders is not None and header.nbytes:
            copy, path = self._exchange(header)
        paths = all_gather_object(path, groups.host)
        rollouts = read(header, paths[self._leader])
        dist.barrier(group=groups.host)
        if copy is not None:
            os.close(copy)
        return rollouts

    def _exchange(self, header: BatchHeader) -> tuple[int | None, str]:
        """Broadcast the file to the lowest ranks of all machines; return the new file, None on rank 0, and its path."""
        file, path = (os.open(header.path, os.O_RDWR), header.path) if self._groups.is_main else _new_file()
        if not self._groups.is_main:
            os.ftruncate(file, header.nbytes)
        with mmap.mmap(file, header.nbytes) as memory:
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            dist.broadcast(flat, 0, group=self._leaders)
            del flat
        if self._groups.is_main:
            os.close(file)
            return None, path
        return file, path
