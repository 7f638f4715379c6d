"""The sender's part of element deltas: a host copy of what was sent last, and the encoding of new tensors against it."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tepo_megatron.weight_sync.bucket_format import dtype_name
from tepo_megatron.weight_sync.element_deltas import Encoding, bits_of, checksum, encode, thread_count


@dataclass
class _SentTensor:
    """A host copy of a tensor as it was sent last, and its CRC-32."""

    tensor: Tensor
    crc32: int


class DeltaEncoder:
    """Encodes the tensors that this rank sends, and keeps a copy of each in host memory."""

    def __init__(self) -> None:
        self._sent: dict[str, _SentTensor] = {}
        self._threads: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """See the class."""
        return sum(sent.tensor.nbytes for sent in self._sent.values())

    def encode(
        self, tensors: Iterable[tuple[str, Tensor]], against_base: bool, encodings: dict[str, Encoding]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, what to send) of each tensor, and note how it is encoded.

        What is sent is a payload of type uint8, or the whole tensor, where a delta does not pay or has no base. Several tensors
        are encoded at a time, in threads; the tensors are iterated in the calling thread.

        Args:
            against_base: Whether all receivers have what was sent last. False: everything is sent whole.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(thread_count(), "encode weights")
        waiting: deque[tuple[str, Future[tuple[Tensor, Encoding]]]] = deque()
        for name, tensor in tensors:
            there = tensor.detach().to("cpu").contiguous()
            waiting.append((name, self._threads.submit(self._encode, name, there, against_base)))
            if len(waiting) > thread_count():
                yield self._finished(*waiting.popleft(), encodings)
        while waiting:
            yield self._finished(*waiting.popleft(), encodings)

    def whole(self, names: Sequence[str], encodings: dict[str, Encoding]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of tensors as they were sent last, the widest dtypes first."""
        for name in sorted(names, key=lambda name: -self._sent[name].tensor.element_size()):
            sent = self._sent[name]
            encodings[name] = Encoding(tuple(sent.tensor.shape), dtype_name(sent.tensor), sent.crc32)
            yield name, sent.tensor

    def close(self) -> None:
        """Free the copies and end the threads. A second call does nothing."""
        self._sent = {}
        if self._threads is not None:
            self._threads.shutdown()
        self._threads = None

    def _finished(
        self, name: str, encoded: Future[tuple[Tensor, Encoding]], encodings: dict[str, Encoding]
    ) -> tuple[str, Tensor]:
        tensor, encodings[name] = encoded.result()
        return name, tensor

    def _encode(self, name: str, tensor: Tensor, against_base: bool) -> tuple[Tensor, Encoding]:
        """Return what to send of a tensor on the CPU, and replace the copy of it."""
        new = bits_of(tensor)
        encoding = Encoding(tuple(tensor.shape), dtype_name(tensor), checksum(new))
        sent = self._sent.get(name)
        if sent is None:
            self._sent[name] = _SentTensor(tensor.clone(), encoding.crc32)
            return tensor, encoding
        base = bits_of(sent.tensor)
        delta = encode(base, new) if against_base else None
        if delta is not None:
            encoding = replace(encoding, base_crc32=sent.crc32, changed=delta.changed, mask_bytes=delta.mask_bytes)
            tensor = torch.frombuffer(bytearray(delta.payload), dtype=torch.uint8)
        np.copyto(base, new)
        sent.crc32 = encoding.crc32
        return tensor, encoding
