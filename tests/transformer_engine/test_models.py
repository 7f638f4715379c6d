"""The model as it is built on GPUs, of Transformer Engine's modules, next to the one that a CPU has, of Megatron-Core's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.transformer_engine import models
from tests.worlds import run_world

PRECISIONS = ("bf16", "fp8-current", "fp8-blockwise")
# defaults with which Megatron-Core and the distributed optimizer read a missing mark
MARKS: dict[str, Any] = {
    "allreduce": True, "sequence_parallel": False, "tensor_model_parallel": False, "partition_dim": -1,
    "is_embedding_or_output_parameter": False, "shared_embedding": False, "shared": False,
}  # fmt: skip
# Transformer Engine's modules hold the norm before them; as many copies of one as there are layers are counted once here
MODULES = {
    "qwen3": {
        "TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention", "RMSNorm",
        "VocabParallelEmbedding", "ColumnParallelLinear",
    },
    "qwen3_moe": {
        "TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention", "RMSNorm",
        "VocabParallelEmbedding", "ColumnParallelLinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear",
        "TopKRouter",
    },
    "qwen3_5": {
        "TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention", "RMSNorm", "GatedDeltaNet",
        "VocabParallelEmbedding", "ColumnParallelLinear",
    },
}  # fmt: skip
Facts = dict[str, Any]


def _facts(rank: int, path: Path, name: str, precision: str) -> Facts:
    """Return the properties of the actors of one precision, by the name in the whole model.

    "te" is built as on GPUs, "plain" as on a CPU.
    """
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate
    from tepo_megatron.models.gather import iterate_hf

    model = models.MODELS[name]
    groups = parallel.initialize(models.config(path, model.parallel, precision).parallel, activate("cpu"), 0)
    te = models.actor(models.config(path, model.parallel, precision), groups)
    plain = models.actor(models.config(path, model.parallel, "bf16", platform="cpu"), groups)
    found: Facts = {
        "modules": {type(m).__name__ for chunk in te.chunks for m in chunk.modules() if _computes(m)},
        "fp8": (te.config.fp8, _recipe(te.config)),
        "layers": [_recipe(te.config, layer) for layer in range(3)],
        "exported": list(iterate_hf(te.bindings, te.arch, groups.tp)),
    }
    for key, actor in {"te": te, "plain": plain}.items():
        found[key] = {
            b.name: {
                "value": b.parameter.detach().clone(),
                "hf": (b.hf_names, b.row.megatron, b.of_expert),
                "marks": {mark: getattr(b.parameter, mark, default) for mark, default in MARKS.items()},
            }
            for b in actor.bindings
        }
    parallel.shutdown()
    return found


def _computes(module: torch.nn.Module) -> bool:
    """Return whether a module holds parameters of its own, or is attention."""
    return any(True for _ in module.parameters(recurse=False)) or type(module).__name__ == "TEDotProductAttention"


def _recipe(config: Any, layer: int = -1) -> str | None:
    """The class of Transformer Engine's recipe that a layer runs under, -1: those in FP8; None in bf16."""
    from megatron.core.fp8_utils import get_fp8_context
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    with get_fp8_context(config, layer):
        return type(FP8GlobalStateManager.get_fp8_recipe()).__name__ if FP8GlobalStateManager.is_fp8_enabled() else None


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Facts]]:
    folder, found = tmp_path_factory.mktemp("models"), {}
    paths = {name: models.write(name, folder) for name in models.MODELS}

    def of(name: str, precision: str) -> list[Facts]:
        if (name, precision) not in found:
            found[name, precision] = run_world(models.MODELS[name].ranks, _facts, paths[name], name, precision)
        return found[name, precision]

    return of


ALL = pytest.mark.parametrize(("name", "precision"), [(n, p) for n in models.MODELS for p in PRECISIONS])


def test_megatron_is_the_images_and_took_this_transformer_engine() -> None:
    """Both versions are those of requirements/gpu-vllm.txt."""
    import megatron.core
    import transformer_engine
    from megatron.core.extensions.transformer_engine import HAVE_TE, get_te_version

    pins = Path(__file__).parents[2].joinpath("requirements", "gpu-vllm.txt").read_text().splitlines()
    assert HAVE_TE and f"transformer-engine=={get_te_version()}" in pins
    assert f"megatron-core=={megatron.core.__version__.partition('+')[0]}" in pins
    assert "transformer_engine_python" in str(transformer_engine.__file__)


@ALL
def test_modules_are_transformer_engines(facts: Any, name: str, precision: str) -> None:
    for rank in facts(name, precision):
        assert rank["modules"] == MODULES[name]


@ALL
def test_layers_run_under_the_presets_recipe(facts: Any, name: str, precision: str) -> None:
    expected = {
        "bf16": (None, None),
        "fp8-current": ("hybrid", "Float8CurrentScaling"),
        "fp8-blockwise": ("e4m3", "Float8BlockScaling"),
    }[precision]
    for rank in facts(name, precision):
        assert rank["fp8"] == expected
        assert rank["layers"] == [expected[1]] * 3


@ALL
def test_parameters_are_those_of_the_model_without_it(facts: Any, name: str, precision: str) -> None:
    """Names in the whole model, rows of our table, Hugging Face names, values and types; and the marks that reductions, norms
    of gradients and the distributed optimizer go by.
    """
    for rank in facts(name, precision):
        te, plain = rank["te"], rank["plain"]
        assert sorted(te) == sorted(plain) and len(te) > 20
        for parameter, found in te.items():
            expected = plain[parameter]
            assert found["hf"] == expected["hf"], parameter
            assert found["marks"] == expected["marks"], parameter
            assert found["value"].dtype == (torch.float32 if "A_log" in parameter else torch.bfloat16), parameter
            assert torch.equal(found["value"], expected["value"]), parameter


@ALL
def test_marks_differ_between_parameters(facts: Any, name: str, precision: str) -> None:
    """Equal marks would make the comparison above one of defaults."""
    marks = {parameter: found["marks"] for parameter, found in facts(name, precision)[0]["te"].items()}
    assert len({m["partition_dim"] for m in marks.values()}) == 3
    dense = name != "qwen3_moe"
    assert {p for p, m in marks.items() if not m["allreduce"]} == {p for p in marks if ".experts." in p}
    assert {p for p, m in marks.items() if m["sequence_parallel"]} == {p for p in marks if dense and "norm" in p}


@ALL
def test_weights_leave_as_they_came(facts: Any, name: str, precision: str, tmp_path: Path) -> None:
    """Weights pass the gather over tensor-parallel ranks unchanged; each expert comes from the rank that holds it."""
    from safetensors.torch import load_file

    expected = load_file(models.write(name, tmp_path) / "model.safetensors")
    ranks = facts(name, precision)
    exported = {hf: tensor for rank in ranks for hf, tensor in rank["exported"]}
    assert exported.keys() == expected.keys()
    for hf, tensor in exported.items():
        assert torch.equal(tensor, expected[hf] if "A_log" in hf else expected[hf].bfloat16()), hf
