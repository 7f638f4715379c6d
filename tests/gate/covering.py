"""A covering array of strength 2 over all training switches: every pair of values is in a row, or refused by config.

Each row is one world of at most four ranks. `python -m tests.gate.covering` prints the rows and the refusals.
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tepo_megatron.actor.layout import check_layout, check_shared_prompts
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.models.families import find_family
from tepo_megatron.models.ops import Architecture
from tepo_megatron.service.method import resolve
from tests.gate import plan
from tests.gate.data import FAMILIES, LONGEST, PROMPTS, SIZES, TEMPERATURE, TRUNCATION

Value = Any
Row = Mapping[str, Value]
Pair = frozenset[tuple[str, Value]]

FACTORS: dict[str, tuple[Value, ...]] = {
    "tp": (1, 2),
    "sequence_parallel": (False, True),
    "pp": (1, 2),
    "vpp": (1, 2),
    "cp": (1, 2),
    "dp": (1, 2),
    "ep": (1, 2),
    "experts": (False, True),
    "tied": (False, True),
    "overlap": ("none", "gradients", "both"),
    "logits_budget_mib": (None, 0, 512),
    "gradient_accumulation_fusion": (False, True),
    "recompute": ("none", "selective", "full"),
    "offload_activations": (False, True),
    "colocate": (False, True),
    "share_prompts": ("never", "always"),
    "fixed_length": (False, True),
    "reference": ("none", "loss", "reward"),
    "weighting": ("none", "clip_cov", "kl_cov", "steer"),
    "correction": ("none", "tis", "geometric_mask", "icepop"),
    "old_logprobs": ("actor", "rollout"),
    "truncation": ("none", "engine", "actor"),  # who states the sampling masks
    "stream": ("off", "prompt"),
}
# a hybrid has no experts, and its sequences share no prompts
HYBRID = FACTORS | {"hybrid": (True,), "ep": (1,), "experts": (False,), "share_prompts": ("never",)}
DEFAULTS = {name: values[0] for name, values in FACTORS.items()}
LAYERS = 4  # one for each virtual stage
LEARNING_RATE = 0.035  # moves every weight tensor by 1 % at least in two updates
HYBRID_LEARNING_RATE = 0.1  # the same for a hybrid, whose convolutions and decays are larger numbers
TRIES = 60  # completions of a pair that are drawn for a row; the best one is taken
_OVERLAP = {"none": (False, False), "gradients": (True, False), "both": (True, True)}


@dataclass(frozen=True)
class Refusal:
    """A pair that config refuses, with the text of the refusal."""

    pair: Pair
    reason: str


def family_of(row: Row) -> tuple[str, bool]:
    """Return the key of `data.FAMILIES`, and whether embeddings are tied."""
    return ("qwen3_5" if row.get("hybrid") else "qwen3_moe" if row["experts"] else "qwen3"), row["tied"]


def config_of(row: Row, model: str = "model", other: str = "other") -> Config:
    """Return the config of a row.

    Raises:
        ConfigError: Two values of the row contradict each other.
    """
    objective: dict[str, Any] = {"name": row["weighting"]}
    if row["weighting"] == "none":
        # tepo's mask compares entropies, which an engine does not report
        objective = {"name": "tepo", "beta": 0.5} if row["old_logprobs"] == "actor" else {"name": "tepo_no_kl"}
    if row["weighting"] in ("clip_cov", "kl_cov"):
        objective["weighting"] = {"share": 0.2}  # of a tiny minibatch: several tokens
    if row["weighting"] == "clip_cov":
        objective["weighting"] |= {"low": 0.1}
    if row["correction"] != "none":
        objective["correction"] = row["correction"]
    if row["reference"] != "none":
        objective["ref_kl"] = {"beta": 0.1, "where": row["reference"], "path": other}
    gradients, parameters = _OVERLAP[row["overlap"]]
    layout = {axis: row[axis] for axis in ("tp", "pp", "vpp", "cp", "dp", "ep", "sequence_parallel")}
    if row["reference"] == "reward" and row["stream"] == "prompt":
        objective["advantage"] = "mean"  # of groups that are not filtered
    same = ("logits_budget_mib", "recompute", "offload_activations", "share_prompts")
    cfg = validate({
        "name": "pair", "platform": "cpu",
        "model": {"path": model, "precision": "fp32"},
        "data": {"train": "unused", "max_prompt_tokens": max(PROMPTS)},
        "parallel": layout,
        "rollout": {
            "prompts_per_step": len(PROMPTS), "samples_per_prompt": 3, "temperature": TEMPERATURE,
            "max_response_tokens": LONGEST - max(PROMPTS), "colocate": row["colocate"],
            "filter_uniform_groups": row["stream"] == "off",
        } | ({} if row["truncation"] == "none" else {"top_k": TRUNCATION.top_k, "top_p": TRUNCATION.top_p}),
        "training": {name: row[name] for name in same} | {
            "old_logprobs": row["old_logprobs"], "stream": row["stream"], "epochs": 1 + (row["stream"] == "off"),
            "minibatch_prompts": len(PROMPTS) if row["stream"] == "off" else -(-len(PROMPTS) // 2),
            "max_tokens_per_microbatch": plan.MICROBATCH,
        },
        "objective": objective,
        "optimizer": {"lr": HYBRID_LEARNING_RATE if row.get("hybrid") else LEARNING_RATE},
        "megatron": {
            "transformer": {"gradient_accumulation_fusion": row["gradient_accumulation_fusion"]},
            "ddp": {
                "overlap_grad_reduce": gradients, "overlap_param_gather": parameters,
                "bucket_size": plan.BUCKET if gradients else None,
            },
            "optimizer": {"adam_eps": plan.EPS, "adam_beta2": 0.95, "weight_decay": 0.01},
        },
        "sync": {"max_logprob_diff": 10.0},
        "logging": {"noise_floor_every": 0},
    })  # fmt: skip
    resolve(cfg)
    architecture = _architecture(*family_of(row))
    check_layout(architecture, cfg.parallel)
    check_shared_prompts(architecture, cfg.training)
    return cfg


@cache
def _architecture(family: str, tied: bool) -> Architecture:
    hf = FAMILIES[family](num_hidden_layers=LAYERS, tie_word_embeddings=tied, **SIZES).to_dict()
    names = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM"}
    hf["architectures"] = [names[family]]
    return find_family(hf).architecture(hf)


def refusal(row: Row) -> str | None:
    """Return why config refuses a row; None where it does not."""
    try:
        config_of(row)
    except ConfigError as error:
        return str(error)
    return None


def ranks(row: Row) -> int:
    return int(row["tp"] * row["pp"] * row["cp"] * row["dp"])


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def all_pairs(hybrid: bool = False) -> list[Pair]:
    """Return all pairs of values of two factors, in a fixed order; those of HYBRID with `hybrid`."""
    found = []
    for (a, values), (b, others) in itertools.combinations((HYBRID if hybrid else FACTORS).items(), 2):
        found += [frozenset({(a, x), (b, y)}) for x in values for y in others]
    return found


@cache
def array(hybrid: bool = False) -> tuple[tuple[Row, ...], tuple[Refusal, ...]]:
    """Return the rows, and the pairs that no row can have. Drawn with a fixed seed, so the same in every run.

    With `hybrid` they are those of HYBRID.
    """
    rng = random.Random(0)
    rows: list[Row] = []
    refusals: list[Refusal] = []
    missing = dict.fromkeys(all_pairs(hybrid))
    while missing:
        pair = next(iter(missing))
        best = max(_completions(pair, missing, rng, hybrid), key=lambda row: len(pairs_of(row) & missing.keys()), default=None)
        if best is None:
            del missing[pair]
            refusals.append(Refusal(pair, _reason(pair, hybrid)))
            continue
        rows.append(best)
        for covered in pairs_of(best):
            missing.pop(covered, None)
    return tuple(rows), tuple(refusals)


def _completions(pair: Pair, missing: Mapping[Pair, None], rng: random.Random, hybrid: bool) -> Iterator[Row]:
    """Return valid rows with this pair. Values are chosen one after the other, those in many missing pairs first."""
    factors = HYBRID if hybrid else FACTORS
    for _ in range(TRIES):
        row = dict(pair)
        names = [name for name in factors if name not in row]
        rng.shuffle(names)
        for name in names:
            values = [value for value in factors[name] if _may_go_on(row | {name: value})]
            if not values:
                break
            rng.shuffle(values)
            row[name] = max(values, key=lambda value: sum(frozenset({(name, value), item}) in missing for item in row.items()))
        whole = {name: row[name] for name in factors if name in row}
        if len(whole) == len(factors) and refusal(whole) is None:
            yield whole


def _may_go_on(row: Row) -> bool:
    """Return whether a row that lacks some values may become valid. It only saves tries; `refusal` decides."""
    held = dict(row)
    sizes = [held.get(axis, 1) for axis in plan.AXES]
    return (
        math.prod(sizes) <= plan.RANKS
        and not (held.get("sequence_parallel") and held.get("tp") == 1)
        and not (held.get("vpp") == 2 and held.get("pp") == 1)
        and not (held.get("ep") == 2 and (held.get("experts") is False or (held.get("dp"), held.get("cp")) == (1, 1)))
        and not (held.get("experts") and held.get("tp") == 2 and held.get("sequence_parallel") is False)
        and not (held.get("old_logprobs") == "rollout" and held.get("correction", "none") != "none")
        and not (held.get("gradient_accumulation_fusion") and held.get("offload_activations"))
        and not (held.get("colocate") and held.get("stream") == "prompt")
    )


def _reason(pair: Pair, hybrid: bool) -> str:
    """Return the text with which config refuses the pair, everything else being at its default."""
    row = DEFAULTS | ({"hybrid": True} if hybrid else {}) | dict(pair)
    if row["ep"] == 2 and row["cp"] == 1 and ("dp", 1) not in pair:
        row["dp"] = 2
    said = refusal(row)
    assert said is not None, f"{sorted(map(str, pair))} is in no row, and config does not refuse it"
    return said


def describe(row: Row) -> str:
    return ", ".join(f"{name}={value}" for name, value in row.items() if value != DEFAULTS.get(name)) or "defaults"


def words_of(pair: Pair) -> str:
    order: Sequence[str] = list(HYBRID)
    return " with ".join(f"{name}={value}" for name, value in sorted(pair, key=lambda item: order.index(item[0])))


def main() -> None:
    """Print the arrays."""
    for hybrid in (False, True):
        rows, refusals = array(hybrid)
        print(f"{'hybrid: ' if hybrid else ''}{len(all_pairs(hybrid))} pairs, {len(rows)} rows, {len(refusals)} refused")
        for row in rows:
            print(f"  {ranks(row)} ranks: {describe(row)}")
        for each in refusals:
            print(f"  refused: {words_of(each.pair)}: {each.reason}")


if __name__ == "__main__":
    main()
