"""Keep tensors of the actor in host memory: its state while the engine uses the device, and activations until backward.

The state is restored bit for bit. Storages are offloaded, not tensors. Megatron's parameters, their gradients, the shards that
it reduces and gathers, and the optimizer's masters of an fp32 model are views of a few buffers, and many objects hold these
views. A storage that is resized to 0 keeps its views. Resized back it may have another address, and all views follow. In
between no view may be used: `require` checks that.

Megatron's own offloading of activations (`fine_grained_activation_offloading`, 0.16 to 0.19) learns from the first update which
tensors there are, and keeps a pool of buffers for each shape. That does not fit packed microbatches, which differ in number and
in length. Here autograd's saved-tensor hooks offload whatever an operation saves; with `training.recompute`, the inputs of
recomputed modules.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from tepo_megatron.actor.rotary import PACKED
from tepo_megatron.base.hardware import LEAST_OFFLOADED
from tepo_megatron.dist.platform import memory
from tepo_megatron.dist.platform.memory import HostArena, HostPiece, HostStacks

Part = Literal["gradients", "optimizer", "parameters"]
PARTS: tuple[Part, ...] = ("gradients", "optimizer", "parameters")
# nowhere: free the part and restore it as zeros; host: copy it to host memory; stays: leave it (a CPU's memory is the host's)
Target = Literal["nowhere", "host", "stays"]
ON_CUDA: Mapping[Part, Target] = {"gradients": "nowhere", "optimizer": "host", "parameters": "host"}
ON_CPU: Mapping[Part, Target] = {"gradients": "nowhere", "optimizer": "stays", "parameters": "stays"}


@dataclass
class _Offloaded:
    """An offloaded storage of `size` bytes. copy: uint8, its contents on the host; None if they are not kept."""

    storage: torch.UntypedStorage
    size: int
    copy: Tensor | None


class Offloader:
    """Offloads parts of an actor from its device and restores them.

    Gradients hold no values between two updates and are not copied. On a GPU the copies are in page-locked memory, an arena for
    each part, which is kept for the next time because locking pages takes longer than filling them.
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
        self._away: dict[Part, list[_Offloaded]] = {}
        self._arenas: dict[Part, HostArena] = {part: HostArena(device) for part in PARTS}

    def require(self, what: str, parts: Iterable[Part] = PARTS) -> None:
        """Raise RuntimeError if one of the parts is offloaded. Its tensors have no memory then."""
        if missing := [part for part in parts if part in self._away]:
            raise RuntimeError(f"{what} needs the {' and '.join(missing)}, which are offloaded; load them first")

    @torch.no_grad()
    def release(self, parts: Iterable[Part]) -> None:
        """Offload parts and free their device memory for other processes. Raises RuntimeError if one is offloaded already."""
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
        memory.release_cached_memory(self._device)

    @torch.no_grad()
    def restore(self, parts: Iterable[Part]) -> None:
        """Restore parts bit for bit, gradients as 0. Parts that are not offloaded stay as they are."""
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
        """Return the bytes of host memory that the copies take."""
        return sum(arena.allocated for arena in self._arenas.values())

    @property
    def copies(self) -> list[Tensor]:
        """Return the copies in host memory of all storages that are offloaded now, each a uint8 view of its part's arena."""
        return [away.copy for parts in self._away.values() for away in parts if away.copy is not None]

    def _copied(self, part: Part) -> list[_Offloaded]:
        """Start the copies of a part to the host, and return its storages, none if the part stays."""
        if self._targets[part] == "stays":
            return []
        storages = self._storages(part)
        if self._targets[part] == "nowhere":
            return [_Offloaded(storage, storage.nbytes(), None) for storage in storages]
        copies = self._arenas[part].pieces([storage.nbytes() for storage in storages])
        for storage, copy in zip(storages, copies, strict=True):
            copy.copy_(_bytes(storage), non_blocking=True)
        return [_Offloaded(storage, storage.nbytes(), copy) for storage, copy in zip(storages, copies, strict=True)]

    def _storages(self, part: Part) -> list[torch.UntypedStorage]:
        """Return the storages of a part, each once: those on the device that have memory. A storage that parameters and
        optimizer share belongs to the parameters.
        """
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._tensors(part)}
        if part == "optimizer":
            for tensor in self._tensors("parameters"):
                storages.pop(tensor.untyped_storage()._cdata, None)
        return [storage for storage in storages.values() if storage.device.type == self._device.type and storage.nbytes()]

    def _tensors(self, part: Part) -> Iterator[Tensor]:
        if part == "optimizer":
            yield from optimizer_tensors(self._optimizer)
            return
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data if part == "gradients" else buffer.param_data


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield the fp32 masters and the optimizer state of each. Moments exist from the first step on."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not part.is_stub_optimizer:
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    yield main
                    yield from (value for value in part.optimizer.state.get(main, {}).values() if isinstance(value, Tensor))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def drop_device_caches(chunks: Iterable[nn.Module]) -> None:
    """Drop the caches that Transformer Engine, Megatron-Core and this package keep on the device between two updates.

    No parameter, gradient or optimizer state is among them: the next forward pass computes what it needs again. They must not
    take device memory while the inference engine uses the device.
    """
    drop_fp8_workspaces(chunks)
    drop_dummy_gradients()
    drop_rotary_tables()


def drop_fp8_workspaces(chunks: Iterable[nn.Module]) -> None:
    """Drop the FP8 copies of weights that Transformer Engine's modules keep: about 2 bytes for each parameter in FP8.

    In 2.20.2 every module has them in `_fp8_workspaces`, a dict by the weight's name. The first microbatch of an update or of a
    pass, which Megatron's schedules announce (`is_first_microbatch`), fills them, and the other microbatches use them. A
    forward pass that finds none quantizes the weight and keeps the result, in any microbatch.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if (workspaces := getattr(module, "_fp8_workspaces", None)) is not None:
                workspaces.clear()


def drop_dummy_gradients() -> None:
    """Drop the dummy gradients that autograd gets where a fused product adds the real gradient to `main_grad`.

    Transformer Engine 2.20.2 keeps one for each shape of a weight in `_dummy_wgrads`; Megatron's own layers share them.
    """
    if (base := sys.modules.get("transformer_engine.pytorch.module.base")) is not None:
        base._dummy_wgrads.clear()


def drop_rotary_tables() -> None:
    """Drop the rotary angles and tables."""
    RotaryEmbedding.forward.cache_clear()
    PACKED.clear()


@dataclass
class _OffloadedTensor:
    """A saved tensor in host memory."""

    piece: HostPiece
    host: Tensor
    device: torch.device
    stream: torch.cuda.Stream | None = None
    ready: torch.cuda.Event | None = None


class HostActivations:
    """A context in which tensors that autograd saves are copied to the host, and back to the device for backward.

    On a GPU the copies go to page-locked memory on a separate stream. On a CPU they are made too, only so that tests can count
    them. The bits of the tensors do not change.

    Attributes:
        least_bytes: As given. It may be changed between two uses of the context.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], device: torch.device, least_bytes: int = LEAST_OFFLOADED) -> None:
        self._chunks, self.least_bytes = chunks, least_bytes
        # Host memory, one stack per microbatch in flight. A microbatch begins with the forward pass of a chunk.
        self.memory = HostStacks(device)
        self._stay: set[int] = set()
        self._stream: torch.cuda.Stream | None = None
        self.moved = 0

    def __enter__(self) -> "HostActivations":
        self._stay = {p.untyped_storage().data_ptr() for chunk in self._chunks for p in chunk.parameters()}
        self.memory.settle()
        self._begins = [chunk.register_forward_pre_hook(lambda *_: self.memory.begin()) for chunk in self._chunks]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._away, self._back)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        for hook in self._begins:
            hook.remove()

    def _away(self, x: Tensor) -> Tensor | _OffloadedTensor:
        """Copy a tensor that autograd saves to the host, unless it must stay on the device."""
        storage = x.untyped_storage()
        if _in_backward() or x.nbytes < self.least_bytes or type(x) is not Tensor or storage.data_ptr() in self._stay:
            return x
        if x.nbytes > storage.nbytes():  # expanded, like the experts' token indices: a copy takes more than it frees
            return x
        self.moved += x.nbytes
        piece = self.memory.take(x.nbytes)
        strides = torch.empty_like(x, device="meta").stride()
        host = piece.data.view(x.dtype).as_strided(x.shape, strides)
        if not x.is_cuda:
            host.copy_(x)
            return _OffloadedTensor(piece, host, x.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self._stream)  # the allocator must not reuse its memory before the copy is done
        return _OffloadedTensor(piece, host, x.device, self._stream, self._stream.record_event())

    def _back(self, kept: Tensor | _OffloadedTensor) -> Tensor:
        """Return the saved tensor on its device."""
        if isinstance(kept, Tensor):
            return kept
        back = torch.empty_like(kept.host, device=kept.device)
        if kept.stream is None:
            return back.copy_(kept.host)
        current = torch.cuda.current_stream(kept.device)
        current.wait_event(kept.ready)
        back.copy_(kept.host, non_blocking=True)
        kept.stream.wait_stream(current)  # the next copy into this host memory must come after this one
        return back


def _in_backward() -> bool:
    """Return whether backward is running. Tensors saved then come from recomputation and are used at once."""
    return bool(torch._C._current_graph_task_id() != -1)  # torch.utils.checkpoint uses the same test
