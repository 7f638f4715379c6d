"""Every row of the table and combinations of parts, each as a config of the product and as a method of the reference.

The reference's method is built from `tests/reference/methods.py` alone, so a part that only the product's row has shows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.report.audit.reference import Formula
from tests.gate.data import LONGEST, PROMPTS, TEMPERATURE, Material
from tests.objective_cases import section_of
from tests.reference.methods import CORRECTION_BOUNDS, METHODS

# coefficients and shares that are large enough for every part to have a visible effect, for rows that have the part
LARGER = {"beta": 0.5, "entropy_coefficient": 0.1, "advantage_alpha": 0.4}
SHARES = {"cov_share": 0.2, "cov_low": 0.1}
COVARIANCES: dict[str, Any] = {"cov_share": 0.2, "cov_low": 0.02, "cov_high": 5.0}
# a learning rate at which the second minibatch meets ratios on both sides of the clip range
LEARNING_RATE = 1.5


@dataclass(frozen=True)
class Variant:
    """A row with some of its parts replaced. `training` holds further keys of that section of the config."""

    row: str
    parts: dict[str, Any]
    training: dict[str, Any]

    @property
    def method(self) -> Formula:
        parts = METHODS[self.row] | self.parts
        low, high = CORRECTION_BOUNDS[parts.get("correction", "none")]
        limit = LONGEST - max(PROMPTS)
        return Formula(**{"correction_low": low, "correction_high": high, "max_response_tokens": limit} | parts)

    def config(self, material: Material, layout: Mapping[str, Any], max_tokens: int) -> Config:
        section = section_of({"name": self.row} | self.parts)
        if self.method.ref_beta:
            section.setdefault("ref_kl", {"beta": self.method.ref_beta})["path"] = str(material.other)
        return validate({
            "name": "row",
            "platform": "cpu",
            "model": {"path": str(material.model), "precision": "fp32"},
            "data": {"train": "unused", "max_prompt_tokens": max(PROMPTS)},
            "rollout": {
                "prompts_per_step": len(PROMPTS), "samples_per_prompt": 3, "temperature": TEMPERATURE,
                "max_response_tokens": LONGEST - max(PROMPTS),
            },
            "training": {"max_tokens_per_microbatch": max_tokens, "minibatch_prompts": 2, "epochs": 1} | self.training,
            "parallel": dict(layout),
            "objective": section,
            # with a large eps the step is the gradient's, so that the rounding of one update is not the next one's error
            "optimizer": {"lr": LEARNING_RATE},
            "megatron": {"optimizer": {"adam_eps": 1.0}},
            "sync": {"max_logprob_diff": 10.0},
            "logging": {"noise_floor_every": 0},
        })  # fmt: skip


def _row(name: str, training: dict[str, Any] | None = None, **parts: Any) -> Variant:
    method = METHODS[name]
    larger: dict[str, Any] = {k: math.copysign(v, method[k]) for k, v in LARGER.items() if method.get(k)}
    if "max_divergence" in method:
        # the probabilities of a random model's tokens are small
        larger["max_divergence"] = {"trust_region_tv": 5e-4, "trust_region_kl": 5e-6}[method["surrogate"]]
    shares = {k: v for k, v in SHARES.items() if k in method or k in parts}
    return Variant(name, larger | shares | parts, training or {})


VARIANTS: dict[str, Variant] = {name: _row(name) for name in METHODS} | {
    "tepo_eq4": _row("tepo_eq4", clip_high=0.02),  # it clips above alone, whatever the sign of the advantage
    "grpo, tis": _row("grpo", correction="tis", correction_high=1.3),
    "grpo, icepop, reference": _row("grpo", correction="icepop", correction_low=0.8, correction_high=1.4, ref_beta=0.3),
    "grpo, dual clip, KL in the reward": _row("grpo", dual_clip=1.4, ref_beta=0.1, ref_kl_in="reward"),
    "grpo, old log-probs of the engine": _row("grpo", {"old_logprobs": "rollout"}),
    "dr_grpo, tis": _row("dr_grpo", correction="tis", correction_high=1.3),
    "dppo, old log-probs of the engine": _row("dppo", {"old_logprobs": "rollout"}),
    "gmpo": _row("gmpo", clip_low=0.1, clip_high=0.1),
    "gmpo, tis": _row("gmpo", correction="tis", correction_high=1.3, clip_low=0.1, clip_high=0.1),
    "gspo, mis": _row(
        "gspo", correction="geometric_mask", correction_low=0.8, correction_high=1.05, clip_low=0.1, clip_high=0.1
    ),
    "tepo, tis, reference": _row("tepo", correction="tis", correction_high=1.3, ref_beta=0.3, ref_kl="k2"),
    "tepo, prompt mean": _row("tepo", aggregate="prompt_mean_token_mean"),
    "tepo, steer": _row("tepo", weighting="steer", steer_lambda_min=0.5),
    "gspo, clip_cov": _row("gspo", weighting="clip_cov", clip_low=0.1, clip_high=0.1, **COVARIANCES),
    "prefix_is, clip_cov": _row("prefix_is", weighting="clip_cov", **COVARIANCES),
    # with a coefficient of 1 the first update brings the student so close to its teacher that the second gradient, of a
    # difference of log-probs, is mostly their rounding in fp32
    "distill": _row("distill", ref_beta=0.1),
    "distill, whole vocabulary": _row("distill", {"logits_budget_mib": 0}, ref_beta=0.3, ref_kl="full"),
    "cispo, icepop": _row("cispo", correction="icepop", correction_low=0.8, correction_high=1.4),
}
