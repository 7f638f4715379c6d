"""The policy losses of verl (`verl.trainer.ppo.core_algos`), called as its actor calls them.

verl averages gradients over ranks and multiplies by their number; microbatches are added. It takes the counts of the whole
minibatch in `global_batch_info`.
"""

import math
from typing import Any

from torch import Tensor

from tepo_megatron.report.audit.reference import Formula
from tests.conformance.answers import Loss
from tests.conformance.check import Subject
from tests.conformance.parts import Part
from tests.reference.methods import METHODS

NEEDS = "verl, installed with torch: `pip install --no-deps --target FOLDER -r requirements/bench.txt`, then `--peers FOLDER`"
_PART = "chooses by the covariances of each microbatch, not of the minibatch"


def loss_of(name: str, aggregation: str, ref_beta: float = 0.0, **keys: Any) -> Loss:
    """Return a registered policy loss.

    Args:
        aggregation: `loss_agg_mode`.
        ref_beta: Coefficient of the KL to the reference, added as verl's actor adds it.
        keys: Fields of `ActorConfig`; `policy_loss` as a dict.
    """
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig, PolicyLossConfig

    policy_loss = PolicyLossConfig(**{"loss_mode": name} | keys.pop("policy_loss", {}))
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=policy_loss, **keys)
    function = core_algos.get_policy_loss_fn(name)

    def loss(part: Part) -> Tensor:
        counts = {"dp_size": part.ranks, "batch_num_tokens": part.tokens, "global_batch_size": part.sequences}
        config.global_batch_info.update(counts)
        value, _ = function(
            old_log_prob=part.old_logprob,
            log_prob=part.logprob,
            advantages=part.advantage[:, None].expand(part.mask.shape),
            response_mask=part.mask,
            loss_agg_mode=aggregation,
            config=config,
        )
        if ref_beta:
            kl = core_algos.kl_penalty(logprob=part.logprob, ref_logprob=part.ref_logprob, kl_penalty="low_var_kl")
            value = value + ref_beta * core_algos.agg_loss(
                loss_mat=kl, loss_mask=part.mask, loss_agg_mode=aggregation, **config.global_batch_info
            )
        return value / part.ranks

    return loss


def subjects() -> list[Subject]:
    """Return the methods that both verl and the reference implement."""
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    grpo = METHODS["grpo"] | {"dual_clip": 3.0}
    found = [
        Subject(f"vanilla, {mode}", loss_of("vanilla", mode, **clip), Formula(**grpo | {"aggregate": aggregate}), splits)
        for mode, aggregate, splits in (
            ("token-mean", "token_mean", True),
            ("seq-mean-token-sum", "sequence_mean_token_sum", True),
            ("seq-mean-token-mean", "sequence_mean_token_mean", False),
        )
    ]
    unclamped = {"log_ratio_limit": math.inf}
    clip_cov = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 5.0}  # all candidates, of which it else draws some
    own_means = dict.fromkeys(
        ("equal microbatches", "unequal microbatches", "a microbatch without tokens", "2 ranks", "2 ranks, 2 microbatches",
         "split sequences"), _PART,
    )  # fmt: skip
    huge = "clamps sequence ratios at 10 nats and only from above"
    return [
        *found,
        Subject(
            "vanilla, KL to the reference",
            loss_of("vanilla", "token-mean", ref_beta=0.1, **clip),
            Formula(**grpo | {"ref_beta": 0.1}),
            True,
            {"huge ratios": "bounds each token's KL at 10"},
        ),
        Subject(
            "gspo",
            loss_of("gspo", "seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4),
            Formula(**METHODS["gspo"]),
            says={"huge ratios": huge},
        ),
        Subject(
            "geo_mean (GMPO)",
            loss_of("geo_mean", "seq-mean-token-mean", clip_ratio_low=0.4, clip_ratio_high=0.4),
            Formula(**METHODS["gmpo"] | unclamped),
            says=dict.fromkeys(
                (
                    "equal microbatches",
                    "unequal microbatches",
                    "a microbatch without tokens",
                    "2 ranks",
                    "2 ranks, 2 microbatches",
                ),
                "takes the mean over the sequences of each microbatch",
            ),
        ),
        Subject("sapo", loss_of("sapo", "seq-mean-token-mean", tau_pos=1.0, tau_neg=1.05), Formula(**METHODS["sapo"])),
        Subject("gpg", loss_of("gpg", "token-mean"), Formula(**METHODS["gpg"]), True),
        Subject(
            "cispo",
            loss_of("cispo", "token-mean", clip_ratio_low=1.0, clip_ratio_high=4.0),
            Formula(**METHODS["cispo"]),
            True,
        ),
        Subject(
            "clip_cov, all candidates",
            loss_of("clip_cov", "token-mean", clip_ratio_low=1.0, clip_ratio_high=1.0, policy_loss=clip_cov),
            Formula(**METHODS["clip_cov"] | unclamped | {"cov_share": 1.0, "cov_low": 0.3, "cov_high": 5.0}),
            True,
            own_means,
        ),
        Subject(
            "kl_cov",
            loss_of("kl_cov", "token-mean", policy_loss={"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}),
            Formula(**METHODS["kl_cov"] | unclamped | {"cov_share": 0.2}),
            True,
            own_means | {"equal rewards": "ranks equal covariances by place, not by the tokens' random keys"},
        ),
    ]
