"""Map the rows of the table to the code that measures them.

A suite runs in a process of its own, because it may set threads, fork and use memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results import ROWS, Measure


@dataclass(frozen=True)
class SuiteOptions:
    """Options of all suites.

    Attributes:
        quick: Use small shapes and few repetitions, only to see that it runs.
    """

    peers: Path | None = None
    quick: bool = False
    rows: Set[int] = frozenset(ROWS)


@dataclass(frozen=True)
class Suite:
    """One suite.

    Attributes:
        rows: Rows of the table that it measures.
        environment: Environment of its process, for what is read when torch is loaded.
    """

    rows: tuple[int, ...]
    run: Callable[[SuiteOptions], list[Measure]]
    environment: Mapping[str, str] = field(default_factory=dict)


def _token_stats(options: SuiteOptions) -> list[Measure]:
    from benchmarks import token_stats

    return token_stats.measure(options.peers, options.quick, rows=options.rows)


def _layouts(options: SuiteOptions) -> list[Measure]:
    from benchmarks import layouts

    return layouts.measure(options.peers)


def _packing(options: SuiteOptions) -> list[Measure]:
    from benchmarks import packing

    return packing.measures(2 if options.quick else packing.SEEDS)


def _step(options: SuiteOptions) -> list[Measure]:
    from benchmarks import _collected

    return _collected.step(options.quick)


def _gpu(options: SuiteOptions) -> list[Measure]:
    from benchmarks.gpu import not_measured

    return not_measured()


def _convert(options: SuiteOptions) -> list[Measure]:
    from benchmarks import _collected

    return _collected.convert(options.quick)


def _checkpoint(options: SuiteOptions) -> list[Measure]:
    from benchmarks import _collected

    return _collected.checkpoint(options.quick)


def _sync(options: SuiteOptions) -> list[Measure]:
    from benchmarks import _collected

    return _collected.sync(options.quick)


def _overlap(options: SuiteOptions) -> list[Measure]:
    from benchmarks import _collected

    return _collected.overlap(options.quick)


def _prefix(options: SuiteOptions) -> list[Measure]:
    from benchmarks import _collected

    return _collected.prefix(options.quick)


def _controller(options: SuiteOptions) -> list[Measure]:
    from benchmarks import _collected

    return _collected.controller(options.quick)


def _mechanisms(options: SuiteOptions) -> list[Measure]:
    from benchmarks import _collected

    return _collected.mechanisms(options.quick)


# waiting threads sleep: on a busy machine, spinning threads would make the times depend on other processes
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KINETO_LOG_LEVEL": "99"}
# one thread before and after a fork, as in tests/conftest.py; without the flag verl would compile in each rank
_FORKS = _PASSIVE | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}

SUITES = {
    "token_stats": Suite((1, 2, 3), _token_stats, _PASSIVE),
    "layouts": Suite((4, 5), _layouts, _FORKS),
    "packing": Suite((6,), _packing),
    "step": Suite((7,), _step, _PASSIVE),
    "gpu": Suite((8, 9), _gpu),
    "convert": Suite((10,), _convert),
    "checkpoint": Suite((11,), _checkpoint, {"OMP_NUM_THREADS": "1"}),
    "sync": Suite((12,), _sync, {"OMP_NUM_THREADS": "1"}),
    "overlap": Suite((13,), _overlap),
    "prefix": Suite((14,), _prefix),
    "controller": Suite((15,), _controller, _FORKS),
    "mechanisms": Suite((16,), _mechanisms, {"OMP_NUM_THREADS": "1"}),
}
