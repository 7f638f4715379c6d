"""What of the actor leaves the device while the engine has it, and comes back bit for bit.

Storages move, not tensors. Megatron's parameters, their gradients, the shards that it reduces and gathers, and the optimizer's
masters where the model is fp32 are views of a few buffers, found by many owners. A storage that is resized to 0 keeps its
views; grown again it may lie elsewhere, and they all follow. In between they must not be touched, which `require` is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from tepo_megatron.actor.device_caches import drop_device_caches
from tepo_megatron.platform import memory
from tepo_megatron.platform.host_memory import HostArena

Part = Literal["gradients", "optimizer", "parameters"]
PARTS: tuple[Part, ...] = ("gradients", "optimizer", "parameters")
# nowhere: freed, and zero when it comes back; host: copied to host memory; stays: where the device's memory is the host's
Target = Literal["nowhere", "host", "stays"]
ON_CUDA: Mapping[Part, Target] = {"gradients": "nowhere", "optimizer": "host", "parameters": "host"}
ON_CPU: Mapping[Part, Target] = {"gradients": "nowhere", "optimizer": "stays", "parameters": "stays"}


@dataclass
class _Away:
    """A storage without memory. copy: uint8, what it held, None where that is of no use."""

    storage: torch.UntypedStorage
    size: int
    copy: Tensor | None


class Offload:
    """Takes parts of an actor off its device and puts them back.

    Gradients hold nothing between two updates and are not kept. Copies are page-locked where the device is a GPU, and their
    memory, an arena for each part, is kept from one time to the next: to lock pages takes longer than to fill them.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        device: torch.device,
        targets: Mapping[Part, Target] | None = None,
    ) -> None:
        self._chunks, self._optimizer, self._device = chunks, optimizer, device
        self._targets = targets or (ON_CUDA if device.type == "cuda" else ON_CPU)
        self._away: dict[Part, list[_Away]] = {}
        self._arenas: dict[Part, HostArena] = {part: HostArena(device) for part in PARTS}

    def require(self, what: str, parts: Iterable[Part] = PARTS) -> None:
        """Raise RuntimeError when some of the parts are offloaded: what their tensors point to is not theirs then."""
        missing = [part for part in parts if part in self._away]
        if missing:
            raise RuntimeError(f"{what} needs the {' and '.join(missing)}, which are offloaded; load them first")

    @torch.no_grad()
    def release(self, parts: Iterable[Part]) -> None:
        """Take parts off the device, and give the memory to whoever asks for it. Raises RuntimeError if one is away already."""
        parts = list(parts)
        self.require("offloading", parts)
        if "gradients" in parts:
            self._optimizer.zero_grad()  # views of the buffers, or copies of them
        if "parameters" in parts:
            drop_device_caches(self._chunks)
        torch.cuda.synchronize()
        for part in parts:
            self._away[part] = self._copied(part)
        torch.cuda.synchronize()
        for part in parts:
            for away in self._away[part]:
                away.storage.resize_(0)
        memory.give_back(self._device)

    @torch.no_grad()
    def restore(self, parts: Iterable[Part]) -> None:
        """Put parts back, bit for bit but for gradients, which are 0. Those that are here already stay as they are."""
        for part in parts:
            for away in self._away.pop(part, ()):
                away.storage.resize_(away.size)
                if away.copy is None:
                    _bytes(away.storage).zero_()
                else:
                    _bytes(away.storage).copy_(away.copy, non_blocking=True)
        torch.cuda.synchronize()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the copies take."""
        return sum(arena.allocated for arena in self._arenas.values())

    def _copied(self, part: Part) -> list[_Away]:
        if self._targets[part] == "stays":
            return []
        storages = self._storages(part)
        if self._targets[part] == "nowhere":
            return [_Away(storage, storage.nbytes(), None) for storage in storages]
        copies = self._arenas[part].pieces([storage.nbytes() for storage in storages])
        for storage, copy in zip(storages, copies, strict=True):
            copy.copy_(_bytes(storage), non_blocking=True)
        return [_Away(storage, storage.nbytes(), copy) for storage, copy in zip(storages, copies, strict=True)]

    def _storages(self, part: Part) -> list[torch.UntypedStorage]:
        """Each once, on the device and with memory; a storage of the parameters that the optimizer uses too is theirs."""
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._tensors(part)}
        if part == "optimizer":
            for tensor in self._tensors("parameters"):
                found.pop(tensor.untyped_storage()._cdata, None)
        return [storage for storage in found.values() if storage.device.type == self._device.type and storage.nbytes()]

    def _tensors(self, part: Part) -> Iterator[Tensor]:
        if part == "optimizer":
            yield from _optimizer_tensors(self._optimizer)
            return
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data if part == "gradients" else buffer.param_data


def _optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Masters, and what is kept for each of them; moments are there from the first step on."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in parts:
        if not part.is_stub_optimizer:
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    yield main
                    yield from (value for value in part.optimizer.state.get(main, {}).values() if isinstance(value, Tensor))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
