"""Weight updates of several servers: those that lack a version get it together, and those that fail meanwhile drop out.

A server that dies during an update is restarted and needs the weights afterwards. Servers of an update that was not finished
are restarted, too, because they may hold a part of it. Where its sender was killed, they get all weights again, and are only
restarted if they cannot get out of it.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import RolloutError, SyncError
from tepo_megatron.base.loop import LoopFuture
from tepo_megatron.config import RolloutConfig
from tepo_megatron.engines.engine import UNKNOWN_VERSION
from tepo_megatron.engines.servers.client import RequestFailed
from tepo_megatron.engines.servers.endpoint import Endpoint
from tepo_megatron.engines.servers.pool import ServerPool
from tepo_megatron.engines.servers.sleep import LiveServer, until
from tepo_megatron.engines.servers.slot import Incarnation
from tepo_megatron.wire.broadcast_group import GroupSpec
from tepo_megatron.wire.bucket_format import Source
from tepo_megatron.wire.transport import Recipient

INTERRUPT_SECONDS = 0.5  # between abort calls: repeated for requests that were still on their way to the server
_NOTHING = "e3b0c44298fc1c14"  # prefix of the SHA-256 of zero bytes; SGLang keeps only this prefix of a hash
# both engines fuse these parameters
_JOINED = (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."), (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj.")


class ChecksumChecks:
    """Consecutive checks of servers that hold the same model: with each other, and with the weights that were sent.

    vLLM and SGLang hash each parameter of each of their ranks, under their own names, as it lies in memory: SHA-256 of the
    bytes (SGLang on GPUs: a kernel of its own). The torch engine gives the CRC-32 of each tensor under its Hugging Face name.
    It takes as long as copying and hashing the model, and nothing is sampled meanwhile. Parameters whose memory was freed are
    not covered, nor are packed copies in their place: on CPU vLLM hashes the embedding and the norms, and no linear layer.
    Those are covered only by the CRC-32 check on arrival (`wire/receiver`) and the comparison of log-probs.
    """

    def __init__(self, same_precision: bool) -> None:
        self._same_precision = same_precision
        self._served: Mapping[str, str] = {}
        self._sent: Mapping[str, int] = {}

    def compare(self, version: int, answers: Mapping[str, Mapping[str, str]], sent: Mapping[str, int]) -> None:
        """Compare one version's checksums. The first comparison only records them for the stale check."""
        known = {
            server: {name: c for name, c in them.items() if not c.startswith(_NOTHING)} for server, them in answers.items()
        }
        if not known:
            return
        first, served = next(iter(known.items()))
        for server, them in known.items():
            different = sorted(name for name in served.keys() | them.keys() if served.get(name) != them.get(name))
            if different:
                raise SyncError(f"weights of version {version}: {first} and {server} serve different ones: {_some(different)}")
        if stale := self.stale(served, sent):
            raise SyncError(
                f"weights of version {version}: {', '.join(known)} still serve{'s' * (len(known) == 1)} those of before: "
                f"{_some(stale)}"
            )
        self._served, self._sent = served, dict(sent)

    def stale(self, served: Mapping[str, str], sent: Mapping[str, int]) -> list[str]:
        """Return the Hugging Face names of tensors whose sent CRC-32 changed since the last `compare`, and their checksums not.

        A tensor with several parts, one for each rank, is stale if no part changed. Where the servers serve another precision
        (`same_precision`), the result is empty unless all changed tensors are stale.
        """
        parts: dict[str, list[str]] = {}
        for key in served:
            parts.setdefault(key.rpartition(":")[2], []).append(key)
        theirs = {name: name if name in parts else _theirs(name) for name in self._sent}
        changed = [name for name, crc32 in self._sent.items() if sent.get(name, crc32) != crc32 and theirs[name] in parts]
        stale = [n for n in changed if all(served[key] == self._served.get(key) for key in parts[theirs[n]])]
        return stale if self._same_precision or len(stale) == len(changed) else []


def _theirs(name: str) -> str:
    for pattern, joined in _JOINED:
        name = pattern.sub(joined, name)
    return name


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(sorted(names)[:5]) + more


class PoolUpdates:
    """Implementation of `transport.WeightReceiver` on a pool of servers."""

    def __init__(self, pool: ServerPool, cfg: RolloutConfig) -> None:
        self._pool, self._cfg = pool, cfg
        self.reset()

    def reset(self) -> None:
        """Forget all updates, because the servers are started again or have ended."""
        # servers of the update under way, with their incarnation when it began
        self._updating: list[LiveServer] = []
        self._bases: set[int] = set()  # versions that these servers had before the update
        self._calls: list[LoopFuture[None]] = []  # of this update, which may be under way
        self._renews = False  # whether the next update goes to all servers, whatever version they have
        self._checks = ChecksumChecks(same_precision=self._cfg.server.precision is None)

    def begin_update(self, version: int) -> None:
        """See `RolloutEngine`. Servers that have `version` already take no part in the update."""
        self._pool.require_start()
        self._pool.require_trust()
        self._pool.sleeping.require_weights()
        self._pool.loop.run(self._begin(version))

    @property
    def base(self) -> int | None:
        return next(iter(self._bases)) if len(self._bases) == 1 else None

    def keep_unchanged(self, names: Sequence[str]) -> None:
        """See `RolloutEngine`. Without a `base` no tensor can stay unchanged, so `names` has to be empty."""
        base = UNKNOWN_VERSION if self.base is None else self.base
        self._pool.loop.run(self._each(lambda endpoint: endpoint.keep_unchanged(base, names)))

    @property
    def recipients(self) -> tuple[Recipient, ...]:
        taking = [(m.endpoint, incarnation) for m, incarnation in self._alive()]
        return tuple(Recipient(e.name, e.host, e.ranks, incarnation.number) for e, incarnation in taking)

    def join_groups(self, specs: Mapping[Recipient, GroupSpec]) -> LoopFuture[None]:
        of = {recipient.incarnation: spec for recipient, spec in specs.items()}
        places = {m.endpoint: of[incarnation.number] for m, incarnation in self._updating if incarnation.number in of}
        return self._call(self._each(lambda endpoint: endpoint.join_groups(places[endpoint])))

    def load(self, sources: Sequence[Source]) -> LoopFuture[None]:
        return self._call(self._each(lambda endpoint: endpoint.load(sources)))

    def _call(self, work: Coroutine[Any, Any, None]) -> LoopFuture[None]:
        self._calls = [call for call in self._calls if not call.done()]
        self._calls.append(call := self._pool.loop.submit(work))
        return call

    def finish_update(self) -> None:
        self._pool.require_trust()
        self._pool.loop.run(self._finish())

    def abandon_update(self) -> None:
        if not self._pool.slots:  # it was not started
            return
        for call in self._calls:
            call.cancel()
        self._pool.loop.run(self._abandon())

    def verify(self, sent: Mapping[str, int]) -> None:
        self._pool.require_trust()
        self._pool.loop.run(self._verify(sent))

    def update_weights(self, files: Sequence[Path], version: int) -> None:
        """Run a whole update from files that all exist: begin, load, finish."""
        self.begin_update(version)
        self.load(files).result()
        self.finish_update()

    # The rest runs in the event loop.

    async def _abandon(self) -> None:
        self._pool.refused = ""  # that may be due to the end of the sender, and the next update shows whether it was
        for member, _ in self._pool.up():
            member.endpoint.broken_off |= member.endpoint.version == UNKNOWN_VERSION
        self._updating, self._calls, self._renews = [], [], True
        await self._pool.notify()

    async def _begin(self, version: int) -> None:
        self._pool.begin_version(version)
        if self._renews:
            for member, _ in self._pool.up():
                member.endpoint.version = UNKNOWN_VERSION
            self._renews = False
        broken_off = [incarnation for _, incarnation in self._updating]
        for member, incarnation in self._updating:
            incarnation.end(RolloutError(f"{member.endpoint.name} was given weights half-way"))
        self._gather_behind(broken_off)
        await self._until_idle()
        if not self._pool.sleeping.asleep and await self._renew_grown():
            self._gather_behind(broken_off)
        await self._each(lambda endpoint: endpoint.begin_update(version))

    def _gather_behind(self, broken_off: Sequence[Incarnation]) -> None:
        """Select the servers of this update: those that are up and lack its version."""
        behind = [(m, incarnation) for m, incarnation in self._pool.up() if m.endpoint.version != self._pool.version]
        self._updating = [(m, incarnation) for m, incarnation in behind if incarnation not in broken_off]
        self._bases = {m.endpoint.version for m, _ in self._updating}

    async def _renew_grown(self) -> bool:
        """Restart the idle servers of the update whose memory has grown too far. Return whether there were any."""
        if not (ended := await self._pool.growth.end_grown(self._updating)):
            return False
        seconds, what = self._cfg.server.change_seconds, "servers whose memory had grown did not start again"
        await until(self._pool.changed, lambda: all(m.lost or m.incarnation not in (None, i) for m, i in ended), seconds, what)
        self._pool.require_enough()
        return True

    async def _until_idle(self) -> None:
        """Wait until no request with the former weights runs, and abort the requests if `rollout.on_weight_update` says so."""

        def busy_ones() -> list[LiveServer]:
            return [each for each in self._alive() if each[0].endpoint.in_flight]

        while busy := busy_ones():
            wait = None
            if self._cfg.on_weight_update != "finish":
                wait = INTERRUPT_SECONDS
                await self._ask(busy, lambda endpoint: endpoint.interrupt())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait), self._pool.changed:
                    await self._pool.changed.wait_for(lambda: not busy_ones())

    def _alive(self) -> list[LiveServer]:
        return [(m, incarnation) for m, incarnation in self._updating if m.incarnation is incarnation]

    async def _ask(
        self,
        servers: Sequence[LiveServer],
        ask: Callable[[Endpoint], Awaitable[Any]],
        returned: type[Exception] = RequestFailed,
    ) -> list[Any]:
        results = await asyncio.gather(*(ask(m.endpoint) for m, _ in servers), return_exceptions=True)
        for (member, incarnation), result in zip(servers, results, strict=True):
            if isinstance(result, RequestFailed):
                await member.failed(incarnation, result)
            elif isinstance(result, BaseException) and not isinstance(result, returned):
                raise result
        return results

    async def _each(self, say: Callable[[Endpoint], Awaitable[None]]) -> None:
        """Make one call of an update to every server whose incarnation took part in it from the start, concurrently."""
        alive = self._alive()
        results = await self._ask(alive, say, returned=SyncError)
        self._updating = [each for each, result in zip(alive, results, strict=True) if result is None]
        if refused := [result for result in results if isinstance(result, SyncError)]:
            self._pool.refused = f"the update to version {self._pool.version} failed"
            raise refused[0]

    async def _finish(self) -> None:
        await self._each(lambda endpoint: endpoint.finish_update())
        for member, _ in self._alive():
            member.endpoint.version = self._pool.version
        self._updating = []
        await self._pool.notify()

    async def _verify(self, sent: Mapping[str, int]) -> None:
        asked = self._pool.serving()
        results = await self._ask(asked, lambda endpoint: endpoint.checksums())
        named = {member.endpoint.name: result for (member, _), result in zip(asked, results, strict=True)}
        answers = {name: result for name, result in named.items() if isinstance(result, Mapping)}
        try:
            self._checks.compare(self._pool.version, answers, sent)
        except SyncError:
            self._pool.refused = f"the check of version {self._pool.version} failed"
            raise
