"""The methods by name, spelled out from their papers: only what each is made of. See `report.audit.reference.Formula`."""

import math
from typing import Any

# Eq. 4 of TEPO with PPO's pessimistic clip; the paper gives no clip range, 0.2 is this project's. beta: Section 4.1.
TEPO: dict[str, Any] = {
    "ratio": "sequence",
    "surrogate": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "aggregate": "token_mean",
    "advantage": "std",
    "kl": "k3_importance_weighted",
    "kl_mask": "falling_entropy",
    "kl_entropy_tolerance": 0.0,
    "beta": 0.001,
}
NO_KL = {k: v for k, v in TEPO.items() if "kl" not in k and k != "beta"} | {"kl_mask": "none", "beta": 0.0}
# Section 4.1 of TEPO: GRPO/DAPO with clip-higher.
GRPO: dict[str, Any] = {
    "ratio": "token",
    "surrogate": "clip",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "aggregate": "token_mean",
    "advantage": "std",
    "beta": 0.0,
    "ref_beta": 0.0,
}
REINFORCE: dict[str, Any] = {
    "ratio": "none",
    "surrogate": "reinforce",
    "aggregate": "token_mean",
    "advantage": "std",
    "beta": 0.0,
}


def without_bounds(method: dict[str, Any]) -> dict[str, Any]:
    """Return the method without clip bounds where nothing reads them."""
    return {k: v for k, v in method.items() if not k.startswith("clip_")}


# arXiv 2602.04879: Eq. 12 sums over the tokens, the advantage is r - mean, Appendix C.1 has the limits
DPPO = without_bounds(GRPO) | {"aggregate": "sequence_mean_token_sum_norm", "advantage": "mean"}

METHODS: dict[str, dict[str, Any]] = {
    "tepo": TEPO,
    "tepo_no_kl": NO_KL,
    "tepo_eq4": TEPO | {"surrogate": "clip_eq4"},
    "tepo_alg1": without_bounds(NO_KL) | {"surrogate": "unclipped"},
    "kl_undifferentiated": TEPO | {"kl_mask": "all"},
    "tepo_kl_rising": TEPO | {"kl_mask": "rising_entropy"},
    "tepo_kl_both": TEPO | {"kl_mask": "both"},
    "max_entropy": NO_KL | {"entropy_coefficient": 0.001},
    "min_entropy": NO_KL | {"entropy_coefficient": -0.001},
    "sequence_mean_token_mean": NO_KL | {"aggregate": "sequence_mean_token_mean"},
    "sequence_mean_token_sum": NO_KL | {"aggregate": "sequence_mean_token_sum"},
    "grpo": GRPO | {"dynamic_sampling": False, "overlong_shaping": False},
    "dapo": GRPO | {"dynamic_sampling": True, "overlong_shaping": True},  # arXiv 2503.14476
    # arXiv 2503.20783: no division by the length nor by the group's deviation; PPO's own clip
    "dr_grpo": GRPO | {"clip_high": 0.2, "aggregate": "sequence_mean_token_sum_norm", "advantage": "mean"},
    # arXiv 2507.18071, Section 5.1: 3e-4 and 4e-4
    "gspo": GRPO | {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence_mean_token_mean"},
    # arXiv 2506.13585: bounded from above only; no upper bound is named there, TRL has 5 (arXiv 2510.13786)
    "cispo": GRPO | {"surrogate": "stop_gradient", "clip_low": 1.0, "clip_high": 4.0},
    # arXiv 2507.20673: the range (e^-0.4, e^0.4) of token ratios, one mean per sequence
    "gmpo": GRPO
    | {
        "ratio": "sequence",
        "surrogate": "clip_tokens",
        "clip_low": 1 - math.exp(-0.4),
        "clip_high": math.exp(0.4) - 1,
        "aggregate": "sequence_mean_token_mean",
    },
    # arXiv 2511.20347: tau_pos 1.0, tau_neg 1.05
    "sapo": without_bounds(GRPO)
    | {"surrogate": "soft_gate", "tau_positive": 1.0, "tau_negative": 1.05, "aggregate": "sequence_mean_token_mean"},
    "dppo": DPPO | {"surrogate": "trust_region_tv", "max_divergence": 0.15},
    "dppo_kl": DPPO | {"surrogate": "trust_region_kl", "max_divergence": 0.05},
    # arXiv 2601.05242: GRPO with rewards that are normalised term by term
    "gdpo": GRPO | {"clip_high": 0.2, "aggregate": "sequence_mean_token_mean", "advantage": "gdpo"},
    "gpg": REINFORCE | {"advantage": "gpg"},  # arXiv 2504.02546
    "reinforce": REINFORCE,
    "rloo": REINFORCE | {"advantage": "leave_one_out"},  # arXiv 2402.14740
    # no reward; KL(student || teacher) by half of the squared log-ratio, whose gradient is log(p/q) d log p
    "distill": REINFORCE | {"advantage": "none", "ref_beta": 1.0, "ref_kl": "k2"},
    "prefix_is": GRPO | {"ratio": "prefix"},
    # arXiv 2505.22617: r = 2e-4, covariances in (1, 5), clip range 1 (its public scripts); k = 2e-3, beta = 1
    "clip_cov": GRPO
    | {"clip_low": 1.0, "clip_high": 1.0, "weighting": "clip_cov", "cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    "kl_cov": without_bounds(GRPO) | {"surrogate": "unclipped", "weighting": "kl_cov", "cov_share": 2e-3, "cov_beta": 1.0},
    # arXiv 2506.14758 with alpha and kappa of TEPO's Section 4.1
    "entropy_advantage": GRPO | {"advantage_alpha": 4e-4, "advantage_kappa": 2.0},
    "steer": GRPO | {"weighting": "steer", "steer_lambda_min": 0.8},
}

# (low, high) where a correction is given none; 0: it has no lower bound
CORRECTION_BOUNDS = {
    "none": (0.0, math.inf), "tis": (0.0, 2.0), "sequence_mis": (0.0, 2.0),
    "geometric_mask": (0.99, 1.01), "icepop": (0.5, 5.0),
}  # fmt: skip
