"""The messages between rank 0 and the rollout service. They are pickled and go over a socket pair, which has no address."""

from typing import Any, NamedTuple

DESCRIPTOR = "TEPO_SERVICE_FD"  # environment variable with the service's end of the socket pair


class Call(NamedTuple):
    """A call of rank 0: a method of the driver, `engine.` and a method of the engine, or one of the service's own."""

    number: int
    name: str
    args: tuple[Any, ...]


class Answer(NamedTuple):
    """The answer to a call: a value or an error."""

    number: int
    value: Any
    error: Exception | None
