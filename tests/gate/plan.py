"""The smallest worlds that train a shipped config on a CPU with the switches of a GPU.

Only sizes shrink: model, tokens, axes of the layout. Keys that select code stay as in the config, and keys that the config
leaves to the platform get the value of `platform: cuda`.
"""

import itertools
from pathlib import Path
from typing import Any

from tepo_megatron.config import Config
from tepo_megatron.config.fields import PLATFORM_DEFAULTS
from tepo_megatron.config.io import plain, validate
from tepo_megatron.doctor.plan.memory import has_teacher
from tests.gate.data import LONGEST, PROMPTS, TEMPERATURE

RANKS = 4  # ranks of a world
AXES = ("tp", "pp", "cp", "dp")
EPS = 1e-3  # eps of Adam; 1e-8 would turn the sign of rounding noise into a step, in any arithmetic
LEARNING_RATE = 0.02  # moves every weight tensor by 1 % at least in two updates
HYBRID_LEARNING_RATE = 0.065  # the same for a hybrid, whose convolutions and decays are larger numbers
EXACT_KL_LEARNING_RATE = 0.035  # the same for the exact KL, whose gradient is smaller and thus closer to EPS
HYBRID = "qwen3_5-"  # start of the name of its model directory (data.py)
MICROBATCH = 64  # tokens of a microbatch, so that there are several
BUCKET = 5_000  # parameters of a bucket, so that there are several where communication overlaps


def worlds(cfg: Config) -> list[dict[str, Any]]:
    """Return the layouts of at most RANKS ranks in which every axis above 1 is 2, and every pair of such axes is together."""
    above = [axis for axis in AXES if getattr(cfg.parallel, axis) > 1]
    most = RANKS.bit_length() - 1
    chosen = [tuple(above)] if len(above) <= most else list(itertools.combinations(above, most))
    return [_layout(cfg, axes) for axes in chosen]


def _layout(cfg: Config, axes: tuple[str, ...]) -> dict[str, Any]:
    layout: dict[str, Any] = {axis: 2 if axis in axes else 1 for axis in AXES}
    layout["vpp"] = 2 if "pp" in axes and cfg.parallel.vpp > 1 else 1
    layout["ep"] = 2 if cfg.parallel.ep > 1 and ("dp" in axes or "cp" in axes) else 1
    layout["sequence_parallel"] = cfg.parallel.sequence_parallel and "tp" in axes
    return layout


def name_of(layout: dict[str, Any]) -> str:
    """Return a layout in the usual notation: TP2+SP DP2."""
    words = [f"{axis.upper()}{layout[axis]}" for axis in ("tp", "pp", "vpp", "cp", "ep", "dp") if layout[axis] > 1]
    if layout["sequence_parallel"]:
        words[0] += "+SP"
    return " ".join(words) or "1 rank"


def on_a_cpu(cfg: Config, model: str, layout: dict[str, Any], precision: str) -> Config:
    tree = plain(cfg)
    if cfg.platform == "cuda":
        for key, default in PLATFORM_DEFAULTS.items():
            section, _, name = key.rpartition(".")
            found = tree
            for part in section.split("."):
                found = found[part]
            if found.get(name) in (None, "auto"):
                found[name] = default.cuda
    tree["platform"] = "cpu"
    tree["model"] |= {"path": model, "precision": precision}
    if cfg.objective.reference_path is not None:
        tree["objective"]["ref_kl"]["path"] = f"{model}-teacher"  # see `Material.other`
    tree["parallel"] |= layout
    if tree["megatron"]["ddp"].get("overlap_grad_reduce"):
        tree["megatron"]["ddp"]["bucket_size"] = BUCKET
    tree["megatron"]["transformer"].pop("first_last_layers_bf16", None)
    tree["data"] |= {"train": "unused", "eval": None, "max_prompt_tokens": max(PROMPTS)}
    tree["reward"]["terms"] = [{"type": "math"}]  # a verifier grades prompts of its own dataset only
    tree["evaluation"] |= {"every": 0, "benchmarks": []}
    tree["rollout"] |= {
        "prompts_per_step": len(PROMPTS), "samples_per_prompt": 3, "temperature": TEMPERATURE, "function": None,
        "max_response_tokens": LONGEST - max(PROMPTS),
    }  # fmt: skip
    epochs, minibatch, _ = updates(cfg)
    tree["training"] |= {
        "max_tokens_per_microbatch": MICROBATCH, "epochs": epochs, "minibatch_prompts": minibatch,
    }  # fmt: skip
    # the rollouts' log-probs are off by design, and `sync` has no engine
    tree["sync"] |= {"max_logprob_diff": 10.0, "quantize": "none"}
    lr = HYBRID_LEARNING_RATE if Path(model).name.startswith(HYBRID) else LEARNING_RATE
    if has_teacher(cfg.objective):
        lr = EXACT_KL_LEARNING_RATE
    tree["optimizer"] |= {"lr": lr, "warmup_steps": 0}
    tree["megatron"]["optimizer"] |= {
        "adam_eps": EPS, "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32", "optimizer_offload_fraction": 0.0
    }  # fmt: skip
    tree["logging"]["noise_floor_every"] = 0
    return validate(tree)


def updates(cfg: Config) -> tuple[int, int, int]:
    """Return epochs, prompts of a minibatch and steps that amount to two updates, as close to the config's own as possible."""
    parts = -(-cfg.rollout.prompts_per_step // cfg.training.minibatch_prompts)
    if cfg.training.epochs > 1:
        return 2, len(PROMPTS), 1
    return (1, len(PROMPTS) // 2, 1) if parts > 1 else (1, len(PROMPTS), 2)
