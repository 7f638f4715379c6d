"""The gated delta rule that our plugin computes inside vLLM, and when it is used. The servers: tests/server/test_hybrid.py."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from tepo_megatron.weight_sync.receiver import vllm_plugin

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cpu", [True, False])
def test_vllm_gets_our_module_on_a_cpu_alone(cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import ModelRegistry  # takes seconds, also where these tests are only collected
    from vllm.platforms import current_platform

    from tepo_megatron.weight_sync.receiver.vllm_qwen3_5 import Qwen3_5ForCausalLM

    registered: dict[str, str] = {}
    monkeypatch.setattr(ModelRegistry, "register_model", registered.__setitem__)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: cpu)
    vllm_plugin.register()
    expected = {name: f"{vllm_plugin.HYBRID_MODULE}:{name}" for name in vllm_plugin.HYBRIDS} if cpu else {}
    assert registered == expected
    assert Qwen3_5ForCausalLM.__module__ == "vllm.model_executor.models.qwen3_5", "the model itself is vLLM's own"


@pytest.mark.parametrize("cuts", [(), (1,), (5, 6, 40)])
def test_the_rule_in_parts_is_that_of_transformers(cuts: tuple[int, ...]) -> None:
    """Two requests of different lengths, of which the first is computed in several steps, in slots that others used before."""
    from tepo_megatron.weight_sync.receiver.vllm_gated_delta import Requests, gated_delta

    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    lengths, states = (70, 9), drawn(4, 4, 8, 6)
    whole = [(drawn(n, 2, 8), drawn(n, 2, 8), drawn(n, 4, 6), -drawn(n, 4).abs(), drawn(n, 4).sigmoid()) for n in lengths]
    edges, outputs, begun = [0, *cuts, lengths[0]], [], False
    for start, stop in itertools.pairwise(edges):
        parts = [tuple(x[start:stop] for x in whole[0])]
        parts += [] if begun else [whole[1]]
        starts = [0, *torch.tensor([len(part[0]) for part in parts]).cumsum(0).tolist()]
        fresh = torch.full((len(parts),), not begun)
        requests = Requests(starts, torch.tensor([3, 1])[: len(parts)], fresh)
        q, k, v, decay, beta = (torch.cat(x) for x in zip(*parts, strict=True))
        out = gated_delta(q, k, v, decay, beta, states, requests)
        outputs.append(out[: stop - start])
        if not begun:
            second = out[stop - start :]
        begun = True
    for found, slot, (q, k, v, decay, beta) in zip((torch.cat(outputs), second), (3, 1), whole, strict=True):
        expected, state = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
            *(x.repeat_interleave(2, 1)[None] for x in (q, k)), v[None], decay[None], beta[None],
            initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert torch.allclose(found, expected[0], atol=1e-5), (found - expected[0]).abs().max()
        assert torch.allclose(states[slot], state[0], atol=1e-5)


def test_an_unfinished_prompt_keeps_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from tepo_megatron.weight_sync.receiver.vllm_qwen3_5 import keep_generators_of_unfinished_prompts

    seen: list[dict[int, Any]] = []
    monkeypatch.setattr(CPUModelRunner, "sample_tokens", lambda self: seen.append(dict(self.input_batch.generators)))
    keep_generators_of_unfinished_prompts()
    mask = torch.tensor([True, False, True, True]).numpy()
    generators = {0: "a", 1: "b", 3: "of a request that is not in the batch"}
    runner: Any = SimpleNamespace(
        input_batch=SimpleNamespace(generators=generators, num_reqs=3), discard_request_mask=SimpleNamespace(np=mask)
    )
    CPUModelRunner.sample_tokens(runner)
    assert seen == [{1: "b", 3: generators[3]}] and set(generators) == {0, 1, 3}
