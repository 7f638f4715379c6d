"""Weights in and out on every layout: bitwise round trips, whole exports, delivery to an engine, and refusals."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tepo_megatron.base.errors import CheckpointError, SyncError
from tepo_megatron.config import SyncConfig
from tepo_megatron.wire.bucket_format import Bucket, crc32, open_buffer
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.tiny import change_tensors, tensors, tiny_model, tiny_qwen3
from tests.worlds import run_world

LAYOUTS = {
    "1 rank": {},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "PP2 VPP2": {"pp": 2, "vpp": 2},
    "TP2 PP2": {"tp": 2, "pp": 2},
    "CP2 DP2": {"cp": 2, "dp": 2},
}


class Recorder:
    """The receiving side of a sync; it reads as late as an engine may, when its answer is awaited.

    Attributes:
        rounds: Names of the files of each round, or the ranks that export them.
        peak: Largest number of bytes in the folder at a time, including files that have not been read.
    """

    def __init__(self, refuses: int | None = None) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.rounds: list[list[Any]] = []
        self.version = self.data = self.largest = self.peak = 0
        self.refuses = refuses

    def begin_update(self, version: int) -> None:
        self.__init__(self.refuses)  # type: ignore[misc]
        self.version = -version

    def load(self, sources: list[Any]) -> "Late":
        self.rounds.append([source.name if isinstance(source, Path) else source.sender for source in sources])
        return Late(lambda: self.take(sources))

    def take(self, sources: list[Any]) -> None:
        if len(self.rounds) == self.refuses:
            raise SyncError("the server does not like them")
        if not isinstance(sources[0], Path):
            return self.map(sources)
        files = sources
        self.largest = max(self.largest, sum(file.stat().st_size for file in files))
        self.peak = max(self.peak, sum(map(size_of, files[0].parent.iterdir())))
        for file in files:
            content = file.read_bytes()
            self.data += len(content) - 8 - int.from_bytes(content[:8], "little")
            self.keep_tensors(load(content).items())

    def map(self, buckets: list[Bucket]) -> None:
        assert {bucket.number for bucket in buckets} == {len(self.rounds) - 1}
        self.largest = max(self.largest, sum(bucket.nbytes for bucket in buckets))
        for bucket in buckets:
            lent = Bucket.from_json(bucket.to_json())
            assert lent == bucket and lent.handle is not None
            with open_buffer(lent.handle, torch.device("cpu")) as row:
                self.data += lent.nbytes
                self.keep_tensors((name, tensor.clone()) for name, tensor in lent.tensors(row))

    def keep_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            assert name not in self.received, f"{name} was sent twice"
            self.received[name] = tensor

    def finish_update(self) -> None:
        self.version = -self.version

    def verify(self, sent: Mapping[str, int]) -> None:
        assert sent == {name: crc32(tensor) for name, tensor in self.received.items()}


def left_of(sync: Any) -> list[str]:
    """Return what this rank still holds of an update: files, or exported buffers."""
    if hasattr(sync.transport, "folder"):
        return [file.name for file in sync.transport.folder.iterdir()]
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "tepo-weights" in line]


def size_of(file: Path) -> int:
    """Return the size of a file; 0 if it gets another name meanwhile, under which the next look counts it."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


class Late(Future[None]):
    """Does its work when asked for its result."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work = work

    def result(self, timeout: float | None = None) -> None:
        self.work()


def export_and_push(rank: int, cfg: Any, out: Path) -> dict[str, Any]:
    actor = open_actor(cfg)
    actor.export_hf(out)
    receiver = Recorder() if rank == 0 else None
    with sync_of(cfg, receiver, actor) as sync:
        sync.push(version=3)
        left = list(sync.transport.folder.iterdir()) if rank == 0 else []
    if receiver is None:
        return {}
    return {"received": receiver.received, "rounds": receiver.rounds, "left": left, "folder": str(sync.transport.folder)}


@pytest.mark.parametrize(
    ("name", "tied"),
    full_but(
        [("1 rank", True), ("1 rank", False)],
        [*((name, True) for name in LAYOUTS), ("PP2", False), ("TP2 PP2", False)],
        itertools.product(LAYOUTS, (True, False)),
    ),
)
def test_round_trip_is_bitwise(tmp_path: Path, name: str, tied: bool) -> None:
    model = tiny_qwen3(tmp_path / "base", tied=tied, layers=4, vocab_size=cases.VOCAB)
    cfg = cases.run_config(tmp_path / "base", LAYOUTS[name])
    cfg = replace(cfg, rollout=replace(cfg.rollout, stop_token_ids=[7]))
    rank0 = run_world(cfg.parallel.world_size, export_and_push, cfg, tmp_path / "out")[0]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 7]
    before = tensors(tmp_path / "base")
    for after in (tensors(tmp_path / "out"), rank0["received"]):
        assert after.keys() == before.keys()
        assert all(torch.equal(after[k], before[k]) for k in before)
    assert not Path(rank0["folder"]).exists() and rank0["left"] == []
    assert [len(files) for files in rank0["rounds"]] == [cfg.parallel.pp]  # a file of each owner
    assert not (tmp_path / "out.partial").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(1, 20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def sync_of(cfg: Any, receiver: Any, actor: Any = None, sync: SyncConfig | None = None) -> Any:
    """Return a sync of the weights of `actor`. None: of a new actor, as the config says."""
    from tepo_megatron.sync.push import make_weight_sync

    actor = actor or open_actor(cfg)
    return make_weight_sync(sync or cfg.sync, actor.bindings, actor.arch, actor.groups, receiver)


def push_twice(rank: int, cfg: Any) -> Recorder | None:
    receiver = Recorder() if rank == 0 else None
    with sync_of(cfg, receiver) as sync:
        for version in (1, 2):
            sync.push(version)
            assert receiver is None or (receiver.version == version and len(receiver.rounds) == sync.rounds)
        assert receiver is None or not left_of(sync)
    return receiver


def tiny_moe(path: Path) -> None:
    settings = {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    tiny_model(path, Qwen3MoeConfig(
        vocab_size=cases.VOCAB, hidden_size=128, intermediate_size=384, moe_intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, norm_topk_prob=True, tie_word_embeddings=False, mlp_only_layers=[], **settings,
    ))  # fmt: skip


ROUNDS = {"TP2": {"tp": 2}, "PP2": {"pp": 2}, "TP2 PP2": {"tp": 2, "pp": 2}, "EP2": {"ep": 2, "dp": 2}}
SENT = full_but(
    [("PP2", "shm"), ("TP2", "ipc")],
    [("TP2 PP2", "shm"), ("TP2 PP2", "ipc"), ("EP2", "shm")],
    itertools.product(ROUNDS, ("shm", "ipc")),
)


@pytest.mark.parametrize(("name", "transport"), SENT)
def test_rounds_bound_the_memory_and_send_every_byte_once(tmp_path: Path, name: str, transport: str) -> None:
    if name == "EP2":
        tiny_moe(tmp_path)
    else:
        tiny_qwen3(tmp_path, layers=4, vocab_size=cases.VOCAB)
    cfg = cases.run_config(tmp_path, ROUNDS[name])
    cfg = replace(cfg, sync=replace(cfg.sync, bucket_mib=1, transport=transport, verify_every=2))
    receiver = run_world(cfg.parallel.world_size, push_twice, cfg)[0]
    model = tensors(tmp_path)
    assert receiver.received.keys() == model.keys() and all(torch.equal(receiver.received[k], model[k]) for k in model)
    model_bytes = sum(t.nbytes for t in model.values())
    headers = 256 * len(model)
    assert receiver.data == model_bytes
    assert receiver.largest <= 2**20 + headers and len(receiver.rounds) > 2
    if transport == "shm":
        assert receiver.largest < receiver.peak <= 2 * receiver.largest  # the next round is written while one is loaded


class Keeper(Recorder):
    """A receiver of updates that leave tensors out."""

    def __init__(self) -> None:
        super().__init__()
        self.base: int | None = None
        self.kept: list[str] = []

    def begin_update(self, version: int) -> None:
        Recorder.__init__(self)
        self.version, self.kept = -version, []

    def keep_unchanged(self, names: list[str]) -> None:
        self.kept = names


def push_changes(rank: int, cfg: Any) -> list[dict[str, Any]]:
    """Return the tensors of each push: all, none, after changes of an MLP and of all layers, and to servers that lack them."""
    receiver = Keeper() if rank == 0 else None
    taken, actor = [], open_actor(cfg)
    with sync_of(cfg, receiver, actor) as sync:
        for version, change in enumerate(["", "nothing", "layers.1.mlp", "layers.", "nothing"]):
            if receiver is not None:
                receiver.base = version - 1 if version < 4 else None
            for binding in actor.bindings:
                if change and change in binding.name:
                    binding.parameter.data.view(-1)[0] += 1
            sync.push(version)
            if receiver is not None:
                taken.append(vars(receiver) | {"left": left_of(sync)})
    return taken


@pytest.mark.parametrize(("name", "transport"), SENT)
def test_only_layers_that_changed_are_sent_and_the_rest_is_named(tmp_path: Path, name: str, transport: str) -> None:
    if name == "EP2":
        tiny_moe(tmp_path)
    else:
        tiny_qwen3(tmp_path, layers=4, vocab_size=cases.VOCAB)
    cfg = cases.run_config(tmp_path, ROUNDS[name])
    cfg = replace(cfg, sync=replace(cfg.sync, bucket_mib=1, delta=True, transport=transport))
    model = tensors(tmp_path)
    everything, nothing, layer, layers, again = run_world(cfg.parallel.world_size, push_changes, cfg)[0]

    def bytes_of(part: str) -> int:
        return sum(t.nbytes for name, t in model.items() if part in name)

    for taken in (everything, nothing, layer, layers, again):
        assert sorted([*taken["received"], *taken["kept"]]) == sorted(model) and taken["left"] == []
        assert taken["data"] == sum(t.nbytes for t in taken["received"].values())
    assert everything["kept"] == again["kept"] == [] and everything["data"] == again["data"] == bytes_of("")
    assert nothing["rounds"] == [] and nothing["data"] == 0 and nothing["version"] == 1
    assert layer["data"] == bytes_of("layers.1.") and layers["data"] == bytes_of("layers.")
    assert "model.embed_tokens.weight" in layers["kept"]
    down = [name for name in layer["received"] if name.endswith("down_proj.weight")]
    assert down and not any(torch.equal(layer["received"][name], model[name]) for name in down)


def push_and_fail(rank: int, cfg: Any, cannot_write: int | None, refuses: int | None) -> tuple[str, list[str]]:
    from tepo_megatron.sync import stores as module

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with sync_of(cfg, Recorder(refuses) if rank == 0 else None) as sync:
        original, calls = module.write_file, 0

        def save(tensors: Any, path: Path, *checksums: Any, **settings: Any) -> None:
            nonlocal calls
            calls += 1
            if rank == cannot_write and calls == 2:
                module.save_file = full
            original(tensors, path, *checksums, **settings)

        module.write_file = save
        try:
            sync.push(1)
        except (CheckpointError, SyncError) as e:
            torch.distributed.barrier()
            left = left_of(sync)
            torch.distributed.barrier()  # rank 0 will remove the folder
            return f"{type(e).__name__}: {e}", left
    raise AssertionError("the push went through")


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize(
    "fault", ["rank 0 cannot write", "rank 1 cannot write", "the engine refuses", "it refuses what is lent"]
)
@pytest.mark.slow
def test_a_fault_in_mid_push_ends_it_on_every_rank(tmp_path: Path, fault: str, layout: dict[str, int]) -> None:
    if layout == {"tp": 2} and fault == "rank 1 cannot write":
        pytest.skip("it writes nothing")
    tiny_qwen3(tmp_path, layers=4, vocab_size=cases.VOCAB)
    cfg = cases.run_config(tmp_path, layout)
    cfg = replace(cfg, sync=replace(cfg.sync, bucket_mib=1, transport="ipc" if "lent" in fault else "shm"))
    ranks = run_world(
        2, push_and_fail, cfg, int(fault[5]) if "write" in fault else None, 1 if "refuses" in fault else None, timeout=120
    )
    for error, left in ranks:
        if "refuses" in fault:
            assert error.startswith("SyncError: ") and "the server does not like them" in error
        else:
            assert error.startswith("CheckpointError: ") and "No space left on device" in error and "sync.bucket_mib" in error
        assert left == []


def test_an_export_that_fails_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    tiny_qwen3(tmp_path / "base", layers=4, vocab_size=cases.VOCAB)
    cfg = cases.run_config(tmp_path / "base", {})
    with pytest.raises(AssertionError, match=r"CheckpointError: .*out\.partial.*No space left on device.*MiB wanted"):
        run_world(1, export_onto_a_full_disk, cfg, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def export_onto_a_full_disk(rank: int, cfg: Any, out: Path) -> None:
    from tepo_megatron.models import hf_io

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    actor = open_actor(cfg)
    hf_io.save_file = full
    actor.export_hf(out)


UP, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
Q, K = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "qk")
# what a conversion does not check (unit/models/test_convert_faults.py has what it does), and one that it does
DAMAGED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing tensor": (lambda w: w.pop(UP), f"tensor {UP} .*is missing"),
    "swapped sizes": (  # which add up to what the fused parameter needs
        lambda w: w.update({Q: w[K], K: w[Q]}),
        rf"{Q}.* expected \[128, 64, 64\] rows, got \[64, 128, 64\]",
    ),
    "short embedding": (lambda w: w.update({EMBEDDING: w[EMBEDDING][:-5]}), r"expected \(70, 128\), got \(65, 128\)"),
    "long embedding": (
        lambda w: w.update({EMBEDDING: torch.cat([w[EMBEDDING], w[EMBEDDING][:9]])}),
        r"expected \(70, 128\), got \(79, 128\)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGED)
def test_damaged_checkpoints_are_refused_by_file_and_tensor(tmp_path: Path, how: str) -> None:
    tiny_qwen3(tmp_path, layers=4, vocab_size=cases.VOCAB)
    change, message = DAMAGED[how]
    change_tensors(tmp_path, change)
    with pytest.raises(AssertionError, match=f"ConversionError: .*{message}"):
        run_world(1, lambda rank, cfg: open_actor(cfg) and None, cases.run_config(tmp_path, {}))
