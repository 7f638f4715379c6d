"""The losses of TRL's GRPO trainer: its own `_compute_loss`, called with given log-probs instead of a model.

TRL's gradients are averaged over ranks. The loss is divided by the number of accumulated microbatches, except where TRL divides
by tokens.
"""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.report.audit.reference import Formula
from tests.conformance.answers import Loss
from tests.conformance.check import Subject
from tests.conformance.parts import Part
from tests.reference.methods import METHODS

NEEDS = "trl, installed with torch: `pip install --no-deps --target FOLDER -r requirements/bench.txt`, then `--peers FOLDER`"
_MEANS = "averages means of microbatches, which is the minibatch's mean where all hold as many sequences"
_TOKENS = "averages means over each microbatch's own tokens"


def loss_of(loss_type: str, level: str = "token", **keys: Any) -> Loss:
    """Return the loss that a `loss_type` of `GRPOConfig` selects.

    Args:
        level: `importance_sampling_level`.
        keys: `epsilon_low`, `epsilon_high`, `delta`, `beta`, `entropy_coef`.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    def loss(part: Part) -> Tensor:
        accelerator = SimpleNamespace(
            num_processes=part.ranks, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=False
        )
        trainer = SimpleNamespace(
            loss_type=loss_type, importance_sampling_level=level, epsilon_low=keys.get("epsilon_low", 0.2),
            epsilon_high=keys.get("epsilon_high", 0.2), beta=keys.get("beta", 0.0), accelerator=accelerator,
            args=SimpleNamespace(
                delta=keys.get("delta"), use_bias_correction_kl=keys.get("bias_correction", False),
                steps_per_generation=part.microbatches, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
            ),
            entropy_coef=keys.get("entropy_coef", 0.0), _entropy_bonus_enabled="entropy_coef" in keys,
            use_adaptive_entropy=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False,
            use_vllm=False,
            model=SimpleNamespace(training=True), current_gradient_accumulation_steps=part.microbatches,
            max_completion_length=1, _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (part.logprob, part.entropy, None),
        )  # fmt: skip
        ids, mask = torch.zeros(part.mask.shape, dtype=torch.int64), part.mask.long()
        inputs = {
            "prompt_ids": ids[:, :0], "prompt_mask": mask[:, :0], "completion_ids": ids, "completion_mask": mask,
            "advantages": part.advantage, "old_per_token_logps": part.old_logprob, "ref_per_token_logps": part.ref_logprob,
            "num_items_in_batch": torch.tensor(part.tokens),
        }  # fmt: skip
        return GRPOTrainer._compute_loss(trainer, None, inputs) / part.ranks

    return loss


def subjects() -> list[Subject]:
    """Return the methods that both TRL and the reference implement."""
    unclamped = {"log_ratio_limit": math.inf}
    plain = METHODS["grpo"] | unclamped | {"clip_high": 0.2}
    higher, per_sequence = plain | {"clip_high": 0.28}, {"aggregate": "sequence_mean_token_mean"}
    gspo = METHODS["gspo"] | unclamped
    means = dict.fromkeys(("unequal microbatches", "a microbatch without tokens", "2 ranks, 2 microbatches"), _MEANS)
    tokens = dict.fromkeys((*means, "equal microbatches", "2 ranks", "split sequences"), _TOKENS)
    bounds: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.28}
    return [
        Subject("grpo", loss_of("grpo"), Formula(**plain | per_sequence), says=means),
        Subject("bnpo", loss_of("bnpo"), Formula(**plain), True, tokens),
        Subject(
            "dr_grpo, maximum length 1", loss_of("dr_grpo"), Formula(**plain | {"aggregate": "sequence_mean_token_sum"}),
            says=means,
        ),
        Subject("dapo", loss_of("dapo", **bounds), Formula(**higher), True),
        Subject("dapo, KL to the reference", loss_of("dapo", beta=0.1, **bounds), Formula(**higher | {"ref_beta": 0.1}), True),
        Subject(
            "dapo, importance-weighted KL to the reference", loss_of("dapo", beta=0.1, bias_correction=True, **bounds),
            Formula(**higher | {"ref_beta": 0.1, "ref_kl": "k3_importance_weighted"}), True,
        ),
        Subject("sapo", loss_of("sapo"), Formula(**METHODS["sapo"] | unclamped), says=means),
        Subject("dapo, delta=3", loss_of("dapo", delta=3.0, **bounds), Formula(**higher | {"dual_clip": 3.0}), True),
        Subject(
            "dapo, entropy bonus", loss_of("dapo", entropy_coef=0.1, **bounds),
            Formula(**higher | {"entropy_coefficient": 0.1}), True, tokens,
        ),
        Subject("cispo", loss_of("cispo", epsilon_high=5.0), Formula(**METHODS["cispo"] | unclamped), True),
        Subject(
            "grpo, sequence level (GSPO)", loss_of("grpo", "sequence", epsilon_low=3e-4, epsilon_high=4e-4), Formula(**gspo),
            says=means,
        ),
        Subject(
            "luspo, sequence level", loss_of("luspo", "sequence", epsilon_low=3e-4, epsilon_high=4e-4),
            Formula(**gspo | {"aggregate": "sequence_mean_token_sum"}), says=means,
        ),
    ]  # fmt: skip
