"""The program of each rank in the gate: the product's own learning step on fixed rollouts, several configs in turn."""

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tepo_megatron.base.types import Rollout
from tepo_megatron.config import Config, MegatronConfig
from tepo_megatron.losses.advantages import split_groups
from tests.parallel import cases
from tests.parallel.test_broadcast import fleet, got
from tests.parallel.test_weights import Recorder
from tests.unit.rollout.test_fleet import behave


@dataclass(frozen=True)
class Job:
    """One config and the rollouts of its steps.

    Attributes:
        folder: Folder through which the trained weights are delivered by `sync.transport`, and in which a checkpoint is saved
            that another actor loads and continues. None: neither is done.
        fixed_length: Pad every microbatch to one length, as on GPUs under megatron.transformer.tp_comm_overlap.
        run: Folder of a run in which every step is recorded for `tepo audit`, with its metrics. None: nothing is recorded.
    """

    cfg: Config
    steps: tuple[tuple[Rollout, ...], ...]
    folder: Path | None = None
    fixed_length: bool = False
    run: Path | None = None


@dataclass
class Outcome:
    """The results of a job on one rank: its parts, in Hugging Face names, of gradients (one dict per update) and weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[dict[str, tuple[float, float]]] = field(default_factory=list)  # numerator and denominator of each update
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buckets: int = 0
    delivered: dict[str, Tensor] | None = None  # what the engine's side received, on rank 0
    resumed: bool | None = None  # whether an actor that loads the checkpoint continues to the same bits


def run_jobs(rank: int, jobs: Sequence[Job]) -> list[Outcome]:
    """Run every job in a forked rank, one after the other, on the mesh of the first job's layout."""
    from tepo_megatron.actor import offload
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate

    # as on a GPU, optimizer and parameters leave the device; by default they stay where device and host share memory
    offload.ON_CPU = offload.ON_CUDA
    groups = parallel.initialize(jobs[0].cfg.parallel, activate("cpu"), 0)
    found = []
    for job in jobs:
        with mock.patch.object(MegatronConfig, "fixed_length", job.fixed_length):
            found.append(_train(job, groups))
    parallel.shutdown()
    return found


def _train(job: Job, groups: Any) -> Outcome:
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.losses import build_objective
    from tepo_megatron.monitor.tracer import Clock
    from tepo_megatron.trainer.driver import StepLog
    from tepo_megatron.trainer.learning import learn
    from tepo_megatron.trainer.placement import Colocated, Disaggregated

    cfg, out = job.cfg, Outcome()
    actor, objective = Actor.open(cfg, groups), build_objective(cfg.objective)
    if actor.activations is not None:
        actor.activations.least_bytes = 1  # tiny tensors are moved too
    if objective.ref_kl is not None:
        actor.keep_reference()
    turns = Colocated(actor, None, groups) if cfg.rollout.colocate else Disaggregated()
    out.buckets = len(actor.chunks[0].bucket_groups)
    gate = _gate(actor, 0, groups)
    step = 0
    for step, rollouts in enumerate(job.steps, 1):
        turns.generate(lambda: None)  # under colocation everything leaves the device ...
        held = any(b.parameter.untyped_storage().nbytes() for b in actor.bindings)
        assert held != cfg.rollout.colocate
        turns.train()  # ... and comes back
        gate.delivered(step - 1)
        actor.start_step(step)
        with _captured(actor, out):
            log, clock = StepLog(), Clock()
            recorder = _recorder(job, step, objective, groups)
            given = _versioned(rollouts, step, cfg)
            learn(parts_of(given, step, cfg), step, actor, objective, cfg.training, log, clock, gate, recorder=recorder)
        if job.run is not None and groups.is_main:
            with (job.run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step} | log.record(clock)) + "\n")
    out.weights = cases.owned_tensors(actor, [b.parameter for b in actor.bindings])
    if job.folder is not None:
        out.delivered = _deliver(actor, turns, job.folder, version=step)
        turns.train()
        fresh = _resumed(actor, job.folder, step)
        for each in (actor, fresh):
            each.start_step(step + 1)
            again = _versioned(job.steps[0], step + 1, cfg)
            parts, gate = parts_of(again, step + 1, cfg), _gate(each, step, groups)
            learn(parts, step + 1, each, objective, cfg.training, StepLog(), Clock(), gate)
        pairs = zip(actor.bindings, fresh.bindings, strict=True)
        out.resumed = all(torch.equal(a.parameter, b.parameter) for a, b in pairs)
    return out


def parts_of(rollouts: Sequence[Rollout], step: int, cfg: Config) -> Iterator[Any]:
    """Yield the parts of a step as the service hands them out, where the last prompt's group arrives first."""
    from tepo_megatron.base.seeding import derive_seed
    from tepo_megatron.monitor.metrics import Metrics
    from tepo_megatron.rollout.streaming import Minibatch, MinibatchStream
    from tepo_megatron.trainer.schedule import RolloutPart

    if cfg.training.stream == "off":
        yield RolloutPart.whole(rollouts)
        return
    groups, found = split_groups(rollouts), list[Minibatch]()
    seed = derive_seed(cfg.seed, "minibatches", step)
    stream = MinibatchStream(cfg.training.stream, len(groups), cfg.training.minibatch_prompts, seed, found.append)
    for place in reversed(range(len(groups))):
        stream.add(place, groups[place])
    yield from (RolloutPart(minibatch.rollouts, tuple(minibatch.ids), None) for minibatch in found)
    last = stream.finish()
    yield RolloutPart(last.rollouts, tuple(last.ids), Metrics())


def _recorder(job: Job, step: int, objective: Any, groups: Any) -> Any:
    from tepo_megatron.actor.recorder import TokenRecorder

    if job.run is None:
        return None
    return TokenRecorder(job.run, step, objective, groups)


def _gate(actor: Any, step: int, groups: Any) -> Any:
    """Return a gate that knows the versions of the rollouts of `step` + 1, all of them with the actor's weights."""
    from tepo_megatron.trainer.gate import WeightsGate

    gate = WeightsGate(actor.cfg.rollout, actor.cfg.training, actor.cfg.sync, actor, groups)
    for version in range(step - actor.cfg.rollout.max_staleness, step + 1):
        gate.delivered(version)
    return gate


def _deliver(actor: Any, turns: Any, folder: Path, version: int) -> dict[str, Tensor] | None:
    """Send the weights as the config says, in the current state of colocation; return what arrived, on rank 0."""
    from tepo_megatron.sync.push import make_weight_sync

    cfg, groups = actor.cfg, actor.groups
    with contextlib.ExitStack() as stack:
        receiver: Any = None
        if groups.is_main:
            receiver = Recorder() if cfg.sync.transport.type != "group" else stack.enter_context(_server(folder, cfg))
        sync = stack.enter_context(make_weight_sync(cfg.sync, actor.bindings, actor.arch, groups, receiver))

        def push() -> None:
            actor.require_loaded("sending weights", "parameters")
            sync.push(version)

        turns.generate(push)
        if receiver is None:
            return None
        assert receiver.version == version
        return receiver.received if isinstance(receiver, Recorder) else got(folder)[0]


@contextlib.contextmanager
def _server(folder: Path, cfg: Config) -> Iterator[Any]:
    """Start a real process in the place of an engine; it joins the group and saves what it receives."""
    with fleet(folder, Path(cfg.model.path), servers=1, tp=1) as servers:
        behave(servers, 0, save=str(folder))
        yield servers


def _resumed(actor: Any, folder: Path, step: int) -> Any:
    """Save a checkpoint as the config says, and return another actor that loaded it."""
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.checkpoint.checkpoints import Checkpoints

    with Checkpoints.open(folder / "checkpoints", actor.cfg.checkpoint, actor.groups) as checkpoints:
        checkpoints.save(step, actor, {"step": step})
        assert checkpoints.wait() is not None
        fresh = Actor.open(actor.cfg, actor.groups)
        if fresh.cfg.objective.ref_kl:
            fresh.keep_reference()
        found = checkpoints.newest()
        assert found is not None
        checkpoints.load(found, fresh)
    return fresh


def _versioned(rollouts: Sequence[Rollout], step: int, cfg: Config) -> list[Rollout]:
    """Return the rollouts as if weights of an older version had sampled them, if the config samples ahead."""
    return [replace(r, policy_version=step - 1 - cfg.rollout.max_staleness) for r in rollouts]


@contextlib.contextmanager
def _captured(actor: Any, out: Outcome) -> Iterator[None]:
    """Keep loss, gradients and their norm of each update within the block, just before the optimizer uses them."""
    step, update = actor.optimizer.step, actor.update

    def step_and_keep() -> Any:
        out.gradients.append(cases.full_gradients(actor))
        return step()

    def update_and_keep(*args: Any) -> Any:
        result = update(*args)
        out.losses.append(result.metrics["loss/total"][0])
        out.norms.append(result.metrics["actor/grad_norm"][0])
        out.metrics.append(result.metrics)
        assert math.isfinite(out.losses[-1])
        return result

    actor.optimizer.step, actor.update = step_and_keep, update_and_keep
    yield
    actor.optimizer.step, actor.update = step, update


def merged(ranks: Sequence[Outcome]) -> Outcome:
    """Return the parts of all ranks merged into whole tensors."""
    first = ranks[0]
    updates = range(len(first.gradients))
    gradients = [{n: t for rank in ranks for n, t in rank.gradients[i].items()} for i in updates]
    weights = {n: t for rank in ranks for n, t in rank.weights.items()}
    return replace(first, gradients=gradients, weights=weights, resumed=all(rank.resumed in (None, True) for rank in ranks))


def distance(a: Tensor, b: Tensor) -> float:
    """Return ||a - b|| / ||b||, in fp64."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()
