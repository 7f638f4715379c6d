"""Quiesce the machines where `tepo serve` runs the servers, so that the trainer has their devices to itself.

A `tepo serve` restarts a dead server whenever it likes, which takes a server's whole memory. So a run that wants the devices
writes a device lease (`lease.DeviceLease`) into the rendezvous folder, with the starts (incarnations) of the servers that it
keeps. It waits until every `tepo serve` there has acknowledged the lease. From then on a `tepo serve` starts no server, has
ended all others, and watches the kept servers by connecting to them instead of asking for their health.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tepo_megatron.errors import RolloutError
from tepo_megatron.inference.servers.lease import DeviceLeases

POLL_SECONDS = 0.1


class Quiesce:
    """Holds a run's device lease on the servers of a rendezvous folder.

    Args:
        leases: The device lease of the rendezvous folder.
        run: The run that takes the devices, as an absolute path.
        starts: Returns the start ids (`Record.start`) of the servers that the run has now.
        seconds: Time limit for all `tepo serve` processes to acknowledge the lease.
    """

    def __init__(self, leases: DeviceLeases, run: str, starts: Callable[[], Sequence[str]], seconds: float) -> None:
        self._leases, self._run, self._starts, self._seconds = leases, run, starts, seconds

    async def reach(self) -> None:
        """Take the lease, and wait until every `tepo serve` has acknowledged it.

        Then only the servers of this run are there, and none is starting.

        Raises:
            RolloutError: A `tepo serve` did not acknowledge within the time limit.
        """
        lease = await asyncio.to_thread(self._leases.take, self._run, self._starts())
        deadline = time.monotonic() + self._seconds
        while missing := [k for k, token in (await self._acknowledgements()).items() if token != lease.token]:
            if time.monotonic() > deadline:
                files = ", ".join(f"{service}.service" for service in missing)
                raise RolloutError(
                    f"rollout.colocate: {', '.join(missing)} (host and pid of `tepo serve`) did not say within "
                    f"{self._seconds:g} s that the devices are free; look at its log in {self._leases.folder}, and if it "
                    f"was killed, remove {files} there"
                )
            await asyncio.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Release the lease, so that servers may be started again. Does nothing if the lease is not this run's."""
        self._leases.release(self._run)

    async def _acknowledgements(self) -> dict[str, str]:
        return await asyncio.to_thread(self._leases.acknowledgements)
