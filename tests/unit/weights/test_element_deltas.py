"""Element deltas are exact for every dtype, and whatever is damaged is refused before much memory is taken."""

from __future__ import annotations

import tracemalloc
from dataclasses import asdict, replace

import numpy as np
import pyarrow
import pytest
import torch

from tepo_megatron.weight_sync.element_deltas import (
    PAYS_BELOW,
    ElementDelta,
    Encoding,
    RefusedDelta,
    bits_of,
    checksum,
    decode,
    encode,
)

DTYPES = ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "uint8", "int64"]
SHAPES = [(1,), (), (7, 3), (4, 16), (257, 1024)]


def random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    itemsize = getattr(torch, dtype).itemsize
    size = int(np.prod(shape)) * itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)


def changed(tensor: torch.Tensor, share: float, seed: int = 1) -> torch.Tensor:
    """Return a copy in which about this share of the elements has another lowest byte."""
    new = tensor.clone()
    rows = new.view(torch.uint8).reshape(-1, tensor.element_size()) if tensor.dim() else new.reshape(1).view(torch.uint8)[None]
    chosen = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed)) < share
    rows[chosen, 0] ^= 1
    return new


def encoding_of(tensor: torch.Tensor, base: torch.Tensor, delta: ElementDelta) -> Encoding:
    dtype = str(tensor.dtype).removeprefix("torch.")
    crcs = checksum(bits_of(tensor)), checksum(bits_of(base))
    return Encoding(tuple(tensor.shape), dtype, *crcs, delta.changed, delta.mask_bytes)


def payload(delta: ElementDelta) -> np.ndarray:
    return np.frombuffer(delta.payload, np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_delta_gives_back_every_bit(dtype: str, shape: tuple[int, ...], share: float) -> None:
    base = random(shape, dtype)
    new = changed(base, share)
    if (delta := encode(bits_of(base), bits_of(new))) is None:
        assert base.nbytes < 100 or share == 1.0  # small tensors gain nothing over zstd's own header
        return
    assert delta.changed == (bits_of(base) != bits_of(new)).sum() and len(delta.payload) <= PAYS_BELOW * base.nbytes
    before = bits_of(base).copy()
    encoding = encoding_of(new, base, delta)
    assert Encoding.from_json(asdict(encoding)) == encoding
    assert np.array_equal(decode(bits_of(base), payload(delta), encoding), bits_of(new))
    assert np.array_equal(bits_of(base), before)


def test_many_deltas_after_each_other_give_back_every_bit() -> None:
    held = bits_of(random((65, 129), "bfloat16")).copy()
    now = held.copy()
    for step in range(50):
        new = bits_of(changed(torch.from_numpy(now.view(np.int16)).view(torch.bfloat16), 0.05, seed=step))
        delta = encode(now, new)
        assert delta is not None
        held = decode(held, payload(delta), Encoding((now.size,), "bfloat16", 0, 0, delta.changed, delta.mask_bytes))
        now = new.copy()
    assert np.array_equal(held, now)


def test_a_tensor_that_changed_in_all_bits_is_not_encoded_beyond_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    compressed = []

    class Counted:
        def __init__(self, *args: object, **settings: object) -> None:
            self.codec = codec(*args, **settings)

        def compress(self, data: np.ndarray, asbytes: bool) -> bytes:
            compressed.append(memoryview(data).nbytes)
            return self.codec.compress(data, asbytes=asbytes)

    codec = pyarrow.Codec
    monkeypatch.setattr(pyarrow, "Codec", Counted)
    base, new = random((1024, 1024), "bfloat16", 0), random((1024, 1024), "bfloat16", 1)
    assert encode(bits_of(base), bits_of(new)) is None
    assert len(compressed) == 2 and sum(compressed) < base.nbytes / 8


BASE = random((64, 64), "bfloat16")
NEW = changed(BASE, 0.2)


def sent() -> tuple[ElementDelta, Encoding]:
    delta = encode(bits_of(BASE), bits_of(NEW))
    assert delta is not None
    return delta, encoding_of(NEW, BASE, delta)


@pytest.mark.parametrize("cut", [1, 20, 100, -1])
def test_a_payload_that_is_too_short_or_too_long_is_refused(cut: int) -> None:
    delta, encoding = sent()
    wrong = delta.payload[:-cut] if cut > 0 else delta.payload + b"\0"
    with pytest.raises(RefusedDelta):
        decode(bits_of(BASE), np.frombuffer(wrong, np.uint8), encoding)


@pytest.mark.parametrize(
    "wrong",
    [{"changed": 1}, {"changed": 64 * 64}, {"changed": -1}, {"changed": 10**15}, {"mask_bytes": 3}, {"mask_bytes": 10**9}],
)
def test_sizes_that_are_not_those_of_the_payload_are_refused(wrong: dict[str, int]) -> None:
    delta, encoding = sent()
    with pytest.raises(RefusedDelta):
        decode(bits_of(BASE), payload(delta), replace(encoding, **wrong))


def test_a_base_of_another_size_is_refused() -> None:
    delta, encoding = sent()
    with pytest.raises(RefusedDelta):
        decode(bits_of(BASE)[:-64], payload(delta), encoding)


def test_a_decompression_bomb_takes_no_memory() -> None:
    """256 MiB of zeros, compressed to 8 kB, in place of the values: only the announced bytes may be allocated."""
    delta, encoding = sent()
    bomb = pyarrow.Codec("zstd", compression_level=1).compress(np.zeros(2**28, np.uint8), asbytes=True)
    wrong = np.frombuffer(delta.payload[: delta.mask_bytes] + bomb, np.uint8)
    before = pyarrow.default_memory_pool().max_memory() or 0
    tracemalloc.start()
    try:
        with pytest.raises(RefusedDelta, match="cannot be decompressed"):
            decode(bits_of(BASE), wrong, encoding)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20 and (pyarrow.default_memory_pool().max_memory() or 0) - before < 2**20


@pytest.mark.parametrize("place", [5, 40, -5])
def test_a_damaged_byte_gives_another_checksum_or_is_refused(place: int) -> None:
    delta, encoding = sent()
    damaged = payload(delta).copy()
    damaged[place] ^= 0x10
    try:
        decoded = decode(bits_of(BASE), damaged, encoding)
    except RefusedDelta:
        return
    assert checksum(decoded) != encoding.crc32
