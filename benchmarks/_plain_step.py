"""The demo's training step in plain PyTorch and transformers, as one would write it for a single process."""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from tepo_megatron.base.types import Rollout
from tepo_megatron.config import Config

FORMS = ("padded", "bucketed")
_PADDING = 1.25  # bucketed: limit of longest / shortest sequence in a rectangle


class PlainStep:
    """Computes old statistics of all sequences, then one AdamW update per minibatch of groups.

    Attributes:
        form: Layout of a minibatch as the model's input. `padded`: one rectangle (causal attention never sees padding on its
            right, so there is no mask); `bucketed`: several rectangles, each of sequences of similar length.
    """

    def __init__(self, cfg: Config, rollouts: list[Rollout], form: str) -> None:
        self.cfg, self.rollouts, self.form, self.steps = cfg, rollouts, form, 0
        self.model = Qwen3ForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32, attn_implementation="sdpa")
        o, adam = cfg.optimizer, cfg.megatron.known_optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=o.lr,
            betas=(adam.adam_beta1, adam.adam_beta2),
            eps=adam.adam_eps,
            weight_decay=adam.weight_decay,
            fused=True,
        )

    def __call__(self) -> list[tuple[float, float]]:
        """Run one step; return (loss, gradient norm) of each update."""
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.cfg.optimizer.lr * min(1.0, self.steps / self.cfg.optimizer.warmup_steps)
        size, out = self.cfg.rollout.samples_per_prompt, []
        rewards = torch.tensor([r.reward for r in self.rollouts], dtype=torch.float64).view(-1, size)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten().float()
        everything = self.by_length(range(len(self.rollouts)))
        with torch.no_grad():
            old_logprob, old_entropy, _ = self.statistics(everything)
        responses = [self.rollouts[i].response_length for i in everything]
        parts = zip(old_logprob.split(responses), old_entropy.split(responses), strict=True)
        old = dict(zip(everything, parts, strict=True))
        order = torch.randperm(rewards.size(0), generator=torch.Generator().manual_seed(self.steps))
        for groups in order.split(self.cfg.training.minibatch_prompts):
            chosen = self.by_length((groups[:, None] * size + torch.arange(size)).flatten().tolist())
            logprob, entropy, sequence = self.statistics(chosen)
            before = torch.cat([old[i][0] for i in chosen]), torch.cat([old[i][1] for i in chosen])
            loss = self.loss(logprob, entropy, before, advantages[chosen], sequence)
            self.optimizer.zero_grad()
            loss.backward()
            clip = self.cfg.megatron.known_optimizer.clip_grad
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            out.append((loss.item(), float(norm)))
        return out

    def loss(
        self, logprob: Tensor, entropy: Tensor, old: tuple[Tensor, Tensor], advantages: Tensor, sequence: Tensor
    ) -> Tensor:
        """Return the `tepo` loss, a mean over response tokens: clipped geometric-mean ratio, and the
        importance-weighted k3 if A > 0 and the entropy falls.
        """
        eps, beta = 0.2, self.cfg.objective.beta
        assert beta is not None
        log_ratio = logprob - old[0]
        count = torch.bincount(sequence, minlength=advantages.numel())
        ratio = (torch.zeros_like(advantages).index_add(0, sequence, log_ratio) / count).exp()[sequence]
        advantage = advantages[sequence]
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)
        masked = (advantage > 0) & (entropy - old[1] < 0)
        return -(surrogate - beta * masked * log_ratio.exp() * (torch.expm1(-log_ratio) + log_ratio)).mean()

    def statistics(self, chosen: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-prob, entropy (without gradient) and sequence index of each response token of the sequences `chosen`."""
        ids = [self.rollouts[i].token_ids_L for i in chosen]
        masks = [self.rollouts[i].response_mask_L for i in chosen]
        hidden, labels = [], torch.cat([x[m] for x, m in zip(ids, masks, strict=True)])
        for part in self._rectangles(ids):
            inputs, is_row = self._padded(ids[part], masks[part])
            hidden.append(self.model.model(inputs, use_cache=False).last_hidden_state[is_row])
        logits = self.model.lm_head(torch.cat(hidden)) / self.cfg.rollout.temperature
        logp = torch.log_softmax(logits, dim=-1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        sequence = torch.arange(len(ids)).repeat_interleave(torch.tensor([int(m.sum()) for m in masks]))
        return logp.gather(1, labels[:, None]).squeeze(1), entropy, sequence

    def by_length(self, chosen: Iterable[int]) -> list[int]:
        """Return the indices, the longest sequence first."""
        return sorted(chosen, key=lambda i: -self.rollouts[i].token_ids_L.numel())

    def _rectangles(self, ids: list[Tensor]) -> list[slice]:
        """Return the slices of sequences, sorted longest first, that are computed together."""
        starts = [0]
        for i, x in enumerate(ids):
            if self.form == "bucketed" and ids[starts[-1]].numel() > _PADDING * x.numel():
                starts.append(i)
        return [slice(a, b) for a, b in itertools.pairwise([*starts, len(ids)])]

    def _padded(self, ids: list[Tensor], masks: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the model's tokens [B, T], and a mask [B, T] of the positions whose label is a response token."""
        mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        is_row = torch.cat((mask[:, 1:], mask.new_zeros(len(ids), 1)), dim=1)
        return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), is_row
