"""Transformer Engine's caches on a GPU besides the actor's parts: their size, and that they are freed with the parameters.

Not run so far.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from tepo_megatron.actor import kernels, precision
from tepo_megatron.config.io import plain, validate
from tests.parallel import cases
from tests.tiny import tiny_model

DEVICE = torch.device("cuda", 0)
HERE = kernels.hardware(DEVICE)
FP8 = [name for name in precision.PRESETS if name.startswith("fp8")]


def _in_use() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(DEVICE)


@pytest.mark.parametrize("preset", FP8)
def test_fp8_copies_of_weights_leave_the_gpu(alone: Any, tmp_path: Path, preset: Any) -> None:
    """2 bytes for each parameter of the decoder's linear modules; and the same log-probs when the parameters are back."""
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.losses import build_objective

    if (reason := precision.refusal(preset, HERE)) is not None:
        pytest.skip(reason)
    case = cases.make_case(tmp_path, tied=True)
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 128}
    model = Qwen3Config(
        vocab_size=cases.VOCAB, num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True, **shape
    )
    tiny_model(tmp_path / "wide", model, scale=1.0)
    tree = plain(cases.run_config(tmp_path / "wide", {})) | {"platform": "cuda"}
    tree["model"]["precision"] = preset
    cfg = validate(tree)
    actor, objective = Actor.open(cfg, alone), build_objective(cfg.objective)
    linear = [b.parameter for b in actor.bindings if ".linear_" in b.name and not b.name.endswith("norm_weight")]
    copies, parameters = 2 * sum(p.numel() for p in linear), sum(b.parameter.nbytes for b in actor.bindings)

    actor.start_step(1)
    actor.update(case.batches[0], objective)
    actor.offload("gradients", "optimizer")
    there = _in_use()
    actor.offload("parameters")
    freed = there - _in_use()
    assert freed >= parameters + copies, f"{freed} bytes left the GPU, of {parameters} of parameters and {copies} in FP8"

    actor.load()
    expected = actor.attach_old_stats(case.batches[1]).old_logprobs_N
    actor.offload("parameters")
    actor.load("parameters")
    found = actor.attach_old_stats(case.batches[1]).old_logprobs_N
    assert expected is not None and found is not None
    assert torch.equal(found, expected)
    assert actor.update(case.batches[1], objective).metrics["actor/grad_norm"][0] > 0
