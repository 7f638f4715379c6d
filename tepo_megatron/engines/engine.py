"""Protocols of an inference engine, one for each kind of user: sampling, weight updates, sleeping, start and end.

    protocol                                     used by
    Sampler                                      rollouts, evaluations, custom generation functions
    WeightReceiver (`wire/transport.py`)  the weight transports
    Sleepable                                    colocation with the trainer
    Lifecycle                                    code that starts the engine: the driver of a run, `tepo evaluate`

`RolloutEngine` is their union. Ask for the smallest protocol that you use.

Partial rollouts: the tokens of aborted requests are kept, and prompt + partial response is resubmitted under the new weights.
An aborted request returns the tokens sampled so far, with their log-probs. The remaining response is requested with prompt +
partial response as the prompt. The new weights alone sample it, with a new KV cache, and each token has its weight version.
Both engines can also resume requests after a pause, but only SGLang reports which token came from which weights.
"""

import queue
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import torch

from tepo_megatron.base.loop import BLOCKED_SECONDS, LoopThread
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.types import Prompt, Rollout, SamplingMask, SamplingParams
from tepo_megatron.wire.transport import WeightReceiver

# Version of an engine that still serves the weights of its model directory.
INITIAL_VERSION = -1
# Version of a server to which others sent weights, or whose weights are gone because it slept. No fleet has this version, so
# the server is not used before it gets weights.
UNKNOWN_VERSION = -2

# Parts whose memory a sleeping engine releases, in the order in which they are woken.
EnginePart = Literal["weights", "kv_cache"]
ENGINE_PARTS: tuple[EnginePart, ...] = ("weights", "kv_cache")

# called with each group as soon as its last sample has arrived
Deliver = Callable[[list[Rollout]], None]


# (prompts, sampling, seed, called with each group) -> the work of sampling them
Begin = Callable[[Sequence[Prompt], SamplingParams, int, Deliver], Coroutine[Any, Any, object]]


class GroupStream:
    """Groups that are sampled in an event loop, in the order of their arrival, for a thread that waits for them."""

    def __init__(self, loop: LoopThread, begin: Begin) -> None:
        self._loop, self._begin = loop, begin
        self._items: queue.SimpleQueue[list[Rollout] | Future[object]] = queue.SimpleQueue()
        self._working: set[Future[object]] = set()

    def add(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> None:
        """Begin to sample these prompts, too, and return at once."""
        working = self._loop.submit(self._begin(prompts, sampling, seed, self._items.put))
        self._working.add(working)
        working.add_done_callback(self._items.put)

    def next(self) -> list[Rollout] | None:
        """Wait for the next group and return it; None if nothing is being sampled. Raises as `Sampler.generate`."""
        while self._working:
            try:
                item = self._items.get(timeout=BLOCKED_SECONDS)
            except queue.Empty:
                self._loop.require_running("sampling")
                continue
            if isinstance(item, list):
                return item
            self._working.discard(item)
            item.result(0)
        return None

    def close(self) -> None:
        """Cancel what is being sampled."""
        for working in self._working:
            working.cancel()
        self._working, self._items = set(), queue.SimpleQueue()  # late results go to the old queue


class Sampler(Protocol):
    """Samples responses with the weights that are served now. One caller samples at a time, except with `sample`."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """Sample `sampling.samples` responses to each prompt, ungraded. The groups are contiguous, in the order of the prompts.

        The samples of a prompt depend only on (weights, prompt, sampling, seed), not on what else is sampled at the same time.
        Samples that a weight update interrupts also depend on when it came. Returns Rollouts; rollout_logprobs are those of the
        distribution sampled from (after temperature).
        """

    def open(self) -> GroupStream:
        """Return a stream that samples like `generate` and delivers group by group. Nothing is being sampled yet."""

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """Sample one prompt like `generate`, awaited in any event loop, many at once: for samples with several turns."""


class Sleepable(Protocol):
    """Releases the memory of its devices, so that the trainer can use them."""

    def sleep(self, abort: bool = False) -> None:
        """Release the memory of the weights and the KV cache, once no request is in flight. Returns when the memory is free."""

    def wake(self, part: EnginePart) -> None:
        """Allocate the memory of `part` again: first the weights, then the KV cache, after which the engine serves.

        The values of the weights are lost; an update has to send them again.
        """


ServerState = Literal["serving", "waiting_for_weights", "asleep", "starting", "lost"]
STATES: tuple[ServerState, ...] = ("serving", "waiting_for_weights", "asleep", "starting", "lost")


@dataclass(frozen=True)
class ServerReport:
    """One server."""

    name: str
    state: ServerState
    version: int
    in_flight: int
    restarts: int


@dataclass(frozen=True)
class EngineReport:
    """All servers."""

    servers: Sequence[ServerReport]
    queued: int
    version: int
    texts: Mapping[str, str]


class Lifecycle(Protocol):
    """Starts and ends the servers, and reports their state and events."""

    def start(self) -> None:
        """Start the servers and return at once, so that the actor can be built meanwhile. Raises RolloutError, ConfigError."""

    def wait_ready(self) -> None:
        """Return when the servers take requests. Raises RolloutError if too few do in time."""

    def resident_bytes(self) -> int:
        """Return the host memory of the engine's processes: the sum of their resident set sizes, in bytes."""

    @property
    def version(self) -> int:
        """Version of the weights of the last `begin_update`; INITIAL_VERSION before the first."""

    @property
    def needs_weights(self) -> bool:
        """Return whether a server lacks the weights of `version`, so that another update has to send them."""

    @property
    def asleep(self) -> Collection[EnginePart]:
        """The parts whose memory is released."""

    def abandon_update(self) -> None:
        """Give up the update under way, if there is one, because its sender is gone. The next update goes to all servers."""

    @property
    def restarts(self) -> int:
        """Number of server restarts since `start`, for any reason."""

    def server_metrics(self) -> Mapping[str, float]:
        """Return the load of each server since the last call, by key of metrics.jsonl; empty if there are no servers."""

    def report(self, seconds: float) -> EngineReport:
        """Return the state of the servers, with the metrics of those that answer within `seconds`. Any thread may call it."""

    def take_events(self) -> list[str]:
        """Return messages for the user about events since the last call, a line or more each."""

    def close(self) -> None:
        """End the servers and every process that they started; bounded in time. May be called again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


class RolloutEngine(Sampler, WeightReceiver, Sleepable, Lifecycle, Protocol):
    """Inference servers that this process uses. One caller may sample while another updates the weights.

    The methods of an update, in the order of their calls. Each raises SyncError, after which the engine can only be closed.

        begin_update   Requests in flight are handled as `rollout.on_weight_update` says, and nothing is sampled until
                       `finish_update`. An earlier update that was not finished is forgotten.
        keep_unchanged Announces tensors that stay those of version `base`. It comes before any `load`. If some updates of
                       an engine leave tensors unchanged, call it in all of its updates.
        join_groups    Has servers form process groups with ranks of the trainer, before any `load` of what these ranks
                       broadcast. Returns at once. The future is done when all servers have tried; the store of the group
                       spec shows which ranks came.
        load           Loads each tensor of the model once, in any number of calls, one at a time. Returns at once. Once the
                       future is done, files may be deleted. For broadcast tensors the store of the group spec shows which
                       ranks received them; they may be sent again to ranks that did not.
        finish_update  Returns when the new weights are served and no cache of the old ones is left.
        abandon_update Gives up an update whose sender is gone. Servers that are left with half of the weights get out of it, or
                       are restarted. The next update goes to all servers, also to those that have its version already.
        verify         Compares the checksums of what all servers serve: with each other, and, for tensors that changed since
                       the last call, with their old value. Only tensors that the servers' checksums cover are compared.
    """


ABORTED = "abort"  # stop reason of an aborted response, in all engines


@dataclass(frozen=True)
class GenerationRequest:
    """A generation request: `sampling.samples` responses to a prompt."""

    prompt: Prompt
    sampling: SamplingParams
    seed: int


def continuation(aborted: Rollout, prompt: Prompt, sampling: SamplingParams, seed: int) -> GenerationRequest:
    """Return the request that continues an aborted response, with one sample."""
    tokens = tuple(aborted.token_ids_L.tolist())
    longer = replace(prompt, token_ids=tokens)
    remaining = sampling.max_tokens - (len(tokens) - len(prompt.token_ids))
    return GenerationRequest(longer, replace(sampling, samples=1, max_tokens=remaining), seed)


def continuations(
    group: Sequence[Rollout], prompt: Prompt, sampling: SamplingParams, seed: int
) -> dict[int, GenerationRequest]:
    """Return the requests that continue the aborted responses of a group, by their index in it."""
    return {
        place: continuation(r, prompt, sampling, derive_seed(seed, "rest", place, r.token_ids_L.numel()))
        for place, r in enumerate(group)
        if r.stop_reason == ABORTED
    }


def merge(aborted: Rollout, end: Rollout) -> Rollout:
    """Merge an aborted response and its continuation, which may have been aborted itself."""
    if not aborted.response_length:
        return end
    begun, versions, servers = aborted.token_ids_L.numel(), list(aborted.later_versions), aborted.servers
    newest = versions[-1][1] if versions else aborted.policy_version
    if end.response_length:
        versions += [change for change in [(begun, end.policy_version), *end.later_versions] if change[1] != newest]
        servers = continued(servers, [(begun if place == 0 else place, name) for place, name in end.servers])
    masks = [r.sampling_mask for r in (aborted, end) if r.sampling_mask is not None]
    return replace(
        end,
        response_mask_L=torch.cat([aborted.response_mask_L, end.response_mask_L[begun:]]),
        rollout_logprobs_L=torch.cat([aborted.rollout_logprobs_L, end.rollout_logprobs_L[begun:]]),
        policy_version=aborted.policy_version,
        later_versions=tuple(versions),
        servers=servers,
        sampling_mask=SamplingMask.cat(masks) if len(masks) == 2 else None,
    )


def continued(servers: Sequence[tuple[int, str]], more: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Return `Rollout.servers` of a sequence: that of its first tokens, extended by that of its later tokens."""
    all_of_them = list(servers)
    for place, name in more:
        if not all_of_them or all_of_them[-1][1] != name:
            all_of_them.append((place, name))
    return tuple(all_of_them)
