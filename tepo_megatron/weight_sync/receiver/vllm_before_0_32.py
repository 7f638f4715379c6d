"""Give vLLM 0.28 to 0.31 what this package asks of 0.32. All but `sleep_status` runs inside the server.

Since 0.32 vLLM's own outputs say which weights sampled them. Before, the API server alone knows when the weights change: every
update goes through its engine client. A response gets two labels, as in 0.32, if weights were loaded between its request and
its end, and the trainer refuses it.
"""

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

INITIAL = "default"  # vLLM's label of the weights of the model directory


@dataclass(frozen=True)
class Weights:
    """The state of the weights: their label, and the number of rounds and ends of updates."""

    label: str = INITIAL
    changes: int = 0


_state = {"weights": Weights()}
_begun: ContextVar[Weights | None] = ContextVar("begun", default=None)


def follow() -> None:
    """Note every update of the engine client in this process. Does nothing if vLLM's outputs have versions of their own."""
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    if "weight_versions" in CompletionOutput.__dataclass_fields__:
        return
    AsyncLLM.update_weights = _loading(AsyncLLM.update_weights)
    AsyncLLM.finish_weight_update = _finishing(AsyncLLM.finish_weight_update)


def now() -> Weights:
    """Return the state of the weights."""
    return _state["weights"]


def request_arrives() -> None:
    """Note the state of the weights at the beginning of the current task's request."""
    _begun.set(now())


def label() -> str:
    """Return the label of a response that ends now, in the task of its request."""
    begun, ended = _begun.get(), now()
    return ended.label if begun is None or begun == ended else f"{begun.label}+{ended.label}"


def _change(label: str) -> None:
    _state["weights"] = Weights(label, now().changes + 1)


def _loading(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    async def update_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        _change(now().label)  # before the engine hears of it
        await upstream(self, *args, **kwargs)

    return update_weights


def _finishing(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    async def finish_weight_update(self: Any, weight_version: str | None = None) -> None:
        await upstream(self, weight_version)
        _change(now().label if weight_version is None else weight_version)

    return finish_weight_update


async def sleep_status(send: Callable[[str, str, None], Awaitable[Any]]) -> dict[str, str]:
    """Return the answer of 0.32 to `/sleep` and `/wake_up`, which earlier releases answer without a body."""
    found = await send("GET", "/is_sleeping", None)
    return {"status": "sleeping" if found["is_sleeping"] else "awake"}
