"""The scripted parts of a rank: mesh, actor, learning, transport and checkpoints, which take the times of `times.yaml`."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from tepo_megatron.base.scratch import WORLD_FOLDER
from tepo_megatron.base.types import Rollout
from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint.restoring import FoundCheckpoint
from tepo_megatron.checkpoint.saving import SavedCheckpoint
from tepo_megatron.config import SyncConfig
from tepo_megatron.dist.objects import all_gather_object
from tepo_megatron.dist.parallel import HOST_LIMIT, Axis, ParallelDims
from tepo_megatron.service.batch_memory import BatchHeader
from tepo_megatron.sync.buckets import BucketPlan, split_into_buckets
from tepo_megatron.sync.push import WeightSync
from tepo_megatron.trainer.schedule import RolloutPart
from tepo_megatron.wire.broadcast_group import GroupSpec
from tepo_megatron.wire.bucket_format import Bucket, TensorEntry
from tepo_megatron.wire.transport import Recipient, StagedBucket

TIMES = yaml.safe_load(Path(__file__).with_name("times.yaml").read_text())
TRAINED = "trained.jsonl"  # file in the folder of the run: what each step was trained on


def initialize(cfg: Any, platform: object, seed: int, config: object = None) -> ParallelDims:
    """Join the world with one group for all axes: each of Megatron's has a thread that polls, more often under a fast clock."""
    store = dist.FileStore(str(Path(os.environ[WORLD_FOLDER]) / "store"), cfg.world_size)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=cfg.world_size, timeout=HOST_LIMIT)
    world = dist.group.WORLD
    axes = dict.fromkeys(("tp", "pp", "cp", "ep"), Axis(1, 0, world))
    axes |= dict.fromkeys(("dp", "dp_cp", "expert_dp"), Axis.of(world))
    return ParallelDims(**axes, host=world, vpp=1, device=torch.device("cpu"), limit=HOST_LIMIT)


def open_actor(cfg: object, groups: ParallelDims) -> Any:
    """Return an actor without a model."""
    fields = {"groups": groups, "packer": SimpleNamespace(), "bindings": (), "arch": None, "noise_floor": None}
    copy = SimpleNamespace(capture=lambda: None)
    return SimpleNamespace(**fields, start_step=lambda step: None, host_copy=lambda: copy)


class Transport:
    """Has the servers load the model's tensors, `sync.bucket_mib` of them a round, of which none is sent."""

    def __init__(self, rounds: Sequence[Bucket], receiver: Any) -> None:
        self._rounds, self._receiver = rounds, receiver
        self._members: Sequence[Recipient] = ()
        self._loading: Any = None

    def stage(self, version: int, number: int, tensors: object, checked: bool) -> StagedBucket | None:
        return None if self._receiver is None else StagedBucket(self._rounds[number], {}, self._rounds[number].nbytes)

    def start(self, sources: Sequence[Any]) -> None:
        if self._receiver is None:
            return
        if (members := self._receiver.recipients) != self._members:
            ranks = 1 + sum(member.ranks for member in members)
            spec = GroupSpec("127.0.0.1", 1, "rehearsal", 1, ranks, 1, seconds=30.0, join_seconds=300.0)
            self._receiver.join_groups(dict.fromkeys(members, spec)).result()
            self._members = members
        self._loading = self._receiver.load(sources)

    def wait(self) -> None:
        if self._loading is not None:
            time.sleep(TIMES["sync_per_round"])
            self._loading.result()
            self._loading = None

    complete = finish = abort = close = lambda *_: None


class Checkpoints:
    """Checkpoints of the run's state alone, complete at once."""

    def __init__(self, folder: Path, groups: ParallelDims) -> None:
        self._folder, self._groups = folder, groups
        self._saved: SavedCheckpoint | None = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path, cfg: object, groups: ParallelDims) -> Iterator[Self]:
        yield cls(folder, groups)

    def save(self, step: int, actor: object, state: Mapping[str, Any], best: int | None = None) -> None:
        if self._groups.is_main:
            (folders.prepare(self._folder, step) / "state.json").write_text(json.dumps(state))
            folders.publish(self._folder, step)
        self._saved = SavedCheckpoint(step, folders.complete(self._folder, step), 0, 0.0, 0.0)

    def poll(self) -> SavedCheckpoint | None:
        saved, self._saved = self._saved, None
        return saved

    wait = poll

    def newest(self) -> FoundCheckpoint | None:
        if not (steps := folders.steps(self._folder)):
            return None
        path = folders.complete(self._folder, max(steps))
        return FoundCheckpoint(path, max(steps), json.loads((path / "state.json").read_text()), {}, {})

    load = staticmethod(lambda found, actor: found.run_state)


def rounds_of(model: str, bucket_bytes: int) -> list[Bucket]:
    """Return the model's tensors in bf16, in buckets of one sender."""
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).named_parameters()
    entries: list[Any] = [TensorEntry(name, tuple(parameter.shape), "bfloat16") for name, parameter in parameters]
    buckets: list[list[Any]] = split_into_buckets(entries, None, lambda entry: entry.nbytes, bucket_bytes)
    return [Bucket(number, 0, tuple(bucket)) for number, bucket in enumerate(buckets)]


def make_weight_sync(
    model: str, cfg: SyncConfig, bindings: object, arch: Any, groups: ParallelDims, receiver: Any
) -> WeightSync:
    rounds, plan = rounds_of(model, cfg.bucket_mib * 2**20), BucketPlan(cfg, [], arch, groups)
    plan.count = len(rounds)
    return WeightSync(cfg, plan, Transport(rounds, receiver), receiver)


def read(really: Callable[..., list[Rollout]], times: int, header: BatchHeader, *paths: str) -> list[Rollout]:
    """Read every byte of a batch once for each rank that this process stands for. All must read the same."""
    sums = set()
    for _ in range(times):
        rollouts = really(header, *paths)
        read_tensors = (x for r in rollouts for x in (r.token_ids_L, r.rollout_logprobs_L, r.response_mask_L))
        sums.add(tuple(float(x.double().sum()) for x in read_tensors))
    assert len(sums) == 1, "two reads of a batch differ"
    return rollouts


def learn(parts: Iterable[RolloutPart], step: int, actor: Any, *others: Any, run: Path, **_: Any) -> None:
    _, _, log, clock, gate = others
    gate.start_step(step)
    row: dict[str, Any] = {"step": step, "prompts": [], "tokens": 0}
    for part in parts:
        tokens = sum(r.token_ids_L.numel() for r in part.rollouts)
        log.receive(tokens, part.metrics)
        row = {"step": step, "prompts": row["prompts"] + [r.prompt_id for r in part.rollouts], "tokens": row["tokens"] + tokens}
    assert all(other == row for other in all_gather_object(row, actor.groups.host)), "the ranks have different batches"
    for phase in ("old_stats", "update"):
        with clock.phase(phase):
            time.sleep(TIMES[f"{phase}_per_1m_tokens"] * row["tokens"] / 1e6)
    if actor.groups.is_main:
        with (run / TRAINED).open("a") as file:
            file.write(json.dumps(row) + "\n")
