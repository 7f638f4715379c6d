"""A real server of each engine, on the CPU, with a tiny random model. The last test kills it."""

import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

from tepo_megatron.base.errors import SyncError
from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.types import Rollout, SamplingParams, Truncation
from tepo_megatron.engines.engine import INITIAL_VERSION, GenerationRequest
from tepo_megatron.engines.sglang import SglangApi, generate_request
from tepo_megatron.engines.torch_engine import TorchApi
from tepo_megatron.engines.vllm import VllmApi, completion_request
from tepo_megatron.wire.bucket_format import Bucket, export_buffer, pack
from tepo_megatron.wire.receiver.binary_answer import CONTENT_TYPE
from tests.direct_requests import connected
from tests.server.served import (
    EOS,
    MAX_LOGPROB_DIFF,
    SAMPLING,
    Served,
    another_engine,
    call,
    logprob_diff,
    make_prompts,
    responses,
    sampled_by,
    save_weights,
    serve,
    server_processes,
    truncated_diff,
)
from tests.tiny import tiny_qwen3

pytestmark = pytest.mark.server
SERVERS = [
    pytest.param(("vllm", 1), id="vllm"),
    pytest.param(("sglang", 1), id="sglang"),
    pytest.param(("torch", 1), id="torch"),
    pytest.param(("vllm", 2), id="vllm-tp2", marks=pytest.mark.full),
    pytest.param(("sglang", 2), id="sglang-tp2", marks=pytest.mark.full),
]
APIS = {"vllm": VllmApi(), "sglang": SglangApi(), "torch": TorchApi()}
# every route that could change what is sampled, or stop it
CONTROLS = {
    "vllm": (
        *(
            "/v1/completions",
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
        ),
        *("/pause", "/resume", "/sleep", "/wake_up", "/abort_requests", "/reset_prefix_cache", "/collective_rpc"),
        "/weight_checker",
    ),
    "sglang": (
        *("/generate", "/v1/completions", "/begin_weight_update", "/end_weight_update", "/update_weights_from_tensor"),
        *("/update_weights_from_disk", "/update_weights_from_distributed", "/init_weights_update_group", "/flush_cache"),
        *("/pause_generation", "/continue_generation", "/abort_request", "/release_memory_occupation", "/weights_checker"),
        *("/resume_memory_occupation", "/update_weight_version", "/slow_down", "/load_lora_adapter"),
    ),
    "torch": (
        *("/generate", "/abort", "/begin_update", "/join_groups", "/keep_unchanged", "/load", "/finish_update", "/checksums"),
        *("/sleep", "/wake"),
    ),
}
# routes that answer without the key: the server's health and its counters
OPEN = {"/health", "/health_generate", "/ready", "/metrics"}
ABOUT = {"vllm": "/weight_info", "sglang": "/model_info", "torch": "/info"}
# settings of the model's author: nearly greedy, and any lower-case letter ends a response
HOSTILE = {"temperature": 0.01, "top_k": 1, "repetition_penalty": 2.0, "eos_token_id": list(range(30, 56))}


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name, tp = request.param
    folder = tmp_path_factory.mktemp(name)
    with serve(name, folder, tp=tp, generation_config=HOSTILE, host="0.0.0.0") as served:
        yield served


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


def same_samples(one: Rollout, other: Rollout) -> bool:
    """Return whether two samples have the same ids, and log-probs that differ only by the order of a batch's sums."""
    diff = (one.rollout_logprobs_L - other.rollout_logprobs_L).abs().max()
    same = torch.equal(one.token_ids_L, other.token_ids_L) and torch.equal(one.response_mask_L, other.response_mask_L)
    return same and one.stop_reason == other.stop_reason and diff.item() <= 1e-5


def in_json_and_binary(served: Served, ask: GenerationRequest) -> list[tuple[HttpAnswer, list[Rollout]]]:
    api = APIS[served.name]
    path, body = ("/v1/completions", completion_request) if served.name == "vllm" else ("/generate", generate_request)
    answers = []
    for accept in ("*/*", CONTENT_TYPE):
        request = body(ask.prompt, ask.sampling, ask.seed)
        answer = connected(served.engine, 0, lambda client, a=accept, r=request: client.exchange("POST", path, r, a))
        answers.append((answer, api.decode(answer, ask, served.engine.version)))
    return answers


def test_binary_and_json_answers_are_the_same(served: Served) -> None:
    if served.name == "torch":
        pytest.skip("it answers in binary alone")
    for prompt in make_prompts(8, seed=4):
        (as_json, from_json), (as_binary, from_binary) = in_json_and_binary(served, GenerationRequest(prompt, SAMPLING, seed=3))
        assert (as_json.content_type, as_binary.content_type) == ("application/json", CONTENT_TYPE)
        assert len(as_binary.body) < len(as_json.body) / 3
        assert all(map(same_samples, from_json, from_binary)) and len(from_json) == len(from_binary) == SAMPLING.samples


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_transformers_after_temperature(served: Served, temperature: float) -> None:
    sampling = SamplingParams(samples=4, temperature=temperature, max_tokens=20)
    rollouts = served.engine.generate(make_prompts(16, seed=2), sampling, seed=0)
    diff = logprob_diff(served.model, rollouts, temperature)
    print(f"largest log-prob difference at T={temperature}: {diff:.1e}")
    assert diff <= MAX_LOGPROB_DIFF
    assert logprob_diff(served.model, rollouts, 2.0) > 0.1  # the comparison can fail


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.9), (5, 1.0), (2, 0.5)])
def test_truncated_logprobs_and_masks_are_those_of_transformers(served: Served, top_k: int, top_p: float) -> None:
    sampling = SamplingParams(samples=4, temperature=0.7, max_tokens=20, top_k=top_k, top_p=top_p)
    rollouts = served.engine.generate(make_prompts(16, seed=2), sampling, seed=0)
    truncation = Truncation(top_k, top_p, renormalizes=served.name != "sglang")
    diff = truncated_diff(served.model, rollouts, 0.7, truncation)
    print(f"top_k={top_k} top_p={top_p}: largest log-prob difference {diff.largest:.1e}, masks of {diff.mean_size:.1f} ids")
    assert diff.largest <= 1e-5 and diff.other_masks <= 0.002
    assert logprob_diff(served.model, rollouts, 0.7) > 0.05  # those of the whole distribution are others
    again = served.engine.generate(make_prompts(16, seed=2)[::-1], sampling, seed=0)
    assert responses(again) == responses(rollouts)


def test_samples_depend_on_the_seed_and_not_on_the_batch(served: Served) -> None:
    prompts = make_prompts(16, seed=4)
    first = responses(served.engine.generate(prompts, SAMPLING, seed=5))
    assert responses(served.engine.generate(prompts[::-1], SAMPLING, seed=5)) == first
    other = responses(served.engine.generate(prompts, SAMPLING, seed=6))
    assert all(first[p.id] != other[p.id] for p in prompts)


@pytest.mark.parametrize("host", ["127.0.0.1", "another address"])
def test_only_health_answers_without_the_key(served: Served, host: str) -> None:
    """Every route that the server has, by its own account, wherever it is reached."""
    url = served.engine.endpoints[0].address.url
    if served.name == "torch":
        routes = {("GET", ABOUT["torch"])} | {("POST", path) for path in CONTROLS["torch"]}
    else:
        routes = {
            (method.upper(), re.sub(r"{[^}]*}", "x", path))
            for path, methods in call(served, "GET", "/openapi.json")["paths"].items()
            for method in methods
            if path not in OPEN
        }
    posted = {path for method, path in routes if method == "POST"}
    assert posted >= set(CONTROLS[served.name]) and ("GET", ABOUT[served.name]) in routes
    if host != "127.0.0.1":
        url = url.replace("127.0.0.1", other_address())
    with httpx.Client(base_url=url, trust_env=False) as stranger:
        assert stranger.get("/health").status_code == 200
        for method, path in routes:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}):
                answer = stranger.request(method, path, json={}, headers=headers)
                assert answer.status_code == 401, (method, path, headers)
    key = served.engine.endpoints[0].address.key
    assert key not in served.log_path.read_text()
    assert not any(key in word for process in server_processes(served.engine) for word in process.cmdline())


@pytest.mark.parametrize(("version", "transport"), [(0, "shm"), (1, "ipc")])
def test_an_update_replaces_all_weights(served: Served, version: int, transport: str, tmp_path: Path) -> None:
    # the last one is longer than a block of vLLM's cache on a CPU, which keeps whole blocks alone (128 tokens)
    prompts = [*make_prompts(8, seed=9), replace(make_prompts(1, seed=9)[0], id=1, token_ids=tuple(range(5, 25)) * 8)]
    served.engine.generate(prompts, SAMPLING, seed=0)  # leaves them in the prefix cache
    new = tiny_qwen3(tmp_path / "new", tied=True, seed=100 + version)
    started = time.monotonic()
    served.engine.begin_update(version)
    for source in written(new, tmp_path) if transport == "shm" else lent(new):
        served.engine.load([source]).result()
        for process in server_processes(served.engine):  # its memory is free
            assert str(tmp_path) not in maps(process) and "tepo-weights" not in maps(process)
    served.engine.finish_update()
    print(f"update in {1e3 * (time.monotonic() - started):.0f} ms")
    rollouts = served.engine.generate(prompts, SAMPLING, seed=0)
    diff = logprob_diff(new, rollouts, SAMPLING.temperature)
    print(f"largest log-prob difference to the new weights: {diff:.1e}")
    assert diff <= MAX_LOGPROB_DIFF
    assert logprob_diff(served.model, rollouts, SAMPLING.temperature) > 0.1
    assert served.engine.version == version == rollouts[0].policy_version
    assert call(served, "GET", ABOUT[served.name])["weight_version"] == str(version)
    served.model = new


@pytest.mark.parametrize("where", ["begun", "half", "complete", "failed"])
def test_a_server_gets_out_of_an_update_whose_sender_is_gone(served: Served, where: str, tmp_path: Path) -> None:
    """The same process then takes other weights.

    A load that fails ends SGLang, and leaves vLLM's answers of several ranks out of order: such servers are restarted.
    """
    if where == "failed" and (served.name == "sglang" or served.tp > 1):
        pytest.skip("the server is restarted")
    engine, before = served.engine, [process.pid for process in server_processes(served.engine)]
    lost, new = (tiny_qwen3(tmp_path / name, tied=True, seed=seed) for name, seed in (("lost", 500), ("new", 501)))
    for name in ("lost", "new"):
        (tmp_path / name).chmod(0o700)
    parts, files = save_weights(lost, tmp_path / "lost", files=3), save_weights(new, tmp_path / "new", files=2)
    version = engine.version + 1
    engine.begin_update(version)
    for part in parts[: {"begun": 0, "half": 1, "complete": 3, "failed": 2}[where]]:
        engine.load([part]).result()
    if where == "failed":
        parts[2].write_bytes(b"")  # as if its sender had been killed
        with pytest.raises(SyncError):
            engine.load([parts[2]]).result()
    engine.abandon_update()
    assert engine.needs_weights
    engine.update_weights(files, version)
    rollouts = engine.generate(make_prompts(8, seed=14), SAMPLING, seed=0)
    assert logprob_diff(new, rollouts, SAMPLING.temperature) <= MAX_LOGPROB_DIFF
    assert [process.pid for process in server_processes(engine)] == before and engine.restarts == 0
    served.model = new


@pytest.mark.parametrize(
    ("in_flight", "truncation"),
    [
        pytest.param("continue", {}, marks=pytest.mark.full),
        ("continue", {"top_k": 50, "top_p": 0.9}),
        pytest.param("restart", {}, marks=pytest.mark.full),
    ],
)
def test_what_is_under_way_goes_on_under_new_weights(
    in_flight: str, truncation: dict[str, Any], served: Served, tmp_path: Path
) -> None:
    """Every token has the log-prob and the sampling mask of the weights that it is said to be of, given all tokens before."""
    old, first = served.model, served.engine.version
    new = tiny_qwen3(tmp_path / "new", tied=True, seed=200 + first)
    (tmp_path / "old").mkdir(mode=0o700)  # servers read from no other folder
    old_files, files = save_weights(old, tmp_path / "old", files=1), save_weights(new, tmp_path, files=1)
    prompts, sampling = make_prompts(20, seed=12), replace(SAMPLING, samples=8, max_tokens=240, stop_token_ids=(), **truncation)
    with another_engine(served, max_staleness=1, on_weight_update=in_flight) as engine:
        for version in range(first, first + 6, 2):  # a busy machine may be too late to change weights under way
            engine.update_weights(old_files, version)
            engine.generate(prompts, replace(sampling, max_tokens=4), seed=1)  # a server's first requests are slow
            groups = engine.open()
            groups.add(prompts[:2], replace(sampling, max_tokens=8), seed=0)
            groups.add(prompts[2:], sampling, seed=0)
            made = list(groups.next() or [])  # 8 tokens each: the others are sampled concurrently and have far to go
            engine.update_weights(files, version + 1)
            made += [r for group in iter(groups.next, None) for r in group]
            mixed = [r for r in made if r.later_versions]
            if sum(bool(r.later_versions) or r.policy_version > version for r in made) > 50:
                break
        again = responses(engine.generate(prompts[2:], sampling, seed=0)) if in_flight == "restart" else {}
    served.engine.update_weights(files, version + 1)  # which the fixture's engine did not send
    served.model = new
    assert sorted(r.prompt_id for r in made) == sorted(p.id for p in prompts for _ in range(8))
    assert {r.stop_reason for r in made} <= {"stop", "length"}
    print(f"{len(mixed)} of {len(made)} responses are of both versions")
    for model, v in ((old, version), (new, version + 1)):
        of_it = sampled_by(made, v)
        if truncation and of_it:
            kept = Truncation(**truncation, renormalizes=served.name != "sglang")
            diff = truncated_diff(model, of_it, sampling.temperature, kept)
            print(f"version {v}: largest difference {diff.largest:.1e}, other masks {diff.other_masks:.1e}")
            assert diff.largest <= MAX_LOGPROB_DIFF and diff.other_masks <= 0.002
        elif of_it:
            assert logprob_diff(model, of_it, sampling.temperature) <= MAX_LOGPROB_DIFF
    if in_flight == "restart":
        assert not mixed
        ended_before = {r.prompt_id for r in made if r.policy_version == version}  # with some samples at least
        sampled_again = {prompt.id for prompt in prompts[2:]} - ended_before
        found = responses(made)
        assert sampled_again and all(found[i] == again[i] for i in sampled_again)
    else:
        assert len(mixed) > 50
        assert logprob_diff(new, sampled_by(mixed, version), sampling.temperature) > 0.1


def test_a_server_that_slept_serves_the_weights_that_follow(served: Served, tmp_path: Path) -> None:
    engine, version, new = served.engine, served.engine.version + 1, tiny_qwen3(tmp_path / "new", tied=True, seed=600)
    files = save_weights(new, tmp_path, files=2)
    engine.sleep()
    assert set(engine.asleep) == {"weights", "kv_cache"}
    engine.wake("weights")
    engine.update_weights(files, version)
    engine.wake("kv_cache")
    assert not engine.asleep
    rollouts = engine.generate(make_prompts(8, seed=15), SAMPLING, seed=0)
    diff = logprob_diff(new, rollouts, SAMPLING.temperature)
    print(f"largest log-prob difference after the sleep: {diff:.1e}")
    assert diff <= MAX_LOGPROB_DIFF and {r.policy_version for r in rollouts} == {version}
    served.model = new


def other_address() -> str:
    """Return an address of this machine, not of its loopback interface where it has another one."""
    found = [a.address for nic in psutil.net_if_addrs().values() for a in nic if a.family == socket.AF_INET]
    return next((address for address in found if not address.startswith("127.")), "127.0.0.2")


def written(model: Qwen3ForCausalLM, folder: Path) -> Iterator[Path]:
    """Write the weights to three files, each removed after it was read; the parts of a layer are in different files."""
    for file in save_weights(model, folder, files=3):
        yield file
        file.unlink()


def lent(model: Qwen3ForCausalLM) -> Iterator[Bucket]:
    """The same in two rows of memory in turn; once read they hold nothing but what is not a number."""
    weights = [(name, weight.detach()) for name, weight in model.named_parameters()]
    rows = [export_buffer(sum(weight.nbytes for _, weight in weights), torch.device("cpu")) for _ in range(2)]
    for i in range(3):
        row = rows[i % 2]
        contents = pack(weights[i::3], row.bytes, with_checksums=True)
        yield Bucket(i, 0, contents, row.handle)
        row.bytes.fill_(255)
    for row in rows:
        row.close()


def maps(process: psutil.Process) -> str:
    """The files that it maps, removed ones too."""
    return Path(f"/proc/{process.pid}/maps").read_text()
