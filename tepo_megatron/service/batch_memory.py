"""The rollouts of a step as flat arrays in shared memory, which every rank of the machine maps.

The service writes a batch into a memory file without a name (memfd), which ends with the processes that hold it open. The ranks
of its machine open it below /proc of the service; `trainer/batch_receiver.py` brings it to other machines. A token takes
9 bytes: int32 id, fp32 log-prob, bool mask. Sampling masks, where sampling is truncated, are in the same file: int32 number of
ids of each response token, and int32 ids. The experts of a token, hundreds of bytes, are in a second file.
"""

import hashlib
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tepo_megatron.base.types import Rollout, SamplingMask
from tepo_megatron.monitor.metrics import Pair

_TOKEN_FIELDS = {
    "token_ids_L": np.dtype(np.int32),
    "rollout_logprobs_L": np.dtype(np.float32),
    "response_mask_L": np.dtype(np.bool_),
}
_MASKS = {"counts_N": np.dtype(np.int32), "ids_M": np.dtype(np.int32)}  # of `SamplingMask`
_COLUMNS = (
    "prompt_id", "policy_version", "stop_reason", "reward", "score", "status", "later_versions", "servers", "terms", "sample",
)  # fmt: skip
_DIGEST_BYTES = 8


@dataclass(frozen=True)
class BatchHeader:
    """The small part of a step's rollouts."""

    path: str  # file with the flat arrays, on the machine of the service
    experts_path: str  # file with the experts there; empty if there are none
    lengths: tuple[int, ...]
    # Field of `Rollout` -> its value for each sequence. The gold answers are left out: no rank needs them.
    columns: Mapping[str, tuple[Any, ...]]
    prompt_experts: tuple[bytes, ...]  # see `Rollout.prompt_experts`, for each sequence
    experts: tuple[np.dtype[Any], int, int] | None  # (dtype, MoE layers, experts per token) if the experts are there; else None
    metrics: Mapping[str, Pair]
    seconds: Mapping[str, float]
    masks: tuple[int, int] = (0, 0)  # (response tokens, ids of all their sampling masks); (0, 0) if the masks are not there
    ids: tuple[int, ...] = ()  # index of each sequence in the rollout batch; see `TrainBatch.ids_B`
    is_last: bool = True  # False for a minibatch after which others of its step follow

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all sequences."""
        return sum(self.lengths)

    @property
    def nbytes(self) -> int:
        """Return the size of the file in bytes, without the experts."""
        return 4 * sum(self.masks) + self.tokens * sum(dtype.itemsize for dtype in _TOKEN_FIELDS.values())

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of the experts of a token; 0 if there are none."""
        if self.experts is None:
            return 0
        dtype, layers, chosen = self.experts
        return dtype.itemsize * layers * chosen


class BatchMemory:
    """The batches that the service has written and the ranks have not read yet."""

    def __init__(self) -> None:
        self._files: dict[str, list[int]] = {}  # path -> file descriptors, of the tokens and of the experts

    def write(
        self,
        rollouts: Sequence[Rollout],
        metrics: Mapping[str, Pair],
        seconds: Mapping[str, float],
        ids: Sequence[int] | None = None,
        is_last: bool = True,
    ) -> BatchHeader:
        """Write graded rollouts into new files and return the header. Experts are written if every rollout has them."""
        experts = [r.experts_LKT for r in rollouts if r.experts_LKT is not None]
        shape = None
        if experts and len(experts) == len(rollouts):
            narrowest = min((x.dtype for x in experts), key=lambda dtype: dtype.itemsize)
            experts = [x.to(narrowest) for x in experts]
            shape = (experts[0].numpy().dtype, *experts[0].shape[1:])
        digests = tuple(map(_digest, rollouts, experts)) if shape is not None else (b"",) * len(rollouts)
        columns = {name: tuple(getattr(r, name) for r in rollouts) for name in _COLUMNS}
        lengths = tuple(r.token_ids_L.numel() for r in rollouts)
        (file, path), (experts_file, experts_path) = new_file(), new_file() if shape is not None else (-1, "")
        self._files[path] = [descriptor for descriptor in (file, experts_file) if descriptor >= 0]
        present = [r.sampling_mask for r in rollouts if r.sampling_mask is not None]
        masks = SamplingMask.cat(present if len(present) == len(rollouts) else [])
        sizes = (masks.counts_N.numel(), masks.ids_M.numel())
        numbers = tuple(range(len(rollouts)) if ids is None else ids)
        header = BatchHeader(path, experts_path, lengths, columns, digests, shape, metrics, seconds, sizes, numbers, is_last)
        if header.nbytes:
            arrays = token_arrays(header, map_file(file, header.nbytes))
            for name in _TOKEN_FIELDS:
                arrays[name].copy_(torch.cat([getattr(r, name) for r in rollouts]))
            arrays["counts_N"].copy_(masks.counts_N)
            arrays["ids_M"].copy_(masks.ids_M)
        if header.nbytes and shape is not None:
            torch.cat(experts, out=experts_of(header, map_file(experts_file, header.tokens * header.expert_bytes)))
        return header

    def release(self, path: str) -> None:
        """Close the files of a batch that all ranks have mapped. A second call does nothing."""
        for file in self._files.pop(path, []):
            os.close(file)


def new_file() -> tuple[int, str]:
    """Return the descriptor of a new memory file without a name, and its path for the processes of this machine."""
    file = os.memfd_create("rollouts", os.MFD_CLOEXEC)
    return file, f"/proc/{os.getpid()}/fd/{file}"


def map_file(file: int, nbytes: int) -> mmap.mmap:
    """Return the shared mapping of a file, which is made as large as that. What nobody writes takes no memory."""
    os.ftruncate(file, nbytes)
    return mmap.mmap(file, nbytes)


def token_arrays(header: BatchHeader, memory: mmap.mmap) -> dict[str, Tensor]:
    """Return the flat arrays in the mapped tokens' file, by field of `Rollout` or `SamplingMask`; they share its memory."""
    arrays, offset, masks = {}, 0, dict(zip(_MASKS, header.masks, strict=True))
    for name, dtype in {**_MASKS, **_TOKEN_FIELDS}.items():  # the wider integers first, so that all are aligned
        tokens = masks.get(name, header.tokens)
        arrays[name] = torch.from_numpy(np.frombuffer(memory, dtype, tokens, offset))
        offset += tokens * dtype.itemsize
    return arrays


def experts_of(header: BatchHeader, memory: mmap.mmap) -> Tensor:
    """Return the experts in a mapping of their file, [tokens, K, T]."""
    assert header.experts is not None
    dtype, *shape = header.experts
    return torch.from_numpy(np.frombuffer(memory, dtype).reshape(header.tokens, *shape))


def _digest(rollout: Rollout, experts_LKT: Tensor) -> bytes:
    experts = experts_LKT[: rollout.prompt_length].contiguous().numpy()
    return hashlib.blake2b(memoryview(experts).cast("B"), digest_size=_DIGEST_BYTES).digest()
