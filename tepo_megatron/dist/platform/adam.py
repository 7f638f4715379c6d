"""Implement Adam on the CPU with the interface of Transformer Engine's and Apex's FusedAdam."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class HostAdam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980) with decoupled weight decay (AdamW, arXiv:1711.05101), or with L2 regularisation.

    As in FusedAdam, the step count belongs to the parameter group and not to each parameter. Megatron's distributed optimizer
    relies on that: with torch.optim.AdamW it cannot load a checkpoint into a fresh optimizer (0.16: KeyError 'step', and one
    step tensor that all parameters share and that each of them advances).

    The state of a parameter is exp_avg and exp_avg_sq, of its shape and dtype. Gradients may have another dtype. Parameters
    without a gradient do not change. `closure` is not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if group["params"]:  # FusedAdam does not count the steps of an empty group either
                group["step"] = group.get("step", 0) + 1
                for p in group["params"]:
                    if p.grad is not None:
                        self._update(p, p.grad.to(p.dtype), group)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), lr, decay, step = group["betas"], group["lr"], group["weight_decay"], group["step"]
        if not (state := self.state[p]):
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        if self.adam_w_mode:
            p.mul_(1 - lr * decay)
        else:
            grad = grad.add(p, alpha=decay)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        p.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - beta1**step))
