"""An update that leaves layers out, of a model with experts, whose kernels vLLM on a CPU builds once."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from tests.server.served import MAX_LOGPROB_DIFF, SAMPLING, logprob_diff, make_prompts, serve
from tests.tiny import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.server


def tiny_moe(path: Path, seed: int = 0) -> PreTrainedModel:
    settings = {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    return tiny_model(path, Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, moe_intermediate_size=192, num_hidden_layers=3,
        num_attention_heads=4, norm_topk_prob=True, tie_word_embeddings=False, mlp_only_layers=[], max_position_embeddings=512,
        **settings,
    ), seed=seed)  # fmt: skip


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.full), "torch"])
def test_experts_of_layers_that_are_left_out_stay(engine: str, tmp_path: Path) -> None:
    prompts = make_prompts(8, seed=13)
    with serve(engine, tmp_path, make=tiny_moe) as served:
        old = load_file(tmp_path / "model" / "model.safetensors")
        tiny_moe(tmp_path / "new", seed=5)
        new = load_file(tmp_path / "new" / "model.safetensors")
        for version, part in enumerate(["", ".layers.1.", "nothing"]):
            sent = {name: t for name, t in (new if version == 1 else old).items() if part in name}
            old |= sent
            served.engine.begin_update(version)
            served.engine.keep_unchanged([name for name in old if name not in sent])
            if sent:
                save_file(sent, tmp_path / "sent.safetensors")
                served.engine.load([tmp_path / "sent.safetensors"]).result()
            served.engine.finish_update()
            save_file(old, tmp_path / "new" / "model.safetensors", {"format": "pt"})
            now = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
            rollouts = served.engine.generate(prompts, SAMPLING, seed=0)
            assert logprob_diff(now, rollouts, SAMPLING.temperature) <= MAX_LOGPROB_DIFF
        assert logprob_diff(served.model, rollouts, SAMPLING.temperature) > 10 * MAX_LOGPROB_DIFF
