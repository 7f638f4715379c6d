"""A server's receiver of broadcast weights, over real gloo groups between threads. No server, no model."""

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tepo_megatron.dist.rendezvous_store import open_store
from tepo_megatron.wire.broadcast_group import SENDER, BroadcastGroup, GroupSpec, UnchangedTensors
from tepo_megatron.wire.bucket_format import Bucket, TensorEntry, crc32
from tepo_megatron.wire.receiver.receiver import RankReceiver

CPU = torch.device("cpu")
MODEL = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.linspace(-1, 1, 7, dtype=torch.bfloat16),
    "scale": torch.tensor(2.5, dtype=torch.bfloat16),
}
SECONDS = 5.0


def packed(number: int, *names: str, sender: int = 0) -> tuple[Bucket, torch.Tensor]:
    """The bucket of these tensors, with checksums, and its row."""
    row = torch.cat([MODEL[name].reshape(-1).view(torch.uint8) for name in names])
    contents = [
        TensorEntry(n, tuple(MODEL[n].shape), str(MODEL[n].dtype).removeprefix("torch."), crc32(MODEL[n])) for n in names
    ]
    return Bucket(number, sender, tuple(contents)), row


class Trainer:
    def __init__(self, store: dist.TCPStore) -> None:
        self.store, self.specs = store, 0
        self.channel: BroadcastGroup | None = None

    def meet(self, inbox: RankReceiver, seconds: float = SECONDS) -> GroupSpec:
        self.specs += 1
        self.spec = GroupSpec("127.0.0.1", self.store.port, f"m{self.specs}", 1, 2, SENDER + 1, seconds, SECONDS)
        inbox.join_groups(self.spec, CPU)
        self.channel = BroadcastGroup.form(self.spec, 0, SENDER, CPU)
        self.store.wait([self.spec.joined_key(SENDER + 1)], datetime.timedelta(seconds=SECONDS))
        return self.spec

    def send(self, inbox: RankReceiver, bucket: Bucket, row: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """Broadcast a bucket; return what the inbox then has to load."""
        assert self.channel is not None
        with ThreadPoolExecutor() as threads:
            taking = threads.submit(inbox.take, [bucket.to_json()])
            self.channel.start(row)
            self.channel.wait()
            arrived = taking.result()
        return None if arrived is None else {name: tensor.clone() for name, tensor in arrived}

    def has(self, number: int) -> bool:
        return self.store.check([self.spec.arrived_key(number, SENDER + 1)])


@contextmanager
def met(folder: Path) -> Iterator[tuple[Trainer, RankReceiver]]:
    """A trainer and an inbox that wait for an update's first round."""
    save_file(MODEL, folder / "model.safetensors")
    trainer, inbox = Trainer(open_store("127.0.0.1")), RankReceiver()
    trainer.meet(inbox)
    inbox.begin(folder, tied_embeddings=False)
    yield trainer, inbox
    inbox.leave()


@pytest.mark.parametrize(
    ("bucket", "fault"),
    [
        (Bucket(1, 0, (TensorEntry("c.bias", (2,), "float32"),)), "1 unknown: c.bias"),
        (Bucket(1, 0, (TensorEntry("scale", (2,), "float32"),)), "1 of another shape: scale"),
        (Bucket(1, 0, (TensorEntry("a.weight", (2, 3), "float32"),)), "1 given twice: a.weight"),
    ],
)
def test_a_round_that_is_not_the_models_is_refused(bucket: Bucket, fault: str, tmp_path: Path) -> None:
    with met(tmp_path) as (trainer, inbox):
        trainer.send(inbox, *packed(0, "a.weight"))
        with pytest.raises(ValueError, match=fault):
            trainer.send(inbox, bucket, torch.zeros(bucket.nbytes, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"2 missing: b\.weight, scale"):
            inbox.finish()


def test_a_damaged_byte_is_noticed(tmp_path: Path) -> None:
    with met(tmp_path) as (trainer, inbox):
        bucket, row = packed(0, "a.weight", "b.weight", "scale")
        row[-2] ^= 1
        with pytest.raises(ValueError, match="tensor scale was damaged on its way"):
            trainer.send(inbox, bucket, row)


def test_only_who_has_the_version_before_may_keep_tensors_of_it(tmp_path: Path) -> None:
    save_file(MODEL, tmp_path / "model.safetensors")
    file, inbox, some = str(tmp_path / "model.safetensors"), RankReceiver(), tuple(MODEL)

    def update(kept: UnchangedTensors, *files: str) -> None:
        inbox.begin(tmp_path, tied_embeddings=False)
        inbox.keep_unchanged(kept)
        inbox.take(list(files))
        inbox.finish()

    with pytest.raises(ValueError, match=r"3 tensors are to stay as in version -1, but this process has version unknown"):
        update(UnchangedTensors(1, -1, some))  # those that it was started with
    update(UnchangedTensors(1, -1, ()), file)
    update(UnchangedTensors(2, 1, some))
    with pytest.raises(ValueError, match=r"are to stay as in version 1, but this process has version 2"):
        update(UnchangedTensors(3, 1, some))
    with pytest.raises(ValueError, match=r"has version unknown"):  # that one was broken off
        update(UnchangedTensors(3, 2, some))
    inbox.begin(tmp_path, tied_embeddings=False)
    inbox.take([file])
    inbox.finish()
    with pytest.raises(ValueError, match=r"has version unknown"):  # it did not say which it was
        update(UnchangedTensors(4, 3, some))
