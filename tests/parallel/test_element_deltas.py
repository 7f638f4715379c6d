"""Element deltas over real transports, from every layout: the served bits are those of whole deliveries, whatever happens."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tepo_megatron.errors import SyncError
from tepo_megatron.inference.engine_api import serialize
from tepo_megatron.weight_sync.bucket_format import ENCODED
from tepo_megatron.weight_sync.receiver.receiver import RankReceiver
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.test_broadcast import config_of, fleet, got
from tests.parallel.test_relay import memory, simulated, world
from tests.parallel.test_weights import ROUNDS, Late, Recorder, actor_of, sync_of, tensors, tiny_moe
from tests.tiny import tiny_qwen3
from tests.unit.rollout.test_fleet import behave, until
from tests.worlds import run_world


class Receivers:
    """The receiving side of file transports: two processes of a server, each with a real receiver.

    Attributes:
        served: The tensors that each serves.
        base: Version of the last update; None where a server has restarted.
        fault: What happens to the second process, or to the files, before the next round.
    """

    def __init__(self, model: Path, elsewhere: Callable[[Path], Path] = lambda path: path) -> None:
        self.elsewhere = elsewhere  # the path under which the second process sees a file
        self.model, self.receivers = model, [RankReceiver(), RankReceiver()]
        self.served: list[dict[str, torch.Tensor]] = [{}, {}]
        self.base: int | None = None
        self.coming = 0
        self.fault = ""

    def begin_update(self, version: int) -> None:
        self.coming = version
        for receiver in self.receivers:
            receiver.begin(self.model, tied_embeddings=True)

    def keep_unchanged(self, names: list[str]) -> None:
        from tepo_megatron.weight_sync.broadcast_group import UnchangedTensors

        for receiver in self.receivers:
            receiver.keep_unchanged(UnchangedTensors(self.coming, -1 if self.base is None else self.base, tuple(names)))

    def load(self, sources: list[Path]) -> Future[None]:
        return Late(lambda: self.take(sources))

    def take(self, sources: list[Path]) -> None:
        self.hurt(sources)
        seen = [sources, [self.elsewhere(path) for path in sources]]
        for receiver, served, files in zip(self.receivers, self.served, seen, strict=True):
            if (arrived := receiver.take(serialize(files))) is not None:
                served |= {name: tensor.clone() for name, tensor in arrived}

    def hurt(self, files: list[Path]) -> None:
        held = self.receivers[1].bases
        if self.fault == "forgotten":
            held.clear()
        elif self.fault == "another version":
            held.keep({name: replace(tensor, crc32=tensor.crc32 ^ 1) for name, tensor in held.held.items()})
        elif self.fault == "damaged base":
            for tensor in held.held.values():
                tensor.tensor.reshape(-1).view(torch.uint8)[-1] ^= 1
        elif self.fault in ("damaged", "truncated", "bomb", "always damaged"):
            damage(files[0], self.fault)
        if not self.fault.startswith("always"):
            self.fault = ""

    def finish_update(self) -> None:
        for receiver in self.receivers:
            receiver.finish()
        self.base = self.coming

    def verify(self, sent: dict[str, int]) -> None:
        served = self.served[0]
        assert sent == {name: zlib.crc32(bytes_of(tensor)) for name, tensor in served.items()}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def damage(path: Path, how: str) -> None:
    """Write a file again with one damaged tensor: the one with the largest payload."""
    with safe_open(path, framework="pt") as file:
        sent, header = {name: file.get_tensor(name).clone() for name in file.offset_keys()}, dict(file.metadata())
    encodings = json.loads(header[ENCODED])["tensors"]
    payloads = [name for name in sent if encodings[name]["base_crc32"] is not None] or list(sent)
    name = max(payloads, key=lambda name: sent[name].nbytes)
    if how == "truncated":
        sent[name] = sent[name][:-7]
    elif how == "bomb":
        import pyarrow

        zeros = pyarrow.Codec("zstd", compression_level=1).compress(bytes(2**26), asbytes=True)
        start = sent[name][: encodings[name]["mask_bytes"]]
        sent[name] = torch.cat([start, torch.frombuffer(bytearray(zeros), dtype=torch.uint8)])
    else:
        sent[name].reshape(-1).view(torch.uint8)[-1] ^= 0x40
    save_file(sent, path, header)


def change(actor: Any, version: int, share: float = 0.05) -> None:
    """Change about `share` of the elements of all parameters but the embedding, the same on every rank that has them."""
    for binding in actor.bindings:
        if "embedding" in binding.name:
            continue
        parameter = binding.parameter.data
        generator = torch.Generator().manual_seed(zlib.crc32(f"{binding.name} {version}".encode()))
        chosen = torch.rand(parameter.shape, generator=generator) < share
        parameter.mul_(torch.where(chosen, 1 + 2.0**-7, 1.0).to(parameter.dtype))


def push_often(
    rank: int, cfg: Any, faults: dict[int, str], folder: Path | None = None, root: Path | None = None, quantize: str = "none"
) -> dict[str, Any]:
    """Push versions 1 to 6 in deltas and whole; return which tensors differ, and what was sent.

    Args:
        rank, cfg: The rank and its config.
        faults: Faults by version, see `Receivers.hurt`; "restarted": the second process has nothing.
        folder: Checkpoint of the servers; None: the trainer's.
        quantize: Value of sync.quantize, which no config of a CPU allows.
        root: Folder of the machines, of which the second process is on the second one. None: there is one machine.
    """
    from tepo_megatron.weight_sync.sync import make_weight_sync

    actor = actor_of(cfg)

    def elsewhere(path: Path) -> Path:
        return path if root is None else memory(root, 1) / path.relative_to(memory(root, 0))

    receiver = Receivers(folder or Path(cfg.model.path), elsewhere) if rank == 0 else None
    pushed, left, same = [], [], []
    plain = Recorder() if rank == 0 else None
    settings = replace(cfg.sync, quantize=quantize)
    whole = replace(settings, delta="none", bucket_mib=512)
    parts = actor.bindings, actor.arch, actor.groups
    with make_weight_sync(settings, *parts, receiver) as sync, make_weight_sync(whole, *parts, plain) as complete:
        for version in range(1, 7):
            change(actor, version)
            fault = faults.get(version, "")
            if receiver is not None and fault == "restarted":
                receiver.receivers[1], receiver.served[1], receiver.base = RankReceiver(), {}, None
            elif receiver is not None:
                receiver.fault = fault
            sync.push(version)
            complete.push(version)
            if receiver is not None and plain is not None:
                pushed.append(sync.pushed)
                left.append(list(sync.transport.folder.iterdir()))
                same.append([differing(served, plain.received) for served in receiver.served])
    return {"pushed": pushed, "left": left, "same": same}


def differing(served: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that do not have the right bits."""
    return [
        name
        for name in served.keys() | right.keys()
        if name not in served or name not in right or bytes_of(served[name]) != bytes_of(right[name])
    ]


def elements(model: Path, name: str, precision: str = "bf16", **sync: Any) -> Any:
    (tiny_moe if name == "EP2" else lambda path: tiny_qwen3(path, layers=4, vocab_size=cases.VOCAB))(model)
    cfg = cases.run_config(model, ROUNDS.get(name, {}))
    cfg = replace(cfg, model=replace(cfg.model, precision=precision))
    return replace(cfg, sync=replace(cfg.sync, delta="elements", bucket_mib=1, **sync))


@pytest.mark.parametrize(
    ("name", "precision"),
    full_but([("1 rank", "bf16"), ("TP2 PP2", "bf16")], [], [(n, p) for n in ("1 rank", *ROUNDS) for p in ("bf16", "fp32")]),
)
def test_many_deltas_serve_the_same_bits_as_whole_deliveries(tmp_path: Path, name: str, precision: str) -> None:
    cfg = elements(tmp_path, name, precision, verify_every=2)
    rank0 = run_world(cfg.parallel.world_size, push_often, cfg, {4: "restarted"})[0]
    assert rank0["same"] == [[[], []]] * 6 and rank0["left"] == [[]] * 6
    full = sum(t.nbytes for t in tensors(tmp_path).values()) // (2 if precision == "bf16" else 1)
    for version, sent in enumerate(rank0["pushed"], 1):
        assert sent.full == full and sent.refused == 0
        assert sent.sent == full if version in (1, 4) else 0 < sent.sent < 0.2 * full  # the first, and after the restart


@pytest.mark.parametrize("fault", full_but([""], [], ["", "forgotten", "damaged base"]))
@pytest.mark.parametrize("name", full_but(["PP2, one each"], [], ["PP2, one each", "TP2 PP2, crosswise", "EP2, one each"]))
def test_deltas_reach_every_machine(tmp_path: Path, name: str, fault: str) -> None:
    """The second process is on another machine, from which its refusal comes."""
    cfg, machines, root = world(tmp_path, name, delta="elements")
    ranks = run_world(len(machines), simulated, machines, root, push_often, cfg, {4: fault}, None, root)
    rank0, _ = ranks[0]
    assert rank0["same"] == [[[], []]] * 6 and rank0["left"] == [[]] * 6
    assert [sent.refused > 0 for sent in rank0["pushed"]] == [version == 4 and bool(fault) for version in range(1, 7)]
    assert all(sent.sent < 0.2 * sent.full for sent in rank0["pushed"][1:3])


@pytest.mark.parametrize("fault", ["forgotten", "another version", "damaged base", "damaged", "truncated", "bomb"])
def test_a_round_that_cannot_be_decoded_is_sent_again_whole(tmp_path: Path, fault: str) -> None:
    """The other process, which has it, takes it once. The deltas after it fit again."""
    cfg = elements(tmp_path, "1 rank")
    rank0 = run_world(1, push_often, cfg, {3: fault})[0]
    assert rank0["same"] == [[[], []]] * 6 and rank0["left"] == [[]] * 6
    refused = [sent.refused for sent in rank0["pushed"]]
    rounds = refused[2]
    assert refused == [0, 0, rounds, 0, 0, 0] and rounds >= 1
    third, fourth = rank0["pushed"][2:4]
    assert fourth.sent < third.sent < 1.3 * third.full


def push_and_fail(rank: int, cfg: Any) -> str:
    actor = actor_of(cfg)
    receiver = Receivers(Path(cfg.model.path)) if rank == 0 else None
    with sync_of(cfg, receiver, actor) as sync:
        sync.push(1)
        change(actor, 2)
        if receiver is not None:
            receiver.fault = "always damaged"
        try:
            sync.push(2)
        except SyncError as e:
            assert receiver is None or receiver.base == 1  # nothing is served of what was damaged
            return str(e)
    return "pushed"


def test_what_is_damaged_whole_too_ends_the_push_on_every_rank(tmp_path: Path) -> None:
    cfg = elements(tmp_path, "PP2")
    for message in run_world(2, push_and_fail, cfg):
        assert "was sent whole 3 times, and a server refused it each time" in message


class Gathered:
    """Counts the bytes of the shards that a rank gathers over tp.

    Attributes:
        sizes: Bytes of this rank's shard, of each parameter that is gathered.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        import torch.distributed as dist

        self.sizes: list[int] = []
        self.on = False
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        gather, all_gather = dist.gather, dist.all_gather

        def count(tensor: torch.Tensor) -> None:
            if self.on:
                self.sizes.append(tensor.nbytes)

        def counted_gather(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            count(tensor)
            return gather(tensor, *args, **kwargs)

        def counted_all_gather(found: list[torch.Tensor], tensor: torch.Tensor, **kwargs: Any) -> Any:
            count(tensor)
            return all_gather(found, tensor, **kwargs)

        patch.setattr(dist, "gather", counted_gather)
        patch.setattr(dist, "all_gather", counted_all_gather)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        self.on = True
        yield
        self.on = False


def broadcast_often(rank: int, cfg: Any, folder: Path, faults: dict[int, str]) -> dict[str, Any]:
    """Push versions 1 to 5 over process groups to two servers of two ranks; return what they received."""
    from tepo_megatron.weight_sync.sync import make_weight_sync

    result: dict[str, Any] = {"pushed": [], "wrong": []}
    with contextlib.ExitStack() as stack:
        model, precision = Path(cfg.model.path), cfg.model.precision
        servers = stack.enter_context(fleet(folder, model, servers=2, tp=2, precision=precision)) if rank == 0 else None
        actor = actor_of(cfg)
        parts = actor.bindings, actor.arch, actor.groups, servers
        sync = stack.enter_context(make_weight_sync(cfg.sync, *parts))
        plain = Recorder() if rank == 0 else None
        whole = replace(cfg, sync=replace(cfg.sync, delta="none", transport="shm"))
        complete = stack.enter_context(sync_of(whole, plain, actor))
        gathered = Gathered(stack)
        for version in range(1, 6):
            change(actor, version)
            fault = faults.get(version, "")
            if servers is not None:
                for i in range(2):
                    hurt = {"broadcast" if fault == "midst" else "base": fault} if fault and i == 1 else {}
                    behave(servers, i, save=str(folder), **hurt)
            with gathered.counting():
                sync.push(version)
            complete.push(version)
            if servers is None or plain is None:
                if fault == "midst":
                    sync.push(version)
                result["gathered"] = gathered.sizes
                continue
            received = got(folder)
            result["pushed"].append(sync.pushed)
            if fault == "midst":
                until(lambda: servers.needs_weights)
                behave(servers, 1, save=str(folder))
                sync.push(version)
                received += got(folder)
                result["pushed"].append(sync.pushed)
            result["wrong"].append([[n for n in differing(r, plain.received) if n in r] for r in received])
            result["received"] = received
            result["whole"] = plain.received
        result |= {"sent": sync.transport.sent_bytes, "gathered": gathered.sizes}
    return result


@pytest.mark.full
@pytest.mark.parametrize("fault", ["", "forgotten", "damaged", "midst"])
@pytest.mark.parametrize("name", ["PP2", "EP2"])
def test_deltas_are_broadcast_to_all_servers(tmp_path: Path, name: str, fault: str) -> None:
    """A rank that has no base, or a damaged one, costs its rounds again; a server that comes back gets everything."""
    model = tmp_path / "model"
    cfg = elements(model, name)
    cfg = replace(cfg, sync=config_of(model, {}, delta="elements").sync)
    rank0 = run_world(2, broadcast_often, cfg, tmp_path, {3: fault}, timeout=240)[0]
    assert [len(received) for received in rank0["wrong"]] == [4] * 5
    assert not any(wrong for received in rank0["wrong"] for wrong in received)
    refused = [sent.refused for sent in rank0["pushed"]]
    if fault == "midst":
        assert refused == [0] * 6
        assert [sent.sent == sent.full for sent in rank0["pushed"]] == [True, False, False, True, False, False]
    else:
        assert (refused[2] >= 1) == bool(fault) and refused[:2] + refused[3:] == [0] * 4
        assert [sent.sent < 0.2 * sent.full for sent in rank0["pushed"]] == [False, True, not fault, True, True]
