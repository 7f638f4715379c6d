"""One real vLLM server, on the CPU, with a tiny random model. The last test kills it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from tepo_megatron.config import RolloutConfig, ServerConfig
from tepo_megatron.errors import RolloutError, SyncError
from tepo_megatron.rollout.engine import INITIAL_VERSION
from tepo_megatron.rollout.vllm import VllmEngine
from tepo_megatron.types import Prompt, Rollout, SamplingParams
from tests.tiny import VOCAB_SIZE, tiny_qwen3

pytestmark = pytest.mark.server

EOS = 2
MAX_LOGPROB_DIFF = 1e-4
SAMPLING = SamplingParams(samples=4, temperature=0.7, max_tokens=20)


@dataclass
class Served:
    """An engine, the model whose weights it serves, and its log."""

    engine: VllmEngine
    model: Qwen3ForCausalLM
    log_path: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm")
    model = tiny_qwen3(folder / "model", tied=True, seed=0)
    cfg = RolloutConfig(server=ServerConfig(kv_cache_gib=0.25, ready_seconds=240))
    log_path = folder / "vllm.log"
    with VllmEngine(
        cfg, model_path=folder / "model", max_model_len=128, platform="cpu", precision="fp32", log_path=log_path, seed=0
    ) as engine:
        engine.start()
        engine.wait_ready()
        yield Served(engine, model, log_path)


def make_prompts(count: int, seed: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, VOCAB_SIZE, (count, 12), generator=generator).tolist()
    # Of different lengths, and with ids that are not their positions.
    return [Prompt(id=1000 + 7 * i, token_ids=tuple(ids[: 3 + i % 10]), answer=str(i)) for i, ids in enumerate(tokens)]


@torch.no_grad()
def logprob_diff(model: Qwen3ForCausalLM, rollouts: list[Rollout], temperature: float) -> float:
    """Largest |engine - transformers| of a response token, in nats."""

    def padded(
        rows: list[torch.Tensor],
    ) -> torch.Tensor:  # on the right, where causal attention does not look
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    tokens = padded([r.token_ids_L for r in rollouts])
    logprobs = (model(tokens).logits[:, :-1].double() / temperature).log_softmax(-1)
    expected = logprobs.gather(2, tokens[:, 1:, None]).squeeze(2)
    given = padded([r.rollout_logprobs_L for r in rollouts])[:, 1:].double()
    chosen = padded([r.response_mask_L for r in rollouts])[:, 1:]
    return (given - expected)[chosen].abs().max().item()


def responses(rollouts: list[Rollout]) -> dict[int, list[list[int]]]:
    """prompt id -> the responses, in order."""
    groups: dict[int, list[list[int]]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt_id, []).append(rollout.response_ids)
    return groups


def save_weights(model: Qwen3ForCausalLM, folder: Path, files: int) -> list[Path]:
    """The model's tensors, the tied output layer left out, dealt to several files."""
    names = [name for name, _ in model.named_parameters()]
    weights = model.state_dict()
    paths = [folder / f"{i}.safetensors" for i in range(files)]
    for i, path in enumerate(paths):
        save_file({name: weights[name].clone() for name in names[i::files]}, path)
    return paths


def test_groups_arrive_in_prompt_order_with_everything_a_rollout_has(served: Served) -> None:
    prompts = make_prompts(64, seed=1)
    rollouts = served.engine.generate(prompts, SAMPLING, seed=3)
    assert [r.prompt_id for r in rollouts] == [p.id for p in prompts for _ in range(SAMPLING.samples)]
    for i, rollout in enumerate(rollouts):
        prompt = prompts[i // SAMPLING.samples]
        context = len(prompt.token_ids)
        assert rollout.token_ids_L[:context].tolist() == list(prompt.token_ids)
        assert not rollout.response_mask_L[:context].any() and rollout.response_mask_L[context:].all()
        assert (rollout.rollout_logprobs_L[:context] == 0).all()
        assert (rollout.rollout_logprobs_L[context:] < 0).all()
        assert rollout.answer == prompt.answer
        assert rollout.policy_version == INITIAL_VERSION == served.engine.version
        if rollout.stop_reason == "stop":  # the token it stopped at is part of the response
            assert rollout.response_ids.index(EOS) == rollout.response_length - 1
        else:
            assert rollout.stop_reason == "length" and rollout.response_length == SAMPLING.max_tokens
    assert {r.stop_reason for r in rollouts} == {"stop", "length"}


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_transformers_after_temperature(served: Served, temperature: float) -> None:
    sampling = SamplingParams(samples=4, temperature=temperature, max_tokens=20)
    rollouts = served.engine.generate(make_prompts(16, seed=2), sampling, seed=0)
    diff = logprob_diff(served.model, rollouts, temperature)
    print(f"largest log-prob difference at T={temperature}: {diff:.1e}")
    assert diff <= MAX_LOGPROB_DIFF
    assert logprob_diff(served.model, rollouts, 2.0) > 0.1  # the comparison can fail


def test_samples_depend_on_the_seed_and_not_on_the_batch(served: Served) -> None:
    prompts = make_prompts(16, seed=4)
    first = responses(served.engine.generate(prompts, SAMPLING, seed=5))
    assert responses(served.engine.generate(prompts[::-1], SAMPLING, seed=5)) == first
    other = responses(served.engine.generate(prompts, SAMPLING, seed=6))
    assert all(first[p.id] != other[p.id] for p in prompts)


def test_samples_of_equal_prompts_are_independent(served: Served) -> None:
    same = make_prompts(1, seed=8)[0].token_ids
    prompts = [Prompt(id=i, token_ids=same, answer="") for i in range(16)]
    sampled = [r.response_ids for r in served.engine.generate(prompts, SAMPLING, seed=0)]
    assert len({tuple(ids) for ids in sampled}) == len(sampled)


def test_only_health_answers_without_the_key(served: Served) -> None:
    with httpx.Client(base_url=served.engine._http["base_url"], trust_env=False) as stranger:
        assert stranger.get("/health").status_code == 200
        for path in ("/start_weight_update", "/pause", "/reset_prefix_cache", "/v1/completions"):
            assert stranger.post(path, json={}).status_code == 401, path
            wrong = {"Authorization": "Bearer wrong"}
            assert stranger.post(path, json={}, headers=wrong).status_code == 401, path
        assert stranger.get("/weight_info").status_code == 401
    key = served.engine._http["headers"]["Authorization"].removeprefix("Bearer ")
    assert key not in served.log_path.read_text()
    assert not any(key in word for process in server_processes(served.engine) for word in process.cmdline())


def test_a_refused_request_is_one_error_and_no_harm(served: Served) -> None:
    too_long = SamplingParams(samples=1, max_tokens=4096)
    with pytest.raises(RolloutError, match=r"400: .*max_model_len"):
        served.engine.generate(make_prompts(3, seed=0), too_long, seed=0)
    assert len(served.engine.generate(make_prompts(1, seed=0), SAMPLING, seed=0)) == SAMPLING.samples


@pytest.mark.parametrize("version", [0, 1])
def test_an_update_replaces_all_weights(served: Served, version: int, tmp_path: Path) -> None:
    prompts = make_prompts(8, seed=9)
    served.engine.generate(prompts, SAMPLING, seed=0)  # leaves the prompts in the prefix cache
    new = tiny_qwen3(tmp_path / "new", tied=True, seed=100 + version)
    files = save_weights(new, tmp_path, files=3)
    started = time.monotonic()
    served.engine.update_weights(files, version)
    print(f"update in {1e3 * (time.monotonic() - started):.0f} ms")
    for file in files:
        file.unlink()
    rollouts = served.engine.generate(prompts, SAMPLING, seed=0)
    diff = logprob_diff(new, rollouts, SAMPLING.temperature)
    print(f"largest log-prob difference to the new weights: {diff:.1e}")
    assert diff <= MAX_LOGPROB_DIFF
    assert logprob_diff(served.model, rollouts, SAMPLING.temperature) > 0.1
    assert served.engine.version == version == rollouts[0].policy_version
    assert served.engine._call("GET", "/weight_info") == {"weight_version": str(version)}
    served.model = new


FAULTS = {
    "missing": r"1 missing: model\.layers\.1\.self_attn\.k_proj\.weight",
    "unknown": r"1 unknown: model\.layers\.0\.self_attn\.q_proj\.bias",
    "given twice": r"1 given twice: model\.norm\.weight",
    "of another shape": r"1 of another shape: model\.layers\.2\.mlp\.up_proj\.weight",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_are_not_the_model_are_refused_by_the_server(served: Served, fault: str, tmp_path: Path) -> None:
    """Asked below `update_weights`, after which the engine would rightly refuse the remaining tests."""
    weights = {name: weight.detach().clone() for name, weight in served.model.named_parameters()}
    if fault == "missing":
        del weights["model.layers.1.self_attn.k_proj.weight"]
    elif fault == "unknown":
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    elif fault == "of another shape":
        weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(385, 128)
    files = [tmp_path / "weights.safetensors", tmp_path / "more.safetensors"]
    save_file(weights, files[0])
    save_file({"model.norm.weight": weights["model.norm.weight"]}, files[1])
    paths = [str(file) for file in files[: 2 if fault == "given twice" else 1]]
    served.engine._call("POST", "/start_weight_update")
    with pytest.raises(RolloutError, match=FAULTS[fault]):
        served.engine._call("POST", "/update_weights", {"update_info": {"paths": paths}})
    rollouts = served.engine.generate(make_prompts(4, seed=10), SAMPLING, seed=0)
    assert logprob_diff(served.model, rollouts, SAMPLING.temperature) <= MAX_LOGPROB_DIFF


def server_processes(engine: VllmEngine) -> list[psutil.Process]:
    """The guard, the API server, the engine core and their helpers."""
    assert engine._server is not None and engine._server._guard is not None
    guard = psutil.Process(engine._server._guard.pid)
    return [guard, *guard.children(recursive=True)]


def test_a_server_killed_in_mid_generation_is_one_prompt_error_and_leaves_nothing(served: Served) -> None:
    processes = server_processes(served.engine)
    api_server = next(p for p in processes if p.ppid() == processes[0].pid)
    assert any("EngineCore" in p.name() or "EngineCore" in " ".join(p.cmdline()) for p in processes)
    endless = SamplingParams(samples=64, max_tokens=100)
    killer = threading.Timer(0.7, api_server.kill)
    killer.start()
    started = time.monotonic()
    with pytest.raises(RolloutError, match=re.escape(str(served.log_path))) as caught:
        served.engine.generate(make_prompts(512, seed=11), endless, seed=0)
    seconds = time.monotonic() - started
    assert 0.7 <= seconds < 6, seconds
    assert "it has ended by SIGKILL" in str(caught.value)
    with pytest.raises(SyncError, match="version 7"):
        served.engine.update_weights([], version=7)
    with pytest.raises(SyncError, match="start a new one"):
        served.engine.generate([], SAMPLING, seed=0)
    served.engine.close()
    gone, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive and len(gone) == len(processes)
