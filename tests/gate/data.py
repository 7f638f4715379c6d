"""Tiny models of each family and the fixed rollouts on which the gate trains them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, MixtralConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tepo_megatron.base.types import Rollout, SamplingMask, Truncation
from tests.gate import reference
from tests.tiny import hybrid_config, tiny_model
from tests.truncated import kept, rows

VOCAB = 70  # no multiple of 16 tp, so every layout pads it
TEMPERATURE = 0.8
PROMPTS = (5, 3, 8, 2)  # tokens of each group's prompt
RESPONSES = ((9, 2, 12), (7, 1, 10), (4, 14, 6), (11, 5, 8))  # tokens of each group's responses
REWARDS = ((1.0, 0.0, 0.0), (0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (0.0, 0.0, 1.0))
TRUNCATION = Truncation(20, 0.9)  # of truncated sampling, where it is asked for
LONGEST = 22  # tokens of a prompt and its response

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "qwen2": Qwen2Config,
    "qwen3": lambda **sizes: Qwen3Config(head_dim=16, **sizes),
    "llama": LlamaConfig,
    "mistral": lambda **sizes: MistralConfig(sliding_window=None, **sizes),
    "qwen3_moe": lambda **sizes: Qwen3MoeConfig(head_dim=16, num_experts=4, norm_topk_prob=True, **_EXPERTS, **sizes),
    "qwen3_5": lambda **sizes: hybrid_config(head_dim=16, full_attention_interval=min(4, sizes["num_hidden_layers"]), **sizes),
    "mixtral": lambda **sizes: MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **sizes),
}


@dataclasses.dataclass(frozen=True)
class Material:
    """A model directory, two others of the same shape, and the rollouts of one or two steps.

    Attributes:
        model: The policy.
        other: A reference policy. With "-teacher" in the place of "-other" the path is that of a teacher, which differs more: a
            gradient of log(p/q) alone is as inexact as this difference is, and fp32 rounds log-probs.
        steps: The rollouts of each step.
    """

    model: Path
    other: Path
    steps: tuple[tuple[Rollout, ...], ...]


def make_material(
    folder: Path, family: str, *, tied: bool, layers: int, steps: int = 2, seed: int = 0, truncated: bool = False
) -> Material:
    """Write the models and draw the rollouts."""
    config = FAMILIES[family](num_hidden_layers=layers, tie_word_embeddings=tied, **SIZES)
    name = f"{family}-{'tied' if tied else 'untied'}-{layers}"
    model, other, teacher = folder / name, folder / f"{name}-other", folder / f"{name}-teacher"
    for path in (model, other, teacher):
        tiny_model(path, config, seed=seed + 1, scale=3.0)
    _perturb(other, seed + 2, 0.03)
    _perturb(teacher, seed + 2, 0.1)
    policy = reference.load(model)
    generator = torch.Generator().manual_seed(seed + 3)
    return Material(model, other, tuple(_rollouts(policy, step, generator, truncated) for step in range(steps)))


def _perturb(path: Path, seed: int, share: float) -> None:
    """Change every weight of a model directory by about this share of the weights' standard deviation."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    file = path / "model.safetensors"
    weights = {n: w + share * w.std() * torch.randn(w.shape, generator=generator) for n, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def _rollouts(policy: torch.nn.Module, step: int, generator: torch.Generator, truncated: bool) -> tuple[Rollout, ...]:
    """Draw random tokens. The engine's log-probs are the policy's at the start, off by up to half a nat for some tokens."""
    out: list[Rollout] = []
    for group, (length, responses, rewards) in enumerate(zip(PROMPTS, RESPONSES, REWARDS, strict=True)):
        # never id 0: transformers keeps the padding token out of the gradient (padding_idx)
        prompt = torch.randint(1, VOCAB, (length,), generator=generator)
        for tokens, reward in zip(responses, rewards, strict=True):
            ids = torch.cat((prompt, torch.randint(1, VOCAB, (tokens,), generator=generator)))
            mask = torch.arange(ids.numel()) >= length
            noise = 0.02 * torch.randn(tokens, generator=generator)
            noise += 0.5 * (torch.rand(tokens, generator=generator) < 0.2) * torch.randn(tokens, generator=generator).sign()
            with torch.no_grad():
                masks = None
                if truncated:  # most tokens, which are drawn from all, are outside of what is kept
                    logits = policy(ids[None]).logits[0, length - 1 : -1]
                    masks = [kept(z, TEMPERATURE, TRUNCATION) | {int(y)} for z, y in zip(logits, ids[length:], strict=True)]
                logprob, _ = reference.statistics(policy, [ids], [mask], TEMPERATURE, [masks])
            logprobs = torch.zeros(ids.numel())
            logprobs[mask] = (logprob + noise).float()
            out.append(
                Rollout(
                    prompt_id=step * len(PROMPTS) + group,
                    token_ids_L=ids,
                    response_mask_L=mask,
                    rollout_logprobs_L=logprobs,
                    policy_version=0,
                    stop_reason="stop",
                    reward=reward,
                    score=reward,
                    sampling_mask=None if masks is None else SamplingMask.from_rows(rows(masks)),
                )
            )
    return tuple(out)


def response_logprobs(rollout: Rollout) -> Tensor:
    """Return the engine's log-probs of the response tokens, fp64."""
    return rollout.rollout_logprobs_L[rollout.response_mask_L].double()


def masks_of(rollout: Rollout) -> list[set[int]] | None:
    """Return the sampling mask of each response token; None if the rollout has none."""
    if rollout.sampling_mask is None:
        return None
    return [set(mask.ids_M.tolist()) for mask in rollout.sampling_mask.split([1] * rollout.response_length)]
