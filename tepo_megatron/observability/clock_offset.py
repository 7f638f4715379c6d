"""The offset between the monotonic clocks of two processes, from round trips over a connection (as NTP does, RFC 5905).

Processes of one machine usually share the clock; those of several machines do not, and neither do some containers.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

ROUND_TRIPS = 8


class ClockOffset(NamedTuple):
    """Offset of a clock against a reference: reference = clock + `ns`, off by at most `uncertainty_ns`."""

    ns: int
    uncertainty_ns: int

    def __add__(self, other: object) -> "ClockOffset":
        """Return the offset against the reference of `other`, which is the offset of this one's reference."""
        if not isinstance(other, ClockOffset):
            return NotImplemented
        return ClockOffset(self.ns + other.ns, self.uncertainty_ns + other.uncertainty_ns)


SAME = ClockOffset(0, 0)  # of the reference itself


def best_offset(round_trips: Iterable[tuple[int, int, int]]) -> ClockOffset:
    """Return the offset that the shortest round trip shows.

    The reference was read at some time between sending and receiving, so the middle is off by at most half a round trip.
    `round_trips`: of each one: time of sending, the reference's answer, time of receiving, in ns.
    """
    sent, reference, received = min(round_trips, key=lambda trip: trip[2] - trip[0])
    return ClockOffset(reference - (sent + received) // 2, (received - sent + 1) // 2)


def measure(ask: Callable[[], int], clock: Callable[[], int], round_trips: int = ROUND_TRIPS) -> ClockOffset:
    """Return the offset of a clock."""
    return best_offset([(clock(), ask(), clock()) for _ in range(round_trips)])
