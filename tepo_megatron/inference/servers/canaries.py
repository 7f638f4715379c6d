"""Ask servers which weights they have: after each update before they sample, and from time to time while they do.

The answers are compared with the actor's log-probs of the last versions (`likelihood.py`). A server whose answer is wrong is
ended; it is restarted and asks for the weights again, as after any other failure, and its unfinished requests go to others.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial

from tepo_megatron.config import SyncConfig
from tepo_megatron.errors import RolloutError, SyncError
from tepo_megatron.inference.engine import UNKNOWN_VERSION
from tepo_megatron.inference.servers.client import RequestFailed
from tepo_megatron.inference.servers.endpoint import Endpoint
from tepo_megatron.inference.servers.growth import LiveServer
from tepo_megatron.inference.servers.likelihood import CanaryJudge
from tepo_megatron.inference.servers.pool import ServerPool
from tepo_megatron.inference.servers.slot import Incarnation, ServerSlot
from tepo_megatron.types import Canaries, CanaryAnswer
from tepo_megatron.weight_sync.mismatch import allowed_difference


class CanaryWatch:
    """The canaries of a pool of servers. All coroutines run in the loop of the pool."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self.reset()

    def reset(self) -> None:
        """Forget the canaries, because the servers are started again or have ended."""
        self._canaries: Canaries | None = None
        self._judge: CanaryJudge | None = None
        self._wrong: set[ServerSlot[Endpoint]] = set()  # those whose last answer was wrong
        self._metrics: dict[str, float] = {}
        self._repeating: asyncio.Task[None] | None = None  # is cancelled with the loop

    async def use(self, canaries: Canaries, cfg: SyncConfig, same_precision: bool) -> None:
        """See `CanaryChecked.use_canaries`."""
        self._canaries, self._judge = canaries, CanaryJudge(canaries, partial(allowed_difference, cfg=cfg), same_precision)
        if cfg.canary_every:
            self._repeating = asyncio.create_task(self._repeat(cfg.canary_every))

    async def expect(self, version: int, logprobs: Sequence[float]) -> None:
        """See `CanaryChecked.expect_scores`."""
        assert self._judge is not None, "use comes first"
        self._judge.expect(version, logprobs)

    async def take_metrics(self) -> Mapping[str, float]:
        """See `Lifecycle.canary_metrics`."""
        metrics, self._metrics = self._metrics, {}
        if self._judge is None:
            return {}
        metrics = {"canary/checks": 0.0, "canary/wrong": 0.0, "canary/seconds": 0.0} | metrics
        if (apart := self._judge.separation) is not None:
            metrics |= {"canary/separation": apart, "canary/distinct": float(apart >= self._judge.distinct)}
        return metrics

    async def vouched(self, servers: Sequence[LiveServer]) -> Sequence[LiveServer]:
        """Ask servers that should have the pool's version; return those that may be used, and end the others.

        All are returned if there are no canaries, or if the engine sleeps: those that serve are asked when it wakes.

        Raises:
            SyncError: No canary can be asked about; a server is wrong twice in a row; or all of several servers are wrong.
        """
        if not self._can_ask():
            return servers
        begun = time.monotonic()
        answers = await asyncio.gather(*(self._ask(*each) for each in servers), return_exceptions=True)
        self._count("canary/seconds", time.monotonic() - begun)
        for answer in answers:
            if isinstance(answer, RolloutError):
                raise self._refuse(f"{answer}; it cannot be asked about canaries: set sync.canaries=0")
            if isinstance(answer, BaseException):
                raise answer
        return self._judged(servers, [answer for answer in answers if not isinstance(answer, BaseException)])

    async def after_wake(self) -> None:
        """Ask the servers of an engine that woke. Those that do not answer need the weights again. Raises as `vouched`."""
        serving = self._pool.serving()
        right = await self.vouched(serving)
        for member, incarnation in serving:
            if (member, incarnation) not in right:
                member.endpoint.version = UNKNOWN_VERSION

    def _can_ask(self) -> bool:
        return self._judge is not None and not self._pool.sleeping.asleep and self._pool.version in self._judge.versions

    async def _repeat(self, seconds: float) -> None:
        """Ask the servers that serve, again and again. A SyncError is kept by the pool and raised by its next user."""
        while not self._pool.refused:
            await asyncio.sleep(seconds)
            servers, version = self._pool.serving(), self._pool.version
            if not self._can_ask():
                continue
            for member, _ in servers:
                self._pool.occupy(member)
            try:
                answers = await asyncio.gather(*(self._ask(*each) for each in servers), return_exceptions=True)
            finally:
                for member, _ in servers:
                    await self._pool.release(member)
            # what an update interrupted says nothing
            given = [(s, a) for s, a in zip(servers, answers, strict=True) if isinstance(a, CanaryAnswer)]
            if self._pool.version == version and not self._pool.sleeping.asleep:
                try:
                    self._judged([server for server, _ in given], [answer for _, answer in given])
                except SyncError as e:
                    self._pool.event(str(e))

    async def _ask(self, member: ServerSlot[Endpoint], incarnation: Incarnation) -> CanaryAnswer | None:
        """Return a server's answer; None if the server failed. Raises RolloutError if it cannot answer such a question."""
        assert self._canaries is not None
        try:
            answer = await member.endpoint.score(self._canaries)
        except RequestFailed as e:
            if e.refused:
                raise RolloutError(f"{member.endpoint.name} {e.what}") from None
            await member.failed(incarnation, e)
            return None
        except RolloutError:
            if member.incarnation is not incarnation:  # it has ended
                return None
            raise
        if answer.logprobs_N.size != self._canaries.num_tokens:
            raise RolloutError(f"{member.endpoint.name} answered with {answer.logprobs_N.size} log-probs of the canaries")
        return answer

    def _judged(self, servers: Sequence[LiveServer], answers: Sequence[CanaryAnswer | None]) -> list[LiveServer]:
        """Return the servers whose answers are right. End those whose answers are wrong. Raises SyncError, see `vouched`."""
        right: list[LiveServer] = []
        wrong: list[RolloutError] = []
        assert self._judge is not None
        for (member, incarnation), answer in zip(servers, answers, strict=True):
            if answer is None or member.incarnation is not incarnation:
                continue
            verdict = self._judge.examine(member.endpoint.name, answer, self._pool.version)
            self._count("canary/checks", 1.0)
            if verdict.right:
                self._metrics["canary/diff_worst"] = max(verdict.diff, self._metrics.get("canary/diff_worst", 0.0))
                self._wrong.discard(member)
                right.append((member, incarnation))
                continue
            self._count("canary/wrong", 1.0)
            error = RolloutError(f"canaries of {member.endpoint.name}: {verdict}")
            wrong.append(error)
            incarnation.end(error)
            if member in self._wrong:
                raise self._refuse(f"{error}. It was wrong before, and has been restarted and given all weights since")
            self._wrong.add(member)
        if len(wrong) == len(servers) > 1:
            raise self._refuse(f"all {len(servers)} inference servers are wrong:\n" + "\n".join(map(str, wrong)))
        return right

    def _refuse(self, why: str) -> SyncError:
        """Return the error after which the engine can no longer be used."""
        self._pool.refused = why.splitlines()[0]
        return SyncError(why)

    def _count(self, name: str, value: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + value
