"""Typing mistakes: each gives one message that names the key and the fix, within seconds, and before anything is started."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tepo_megatron.command import launcher, parsers
from tests.tiny import tiny_qwen3

pytestmark = pytest.mark.slow
CPU_SECONDS = 10.0  # each, with the imports of the first
FILES = {
    "train.jsonl": '{"prompt": "1+1=", "answer": "2"}\n' * 3,
    "mine.yaml": "name: mine\nplatform: cpu\nmodel: {path: model, precision: fp32}\n"
    "data: {train: train.jsonl, max_prompt_tokens: 16}\nrollout: {max_response_tokens: 16}\n",
    "words.jsonl": "hello\nworld\n",
    "empty.jsonl": "",
    "prompts.jsonl": '{"prompt": "1+1="}\n',
    "list.yaml": "- a\n",
    "tab.yaml": "name: x\nmodel:\n\tpath: y\n",
    "twice.yaml": "name: a\nmodel:\n  path: x\nmodel:\n  path: y\n",
    "rewards.py": "def short(answer): return 1\n",
    "syntax.py": "def reward(:\n",
    "imports.py": "import nothing_of_the_kind\n",
}
CUSTOM = "--reward.terms=[{type: custom, function: %s}]"
# words after `tepo train mine.yaml` -> what the message says
OF_TRAIN = {
    "--trainig.steps 5": "trainig: unknown key; did you mean training?",
    "--training.step 5": "training.step: unknown key; did you mean steps?",
    "--steps 5": "did you mean training.steps or sft.steps?",
    "--lr 1e-5": "did you mean optimizer.lr?",
    "--learning_rate 1e-5": "did you mean optimizer.lr?",
    "--objective.eps 0.2": "did you mean objective.clip_low and objective.clip_high?",
    "--rollout.server.port 80": "rollout.server.port: unknown key; rollout.server has: .*tp",
    "--megatron.optimizer.weight_decy 0.1": "did you mean weight_decay?",
    "--training.steps": "--training.steps: the value is missing",
    "training.steps 5": "expected --key value",
    "--training.steps five": "training.steps: .*valid integer .got 'five'",
    "--training.steps 2.5": "training.steps: .*valid integer .got 2.5",
    "--training.steps 0": "training.steps: .*greater than or equal to 1",
    "--optimizer.lr fast": "optimizer.lr: .*valid number",
    "--optimizer.lr 1e-5x": "optimizer.lr: .*valid number",
    "--optimizer.lr -1e-5": "optimizer.lr: .*greater than 0",
    "--seed -1": "seed: .*greater than or equal to 0",
    "--name a/b": "name='a/b' must be a plain folder name",
    "--output /proc/x": "output=/proc/x: .* cannot be written .*choose another `output`",
    "--resume true --overwrite true": "contradict each other",
    "--platform gpu": "platform: .*'cpu' or 'cuda'",
    "--model.path nowhere": "nowhere/config.json: not found; model.path must be .*hf download",
    "--model.path train.jsonl": "train.jsonl/config.json: not found; model.path must be",
    "--model.precision fp16": "model.precision: .*'fp32', 'bf16'",
    "--model.precision fp8-blockwise": "model.precision=fp8-blockwise needs platform=cuda",
    "--model.attention flash": "model.attention: .*'auto', 'te' or 'sdpa'",
    "--data.train nowhere.jsonl": "nowhere.jsonl: cannot read the dataset .*give the path",
    "--data.train words.jsonl": "words.jsonl:1: not valid JSON",
    "--data.train empty.jsonl": "empty.jsonl: the dataset is empty",
    "--data.train prompts.jsonl": "prompts.jsonl:1: .*data.prompt_key and data.answer_key",
    "--data.train reasoning_gym:chainsum": "did you mean chain_sum",
    "--data.train train.jsonl[5]": "data.train='train.jsonl.5.'|cannot read the dataset",
    "--data.eval nowhere.jsonl": "nowhere.jsonl: cannot read the dataset",
    "--data.prompt_key question": "data.prompt_key=question: the row has no such key; its keys are 'prompt', 'answer'",
    "--data.answer_key solution": "data.answer_key=solution: the row has no such key",
    "--parallel.tp 3": "parallel.tp=3 does not divide .*use 1 or 2",
    "--parallel.tp 0": "parallel.tp: .*greater than or equal to 1",
    "--parallel.pp 7": "parallel.pp=7 exceeds num_layers=2; use at most 2",
    "--parallel.sequence_parallel maybe": "parallel.sequence_parallel: .*valid boolean",
    "--rollout.engine vlm": "rollout.engine: .*'vllm', 'sglang' or 'torch'",
    "--rollout.servers 0": "rollout.servers: .*greater than or equal to 1",
    "--rollout.server.tp 3": "rollout.server.tp=3 does not divide the 4 attention heads of the model; use one of 1, 2, 4",
    "--rollout.server.urls [localhost]": "urls: 'localhost' is not http",
    "--rollout.samples_per_prompt 1": "rollout.samples_per_prompt: .*greater than or equal to 2",
    "--rollout.temperature 0": "rollout.temperature: .*greater than or equal to 0.01",
    "--rollout.top_p 1.5": "rollout.top_p: .*less than or equal to 1",
    "--rollout.max_response_tokens 100000": "max_tokens_per_microbatch=.* cannot hold one sequence of 100016 tokens",
    "--rollout.max_staleness -1": "rollout.max_staleness: .*greater than or equal to 0",
    "--objective.name tepoo": "objective.name='tepoo' is unknown; use path/to/file.py:NAME, or one of tepo,",
    "--objective.name rewards.py:short": "rewards.py:short: it is no Objective but function",
    "--objective.name rewards.py:long": "rewards.py defines no long; name an Objective",
    "--objective.aggregate mean": "objective.aggregate='mean' is unknown; use one of token_mean",
    "--objective.beta -1": "objective.beta: .*greater than or equal to 0",
    "--reward.terms=[{type: maths}]": "reward.terms.0: no type is called maths; did you mean math",
    "--reward.terms=[{type: xyz}]": "reward.terms.0: no type is called xyz; one of math, answer_line",
    "--reward.terms math": r"reward.terms: a list is expected; put \[ \] around it",
    "--training.steps 5m": "training.steps: .*valid integer, without a unit",
    "--wach": "tepo train takes no --wach; did you mean --watch",
    "--reward.terms=[]": "terms: the first entry is the verdict",
    "--reward.terms=[{type: custom}]": "reward.terms.0.custom.function: this key is required",
    CUSTOM % "rewards.py:short": "rewards.py:short: short must take prompt, response, answer",
    CUSTOM % "rewards.py:long": "rewards.py defines no long",
    CUSTOM % "syntax.py:reward": "syntax.py cannot be imported .SyntaxError",
    CUSTOM % "imports.py:reward": "No module named 'nothing_of_the_kind' at .*imports.py:1",
    CUSTOM % "nowhere.py:reward": "there is no file .*nowhere.py",
    "--checkpoint.every often": "checkpoint.every='often': give a number of steps, minutes as '30 min', or 0",
    "--checkpoint.keep_best true": "checkpoint.keep_best=true needs .*evaluation.every",
    "--evaluation.benchmarks=[aime]": "evaluation.benchmarks.0: .*'aime24'",
    "--sync.transport nccl": "sync.transport: must be one of shm, group and ipc",
    "--logging.metrics_port 99999": "logging.metrics_port: .*less than or equal to 65535",
    "--training.recompute all": "training.recompute: .*'none', 'selective' or 'full'",
    "--training.max_tokens_per_microbatch 10": "max_tokens_per_microbatch=10 cannot hold .*raise it",
}
OTHERS = {
    "train nowhere.yaml": "nowhere.yaml: cannot read the config file .*give the path of a YAML file",
    "train list.yaml": "list.yaml: a config is a mapping of keys, not list",
    "train tab.yaml": "tab.yaml: not valid YAML: .*line 3",
    "train twice.yaml": "model is written twice, in lines 2 and 4; keep one",
    "train --seed 1 mine.yaml": "the config file comes first",
    "trian mine.yaml": "invalid choice: 'trian'",
    "sft mine.yaml": "sft.data is not set; .*--sft.data FILE",
    "sft mine.yaml --sft.data nowhere.jsonl --sft.max_tokens 16": "nowhere.jsonl: cannot read the dataset",
    "resume runs/nothing": "runs/nothing: no run is there",
    "report runs/nothing": "runs/nothing/metrics.jsonl: .*give the folder of a run",
    "watch runs/nothing": "runs/nothing: there is no such folder; give the folder of a run",
    "replay runs/nothing": "give the folder of a run",
    "audit runs/nothing --step 1": "runs/nothing: there is no such folder; train with --logging.audit_every 1",
    "compare a b": "a/evaluation.json: .*give a folder that tepo evaluate wrote",
    "evaluate nowhere": "nowhere: no such directory; give a Hugging Face model",
    "replay runs --untill 3": "tepo replay takes no --untill; did you mean --until",
    "report runs --output x.html": "tepo report takes no --output; did you mean --out",
    "plan mine.yaml --gpus -3": "--gpus -3: a positive number",
    "plan mine.yaml --gpu h900": "--gpu h900: not in the table; use one of H100",
    "serve mine.yaml": "rollout.server.rendezvous",
}
CASES = {f"train mine.yaml {words}": said for words, said in OF_TRAIN.items()} | OTHERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    tiny_qwen3(made / "model", layers=2)
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


@pytest.mark.parametrize("words", CASES)
def test_a_mistake_is_one_clear_message(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda _, words, *__, **___: pytest.fail(f"{words} was started"))
    begun = time.process_time()
    try:
        status = parsers.main(re.findall(r"--[\w.]+=\[.*\]|\S+", words))
    except SystemExit as e:  # argparse's
        status = e.code
    assert time.process_time() - begun < CPU_SECONDS
    message = capsys.readouterr().err
    assert status in (1, 2) and re.search(CASES[words], message, re.DOTALL), message
    assert "Traceback" not in message and message.count("error: ") == 1
    assert not any((folder / "runs").glob("*/metrics.jsonl"))


def test_the_files_themselves_would_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: begun.append(1))
    assert parsers.main(["train", "mine.yaml", "--overwrite", "true"]) == 0 and begun
