"""The messages between rank 0 and the rollout service. They are pickled.

They go over a socket pair, which has no address (`command/ranks.py`).
"""

from typing import Any, Literal, NamedTuple

from tepo_megatron.base.save_requests import TraceRequest

CONTROL = "TEPO_SERVICE_CONTROL_FD"  # the service's environment variable with the socket over which it gets its connections
CONNECTION = "TEPO_SERVICE_CONNECTION"  # rank 0's environment variable: FD,PID of its connection and of the service


class Call(NamedTuple):
    """A call of rank 0: a method of the driver, `engine.` or `trace.` and one of its methods, or one of the service's own."""

    number: int
    name: str
    args: tuple[Any, ...]


class Waited(NamedTuple):
    """The end of a wait for work of the rollout thread."""

    # "done"; "minibatch": one of the minibatches is there before the others (`training.stream`); "weights": the engine asks for
    # weights, and without them the work may never finish; "stop": the run is to save a checkpoint and end, whatever is still
    # being sampled
    event: Literal["done", "minibatch", "weights", "stop"]
    result: Any = None
    save: bool = False
    trace: TraceRequest | None = None  # the steps after this one are to be traced. None: nobody asked for it.


class KeptRollouts(NamedTuple):
    """The rollouts that a service which outlived its ranks has for the next ones."""

    version: int | None
    started: int


class Answer(NamedTuple):
    """The answer to a call: a value or an error."""

    number: int
    value: Any
    error: Exception | None


def ended(pid: int) -> str:
    """Return rank 0's words for a service that has ended, to which the launcher adds how."""
    return f"the rollout service (pid {pid}) has ended"
