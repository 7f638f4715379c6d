"""Servers that hold an FP8 model and get its weights quantized at the source, by CUDA IPC. Not run so far."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tepo_megatron.config import RolloutConfig, ServerConfig
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.engines import build_engine
from tepo_megatron.engines.sglang import default_python
from tepo_megatron.models import fp8
from tepo_megatron.wire.bucket_format import Bucket, export_buffer, pack
from tests.dequantized import dequantize
from tests.server.served import SAMPLING, logprob_diff, make_prompts
from tests.tiny import VOCAB_SIZE, tiny_model

DEVICE = torch.device("cuda", 0)
if torch.cuda.get_device_capability(DEVICE) < (8, 9):
    pytest.skip("this GPU does not compute in e4m3", allow_module_level=True)

INSTALLED = {"vllm": importlib.util.find_spec("vllm") is not None, "sglang": default_python().is_file()}
EXTRA = {"vllm": ["--gpu-memory-utilization", "0.5"], "sglang": ["--mem-fraction-static", "0.5"]}


def blocks_of_128(path: Path, seed: int) -> Any:
    """A model whose linear layers, the joined ones too, are whole blocks, in bf16."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return tiny_model(path, Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=2, max_position_embeddings=512,
        tie_word_embeddings=True, **heads,
    ), seed=seed)  # fmt: skip


def quantized(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """Return the tensors as `sync.quantize=fp8` sends them; set the model to the values that an engine computes with."""
    sent: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        data = weight.detach().bfloat16()
        if "_proj." not in name:
            sent[name] = data
            continue
        sent[name], sent[name + fp8.SCALE_SUFFIX] = fp8.quantize(data)
        data = dequantize(sent[name], sent[name + fp8.SCALE_SUFFIX])
        weight.data.copy_(data)
    return sent


@pytest.mark.parametrize("name", INSTALLED)
def test_a_server_serves_the_quantized_weights_that_it_is_sent(name: Any, tmp_path: Path) -> None:
    if not INSTALLED[name]:
        pytest.skip(f"{name} is not installed")
    blocks_of_128(tmp_path / "model", seed=0)
    new = blocks_of_128(tmp_path / "new", seed=1)
    old = blocks_of_128(tmp_path / "old", seed=2)
    tensors = quantized(new)
    row = export_buffer(2 * sum(t.nbytes for t in tensors.values()), DEVICE)
    contents = pack(((n, t.to(DEVICE)) for n, t in tensors.items()), row.bytes, with_checksums=True)
    row.flush()
    cfg = RolloutConfig(engine=name, server=ServerConfig(extra_args=EXTRA[name]))
    launch = LaunchSpec(
        tmp_path / "model", max_model_len=128, platform="cuda", precision="bf16", seed=0, maps_memory=True, in_fp8=True
    )
    with build_engine(cfg, launch, tmp_path / "server.log") as engine:
        engine.start()
        engine.wait_ready()
        for version in (0, 1):
            engine.begin_update(version)
            engine.load([Bucket(0, 0, contents, row.handle)]).result()
            engine.finish_update()
            rollouts = engine.generate(make_prompts(16, seed=0), SAMPLING, seed=version)
            # bf16 and activations in FP8 against fp32: which weights are served, not how well
            assert logprob_diff(new, rollouts, SAMPLING.temperature) < 0.5 * logprob_diff(old, rollouts, SAMPLING.temperature)
    row.close()
