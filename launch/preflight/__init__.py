"""Find before a job is queued what would otherwise end it after it was queued. All faults are reported at once.

A fault is one line of text: the key with its value, what is wrong, and the fix. `--no-preflight` leaves these checks out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from launch.layout import Layout, lay_out
from launch.preflight import inputs, machines
from launch.profile import Cluster, load_cluster, this_machine
from tepo_megatron.base.errors import ConfigError, TepoError
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config

if TYPE_CHECKING:
    from launch.executors import Executor

T = TypeVar("T")
MARGIN = 1.35  # `tepo plan` was off by up to so much from published steps


@dataclass
class Report:
    """The faults that a preflight found, and what was not checked; one line each."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, call: Callable[..., T], *args: Any) -> T | None:
        """Return the result of a call; for a ConfigError add its lines to the faults and return None."""
        try:
            return call(*args)
        except ConfigError as e:
            self.faults += [line for line in str(e).splitlines() if line not in self.faults]
            return None

    def add(self, faults: Iterator[str]) -> None:
        """Add faults that are not among them yet."""
        self.faults += [fault for fault in faults if fault not in self.faults]


def read(config: str, overrides: Sequence[str], profile: str | None, executor: Executor) -> tuple[Config, Cluster, Layout]:
    """Read a config and a profile and check everything that can be known here. Raise ConfigError with a line for each fault."""
    report = Report()
    cluster = report.attempt(load_cluster, profile) if profile is not None else this_machine()
    cfg = report.attempt(load_config, config, list(overrides))
    layout = None
    if cluster is not None:
        report.attempt(executor.check, cluster, cfg)
        report.add(machines.environment_faults(cluster))
    if cfg is not None:
        report.add(inputs.faults(cfg, cluster or Cluster()))
    if cluster is not None and cfg is not None and getattr(cluster, executor.NAME, None) is not None:
        layout = report.attempt(lay_out, cfg, cluster)
        # most of it does not depend on the layout, whose fault is known
        report.attempt(executor.check_run, cfg, cluster, layout or Layout(1, 1))
        if layout is not None:
            report.add(machines.partition_faults(cluster, layout))
        report.add(machines.storage_faults(cfg, cluster))
        _check_plan(cfg, cluster, report)
    return _result(report, cfg, cluster, layout)


def check_command(cluster: Cluster, executor: Executor) -> None:
    """Check what a command such as `convert` needs of the cluster. Raise ConfigError with a line for each fault."""
    report = Report()
    report.attempt(executor.check, cluster, None)
    report.add(machines.environment_faults(cluster))
    _raise_faults(report)


def _result(
    report: Report, cfg: Config | None, cluster: Cluster | None, layout: Layout | None
) -> tuple[Config, Cluster, Layout]:
    """Print the notes and return what was read, or raise ConfigError with the faults."""
    for note in report.notes:
        print(f"preflight: {note}")
    _raise_faults(report)
    assert cfg is not None and cluster is not None and layout is not None, "otherwise there is a fault"
    return cfg, cluster, layout


def _raise_faults(report: Report) -> None:
    if report.faults:
        number = f"{len(report.faults)} faults" if len(report.faults) > 1 else "1 fault"
        lines = "\n".join(f"  {fault}" for fault in report.faults)
        raise ConfigError(f"preflight found {number}, and nothing was submitted (--no-preflight skips these checks):\n{lines}")


def _check_plan(cfg: Config, cluster: Cluster, report: Report) -> None:
    """Add the verdict of `tepo plan` on memory, and the fault of a step that does not end between warning and time limit."""
    if cfg.platform != "cuda":
        return
    gpu = cluster.gpu or "H100"
    try:
        from tepo_megatron.doctor.plan.command import PlanRequest, predictor_of, refusal
        from tepo_megatron.doctor.plan.search import judge

        predictor = predictor_of(cfg, PlanRequest(gpu=gpu))
        found = judge(predictor)
    except ModuleNotFoundError as e:
        report.notes.append(f"tepo plan was skipped: {e.name} is not installed here; run `make launch`")
        return
    except TepoError as e:
        if str(e).startswith("--gpu") and cluster.gpu is not None:
            report.faults.append(f"gpu={gpu}: {str(e).partition(': ')[2]}; correct it in the profile")
        else:
            report.notes.append(f"tepo plan was skipped: {' '.join(str(e).split())}")
        return
    slurm = cluster.slurm
    if found.why:
        report.faults.append(f"parallel, rollout: tepo plan for {gpu}: {refusal(found, found.why)}")
    elif found.step is not None and slurm is not None and slurm.restarts and found.step.seconds > slurm.patience:
        # one step, running when the warning comes, may pass between the warning and a complete checkpoint
        report.faults.append(
            f"slurm.warning_seconds={slurm.warning_seconds}: before its time limit the job waits {slurm.patience} s until the "
            f"running step is saved, and a step takes about {found.step.seconds:.0f} s (tepo plan); raise it to "
            f"{int(MARGIN * found.step.seconds) + 60}"
        )
