"""Binary answers to generation requests: their format, and the middleware with which a server sends them.

A client asks with `Accept: CONTENT_TYPE`, or `Accept: WITH_EXPERTS` to get the experts of an MoE model too. With TIMED after it
a vLLM server also sends the header `Server-Timing`. A server without the middleware ignores the header and answers in JSON. All
numbers are little-endian, without gaps:

    header                 magic, format, layers and experts per token of the experts, number of samples, length of the body
    samples                one record each: finish reason, lengths, label of the weights
    int32[tokens]          ids of all samples, one sample after the other
    fp32[tokens]           log-probs of all samples, in nats
    int32[...]             sampling masks of each sample that has them: number of ids of each token, then the ids
    integers               experts of all samples, each sample in its own integer type
    uint32                 CRC-32 of everything before
"""

import struct
import time
import zlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONTENT_TYPE = "application/x-tepo-samples"
WITH_EXPERTS = f"{CONTENT_TYPE}; experts=1"
TIMED = "; timing=1"  # added by a client that asks how long its request took
_MAGIC, _FORMAT = b"TPSA", 2
_HEADER = struct.Struct("<4sHHHHIQ")
_SAMPLE = np.dtype(
    [
        ("finish", "u1"),
        ("expert_type", "u1"),
        ("knows_prompt", "<u2"),
        ("tokens", "<u4"),
        ("prompt_tokens", "<u4"),
        ("prompt_crc", "<u4"),
        ("experts", "<u8"),
        ("mask_ids", "<u8"),
        ("label", "S40"),
    ]
)
_CRC = struct.Struct("<I")
_FINISH = ("stop", "length", "abort")
_OTHER = "other"  # a finish reason that is none of these
_EXPERT_TYPES = tuple(np.dtype(name) for name in ("u1", "<u2", "<i2", "<i4"))


@dataclass(frozen=True, eq=False)
class Sample:
    """One sampled response."""

    finish_reason: str  # "stop", "length" or "abort"; another reason arrives as "other"
    label: str  # label of the weights that sampled it, cut at 40 bytes. Empty: unknown, or nothing was sampled.
    prompt_tokens: int  # number of tokens of the prompt, as the engine saw it
    prompt_crc: int | None  # `ids_crc` of the prompt's tokens, as the engine saw them. None: unknown.
    ids_T: NDArray[np.int32]  # int32 response token ids
    logprobs_T: NDArray[np.float32]  # fp32 log-probs in nats
    # Integer [input tokens, layers, experts per token], or flat if the engine does not tell the shape. None: none.
    experts: NDArray[Any] | None = None
    # int32 ids of the sampling masks of all tokens, one after the other, and int32 number of ids of each token. None: none.
    masks: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None


def ids_crc(ids: ArrayLike) -> int:
    """Return the CRC-32 of token ids, as int32."""
    return zlib.crc32(np.asarray(ids, dtype="<i4").tobytes())


def encode(samples: Sequence[Sample]) -> bytes:
    """Return the samples as a binary answer. Raises ValueError if the number of ids and log-probs differ."""
    recorded = [sample.experts for sample in samples if sample.experts is not None]
    layers, per_token = next((experts.shape[1:] for experts in recorded if experts.ndim == 3), (0, 0))
    records = np.zeros(len(samples), _SAMPLE)
    experts, masks = [], []
    for record, sample in zip(records, samples, strict=True):
        if sample.ids_T.shape != sample.logprobs_T.shape:
            raise ValueError(f"{sample.ids_T.size} tokens but {sample.logprobs_T.size} log-probs")
        reason, tokens = sample.finish_reason, sample.ids_T.size
        record["finish"] = _FINISH.index(reason) if reason in _FINISH else len(_FINISH)
        record["knows_prompt"], record["prompt_crc"] = sample.prompt_crc is not None, sample.prompt_crc or 0
        record["tokens"], record["prompt_tokens"], record["label"] = tokens, sample.prompt_tokens, sample.label.encode()
        if sample.masks is not None:
            ids, counts = sample.masks
            record["mask_ids"] = ids.size
            masks += [counts.astype("<i4").tobytes(), ids.astype("<i4").tobytes()] if ids.size else []
        if sample.experts is not None:
            narrow = _narrow(sample.experts)
            experts.append(narrow.tobytes())
            record["expert_type"], record["experts"] = _EXPERT_TYPES.index(narrow.dtype), narrow.size
    parts = [sample.ids_T.astype("<i4").tobytes() for sample in samples]
    parts += [sample.logprobs_T.astype("<f4").tobytes() for sample in samples]
    parts = [records.tobytes(), *parts, *masks, *experts]
    length = _HEADER.size + sum(map(len, parts)) + _CRC.size
    body = b"".join([_HEADER.pack(_MAGIC, _FORMAT, layers, per_token, 0, len(samples), length), *parts])
    return body + _CRC.pack(zlib.crc32(body))


def _narrow(experts: NDArray[Any]) -> NDArray[Any]:
    low, high = (int(experts.min()), int(experts.max())) if experts.size else (0, 0)
    return experts.astype(next(kind for kind in _EXPERT_TYPES if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max))


def decode(body: bytes, samples: int, max_tokens: int) -> list[Sample]:
    """Return the samples of a binary answer. Their arrays are read-only views of `body`: nothing else is allocated.

    Raises ValueError if the answer is damaged, or of another size than was asked for.
    """
    start = _HEADER.size + samples * _SAMPLE.itemsize
    if len(body) < start + _CRC.size:
        raise ValueError(f"a binary answer of {len(body)} bytes, too short for {samples} samples")
    magic, version, layers, per_token, _, count, length = _HEADER.unpack_from(body)
    if (magic, version) != (_MAGIC, _FORMAT):
        raise ValueError(f"no binary answer of format {_FORMAT}")
    if (count, length) != (samples, len(body)):
        raise ValueError(f"{count} samples in {length} bytes instead of {samples} in {len(body)}")
    view = memoryview(body)
    if _CRC.unpack_from(body, len(body) - _CRC.size)[0] != zlib.crc32(view[: -_CRC.size]):
        raise ValueError("a binary answer whose checksum is wrong")
    records = np.frombuffer(body, _SAMPLE, samples, _HEADER.size).tolist()
    tokens = [record[3] for record in records]
    if max(tokens, default=0) > max_tokens:
        raise ValueError(f"{max(tokens)} response tokens, max_tokens={max_tokens}")
    if any(record[1] >= len(_EXPERT_TYPES) for record in records):
        raise ValueError("experts of an unknown type")
    sizes = [record[6] * _EXPERT_TYPES[record[1]].itemsize for record in records]
    masks = [4 * (record[3] + record[7]) if record[7] else 0 for record in records]
    if start + 8 * sum(tokens) + sum(masks) + sum(sizes) + _CRC.size != len(body):
        what = f"{sum(tokens)} tokens, {sum(masks)} bytes of masks and {sum(sizes)} bytes of experts"
        raise ValueError(f"{what} do not fill an answer of {len(body)} bytes")
    ids = np.frombuffer(body, "<i4", sum(tokens), start)
    logprobs = np.frombuffer(body, "<f4", sum(tokens), start + 4 * sum(tokens))
    at, mask_at, decoded = 0, start + 8 * sum(tokens), []
    expert_at = mask_at + sum(masks)
    for record, mask_size, size in zip(records, masks, sizes, strict=True):
        finish, kind, known, number, prompt_tokens, crc, values, mask_ids, label = record
        experts = None
        if values:
            experts = np.frombuffer(body, _EXPERT_TYPES[kind], values, expert_at)
            experts = experts.reshape(-1, layers, per_token) if layers and per_token else experts
        reason = _FINISH[finish] if finish < len(_FINISH) else _OTHER
        part = slice(at, at + number)
        prompt_crc = crc if known else None
        mask = None
        if mask_ids:
            counts = np.frombuffer(body, "<i4", number, mask_at)
            mask = np.frombuffer(body, "<i4", mask_ids, mask_at + 4 * number), counts
        decoded.append(Sample(reason, label.decode(), prompt_tokens, prompt_crc, ids[part], logprobs[part], experts, mask))
        at, mask_at, expert_at = at + number, mask_at + mask_size, expert_at + size
    return decoded


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass
class Exchange:
    """A request whose client takes a binary answer."""

    experts: bool
    timed: bool = False
    body: bytes | None = None
    begun: float = 0.0
    first: float | None = None

    def timing(self) -> str:
        """Return the header `Server-Timing` for a request that ends now: ms to the first token, and to the end."""
        total = time.monotonic() - self.begun
        first = total if self.first is None else min(total, self.first - self.begun)
        return f"first;dur={1000 * first:.3f}, total;dur={1000 * total:.3f}"


current: ContextVar[Exchange | None] = ContextVar("current", default=None)  # what the request of this task asks for


class BinaryAnswers:
    """ASGI middleware: replace the server's answer by the binary one that it left in `current`, if any.

    Its code elsewhere fills `Exchange.body` and returns a small answer in place of the JSON, which is never built.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1") if scope["type"] == "http" else ""
        kind = accept.removesuffix(TIMED)
        if kind not in (CONTENT_TYPE, WITH_EXPERTS):
            await self._app(scope, receive, send)
            return
        exchange = Exchange(experts=kind == WITH_EXPERTS, timed=kind != accept, begun=time.monotonic())
        replaces = False

        async def replacing(message: Message) -> None:
            nonlocal replaces
            if message["type"] == "http.response.start" and exchange.body is not None and message["status"] == 200:
                replaces, length = True, str(len(exchange.body)).encode()
                headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", length)]
                if exchange.timed and exchange.first is not None:
                    headers.append((b"server-timing", exchange.timing().encode()))
                message = {**message, "headers": headers}
            elif replaces and message["type"] == "http.response.body":
                message = {**message, "body": exchange.body}
                exchange.body = b""
            await send(message)

        before = current.set(exchange)
        try:
            await self._app(scope, receive, replacing)
        finally:
            current.reset(before)
