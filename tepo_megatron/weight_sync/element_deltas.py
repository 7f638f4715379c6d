"""Element deltas (`sync.delta=elements`): only the elements of a tensor whose bits changed are sent, compressed.

A delta is a mask with one bit for each element, which is 1 where the element changed, and the XOR of the new and the old bits
of each changed element. In bf16 an optimizer's step moves an element by few units in the last place, so the high bytes of these
XORs are mostly 0: the values are stored byte by byte, all low bytes first. Mask and values are compressed with zstd, level 1.
They are at the start and at the end of the payload.

Runs in the trainer and inside the servers. A receiver knows all sizes before it decompresses anything.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tepo_megatron.utils.control_groups import usable_cores

PAYS_BELOW = 0.6  # a delta is sent if its payload is at most this part of the tensor's bytes
_SAMPLE = 2**15  # elements of each of the three pieces from which the size of a payload is estimated
_LEVEL = 1
_MOST_THREADS = 8

Bits = NDArray[np.unsignedinteger[Any]]


class RefusedDelta(Exception):
    """A tensor cannot be decoded, or is not what was sent. Sent whole, it can be accepted."""


@dataclass(frozen=True)
class Encoding:
    """The way in which a tensor is sent with `sync.delta=elements`.

    Attributes:
        dtype: Name of its dtype in `torch`.
        crc32: CRC-32 of its bytes.
        base_crc32: CRC-32 of the bytes to which the delta is applied; None: the tensor is sent whole.
        mask_bytes: Bytes of the compressed mask, at the start of the payload.
    """

    shape: tuple[int, ...]
    dtype: str
    crc32: int
    base_crc32: int | None = None
    changed: int = 0
    mask_bytes: int = 0

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Encoding":
        """Return the encoding whose fields `dataclasses.asdict` gave."""
        return cls(**{**fields, "shape": tuple(fields["shape"])})


@dataclass(frozen=True)
class ElementDelta:
    """One encoded difference of two tensors.

    Attributes:
        payload: Compressed mask, then compressed values.
        changed, mask_bytes: See `Encoding`.
    """

    payload: bytes
    changed: int
    mask_bytes: int


def thread_count() -> int:
    """Return the number of threads in which one process encodes or decodes tensors."""
    return min(_MOST_THREADS, usable_cores())


def bits_of(tensor: Tensor) -> Bits:
    """Return a flat view of a contiguous CPU tensor's bits, as unsigned integers of the elements' size."""
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"u{tensor.element_size()}")


def checksum(bits: Bits) -> int:
    """Return the CRC-32 of the bytes of `bits_of` a tensor."""
    return zlib.crc32(bits.view(np.uint8).data)


def encode(base: Bits, new: Bits) -> ElementDelta | None:
    """Return the delta that leads from `base` to `new`. None: it does not pay, see `PAYS_BELOW`.

    A sample decides first, so that a tensor that changed everywhere costs little.

    Args:
        base, new: The bits of two tensors of the same dtype and number of elements.
    """
    difference = base ^ new
    if difference.size > 6 * _SAMPLE:
        starts = (0, (difference.size - _SAMPLE) // 2, difference.size - _SAMPLE)
        sampled = np.concatenate([difference[start : start + _SAMPLE] for start in starts])
        if not _pays(_compressed(sampled), sampled):
            return None
    delta = _compressed(difference)
    return delta if _pays(delta, difference) else None


def decode(base: Bits, payload: Bits, encoding: Encoding) -> Bits:
    """Return the bits of the new tensor; `base` is not changed.

    Args:
        payload: The bytes that were sent, uint8.
    Raises:
        RefusedDelta: The payload is damaged, or does not fit the base.
    """
    if not (0 <= encoding.changed <= base.size and 0 <= encoding.mask_bytes <= payload.size):
        raise RefusedDelta(f"{encoding.changed} of {base.size} elements, {encoding.mask_bytes} of {payload.size} bytes of mask")
    mask = _decompress(payload[: encoding.mask_bytes], -(-base.size // 8))
    places = np.flatnonzero(np.unpackbits(mask, count=base.size).view(bool))
    if places.size != encoding.changed:
        raise RefusedDelta(f"the mask has {places.size} elements instead of {encoding.changed}")
    planes = _decompress(payload[encoding.mask_bytes :], encoding.changed * base.itemsize)
    new = base.copy()
    new[places] ^= np.ascontiguousarray(planes.reshape(base.itemsize, -1).T).reshape(-1).view(base.dtype)
    return new


def _compressed(difference: Bits) -> ElementDelta:
    changed = difference != 0
    values = difference[changed]
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(-1, difference.itemsize).T)
    mask = _codec().compress(np.packbits(changed), asbytes=True)
    return ElementDelta(mask + _codec().compress(planes, asbytes=True), values.size, len(mask))


def _pays(delta: ElementDelta, difference: Bits) -> bool:
    return len(delta.payload) <= PAYS_BELOW * difference.nbytes


def _decompress(compressed: Bits, size: int) -> Bits:
    """Return `size` bytes, and never allocate more. Raises RefusedDelta if there are not as many."""
    try:
        return np.frombuffer(_codec().decompress(compressed.tobytes(), decompressed_size=size), np.uint8)
    except OSError as e:
        raise RefusedDelta(f"cannot be decompressed into {size} bytes ({e})") from None


def _codec() -> Any:
    import pyarrow  # not at the top: servers load it only where deltas are sent

    return pyarrow.Codec("zstd", compression_level=_LEVEL)
