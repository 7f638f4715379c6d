"""The planned bytes of a delivery are those of real tensors, split as the engines split them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tepo_megatron.config import SyncConfig
from tepo_megatron.plan.models import read_model
from tepo_megatron.plan.weight_traffic import traffic_lines, weight_traffic
from tests.parallel import cases
from tests.parallel.test_weights import tiny_moe
from tests.tiny import tiny_qwen3

GROUPS = 2  # of keys and values in both models


def held_of(name: str, nbytes: int, tp: int) -> float:
    """Return the bytes of a tensor that a server rank holds, by its Hugging Face name."""
    if "norm" in name or ".gate." in name:
        return nbytes
    return nbytes / min(tp, GROUPS) if "k_proj" in name or "v_proj" in name else nbytes / tp


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(("tp", "server_tp"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_the_bytes_of_a_delivery(tmp_path: Path, experts: bool, tp: int, server_tp: int) -> None:
    if experts:
        tiny_moe(tmp_path)
    else:
        tiny_qwen3(tmp_path, layers=2, vocab_size=cases.VOCAB)  # no multiple of 64
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    sizes = {}
    for name, tensor in model.named_parameters():
        fused = {"gate_up_proj": 1, "down_proj": 1}  # Transformers joins the experts of a layer
        sizes[name] = tensor.numel() * 2 * fused.get(name.rpartition(".")[2], 1)
    family, arch = read_model(str(tmp_path))
    found = weight_traffic(family.rows, arch, tp, server_tp, element=2)
    assert found.whole == sum(sizes.values())
    assert found.held == pytest.approx(sum(held_of(name, size, server_tp) for name, size in sizes.items()))
    replicated = sum(size for name, size in sizes.items() if "norm" in name or ".gate." in name)
    assert found.gathered == pytest.approx((found.whole - replicated) * (tp - 1) / tp)


def test_the_plan_names_what_is_kept_and_what_would_do(tmp_path: Path) -> None:
    tiny_qwen3(tmp_path, layers=2)
    family, arch = read_model(str(tmp_path))
    traffic = weight_traffic(family.rows, arch, 2, 2, element=2)
    for transport, how in (("group", "arrive at"), ("shm", "memory that each server rank maps")):
        text = "\n".join(traffic_lines(traffic, SyncConfig(transport=transport)))
        assert how in text
