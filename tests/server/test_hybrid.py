"""A real vLLM on the CPU serves a tiny hybrid (Qwen3.5), whose gated delta nets are ours where vLLM has no kernels."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tepo_megatron.base.errors import SyncError
from tepo_megatron.base.types import Prompt, SamplingParams
from tests.server.hybrids import tiny_hybrid
from tests.server.served import (
    MAX_MODEL_LEN,
    SAMPLING,
    Served,
    another_engine,
    logprob_diff,
    make_prompts,
    sampled_by,
    save_weights,
    serve,
)

pytestmark = [pytest.mark.server, pytest.mark.full]
NOISE = 5e-5  # nats; transformers in fp32 itself is 1e-5 off its own fp64 on these models


def prompts_of_all_lengths() -> list[Prompt]:
    """Return prompts around the sizes of a chunk and of a block, of a single token, and as long as they can be."""
    ids = torch.randint(4, 50, (MAX_MODEL_LEN,), generator=torch.Generator().manual_seed(7)).tolist()
    lengths = (1, 2, 3, 4, 31, 32, 33, 63, 64, 65, 129, MAX_MODEL_LEN - SAMPLING.max_tokens)
    return [Prompt(id=n, token_ids=tuple(ids[:n]), answer="") for n in lengths]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve("vllm", tmp_path_factory.mktemp("hybrid"), make=tiny_hybrid) as served:
        yield served


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_transformers(served: Served, temperature: float) -> None:
    sampling = SamplingParams(samples=4, temperature=temperature, max_tokens=20)
    rollouts = served.engine.generate([*prompts_of_all_lengths(), *make_prompts(16, seed=2)], sampling, seed=0)
    diff = logprob_diff(served.model, rollouts, temperature)
    print(f"largest log-prob difference at T={temperature}: {diff:.1e}")
    assert diff <= NOISE
    assert logprob_diff(served.model, rollouts, 2.0) > 0.1


def test_what_is_under_way_goes_on_under_new_weights(served: Served, tmp_path: Path) -> None:
    """The states of an interrupted sequence are computed again from all its tokens, under the new weights."""
    old, version = served.model, served.engine.version
    new = tiny_hybrid(tmp_path / "new", seed=200)
    (tmp_path / "old").mkdir(mode=0o700)
    old_files, files = save_weights(old, tmp_path / "old", files=1), save_weights(new, tmp_path, files=1)
    prompts, sampling = make_prompts(20, seed=12), replace(SAMPLING, samples=8, max_tokens=100, stop_token_ids=())
    with another_engine(served, max_staleness=1, on_weight_update="continue") as engine:
        engine.update_weights(old_files, version)
        engine.generate(prompts, replace(sampling, max_tokens=4), seed=1)  # a server's first requests are slow
        groups = engine.open()
        groups.add(prompts[:2], replace(sampling, max_tokens=20), seed=0)
        groups.add(prompts[2:], sampling, seed=0)
        made = list(groups.next() or [])
        engine.update_weights(files, version + 1)
        made += [r for group in iter(groups.next, None) for r in group]
    served.engine.update_weights(files, version + 1)  # which the fixture's engine did not send
    served.model = new
    assert sorted(r.prompt_id for r in made) == sorted(p.id for p in prompts for _ in range(8))
    mixed = [r for r in made if r.later_versions]
    assert len(mixed) > 50
    for model, v in ((old, version), (new, version + 1)):
        diff = logprob_diff(model, sampled_by(made, v), sampling.temperature)
        print(f"version {v}: largest difference {diff:.1e}")
        assert diff <= NOISE
    assert logprob_diff(new, sampled_by(mixed, version), sampling.temperature) > 0.1


def test_layers_that_are_left_out_stay_and_halves_of_a_decay_are_refused(served: Served, tmp_path: Path) -> None:
    """vLLM loads `A_log` and `dt_bias`, which belong to one module, together or not at all."""
    engine, old = served.engine, served.model
    new, now = tiny_hybrid(tmp_path / "new", seed=400), dict(old.named_parameters())
    for part in ("", ".layers.1.", ".layers.3.", "nothing"):
        now |= {name: weight for name, weight in new.named_parameters() if part and part in name}
        sent = {name: weight.detach().clone() for name, weight in now.items() if part in name}
        engine.begin_update(engine.version + 1)
        engine.keep_unchanged([name for name in now if name not in sent])
        if sent:
            save_file(sent, tmp_path / "sent.safetensors")
            engine.load([tmp_path / "sent.safetensors"]).result()
        engine.finish_update()
        old.load_state_dict({name: weight.detach().clone() for name, weight in now.items()}, strict=False)
        rollouts = engine.generate(make_prompts(8, seed=13), SAMPLING, seed=0)
        assert logprob_diff(old, rollouts, SAMPLING.temperature) <= NOISE
    assert logprob_diff(new, rollouts, SAMPLING.temperature) > 10 * NOISE
    half = {"model.layers.1.linear_attn.A_log": now["model.layers.1.linear_attn.A_log"].detach().clone()}
    save_file(half, tmp_path / "half.safetensors")
    engine.begin_update(engine.version + 1)
    engine.keep_unchanged([name for name in now if name not in half])
    with pytest.raises(SyncError, match=r"without the other of their pair: model\.layers\.1\.linear_attn\.dt_bias"):
        engine.load([tmp_path / "half.safetensors"]).result()
