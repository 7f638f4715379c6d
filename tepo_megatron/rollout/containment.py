"""Keep the failure of a user's code to one sample: limits, deadlines, and the sample that stands for a lost one.

A lost sample has no response tokens and a `Rollout.failure`. Training leaves it out: advantages are those of the rest of its
group, and a group with fewer than two whole samples is dropped. Evaluations count it as wrong, and say how many there are.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Sequence

import torch

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.loop import time_limit
from tepo_megatron.base.types import Prompt, Rollout, split_samples
from tepo_megatron.monitor.metrics import Metrics

_log = logging.getLogger(__name__)
FAILURE_KINDS = ("raised", "timed_out", "over_limit")
CANCEL_SECONDS = 1.0  # limit since the cancellation of a call: it has only to return; then code that goes on is abandoned
LEAST_SAMPLES = 2  # whole samples of a group that can be learned from


class OverLimit(Exception):
    """A sample needs more than a limit of `rollout.limits` allows. Catching it does not save the sample."""


class LossCounter:
    """Counts the samples of a step, and those that were lost."""

    def __init__(self, max_failed_share: float) -> None:
        self._most, self._samples, self._sequences = max_failed_share, 0, 0
        self._failures: list[str] = []

    def take(self, group: Sequence[Rollout]) -> list[Rollout]:
        """Count a group, and return its sequences without the lost samples; empty if too few samples are left to compare."""
        samples = split_samples(group)
        self._samples += len(samples)
        self._sequences += len(group)
        self._failures += [sample[0].failure for sample in samples if sample[0].failure]
        rest = [rollout for rollout in group if not rollout.failure]
        return rest if len(split_samples(rest)) >= LEAST_SAMPLES else []

    def end_step(self, step: int, metrics: Metrics) -> None:
        """Add the metrics of the step's samples."""
        for kind in FAILURE_KINDS:
            metrics.add(f"rollout/samples_{kind}", sum(kind_of(failure) == kind for failure in self._failures))
        if self._samples:
            metrics.add("rollout/sequences_per_sample", self._sequences / self._samples)
        report_lost(f"step {step}", self._failures, self._samples, self._most)


def report_lost(what: str, failures: Sequence[str], samples: int, max_failed_share: float) -> None:
    """Log how many samples were lost, if any were. Raises RolloutError if they are more than `max_failed_share`."""
    if not failures:
        return
    lost = f"{what}: {len(failures)} of {samples} samples were lost"
    if len(failures) > max_failed_share * samples:
        raise RolloutError(
            f"{lost}, more than rollout.max_failed_share={max_failed_share:g}; correct rollout.function, or raise that share. "
            f"The first: {failures[0]}"
        )
    _log.warning("%s; the first: %s", lost, failures[0])


async def within(work: Awaitable[object], seconds: float) -> object:
    """Return the result of a user's code, or raise its error.

    Code that ignores its cancellation is abandoned, so that this call returns in bounded time as long as the code awaits.
    Raises OverLimit if the deadline has passed.
    """
    task = asyncio.ensure_future(caught(work))
    try:
        with contextlib.suppress(TimeoutError):
            async with time_limit(seconds):
                await asyncio.wait({task})
        if not task.done():
            raise OverLimit(f"timed out after rollout.limits.seconds={seconds:g}")
        if task.cancelled():
            raise RuntimeError("it was cancelled, by itself")
        result, error = task.result()
        if error is not None:
            raise error
        return result
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        if task.done() and not task.cancelled():
            with contextlib.suppress(BaseException):
                task.exception()  # else asyncio reports that nobody retrieved it


async def caught(work: Awaitable[object]) -> tuple[object, BaseException | None]:
    """Return (result, error) of a user's code: a SystemExit would end the event loop."""
    try:
        return await work, None
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as e:
        return None, e


def lost_sample(prompt: Prompt, sample: int, failure: str) -> Rollout:
    """Return the rollout that stands for a lost sample."""
    tokens = len(prompt.token_ids)
    return Rollout(
        prompt_id=prompt.id,
        token_ids_L=torch.tensor(prompt.token_ids, dtype=torch.int64),
        response_mask_L=torch.zeros(tokens, dtype=torch.bool),
        rollout_logprobs_L=torch.zeros(tokens),
        policy_version=0,
        stop_reason="stop",
        answer=prompt.answer,
        row=prompt.meta,
        sample=sample,
        failure=failure,
    )


def kind_of(failure: str) -> str:
    """Return the status of a lost sample for the metrics: "timed_out", "over_limit" or "raised"."""
    if "timed out after rollout.limits" in failure:
        return "timed_out"
    return "over_limit" if "over its limit" in failure else "raised"
