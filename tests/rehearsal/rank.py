"""`tepo train` whose ranks have no model: python -m tests.rehearsal.rank train CONFIG [--key value ...]

The loop of a rank, its calls of the service, the way of a batch to all ranks and the pushes are those of `train.py`. Scripted
are actor, mesh, transport and checkpoints, which take the times of `times.yaml`. Started by the launcher, the module is a rank.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from tepo_megatron import cli
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.launcher import launcher

TIMES = yaml.safe_load(Path(__file__).with_name("times.yaml").read_text())
READS = "TEPO_REHEARSAL_READS"  # environment variable: how often each process reads a batch, for the ranks that it stands for
TRAINED, MESSAGE = "trained.jsonl", "largest_message.json"  # files in the folder of the run


class ScriptedActor:
    bindings, arch, noise_floor = (), None, None

    def __init__(self, groups: Any) -> None:
        self.groups, self.packer = groups, SimpleNamespace()

    @classmethod
    def open(cls, cfg: Config, groups: Any) -> ScriptedActor:
        return cls(groups)

    def start_step(self, step: int) -> None: ...

    def host_copy(self) -> Any:
        return SimpleNamespace(capture=lambda: None)


class ScriptedTransport:
    """Has the servers load Qwen3-14B's tensors, `sync.bucket_mib` of them a round, of which none is sent."""

    def __init__(self, rounds: Sequence[Any], receiver: Any) -> None:
        self._rounds, self._receiver = rounds, receiver
        self._members, self._loading = (), None

    def stage(self, version: int, number: int, tensors: object, checked: bool) -> Any:
        from tepo_megatron.weight_sync.transport import StagedBucket

        return None if self._receiver is None else StagedBucket(self._rounds[number], {}, self._rounds[number].nbytes)

    def start(self, sources: Sequence[Any]) -> None:
        if self._receiver is not None:
            self._join(self._receiver.recipients)
            self._loading = self._receiver.load(sources)

    def _join(self, members: Sequence[Any]) -> None:
        from tepo_megatron.weight_sync.broadcast_group import GroupSpec

        if members != self._members:
            ranks = sum(member.ranks for member in members)
            spec = GroupSpec("127.0.0.1", 1, "rehearsal", 1, 1 + ranks, 1, seconds=30.0, join_seconds=300.0)
            self._receiver.join_groups(dict.fromkeys(members, spec)).result()
            self._members = members

    def wait(self) -> None:
        if self._loading is not None:
            time.sleep(TIMES["sync_per_round"])
            self._loading.result()
            self._loading = None

    def complete(self, reports: Sequence[Any]) -> None: ...

    finish = abort = close = lambda self: None


class ScriptedCheckpoints:
    """Checkpoints of the run's state alone, complete after their time."""

    def __init__(self, folder: Path, groups: Any) -> None:
        self._folder, self._groups = folder, groups
        self._saving: tuple[int, float] | None = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path, cfg: object, groups: Any) -> Iterator[ScriptedCheckpoints]:
        yield cls(folder, groups)

    def save(self, step: int, actor: object, state: Mapping[str, Any], best: int | None = None) -> None:
        from tepo_megatron.checkpoint import folder as folders

        assert self._saving is None, "the next checkpoint is due before this one is complete"
        self._saving = step, time.monotonic()
        if self._groups.is_main:
            (folders.prepare(self._folder, step) / "state.json").write_text(json.dumps(state))

    def poll(self) -> Any:
        return self.wait() if self._saving is not None and time.monotonic() > self._saving[1] + TIMES["checkpoint"] else None

    def wait(self) -> Any:
        from tepo_megatron.checkpoint import folder as folders
        from tepo_megatron.checkpoint.saving import SavedCheckpoint

        if self._saving is None:
            return None
        (step, begun), self._saving = self._saving, None
        if self._groups.is_main:
            time.sleep(max(0.0, begun + TIMES["checkpoint"] - time.monotonic()))
            folders.publish(self._folder, step)
        return SavedCheckpoint(step, folders.complete(self._folder, step), 0, 0.0, TIMES["checkpoint"])

    def newest(self) -> Any:
        from tepo_megatron.checkpoint import folder as folders
        from tepo_megatron.checkpoint.restoring import FoundCheckpoint

        if not (steps := folders.steps(self._folder)):
            return None
        path = folders.complete(self._folder, max(steps))
        return FoundCheckpoint(path, max(steps), json.loads((path / "state.json").read_text()), {}, {})

    def load(self, found: Any, actor: object) -> dict[str, Any]:
        return found.run_state


def rounds_of(bucket_bytes: int) -> list[Any]:
    """Return Qwen3-14B's tensors in bf16, in buckets of one sender."""
    from tepo_megatron.weight_sync.bucket_format import Bucket, TensorEntry

    hidden, inner, q, kv, vocabulary = 5120, 17408, 40 * 128, 8 * 128, 151936
    layer = {
        "input_layernorm": (hidden,), "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q), "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,), "post_attention_layernorm": (hidden,), "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    shapes = {"model.embed_tokens": (vocabulary, hidden)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(40) for name, shape in layer.items()}
    shapes |= {"model.norm": (hidden,), "lm_head": (vocabulary, hidden)}
    buckets: list[list[TensorEntry]] = [[]]
    for name, shape in shapes.items():
        entry = TensorEntry(f"{name}.weight", shape, "bfloat16")
        if buckets[-1] and sum(other.nbytes for other in buckets[-1]) + entry.nbytes > bucket_bytes:
            buckets.append([])
        buckets[-1].append(entry)
    return [Bucket(number, 0, tuple(bucket)) for number, bucket in enumerate(buckets)]


def make_weight_sync(cfg: Any, bindings: object, arch: object, groups: Any, receiver: Any) -> Any:
    from tepo_megatron.weight_sync.buckets import BucketPlan
    from tepo_megatron.weight_sync.sync import WeightSync

    rounds, plan = rounds_of(cfg.bucket_mib * 2**20), BucketPlan(cfg, [], None, groups)
    plan.count = len(rounds)
    return WeightSync(cfg, plan, ScriptedTransport(rounds, receiver), receiver)


def read_for_all(read: Callable[..., Any], header: Any, *paths: str) -> Any:
    """Read every byte of a batch once for each rank that this process stands for. All must read the same."""
    sums = set()
    for _ in range(int(os.environ[READS])):
        rollouts = read(header, *paths)
        fields = ("token_ids_L", "rollout_logprobs_L", "response_mask_L")
        sums.add(tuple(float(getattr(r, name).double().sum()) for r in rollouts for name in fields))
    assert len(sums) == 1, "two reads of a batch differ"
    return rollouts


def learn(
    parts: Any, step: int, actor: Any, objective: Any, training: Any, log: Any, clock: Any, gate: Any, run: Path, **_: Any
) -> None:
    from tepo_megatron.distributed.objects import all_gather_object

    gate.start_step(step)
    rollouts, tokens = [], 0
    for part in parts:
        count = sum(r.token_ids_L.numel() for r in part.rollouts)
        log.receive(count, part.metrics)
        rollouts, tokens = rollouts + part.rollouts, tokens + count
    row = {"step": step, "prompts": [r.prompt_id for r in rollouts], "tokens": tokens}
    assert all(other == row for other in all_gather_object(row, actor.groups.host)), "the ranks have different batches"
    for phase in ("old_stats", "update"):
        with clock.phase(phase):
            time.sleep(TIMES[f"{phase}_per_1m_tokens"] * tokens / 1e6)
    if actor.groups.is_main:
        with (run / TRAINED).open("a") as file:
            file.write(json.dumps(row) + "\n")


def initialize(cfg: Any, platform: Any, seed: int, config: object = None) -> Any:
    """Join the world with one group for all axes: each of Megatron's has a thread that polls, more often under a fast clock."""
    import torch
    import torch.distributed as dist

    from tepo_megatron.distributed.parallel import HOST_LIMIT, Axis, ParallelDims
    from tepo_megatron.utils.scratch import WORLD_FOLDER

    store = dist.FileStore(str(Path(os.environ[WORLD_FOLDER]) / "store"), cfg.world_size)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=cfg.world_size, timeout=HOST_LIMIT)
    world = dist.group.WORLD
    alone, all_ranks = Axis(1, 0, world), Axis.of(world)
    axes = {"tp": alone, "pp": alone, "cp": alone, "ep": alone, "dp": all_ranks, "dp_cp": all_ranks, "expert_dp": all_ranks}
    return ParallelDims(**axes, host=world, vpp=1, device=torch.device("cpu"), limit=HOST_LIMIT)


def measure_messages(path: Path) -> None:
    """Write the size of the largest message of the run between rank 0 and the service into a file."""
    largest = json.loads(path.read_text())["bytes"] if path.exists() else 0

    def note(nbytes: int, way: str) -> None:
        nonlocal largest
        if nbytes > largest:
            largest = nbytes
            path.write_text(json.dumps({"bytes": nbytes, "way": way}))

    send, receive = Connection._send_bytes, Connection._recv_bytes

    def sent(self: Connection, message: Any) -> None:
        note(len(message), "to the service")
        send(self, message)

    def received(self: Connection, maxsize: int | None = None) -> Any:
        message = receive(self, maxsize)
        note(message.getbuffer().nbytes, "from the service")
        return message

    Connection._send_bytes, Connection._recv_bytes = sent, received


def work(cfg: Config, platform: Any) -> None:
    """Train as this process's rank."""
    from tepo_megatron import train
    from tepo_megatron.controller import batch_receiver
    from tepo_megatron.distributed import parallel

    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    if os.environ["RANK"] == "0":
        measure_messages(cfg.run_dir / MESSAGE)
    batch_receiver.read = functools.partial(read_for_all, batch_receiver.read)
    train.Actor, train.Checkpoints, train.make_weight_sync = ScriptedActor, ScriptedCheckpoints, make_weight_sync
    parallel.initialize = initialize
    train.learn = functools.partial(learn, run=cfg.run_dir)
    train.train(cfg, platform, on_hang=launcher._end_at_once)


if __name__ == "__main__":
    if launcher.inside_torchrun():
        sys.exit(launcher.run_rank(load_config(sys.argv[1]), work=work))
    launcher.launch = functools.partial(launcher.launch, worker="tests.rehearsal.rank")
    sys.exit(cli.main())
