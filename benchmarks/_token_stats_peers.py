"""The alternatives that `benchmarks/token_stats.py` measures: ours, and each peer's own code, called as its trainer calls it.

Every alternative takes logits [R, V] and labels [R] and returns (log-prob [R], entropy [R]), both differentiable.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.results import OURS
from tepo_megatron.ops.vocab_parallel import token_stats

Statistics = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def ours(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the statistics with `token_stats`."""
    stats = token_stats(logits, labels, 1.0, None)
    return stats.logprob_R, stats.entropy_R


def plain_formula(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the statistics with log_softmax in fp32, a gather and a sum, by autograd."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def trl() -> Statistics:
    """Return TRL's GRPO trainer code: [batch, tokens, V] in the model's dtype, here a batch of 4; entropy with its gradient."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def run(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, labels = logits.view(4, -1, logits.size(1)), labels.view(4, -1)
        return selective_log_softmax(logits, labels).flatten(), entropy_from_logits(logits).flatten()

    return run


def verl() -> Statistics:
    """Return the code of verl's FSDP engine: packed rows in the model's dtype; entropy_from_logits is not compiled."""
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    return lambda logits, labels: (logprobs_from_logits(logits, labels), entropy_from_logits(logits))


def trl_form(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the operations of TRL 1.16 for bf16 logits: log_softmax of each of 4 sequences; entropy in chunks of 128 rows."""
    sequences = zip(logits.chunk(4), labels.chunk(4), strict=True)
    logprobs = [torch.log_softmax(x, dim=-1).gather(1, y[:, None]).squeeze(1) for x, y in sequences]
    parts = (torch.log_softmax(x, dim=-1) for x in logits.split(128))
    return torch.cat(logprobs), torch.cat([-(x.exp() * x).sum(-1) for x in parts])


def verl_form(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the operations of verl 0.9.1: a fused cross-entropy, here PyTorch's for flash-attn's; entropy from a softmax."""
    logprobs = -torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return logprobs, torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * logits).sum(-1)


FORMS: dict[str, Statistics] = {"trl": trl_form, "verl": verl_form}  # our own code for what each peer computes


def alternatives(forms: bool = False) -> dict[str, Statistics]:
    """Return the alternatives that can be measured here, by name, ours first; those that are not installed are left out."""
    found: dict[str, Statistics] = {OURS: ours}
    for name, load in (("trl", trl), ("verl", verl)):
        try:
            found[name] = load()
        except ImportError as e:
            print(f"{name} is left out: {e}", file=sys.stderr)
            if forms:
                found[f"{name} form"] = FORMS[name]
    found["plain"] = plain_formula
    return found


def vocab_parallel(ranks: int) -> dict[str, Statistics]:
    """Return the alternatives for logits split over all ranks of the world: ours, and verl's for Megatron if installed."""

    def ours(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        stats = token_stats(logits, labels, 1.0, dist.group.WORLD)
        return stats.logprob_R, stats.entropy_R

    found: dict[str, Statistics] = {OURS: ours}
    try:
        from megatron.core import parallel_state
        from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits
    except ImportError:
        return found
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)

    def verl(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        entropy = vocab_parallel_entropy(logits)
        return vocab_parallel_log_probs_from_logits(logits.clone(), labels), entropy  # it overwrites its logits

    found["verl"] = verl
    return found
