"""The task of `benchmarks.mechanisms`: a chain of symbols with a reward for the whole chain alone, and its tiny policies.

A prompt k asks for n_k symbols, 2 to 24, and then an end. At progress p one symbol of twelve is right. A wrong one advances
too, unseen, and spoils the outcome. A filler symbol stays at p and does no harm, so that lengths vary. The reward is 1 if every
symbol was right and the end came at p = n_k. A policy is a table of distributions over (k, p), computed by a small network.
Accuracy, length, entropy and KL therefore have closed forms.

There is one network per seed, and all seeds are computed at once. Suffixes: _S seeds, _K prompts, _Q some of the prompts,
_P progress, _V symbols, _W weights of a network, _B responses, _T tokens of a response, _R tokens of many.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PROMPTS, MAX_SYMBOLS, SYMBOLS = 48, 24, 14
FILLER, END = SYMBOLS - 2, SYMBOLS - 1
MAX_TOKENS = 96  # limit of the length of a response
_WIDTH, _HIDDEN = 48, 96
_STATES = MAX_SYMBOLS + 1
_SHAPES = (
    (PROMPTS, _WIDTH), (_STATES, _WIDTH), (_WIDTH, _HIDDEN), (_WIDTH, _HIDDEN), (1, _HIDDEN), (_HIDDEN, _HIDDEN), (1, _HIDDEN),
    (_HIDDEN, SYMBOLS), (1, SYMBOLS),
)  # fmt: skip
# the policies that training starts from: shares of the right symbol among symbols, and of the filler among tokens
_RIGHT, _FILL, _EARLY_END = 0.86, 0.25, 1e-3


@dataclass(frozen=True)
class ChainTask:
    """The chains of all seeds."""

    symbols_SK: Tensor  # number of symbols n_k that a prompt asks for
    right_SKP: Tensor  # the right token in each state; the end where p = n_k

    @classmethod
    def of(cls, seeds: Sequence[int]) -> "ChainTask":
        """Return the chains of these seeds."""
        symbols, right = [], []
        for seed in seeds:
            g = torch.Generator().manual_seed(1000 + seed)
            n_K = torch.linspace(2, MAX_SYMBOLS, PROMPTS).long()[torch.randperm(PROMPTS, generator=g)]
            right_KP = torch.randint(0, FILLER, (PROMPTS, _STATES), generator=g)
            right_KP[torch.arange(_STATES) == n_K[:, None]] = END
            symbols.append(n_K)
            right.append(right_KP)
        return cls(torch.stack(symbols), torch.stack(right))

    @property
    def valid_SKP(self) -> Tensor:
        """The states that a response can be in, p <= n_k."""
        return torch.arange(_STATES) <= self.symbols_SK[..., None]


@dataclass(frozen=True)
class Responses:
    """Sampled responses of one seed, [B, T] and padded to the longest."""

    prompt_B: Tensor
    progress_BT: Tensor
    token_BT: Tensor
    mask_BT: Tensor  # bool, the tokens that the policy sampled
    reward_B: Tensor


def logprobs(weights_SW: Tensor, prompts_SQ: Tensor) -> Tensor:
    """Return the log-probs of all tokens in all states of some prompts, [S, Q, P, V], differentiable."""
    sizes = [a * b for a, b in _SHAPES]
    parts = [w.view(-1, *shape) for w, shape in zip(weights_SW.split(sizes, 1), _SHAPES, strict=True)]
    prompt_SKD, progress_SPD, of_prompt, of_progress, bias_1, matrix_2, bias_2, matrix_3, bias_3 = parts
    prompt_SQD = prompt_SKD.gather(1, prompts_SQ[..., None].expand(-1, -1, _WIDTH))
    first = (prompt_SQD @ of_prompt)[:, :, None] + (progress_SPD @ of_progress + bias_1)[:, None]
    second = F.gelu(first).flatten(1, 2) @ matrix_2 + bias_2
    return (F.gelu(second) @ matrix_3 + bias_3).log_softmax(-1).unflatten(1, first.shape[1:3])


def entropies(logprob_V: Tensor) -> Tensor:
    """Return the entropies in nats of distributions along the last dimension."""
    return -(logprob_V.exp() * logprob_V).sum(-1)


def all_prompts(seeds: int) -> Tensor:
    """Return every prompt for each seed, [S, K]."""
    return torch.arange(PROMPTS).expand(seeds, -1)


class SeedAdam:
    """Adam (betas 0.9 and 0.999) with one network per row, each with its own gradient norm and number of steps."""

    def __init__(self, weights_SW: Tensor, lr: float) -> None:
        self.weights_SW, self.lr = weights_SW, lr
        self.first_SW, self.second_SW = torch.zeros_like(weights_SW), torch.zeros_like(weights_SW)
        self.steps_S1 = weights_SW.new_zeros(len(weights_SW), 1)

    @torch.no_grad()
    def step(self, active_S: Tensor, max_norm: float = math.inf) -> None:
        """Update the rows of the mask with `weights_SW.grad`, and clear it; the others keep their weights and moments."""
        grad_SW = self.weights_SW.grad
        assert grad_SW is not None
        self.weights_SW.grad = None
        grad_SW = grad_SW * (max_norm / (grad_SW.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        on = active_S[:, None].float()
        self.steps_S1 += on
        self.first_SW.lerp_(grad_SW, 0.1 * on)
        self.second_SW.lerp_(grad_SW.square(), 0.001 * on)
        steps = self.steps_S1.clamp(min=1)
        root_SW = (self.second_SW / (1 - 0.999**steps)).sqrt() + 1e-8
        self.weights_SW -= self.lr * on * (self.first_SW / (1 - 0.9**steps)) / root_SW


def start_policies(seeds: Sequence[int], task: ChainTask, steps: int = 400) -> Tensor:
    """Return networks that were taught to be right in 86 % of the symbols, [S, W]."""
    rows = []
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(shape, generator=g) * (1 if i < 2 else shape[0] ** -0.5) for i, shape in enumerate(_SHAPES)]
        rows.append(torch.cat([(w * (len(w) > 1)).flatten() for w in drawn]))
    weights_SW = torch.stack(rows).requires_grad_()
    target = torch.full((*task.right_SKP.shape, SYMBOLS), (1 - _RIGHT) * (1 - _FILL) / (SYMBOLS - 3))
    target[..., END] = _EARLY_END
    target[..., FILLER] = _FILL
    target.scatter_(-1, task.right_SKP[..., None], _RIGHT * (1 - _FILL))
    target = target / target.sum(-1, keepdim=True) * task.valid_SKP[..., None]
    everyone, adam = torch.ones(len(seeds), dtype=torch.bool), SeedAdam(weights_SW, 3e-3)
    for _ in range(steps):
        loss_S = -(target * logprobs(weights_SW, all_prompts(len(seeds)))).sum((1, 2, 3)) / task.valid_SKP.sum((1, 2))
        loss_S.sum().backward()
        adam.step(everyone)
    return weights_SW.detach()


def closed_form(logprob_SKPV: Tensor, task: ChainTask) -> dict[str, Tensor]:
    """Return accuracy, length (tokens per required token) and entropy (nats, mean over states) of each seed, [S].

    The accuracy is the mean over prompts of the probability of reward 1, apart from responses longer than MAX_TOKENS.
    """
    valid_SKP = task.valid_SKP
    advance_SKP = torch.log1p(-logprob_SKPV[..., FILLER].exp().clamp(max=1 - 1e-6))
    right_SKP = logprob_SKPV.gather(-1, task.right_SKP[..., None])[..., 0] - advance_SKP
    length_SK = ((-advance_SKP).exp() * valid_SKP).sum(2) / (task.symbols_SK + 1)
    entropy_SKP = entropies(logprob_SKPV)
    return {
        "accuracy": (right_SKP * valid_SKP).sum(2).exp().mean(1),
        "length": length_SK.mean(1),
        "entropy": (entropy_SKP * valid_SKP).sum((1, 2)) / valid_SKP.sum((1, 2)),
    }


def sample(logprob_SKPV: Tensor, task: ChainTask, prompt_SB: Tensor, generators: Sequence[torch.Generator]) -> list[Responses]:
    """Sample one response to each prompt, token by token; return those of each seed."""
    uniform_TSB = torch.stack([torch.rand(MAX_TOKENS, prompt_SB.shape[1], generator=g) for g in generators], 1)
    below_SKPV, seed_S1 = logprob_SKPV.exp().cumsum(-1), torch.arange(len(prompt_SB))[:, None]
    symbols_SB, progress_SB = task.symbols_SK.gather(1, prompt_SB), torch.zeros_like(prompt_SB)
    alive_SB, good_SB = torch.ones_like(prompt_SB, dtype=torch.bool), torch.ones_like(prompt_SB, dtype=torch.bool)
    progress, tokens, masks = [], [], []
    for uniform_SB in uniform_TSB:
        state = seed_S1, prompt_SB, progress_SB
        token_SB = (below_SKPV[state] <= uniform_SB[..., None]).sum(-1).clamp(max=END)
        progress.append(progress_SB)
        tokens.append(token_SB)
        masks.append(alive_SB)
        advances_SB, ended_SB = token_SB != FILLER, token_SB == END
        # in the state p = n_k the right token is the end, and any symbol leaves the chain
        wrong_SB = advances_SB & (token_SB != task.right_SKP[state])
        good_SB = good_SB & ~(alive_SB & wrong_SB)
        alive_SB = alive_SB & ~ended_SB & ~(advances_SB & (progress_SB >= symbols_SB))
        progress_SB = torch.where(alive_SB & advances_SB, progress_SB + 1, progress_SB)
        if not alive_SB.any():
            break
    rewards_SB = (good_SB & ~alive_SB).float()
    progress_SBT, token_SBT, mask_SBT = (torch.stack(x, -1) for x in (progress, tokens, masks))
    columns = prompt_SB, progress_SBT, token_SBT, mask_SBT, rewards_SB
    return [Responses(*of_seed) for of_seed in zip(*columns, strict=True)]
