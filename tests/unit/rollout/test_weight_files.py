"""Weight files that a server accepts as those of its model, and those that it refuses. No server."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tepo_megatron.weight_sync.receiver.weight_files import NEVER_SENT, UpdateTracker, check_files, tensors
from tepo_megatron.weights.families import FAMILIES

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


def test_a_file_of_another_machine_is_named_with_this_one(tmp_path: Path) -> None:
    saved(tmp_path / "model", MODEL)
    with pytest.raises(ValueError, match=rf"/none is not seen on {socket.gethostname()}: .* set sync\.transport\.folder"):
        received(tmp_path / "model", [str(tmp_path / "none")])


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


def test_only_what_is_missing_waits_for_the_end(tmp_path: Path) -> None:
    saved(tmp_path / "model", MODEL)
    first, unknown = saved(tmp_path / "sent", {"b.weight": torch.zeros(4)}, {"c.bias": torch.zeros(1)})
    update = UpdateTracker(tmp_path / "model", tied_embeddings=False)
    update.add(check_files([first]))
    with pytest.raises(ValueError, match=r"1 unknown: c\.bias"):
        update.add(check_files([unknown]))
    with pytest.raises(ValueError, match=r"2 missing: a\.weight, lm_head\.weight"):
        update.finish()


def test_the_model_in_several_files_passes_and_is_read_in_turn(tmp_path: Path) -> None:
    saved(tmp_path / "model", MODEL)
    paths = saved(tmp_path / "sent", {"b.weight": torch.arange(4.0)}, without("b.weight"))
    received(tmp_path / "model", paths)
    received(tmp_path / "model", *([path] for path in paths))
    read = dict(tensors(paths))
    assert read.keys() == MODEL.keys() and read["b.weight"].tolist() == [0, 1, 2, 3]


def test_a_tied_output_layer_may_be_there_or_not(tmp_path: Path) -> None:
    saved(tmp_path / "model", without("lm_head.weight"))
    for i, sent in enumerate((MODEL, without("lm_head.weight"))):
        received(tmp_path / "model", saved(tmp_path / str(i), sent), tied_embeddings=True)
    with pytest.raises(ValueError, match=r"1 unknown: lm_head\.weight"):
        received(tmp_path / "model", saved(tmp_path / "again", MODEL))


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


def test_tensors_next_to_a_text_model_are_not_expected(tmp_path: Path) -> None:
    """The server names them by a pattern of its own, because it loads nothing of the trainer's families."""
    with_more = [family for family in FAMILIES.values() if family.text_config is not None]
    for name in ("visual.a", "model.visual.b.weight", "mtp.c", "model.visuals.a", "model.mtp.a", "lm_head.weight"):
        assert {family.carries(name) for family in with_more} == {bool(NEVER_SENT.match(name))}, name
    saved(tmp_path / "model", MODEL | {"mtp.layer.weight": torch.zeros(2), "model.visual.a": torch.zeros(2)})
    received(tmp_path / "model", saved(tmp_path / "sent", MODEL))


def test_half_of_a_decay_is_refused(tmp_path: Path) -> None:
    """vLLM loads both tensors of the module together, and would serve undefined numbers after an update with one of them."""
    pair = {f"model.layers.0.linear_attn.{name}": torch.zeros(4) for name in ("A_log", "dt_bias")}
    saved(tmp_path / "model", pair | MODEL)
    for i, (sent, kept) in enumerate((list(pair), list(pair)[::-1])):
        update = UpdateTracker(tmp_path / "model", tied_embeddings=False)
        update.keep_unchanged([kept, *MODEL])
        with pytest.raises(ValueError, match=rf"1 that were to stay without the other of their pair: {kept}"):
            update.add(check_files(saved(tmp_path / str(i), {sent: pair[sent]})))
    update = UpdateTracker(tmp_path / "model", tied_embeddings=False)
    update.keep_unchanged(list(MODEL))
    update.add(check_files(saved(tmp_path / "both", pair)))
    update.finish()
