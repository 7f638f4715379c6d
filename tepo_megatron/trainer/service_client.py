"""Rank 0's end of the rollout service: call it, and notice when it dies or hangs. The launcher starts it."""

import contextlib
import math
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.limits import START_SECONDS
from tepo_megatron.base.progress import STUCK_SECONDS, StartProgress
from tepo_megatron.config import ParallelConfig
from tepo_megatron.engines.engine import EnginePart
from tepo_megatron.service.messages import CONNECTION, Answer, Call, ended
from tepo_megatron.wire.broadcast_group import GroupSpec
from tepo_megatron.wire.bucket_format import Source
from tepo_megatron.wire.transport import Recipient

PING_SECONDS = 5.0  # of waiting, after which the service is asked whether it lives
CLOSE_SECONDS = 300.0  # limit since the last call: ending servers takes seconds, closing Weights & Biases minutes; then SIGKILL


class ServiceAddress(NamedTuple):
    """A connection to the service, which the launcher has made, and the service's pid."""

    connection: Connection
    pid: int

    @classmethod
    def inherited(cls) -> Self:
        """Return what the launcher gave to this rank 0."""
        descriptor, pid = map(int, os.environ.pop(CONNECTION).split(","))
        return cls(Connection(descriptor), pid)


def limit_blocking(connection: Connection, seconds: float) -> None:
    """Have a read or write within a message fail with BlockingIOError after so long without a byte."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, limit)


class PendingAnswer:
    """The answer to a call that was sent. It may arrive while rank 0 waits for another one."""

    def __init__(self, client: "ServiceClient", call: Call) -> None:
        self._client, self.number, self.name = client, call.number, call.name

    def result(self) -> Any:
        """Wait for the answer and return its value. Raises its error, or RolloutError if the service is lost."""
        return self._client.receive(self)


class ServiceClient:
    """Calls the rollout service. Only rank 0 has one, and only its main thread uses it."""

    def __init__(
        self,
        address: ServiceAddress,
        silence_seconds: float,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._connection, self.pid = address
        self._process = os.pidfd_open(self.pid)
        self._silence_seconds, self._start_seconds = silence_seconds, max(start_seconds, silence_seconds)
        limit_blocking(self._connection, self._silence_seconds)
        self._numbers = 0
        self._answers: dict[int, Answer] = {}  # those that arrived before they were asked for
        self._pings: set[int] = set()
        self._lost: RolloutError | None = None
        self._start: StartProgress | None = StartProgress(self.pid)  # None: the service has sent something

    def call(self, name: str, *args: Any) -> Any:
        """Make a call and return its result. Raises its error, or RolloutError if the service is lost."""
        return self.begin(name, *args).result()

    def begin(self, name: str, *args: Any) -> PendingAnswer:
        """Make a call and return at once."""
        self._numbers += 1
        call = Call(self._numbers, name, args)
        try:
            self._connection.send(call)
        except BlockingIOError:
            raise self._silent(name, self._silence_seconds) from None
        except OSError:
            raise self._ended() from None
        return PendingAnswer(self, call)

    def receive(self, pending: PendingAnswer, seconds: float = math.inf) -> Any:
        """Wait for one answer; see `PendingAnswer.result`. Answers to other calls are kept."""
        begun = asked = time.monotonic()
        silent = 0.0  # counted in waits of this process, so that a stop of it, or of the whole run, is none of the service
        while pending.number not in self._answers:
            limit = self._silence_seconds if self._start is None else self._start_seconds
            wait = min(PING_SECONDS, limit / 4)  # a call may take long: only pings that are not answered are silence
            try:
                if self._connection.poll(wait):
                    answer = self._connection.recv()
                    if answer.number in self._pings:
                        self._pings.remove(answer.number)
                    else:
                        self._answers[answer.number] = answer
                    silent, self._start = 0.0, None
                elif self._start is None:
                    silent += wait
                elif (idle := self._start.idle_seconds()) > max(STUCK_SECONDS, self._silence_seconds):
                    raise self._declare_lost(f"is stuck in its start: for {idle:.0f} s it used neither CPU time nor a disk")
                else:
                    silent += wait
            except BlockingIOError:  # it stopped within an answer
                raise self._silent(pending.name, self._silence_seconds) from None
            except (EOFError, OSError):
                raise self._ended() from None
            now = time.monotonic()
            if silent > limit:
                raise self._silent(pending.name, limit)
            if now - begun > seconds:
                raise RolloutError(f"the rollout service did not finish the call {pending.name} within {seconds:g} s")
            if now - asked >= wait and not self._pings:  # a service that imports its modules reads none
                asked = now
                self._pings.add(self.begin("ping").number)
        answer = self._answers.pop(pending.number)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def close(self) -> None:
        """Have the service end its servers, graders and itself; bounded in time."""
        if self._connection.closed:
            return
        with contextlib.suppress(RolloutError):
            if self._lost is None:
                self.receive(self.begin("close"), CLOSE_SECONDS)
        self.leave()
        if not self._has_ended():
            self._kill()
            self._has_ended()

    def leave(self) -> None:
        """Close the connection. A service that outlives rank 0 keeps its work for the next one. A second call does nothing."""
        self._connection.close()

    def _silent(self, call: str, seconds: float) -> RolloutError:
        if self._start is None:
            key, what = "heartbeat_timeout if its machine was busy", "gave no answer"
        else:
            key, what = "start_seconds if its modules or the data lie on a slow file system", "has not started: no answer"
        return self._declare_lost(f"{what} for {seconds:g} s, in the call {call}; raise parallel.{key}")

    def _declare_lost(self, what: str) -> RolloutError:
        self._lost = RolloutError(f"the rollout service (pid {self.pid}) {what}")
        self._kill()
        return self._lost

    def _ended(self) -> RolloutError:
        if self._lost is None:
            how = ended(self.pid) if self._has_ended() else f"the rollout service (pid {self.pid}) closed its connection"
            self._lost = RolloutError(how)
        return self._lost

    def _has_ended(self) -> bool:
        """Wait until the service has ended; False if it has not within CLOSE_SECONDS."""
        return bool(select.select([self._process], [], [], CLOSE_SECONDS)[0])

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)


@contextlib.contextmanager
def connected(cfg: ParallelConfig, address: ServiceAddress, kept: bool) -> Iterator[ServiceClient]:
    """Yield a client of the service. When the block ends, the service is closed.

    After an error, a service that is `kept` is left to the next rank 0.
    """
    client = ServiceClient(address, cfg.heartbeat_timeout, cfg.start_seconds)
    try:
        yield client
    except BaseException:
        if not kept:
            client.close()
        client.leave()
        raise
    client.close()


class ServiceEngine:
    """The engine in the service, as far as the ranks use it: `WeightReceiver`, `Sleepable` and parts of `Lifecycle`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client

    def wait_ready(self) -> None:
        self._client.call("engine.wait_ready")

    def resident_bytes(self) -> int:
        return int(self._client.call("engine.resident_bytes"))

    def sleep(self, abort: bool = False) -> None:
        self._client.call("engine.sleep", abort)

    def wake(self, part: EnginePart) -> None:
        self._client.call("engine.wake", part)

    def begin_update(self, version: int) -> None:
        self._client.call("engine.begin_update", version)

    @property
    def base(self) -> int | None:
        base: int | None = self._client.call("engine.base")
        return base

    def keep_unchanged(self, names: Sequence[str]) -> None:
        self._client.call("engine.keep_unchanged", names)

    @property
    def recipients(self) -> tuple[Recipient, ...]:
        recipients: tuple[Recipient, ...] = self._client.call("engine.recipients")
        return recipients

    def join_groups(self, specs: Mapping[Recipient, GroupSpec]) -> PendingAnswer:
        return self._client.begin("engine.join_groups", specs)

    def load(self, sources: Sequence[Source]) -> PendingAnswer:
        return self._client.begin("engine.load", sources)

    def finish_update(self) -> None:
        self._client.call("engine.finish_update")

    def verify(self, sent: Mapping[str, int]) -> None:
        self._client.call("engine.verify", sent)
