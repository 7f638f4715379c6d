"""Weight files that a server accepts as those of its model, and those that it refuses. No server."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tepo_megatron.wire.receiver.receiver import UpdateTracker, check_files, tensors

MODEL = {"a.weight": torch.zeros(3, 2), "b.weight": torch.zeros(4), "lm_head.weight": torch.zeros(3, 2)}


def saved(folder: Path, *files: dict[str, torch.Tensor]) -> list[str]:
    folder.mkdir(mode=0o700)
    paths = [folder / f"{i}.safetensors" for i in range(len(files))]
    for path, weights in zip(paths, files, strict=True):
        save_file({name: weight.clone() for name, weight in weights.items()}, path)
    return [str(path) for path in paths]


def without(name: str) -> dict[str, torch.Tensor]:
    return {n: t for n, t in MODEL.items() if n != name}


FAULTS = {
    "1 missing: b.weight": [without("b.weight")],
    "1 unknown: c.bias": [MODEL | {"c.bias": torch.zeros(1)}],
    "1 given twice: b.weight": [MODEL, {"b.weight": torch.zeros(4)}],
    "1 of another shape: a.weight": [MODEL | {"a.weight": torch.zeros(4, 2)}],
    "1 missing: lm_head.weight": [without("lm_head.weight")],
}


def received(model: Path, *rounds: list[str], tied_embeddings: bool = False) -> None:
    update = UpdateTracker(model, tied_embeddings)
    for paths in rounds:
        update.add(check_files(paths))
    update.finish()


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "one by one"])
@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_are_not_the_model_are_refused(fault: str, apart: bool, tmp_path: Path) -> None:
    saved(tmp_path / "model", MODEL)
    paths = saved(tmp_path / "sent", *FAULTS[fault])
    with pytest.raises(ValueError, match=fault):
        received(tmp_path / "model", *([[path] for path in paths] if apart else [paths]))


def open_the_folder(path: Path) -> None:
    path.parent.chmod(0o711)


def link_the_file(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


def link_the_folder(path: Path) -> None:
    path.parent.symlink_to(path.parent.rename(path.parents[1] / "elsewhere"))


def give_away(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    os.chown(path, 65534, -1)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (open_the_folder, r"/sent/0\.safetensors: .* with mode 0711; user \d+ reads weights from folders of its own"),
        (link_the_file, r"/sent/0\.safetensors: is a link"),
        (link_the_folder, r"/sent/0\.safetensors: is a link, or lies in one"),
        (give_away, r"/sent/0\.safetensors: a file of user 65534 in a folder of user 0"),
    ],
)
def test_what_others_could_have_written_is_not_read(change: Callable[[Path], None], refusal: str, tmp_path: Path) -> None:
    saved(tmp_path / "model", MODEL)
    (sent,) = saved(tmp_path / "sent", MODEL)
    received(tmp_path / "model", [sent])
    change(Path(sent))
    with pytest.raises(ValueError, match=refusal):
        received(tmp_path / "model", [sent])


def test_the_model_in_several_files_passes_and_is_read_in_turn(tmp_path: Path) -> None:
    saved(tmp_path / "model", MODEL)
    paths = saved(tmp_path / "sent", {"b.weight": torch.arange(4.0)}, without("b.weight"))
    received(tmp_path / "model", paths)
    received(tmp_path / "model", *([path] for path in paths))
    read = dict(tensors(paths))
    assert read.keys() == MODEL.keys() and read["b.weight"].tolist() == [0, 1, 2, 3]


def test_what_stays_need_not_be_given_and_may_not(tmp_path: Path) -> None:
    saved(tmp_path / "model", MODEL)
    update = UpdateTracker(tmp_path / "model", tied_embeddings=False)
    update.keep_unchanged(["a.weight"])
    (b,) = saved(tmp_path / "b", {"b.weight": torch.zeros(4)})
    update.add(check_files([b]))
    with pytest.raises(ValueError, match=r"1 given that were to stay: a\.weight"):
        update.add(check_files(saved(tmp_path / "a", {"a.weight": torch.zeros(3, 2)})))
    with pytest.raises(ValueError, match=r"1 missing: lm_head\.weight"):
        update.finish()
    update.add(check_files(saved(tmp_path / "head", {"lm_head.weight": torch.zeros(3, 2)})))
    update.finish()
    with pytest.raises(ValueError, match=r"1 unknown: c\.bias"):
        UpdateTracker(tmp_path / "model", tied_embeddings=False).keep_unchanged(["c.bias"])
