"""Every model family against transformers on every layout it must run on: weights bitwise, logits, greedy tokens, one step.

The models are random, in fp32, at odd shapes: heads 8/2 or 7/1, head_dim != hidden / heads, a vocabulary that every layout pads
differently, three layers (uneven over PP2), six experts. Logits are compared by max |a - b| / max |b|.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, MixtralConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tepo_megatron.base.types import Rollout, TrainBatch
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.parallel.test_weights import Recorder, tensors
from tests.reference import tepo
from tests.tiny import hybrid_config, tiny_model, tiny_multimodal
from tests.worlds import run_world

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
NEW_TOKENS = 32
VOCAB = 70

EIGHT_HEADS = {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 20, "intermediate_size": 136}
SEVEN_HEADS = {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1, "intermediate_size": 150}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 56, "num_experts": 6}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def shaped(kind: Callable[..., PretrainedConfig], *shape: dict[str, Any], **fields: Any) -> PretrainedConfig:
    merged = {
        "vocab_size": VOCAB, "num_hidden_layers": 3, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    for part in (*shape, fields):
        merged |= part
    return kind(**merged)


EIGHT = {  # every layout
    "qwen2": lambda: shaped(Qwen2Config, EIGHT_HEADS, TIED, rope_parameters=YARN),
    "qwen3": lambda: shaped(Qwen3Config, EIGHT_HEADS, rope_theta=1e6),
    "llama": lambda: shaped(LlamaConfig, EIGHT_HEADS, TIED, rope_parameters=LLAMA3, rms_norm_eps=1e-5),
    "mistral": lambda: shaped(MistralConfig, EIGHT_HEADS, sliding_window=None, rope_theta=3e4),
    "qwen3_moe": lambda: shaped(Qwen3MoeConfig, EIGHT_HEADS, EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
    "mixtral": lambda: shaped(MixtralConfig, EIGHT_HEADS, num_local_experts=6, num_experts_per_tok=2),
    "qwen3_5": lambda: hybrid_config(vocab_size=VOCAB),
}
SEVEN = {  # without tensor parallelism
    "qwen2 7/1": lambda: shaped(Qwen2Config, SEVEN_HEADS),
    "qwen3 7/1": lambda: shaped(Qwen3Config, SEVEN_HEADS, TIED, head_dim=24, rope_parameters=YARN | {"attention_factor": 1.5}),
    "llama 7/1": lambda: shaped(
        LlamaConfig, SEVEN_HEADS, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    ),
    "mistral 7/1": lambda: shaped(MistralConfig, SEVEN_HEADS, TIED, head_dim=12, sliding_window=None, rope_parameters=YARN),
    "qwen3_moe 7/1": lambda: shaped(Qwen3MoeConfig, SEVEN_HEADS, EXPERTS, TIED, head_dim=24, norm_topk_prob=False),
    "mixtral 7/1": lambda: shaped(MixtralConfig, SEVEN_HEADS, TIED, num_local_experts=6, num_experts_per_tok=3, head_dim=24),
    "qwen3_5 7/1": lambda: hybrid_config(
        vocab_size=VOCAB,
        num_attention_heads=7,
        num_key_value_heads=1,
        linear_num_key_heads=3,
        linear_num_value_heads=9,
        tie_word_embeddings=True,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
}
FOUR_LAYERS = {  # for pipelines with a middle, and virtual ones
    "qwen2 deep": lambda: shaped(Qwen2Config, EIGHT_HEADS, num_hidden_layers=4),
    "mixtral deep": lambda: shaped(MixtralConfig, EIGHT_HEADS, num_hidden_layers=4, num_local_experts=6, num_experts_per_tok=2),
}
MODELS = EIGHT | SEVEN | FOUR_LAYERS
MOE = ("qwen3_moe", "mixtral")
TP_SP = {"tp": 2, "sequence_parallel": True}
EP2 = {"ep": 2, "dp": 2}
HYBRID_LAYOUTS = [{}, {"tp": 2}, TP_SP, {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}, {"cp": 4}, {"cp": 2} | TP_SP]
DENSE_LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]
MOE_LAYOUTS = [{}, TP_SP, {"pp": 2}, EP2, {"ep": 2, "cp": 2}, EP2 | {"pp": 2}, EP2 | TP_SP, {"ep": 2, "dp": 4}]
LAYOUTS = dict.fromkeys(MOE, MOE_LAYOUTS) | {"qwen3_5": HYBRID_LAYOUTS}
STEPS = [
    ("qwen2", {}), ("qwen2", TP_SP), ("qwen2", {"pp": 2}), ("qwen2 deep", {"pp": 3}), ("qwen3_moe", {}), ("qwen3_moe", TP_SP),
    ("qwen3_moe", EP2), ("qwen3_moe", {"ep": 2, "cp": 2}), ("qwen3_moe", EP2 | {"pp": 2}), ("qwen3_moe", EP2 | TP_SP),
    ("qwen3_moe", {"ep": 2, "dp": 4}), ("mixtral", EP2), ("mixtral deep", {"pp": 2, "vpp": 2}),
    ("mixtral deep", EP2 | {"pp": 2, "vpp": 2}), ("qwen3_5", {}), ("qwen3_5", TP_SP), ("qwen3_5", {"cp": 2, "pp": 2}),
]  # fmt: skip


@functools.cache
def reference(name: str, folder: Path) -> tuple[Path, list[Tensor], list[Tensor], list[int]]:
    """The model's directory; some sequences, transformers' logits [L, V] for each, and its greedy continuation of the first.

    The last sequence is the first with its continuation, but for the last token.
    """
    path = folder / name.replace("/", "-")
    tiny_model(path, MODELS[name](), seed=1, scale=8.0)
    model = tepo.load(path, torch.float32)
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(3, VOCAB, (n,), generator=generator) for n in (5, 41, 19, 64)]
    with torch.no_grad():
        ids = sequences[0]
        for _ in range(NEW_TOKENS):
            ids = torch.cat((ids, model(ids[None]).logits[0, -1:].argmax(-1)))
        sequences.append(ids[:-1])
        logits = [model(ids[None]).logits[0] for ids in sequences]
    return path, sequences, logits, ids[-NEW_TOKENS:].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def batch_of(sequences: list[Tensor], rows: int | None = None) -> TrainBatch:
    """Sequences whose last `rows` positions (None: all) reach the output layer: a row's label is the next token."""
    rollouts = []
    for i, ids in enumerate(sequences):
        ids = torch.cat((ids, ids[:1]))
        mask = torch.arange(ids.numel()) >= (1 if rows is None else ids.numel() - rows)
        rollouts.append(Rollout(i, ids, mask, torch.zeros(ids.numel()), 0, "stop"))
    return TrainBatch.build(rollouts, torch.zeros(len(rollouts)))


def gathered_logits(actor: Any, batch: TrainBatch) -> Tensor:
    """[N, V] of all response rows, the same on every rank."""
    import torch.distributed as dist

    from tepo_megatron.models.ops import padded_vocab_size

    groups = actor.groups
    logits_N = torch.zeros(batch.num_tokens, padded_vocab_size(VOCAB, groups.tp.size))

    def visit(microbatch: Any, logits_R: Tensor) -> None:
        parts = [torch.empty_like(logits_R) for _ in range(groups.tp.size)]
        dist.all_gather(parts, logits_R.contiguous(), group=groups.tp.group)
        logits_N[microbatch.token_R] = torch.cat(parts, dim=-1)

    actor.schedule.forward(actor.packer.pack(batch, actor.packer.plan(batch)), visit)
    if groups.is_last_stage:
        dist.all_reduce(logits_N, group=groups.dp_cp.group)
    return groups.broadcast_from_last_stage(logits_N)[:, :VOCAB]


def visit_model(rank: int, cfg: Any, sequences: list[Tensor], out: Path) -> dict[str, Any]:
    """Export, push to an engine, and compute logits of all positions in a forked rank; on one rank, also continue greedily."""
    from tepo_megatron.sync.push import make_weight_sync

    actor = open_actor(cfg)
    actor.export_hf(out)
    receiver = Recorder() if rank == 0 else None
    with make_weight_sync(cfg.sync, actor.bindings, actor.arch, actor.groups, receiver) as sync:
        sync.push(version=1)
    logits = gathered_logits(actor, batch_of(sequences))
    ids = sequences[0]
    for _ in range(NEW_TOKENS if actor.groups.world_size == 1 else 0):
        ids = torch.cat((ids, gathered_logits(actor, batch_of([ids], rows=1)).argmax(-1)))
    received = receiver.received if receiver else {}
    return {"logits": logits, "token by token": ids[len(sequences[0]) :].tolist(), "received": received}


def check(name: str, layout: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    path, sequences, expected, greedy = reference(name, folder)
    cfg = cases.run_config(path, layout, max_tokens=80)
    ranks = run_world(cfg.parallel.world_size, visit_model, cfg, sequences, tmp_path / "out")
    before = tensors(path)
    for after in (tensors(tmp_path / "out"), ranks[0]["received"]):
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
    scale = max(x.abs().max() for x in expected)
    assert len(ranks) > 1 or ranks[0]["token by token"]
    for rank in ranks:
        difference = (rank["logits"] - torch.cat(expected)).abs().max() / scale
        assert difference <= TOLERANCE, f"logits differ by {difference:.1e}"
        # the same next token after the same prefix at each position is the same continuation
        assert rank["logits"][-NEW_TOKENS:].argmax(-1).tolist() == greedy
        assert rank["token by token"] in ([], greedy)


def params(on_two_ranks: Sequence[tuple[str, dict[str, Any]]], pairs: Iterable[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Mark as full all worlds of several ranks but those of `on_two_ranks`."""
    return [
        pytest.param(
            name,
            layout,
            marks=[pytest.mark.full] if layout and (name, layout) not in on_two_ranks else [],
            id=f"{name} {layout}",
        )
        for name, layout in pairs
    ]


# each family on one layout of two ranks, families with experts on several
ON_TWO_RANKS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"tp": 2}), ("qwen3", {"pp": 2}), ("llama", {"tp": 2}), ("mistral", {"pp": 2}), ("qwen3_moe", TP_SP),
    ("qwen3_moe", {"ep": 2, "cp": 2}), ("mixtral", EP2), ("mixtral", {"pp": 2}), ("mixtral deep", {"pp": 2, "vpp": 2}),
]  # fmt: skip
STEPS_ON_TWO_RANKS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", TP_SP), ("qwen3_moe", {"ep": 2, "cp": 2}), ("mixtral", EP2), ("mixtral deep", {"pp": 2, "vpp": 2}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"),
    params(
        ON_TWO_RANKS,
        [(name, layout) for name in EIGHT for layout in LAYOUTS.get(name, DENSE_LAYOUTS)]
        + [(name, layout) for name in SEVEN for layout in ({}, {"pp": 2})]
        + [("mixtral deep", {"pp": 2, "vpp": 2}), ("qwen2 deep", {"pp": 3})],
    ),
)
def test_the_model_is_that_of_transformers(folder: Path, tmp_path: Path, name: str, layout: dict[str, Any]) -> None:
    check(name, layout, folder, tmp_path)


@pytest.mark.parametrize("layout", [{}, pytest.param({"tp": 2}, marks=pytest.mark.full)], ids=str)
def test_a_multimodal_file_is_trained_as_its_text_model(folder: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Logits are the text model's, an update has its tensors alone, and an export has the others too, bit for bit."""
    _, sequences, expected, _ = reference("qwen3_5", folder)
    path = tmp_path / "multimodal"
    tiny_multimodal(path, MODELS["qwen3_5"](), seed=1, scale=8.0)
    cfg = cases.run_config(path, layout, max_tokens=80)
    ranks = run_world(cfg.parallel.world_size, visit_model, cfg, sequences, tmp_path / "out")
    before, after, received = tensors(path), tensors(tmp_path / "out"), ranks[0]["received"]
    carried = {n for n in before if n.startswith(("mtp.", "model.visual."))}
    assert carried and after.keys() == before.keys() and received.keys() == before.keys() - carried
    assert all(torch.equal(after[n], before[n]) for n in before) and all(torch.equal(received[n], before[n]) for n in received)
    scale = max(x.abs().max() for x in expected)
    assert (ranks[-1]["logits"] - torch.cat(expected)).abs().max() <= TOLERANCE * scale


def rewarded_batch() -> TrainBatch:
    generator = torch.Generator().manual_seed(5)
    rollouts = []
    for i, (prompt, response) in enumerate([(4, 20), (3, 1), (6, 33), (5, 12), (3, 27)]):
        ids = torch.randint(3, VOCAB, (prompt + response,), generator=generator)
        mask = torch.arange(ids.numel()) >= prompt
        rollouts.append(Rollout(i, ids, mask, torch.zeros(ids.numel()), 0, "stop"))
    old_N = torch.zeros(sum(r.response_length for r in rollouts))  # not used by the policy gradient
    return TrainBatch(tuple(rollouts), torch.tensor([1.0, -0.7, 0.4, -1.3, 0.8]), old_N, old_N)


@functools.cache
def reference_step(name: str, folder: Path, dtype: torch.dtype = torch.float64, nudge: int = 0) -> tepo.Step:
    """A step with the policy gradient of -sum A log pi / N, in the file's names."""
    trainer, batch = tepo.Trainer(reference(name, folder)[0], **cases.ADAM, dtype=dtype, nudge=nudge), rewarded_batch()
    loss = torch.zeros((), dtype=torch.float64)
    for rollout, advantage in zip(batch.rollouts, batch.advantages_B.double(), strict=True):
        logprob, _ = tepo.statistics(trainer.model, rollout.token_ids_L, rollout.response_mask_L, cases.TEMPERATURE)
        loss = loss - advantage * logprob.sum() / batch.num_tokens
    step = trainer.take(loss)
    return replace(step, gradients=in_file_names(name, step.gradients), weights=in_file_names(name, step.weights))


def in_file_names(model: str, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers holds the experts of a layer in one tensor; its files hold one per expert."""
    mixtral = model.startswith("mixtral")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for name, x in named.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        prefix = name.rpartition(".")[0]
        for i, expert in enumerate(x if ".experts." in name else ()):
            if name.endswith("gate_up_proj"):
                out[f"{prefix}.{i}.{gate}.weight"], out[f"{prefix}.{i}.{up}.weight"] = expert.chunk(2)
            else:
                out[f"{prefix}.{i}.{down}.weight"] = expert
        if ".experts." not in name:
            out[name] = x
    return out


@pytest.mark.parametrize(("name", "layout"), params(STEPS_ON_TWO_RANKS, STEPS))
def test_a_training_step_equals_the_reference(folder: Path, name: str, layout: dict[str, Any]) -> None:
    """Loss, gradient norm, and gradients and weights per tensor, by ||a - b|| / ||b||."""
    cfg = cases.run_config(reference(name, folder)[0], layout, max_tokens=50, objective={"name": "reinforce"})
    ranks = run_world(cfg.parallel.world_size, cases.train_steps, cfg, (rewarded_batch(),))
    cases.compare(ranks, (reference_step(name, folder),), lambda nudge: (reference_step(name, folder, torch.float32, nudge),))
