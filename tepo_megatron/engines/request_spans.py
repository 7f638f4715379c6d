"""Spans of generation requests and weight updates, for the rows of the servers in the trace of a step.

A server reports how long a request took until its first token and until its end, in the header `Server-Timing` of its answer.
These are durations since it read the request. They are placed so that they end when the answer has arrived, and are too late by
the time that the answer was on its way. What is left before them is the way to the server, and the wait until a busy server
reads the request. Before the first token a request waits in the engine's queue and is prefilled; no engine reports these apart.
"""

import math
import re
from collections.abc import Sequence

from tepo_megatron.engines.partial import GenerationRequest
from tepo_megatron.monitor.tracer import tracer

REQUESTS, WEIGHTS = "requests", "weights"  # rows of a server
_TIMING = re.compile(r"first;dur=([0-9.]{1,20}), total;dur=([0-9.]{1,20})")
_LONGEST_MS = 1e9


def server_times(timing: str | None) -> tuple[int, int] | None:
    """Return the ns until the first token and until the end of a request; None if the server does not report them."""
    match = None if timing is None else _TIMING.fullmatch(timing)
    if match is None or any(text.count(".") > 1 or text == "." for text in match.groups()):
        return None
    first, total = (float(text) for text in match.groups())
    if not 0 <= first <= total <= _LONGEST_MS or not math.isfinite(total):
        return None
    return int(first * 1e6), int(total * 1e6)


def add_generation(server: str, ask: GenerationRequest, version: int, begun: int, timing: str | None) -> None:
    """Record a request that a server has just answered."""
    if not tracer.active:
        return
    ended, unit, prompt = tracer.clock(), tracer.unit(), ask.prompt
    facts = {"prompt": prompt.id, "prompt_tokens": len(prompt.token_ids), "samples": ask.sampling.samples, "version": version}
    tracer.add("generate", REQUESTS, begun, ended, process=server, unit=unit, flows=[prompt.id], **facts)
    if (times := server_times(timing)) is not None:
        first, total = times
        read = max(begun, ended - total)
        tracer.add("until it is read", REQUESTS, begun, read, process=server, unit=unit)
        tracer.add("queue and prefill", REQUESTS, read, read + min(first, ended - read), process=server, unit=unit)
        tracer.add("decode", REQUESTS, read + min(first, ended - read), ended, process=server, unit=unit)


def add_request(asks: Sequence[GenerationRequest], server: str, times: tuple[int, int, int, int]) -> None:
    """Record the service's side of requests that were answered by one server."""
    if not tracer.active:
        return
    (begun, sent, answered, parsed), unit, prompt = times, tracer.unit(), asks[0].prompt.id
    tracer.add("request", REQUESTS, begun, parsed, unit=unit, flows=[prompt], prompt=prompt, server=server)
    tracer.add("wait for a server", REQUESTS, begun, sent, unit=unit)
    tracer.add("in flight", REQUESTS, sent, answered, unit=unit)
    tracer.add("parse", REQUESTS, answered, parsed, unit=unit)
