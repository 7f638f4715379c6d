"""Bad input at the command line: one clear error, a non-zero exit of every rank within 30 s, nothing left behind."""

import json
import socket
import time
from pathlib import Path

import pytest

from tests.tiny import tiny_qwen3

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a dataset: none of these runs gets as far as asking it anything."""
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3(path, layers=4)
    rows = [{"prompt": f"1+{i}?\n", "answer": str(1 + i)} for i in range(40)]
    for name in ("train.jsonl", "eval.jsonl"):
        (path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def refused(command, *phrases: str, within: float = 30.0) -> None:
    started = time.monotonic()
    assert command.wait(60) == 1, command.output
    assert time.monotonic() - started <= within
    for phrase in phrases:
        assert phrase in command.output, command.output
    assert command.output.count("tepo: error:") == 1 and "Traceback" not in command.output, command.output
    command.assert_nothing_left()


@pytest.mark.parametrize(
    ("overrides", "phrase"),
    [
        ({"rollout__temprature": 1}, "rollout.temprature: unknown key; did you mean temperature?"),
        ({"parallel__sequence_parallel": "true", "parallel__tp": 1}, "sequence_parallel=true needs tp > 1"),
        ({"parallel__tp": 4}, "parallel.tp=4 does not divide num_query_groups=2; use 1 or 2"),
        ({"objective__name": "tpeo"}, "objective.name='tpeo' is unknown"),
        ({"model__path": "no/such/model"}, "no/such/model/config.json: not found"),
    ],
)
def test_refused_before_any_process_starts(tepo, arguments, model: Path, tmp_path: Path, overrides: dict, phrase: str) -> None:
    refused(tepo(*arguments(model, **overrides)), phrase)
    assert not (tmp_path / "runs").exists()


def test_truncated_checkpoint(tepo, arguments, tmp_path: Path) -> None:
    path = tmp_path / "model"
    tiny_qwen3(path, layers=4)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(tepo(*arguments(path)), f"{weights}: truncated or corrupt")


@pytest.mark.parametrize(
    ("text", "overrides", "phrase"),
    [
        ("", {}, "train.jsonl"),
        ('{"prompt": "1+1?", "answer": "2"}\n{"prompt": ', {}, "train.jsonl:2"),
        ('{"prompt": "1+1?", "answer": "2"}\n', {"data__max_prompt_tokens": 3}, "data.max_prompt_tokens=3"),
    ],
    ids=["empty", "malformed", "all over-long"],
)
def test_datasets_without_a_usable_prompt(
    tepo, arguments, model: Path, tmp_path: Path, text: str, overrides: dict, phrase: str
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(text)
    refused(tepo(*arguments(model, data__train=data, **overrides)), phrase)


def test_busy_port(tepo, arguments, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        refused(tepo(*arguments(model, rollout__server__port=port)), "rollout.server.port", str(port))


def test_a_server_that_never_gets_ready(tepo, arguments, model: Path) -> None:
    """The limit passes while it loads: the error names the key and shows the log's tail."""
    refused(tepo(*arguments(model, rollout__server__ready_seconds=1)), "rollout.server.ready_seconds")


def test_a_server_that_dies_at_once(tepo, arguments, model: Path) -> None:
    command = tepo(*arguments(model, rollout__server__extra_args="[--no-such-option]"))
    refused(command, "no-such-option", within=60.0)


def test_cuda_without_a_gpu(tepo, arguments, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on a machine with GPUs too
    refused(tepo(*arguments(model, platform="cuda")), "platform")
