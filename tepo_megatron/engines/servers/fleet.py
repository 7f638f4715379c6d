"""Several inference servers as one RolloutEngine.

A server is used only while it is healthy and serves the fleet's version of the weights. A failed server is ended and restarted.
It is used again once it has received the weights again, which `needs_weights` asks the trainer for.
"""

from collections.abc import Sequence
from typing import Self

from tepo_megatron.config import RolloutConfig
from tepo_megatron.engines.engine import EnginePart
from tepo_megatron.engines.servers.endpoint import Endpoint
from tepo_megatron.engines.servers.listener import RunListener
from tepo_megatron.engines.servers.pool import ServerPool
from tepo_megatron.engines.servers.routing import RoutedSampler
from tepo_megatron.engines.servers.slot import ServerSlot
from tepo_megatron.engines.servers.updates import PoolUpdates


class Fleet(RoutedSampler, PoolUpdates):
    """Implementation of `engine.RolloutEngine` on several servers. Its base classes share the pool of these servers.

    `endpoints`: the servers, in the order in which they were given. Only the fleet may call methods that change them.
    """

    def __init__(self, endpoints: Sequence[Endpoint], cfg: RolloutConfig, listener: RunListener | None = None) -> None:
        pool = ServerPool(endpoints, cfg, listener)
        RoutedSampler.__init__(self, pool, cfg)
        PoolUpdates.__init__(self, pool, cfg)
        self.endpoints = endpoints

    def start(self) -> None:
        """Launch all servers and return at once.

        Raises RolloutError (busy port, unwritable log), ConfigError (not installed).
        """
        self._pool.start()
        self.reset()

    def wait_ready(self) -> None:
        self._pool.wait_ready()

    def sleep(self, abort: bool = False) -> None:
        """See `Sleepable.sleep`. A server that fails to sleep is ended. No server is started while the fleet sleeps."""
        self._pool.require_start()
        self._pool.loop.run(self._pool.sleeping.sleep(self._pool.slots, abort))
        self._pool.require_enough()

    def wake(self, part: EnginePart) -> None:
        """See `Sleepable.wake`. A server that fails to wake is ended, and restarted once all parts are awake."""
        self._pool.require_start()
        self._pool.loop.run(self._pool.sleeping.wake(self._pool.slots, part))
        self._pool.require_enough()

    @property
    def asleep(self) -> frozenset[EnginePart]:
        return self._pool.sleeping.asleep

    @property
    def version(self) -> int:
        """Version of the weights of the last `begin_update`; INITIAL_VERSION before the first."""
        return self._pool.version

    @property
    def needs_weights(self) -> bool:
        """Return whether a healthy server waits for the weights of `version`."""
        return any(slot.endpoint.version != self._pool.version for slot, _ in self._pool.up())

    @property
    def slots(self) -> Sequence[ServerSlot[Endpoint]]:
        """The slots of all servers, in the order of `endpoints`; empty before `start`. Only the fleet may change them."""
        return self._pool.slots

    def take_events(self) -> list[str]:
        return self._pool.take_events()

    def resident_bytes(self) -> int:
        return sum(endpoint.resident_bytes for endpoint in self.endpoints)

    @property
    def restarts(self) -> int:
        return sum(slot.restart_count for slot in self._pool.slots)

    def close(self) -> None:
        self._pool.close()
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
