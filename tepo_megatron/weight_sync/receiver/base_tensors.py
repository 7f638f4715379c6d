"""A server process's copy of the weights, to which element deltas are applied. Runs inside the servers."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.weight_sync.bucket_format import dtype_name
from tepo_megatron.weight_sync.element_deltas import Encoding, RefusedDelta, bits_of, checksum, decode, thread_count


@dataclass(frozen=True)
class DecodedTensor:
    """A tensor in host memory, and its CRC-32."""

    tensor: Tensor
    crc32: int


class BaseTensors:
    """Host copies of the tensors of the last update, by Hugging Face name.

    The CRC-32 of each copy was computed from its bytes when it was decoded. A copy that was damaged later is noticed with the
    next delta, because the result then has another CRC-32 than the sender's.
    """

    def __init__(self) -> None:
        self.held: dict[str, DecodedTensor] = {}

    def decode(self, arrived: Iterable[tuple[str, Tensor, Encoding]]) -> dict[str, DecodedTensor]:
        """Return the tensors of a round, in new memory. Nothing is kept yet, see `keep`.

        Raises:
            RefusedDelta: A delta does not fit what is held here, or something was damaged on its way.
        """
        with ThreadPoolExecutor(thread_count()) as threads:
            decoding = [(name, threads.submit(self._decode, name, sent, how)) for name, sent, how in arrived]
            return {name: tensor.result() for name, tensor in decoding}

    def keep(self, decoded: dict[str, DecodedTensor]) -> None:
        """Keep these tensors in the place of the former ones."""
        self.held |= decoded

    def clear(self) -> None:
        """Free all copies."""
        self.held = {}

    def _decode(self, name: str, sent: Tensor, encoding: Encoding) -> DecodedTensor:
        dtype = getattr(torch, encoding.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise RefusedDelta(f"{name}: {encoding.dtype} is no dtype")
        if encoding.base_crc32 is None:
            whole = torch.empty(sent.shape, dtype=sent.dtype).copy_(sent)
            if whole.dtype != dtype or tuple(whole.shape) != encoding.shape:
                raise RefusedDelta(f"{name}: {whole.dtype} {tuple(whole.shape)} instead of {dtype} {encoding.shape}")
        else:
            base = self.held.get(name)
            if base is None or base.crc32 != encoding.base_crc32:
                raise RefusedDelta(f"{name}: {'no base' if base is None else 'another base'} is held here")
            if base.tensor.dtype != dtype or tuple(base.tensor.shape) != encoding.shape:
                raise RefusedDelta(f"{name}: the base is {dtype_name(base.tensor)} {tuple(base.tensor.shape)}")
            if sent.dtype != torch.uint8 or sent.dim() != 1:
                raise RefusedDelta(f"{name}: a payload of {sent.dtype} with {sent.dim()} dimensions")
            bits = decode(bits_of(base.tensor), bits_of(sent.cpu().contiguous()), encoding)
            whole = torch.from_numpy(bits.view("u1")).view(dtype).reshape(encoding.shape)
        if (found := checksum(bits_of(whole))) != encoding.crc32:
            raise RefusedDelta(f"{name}: CRC-32 {found:08x} instead of {encoding.crc32:08x}")
        return DecodedTensor(whole, found)
