"""The binary format of answers, and the middleware that sends it. No server."""

import asyncio
import struct
import tracemalloc
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.types import Prompt, Rollout, Routing, SamplingParams
from tepo_megatron.engines.engine import ABORTED, INITIAL_VERSION, GenerationRequest
from tepo_megatron.engines.engine_api import StaleWeights
from tepo_megatron.engines.vllm import VllmApi
from tepo_megatron.wire.receiver.binary_answer import (
    CONTENT_TYPE,
    WITH_EXPERTS,
    BinaryAnswers,
    Sample,
    current,
    decode,
    encode,
    ids_crc,
)

PROMPT = Prompt(id=7, token_ids=(4, 5, 6), answer="9")
SAMPLING = SamplingParams(samples=3, max_tokens=4, stop_token_ids=(2,))
ASK = GenerationRequest(PROMPT, SAMPLING, seed=0)
HEADER = 24  # bytes before the samples
RECORD = 72  # bytes of a sample's record


def sample(ids: list[int], logprobs: list[float], reason: str, **changes: Any) -> Sample:
    prompt_crc = ids_crc(PROMPT.token_ids)
    return replace(Sample(reason, "3", 3, prompt_crc, np.array(ids, np.int32), np.array(logprobs, np.float32)), **changes)


SAMPLES = [
    sample([8, 2], [-0.5, -1e-30], "stop"),
    sample([], [], ABORTED, label=""),
    sample([2**31 - 1, 9, 10, 11], [-9999.0, -0.1, -0.3, 0.0], "length"),
]


def parse(body: bytes, ask: GenerationRequest = ASK, version: int = 3) -> list[Rollout]:
    return VllmApi().decode(HttpAnswer(200, CONTENT_TYPE, body), ask, version)


def signed(body: bytes) -> bytes:
    """Return a body with the right checksum after its content was changed, as a hostile server would send it."""
    return body[:-4] + struct.pack("<I", zlib.crc32(body[:-4]))


def test_an_answer_arrives_bit_for_bit() -> None:
    body = encode(SAMPLES)
    assert len(body) == HEADER + 3 * RECORD + 8 * 6 + 4
    for sent, got in zip(SAMPLES, decode(body, 3, 4), strict=True):
        assert (got.finish_reason, got.label, got.prompt_tokens) == (sent.finish_reason, sent.label, 3)
        assert got.prompt_crc == sent.prompt_crc and got.experts is None
        assert got.ids_T.dtype == np.int32 and np.array_equal(got.ids_T, sent.ids_T)
        assert got.logprobs_T.dtype == np.float32 and got.logprobs_T.tobytes() == sent.logprobs_T.tobytes()
    rollouts = parse(body)
    assert [r.response_ids for r in rollouts] == [[8, 2], [], [2**31 - 1, 9, 10, 11]]
    assert [r.stop_reason for r in rollouts] == ["stop", ABORTED, "length"]
    assert rollouts[0].rollout_logprobs_L.tolist() == [0, 0, 0, -0.5, float(np.float32(-1e-30))]


@pytest.mark.parametrize(
    ("experts", "kind"),
    [
        (np.arange(24).reshape(4, 3, 2), "u1"),
        (np.arange(24).reshape(4, 3, 2) + 300, "<u2"),
        (np.arange(24).reshape(4, 3, 2) - 1, "<i2"),
        (np.arange(24) + 70000, "<i4"),
        (np.array([0, 255]), "u1"),
        (np.array([0, 256]), "<u2"),
        (np.array([0, 65535]), "<u2"),
        (np.array([0, 65536]), "<i4"),
        (np.array([-1, 32767]), "<i2"),
        (np.array([-1, 32768]), "<i4"),
    ],
)
def test_experts_travel_in_the_narrowest_integers_that_hold_them(experts: np.ndarray, kind: str) -> None:
    given = [sample([8], [-0.5], "length", experts=experts), sample([8, 2], [-0.5, -0.5], "stop")]
    first, second = decode(encode(given), 2, 4)
    assert first.experts is not None and first.experts.dtype == np.dtype(kind) and second.experts is None
    assert np.array_equal(first.experts, experts) and first.experts.shape == experts.shape


def test_every_cut_and_every_damaged_byte_is_refused() -> None:
    routing = Routing(num_layers=1, sparse_layers=(0,), per_token=2, number=300)
    ask = GenerationRequest(PROMPT, replace(SAMPLING, samples=2, routing=routing), seed=0)
    experts = np.arange(8).reshape(4, 1, 2) + 250
    body = encode([sample([8, 2], [-0.5, -0.25], "stop", experts=experts)] * 2)
    assert len(parse(body, ask)) == 2
    for end in range(len(body)):
        with pytest.raises(RolloutError, match=r"prompt 7: .*vLLM"):
            parse(body[:end], ask)
    for place in range(len(body)):
        for bit in (1, 128):
            damaged = bytearray(body)
            damaged[place] ^= bit
            with pytest.raises(RolloutError, match=r"prompt 7: .*vLLM"):
                parse(bytes(damaged), ask)
    with pytest.raises(RolloutError, match="instead of"):
        parse(body + b"\0", ask)


def test_hostile_answers_with_a_right_checksum_cost_no_memory_and_no_crash() -> None:
    """Every byte of the header and of a record takes extreme values; whatever is accepted has the size that was asked for."""
    body = encode(SAMPLES)
    tracemalloc.start()
    try:
        for place in range(HEADER + RECORD):
            for value in (b"\0", b"\xff", b"\xff" * 8):
                changed = signed(body[:place] + value + body[place + len(value) :])
                try:
                    rollouts = parse(changed)
                except RolloutError as e:
                    assert "vLLM" in str(e)
                else:
                    assert len(rollouts) == 3 and all(r.response_length <= 4 for r in rollouts)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"logprobs_T": np.array([-0.5, np.nan], np.float32)}, "not finite"),
        ({"logprobs_T": np.array([-0.5, -np.inf], np.float32)}, "not finite"),
        ({"logprobs_T": np.array([-0.5, 0.1], np.float32)}, "positive"),
        ({"ids_T": np.array([8, 9], np.int32)}, "stopped at token 9, which is none of the stop tokens"),
        ({"ids_T": np.array([-8, 2], np.int32)}, "token id -8"),
        ({"prompt_tokens": 4}, "prompt's tokens"),
        ({"prompt_crc": ids_crc([4, 5, 7])}, "prompt's tokens"),
        ({"finish_reason": "error"}, "finish_reason='other'"),
    ],
)
def test_what_was_not_asked_for_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RolloutError, match=f"prompt 7: .*({complaint})"):
        parse(encode([replace(SAMPLES[0], **changes), *SAMPLES[1:]]))
    assert len(parse(encode([replace(SAMPLES[0], prompt_crc=None), *SAMPLES[1:]]))) == 3


def test_samples_of_other_weights_are_refused() -> None:
    for label in ("4", "3+4", "default", ""):
        with pytest.raises(StaleWeights, match="of version 3"):
            parse(encode([replace(SAMPLES[0], label=label), *SAMPLES[1:]]))
    assert parse(encode([replace(s, label="default") for s in SAMPLES]), version=INITIAL_VERSION)


@pytest.mark.parametrize(
    ("accept", "status", "made", "expected"),
    [
        (CONTENT_TYPE, 200, b"binary", b"binary"),
        (WITH_EXPERTS, 200, b"binary", b"binary"),
        (CONTENT_TYPE, 200, None, b"{}"),  # the server had no binary answer
        (CONTENT_TYPE, 500, b"binary", b"{}"),
        ("*/*", 200, b"binary", b"{}"),
    ],
)
def test_the_middleware_replaces_the_body_that_was_asked_for(
    accept: str, status: int, made: bytes | None, expected: bytes
) -> None:
    asked: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def handler() -> None:  # servers run their handlers in tasks of their own
            asked.append(exchange := current.get())
            if exchange is not None:
                exchange.body = made

        await asyncio.create_task(handler())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        await send({"type": "http.response.body", "body": b"}"})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/generate", "headers": [(b"accept", accept.encode())]}
    asyncio.run(BinaryAnswers(app)(scope, None, send))  # type: ignore[arg-type]
    body = b"".join(message["body"] for message in sent[1:])
    headers = dict(sent[0]["headers"])
    assert body == expected and int(headers[b"content-length"]) == len(expected)
    assert (headers[b"content-type"] == CONTENT_TYPE.encode()) == (expected == b"binary")
    assert (asked[0] is not None and asked[0].experts) == (accept == WITH_EXPERTS)
    assert current.get() is None
