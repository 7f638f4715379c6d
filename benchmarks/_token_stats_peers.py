"""The alternatives that `benchmarks/token_stats.py` measures: ours, and each peer's own code called as its trainer calls it.

Every alternative takes logits [R, V] and labels [R] and returns (log-prob [R], entropy [R]), both differentiable.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._measure import counted_collectives
from tepo_megatron.ops.vocab_parallel import token_stats

Statistics = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
OURS = "ours"


def ours(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    stats = token_stats(logits, labels, 1.0, None)
    return stats.logprob_R, stats.entropy_R


def plain_formula(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log_softmax in fp32, a gather and a sum, by autograd."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def trl() -> Statistics:
    """TRL's GRPO trainer: [batch, tokens, V] in the model's dtype, here a batch of 4; entropy with its gradient."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def run(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, labels = logits.view(4, -1, logits.size(1)), labels.view(4, -1)
        return selective_log_softmax(logits, labels).flatten(), entropy_from_logits(logits).flatten()

    return run


def verl() -> Statistics:
    """verl's FSDP engine: packed rows in the model's dtype; entropy_from_logits not compiled."""
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    return lambda logits, labels: (logprobs_from_logits(logits, labels), entropy_from_logits(logits))


def alternatives(peers: Path | None) -> tuple[dict[str, Statistics], dict[str, str]]:
    """What can be measured here, by name, ours first; and each peer's version, or why it is not there.

    peers: a folder to look into after the installed packages (`pip install --target`).
    """
    if peers is not None:
        sys.path.append(str(peers))
    found: dict[str, Statistics] = {OURS: ours}
    versions: dict[str, str] = {}
    for name, load in (("trl", trl), ("verl", verl)):
        try:
            found[name] = load()
            versions[name] = importlib.metadata.version(name)
        except ImportError as e:
            versions[name] = f"not installed ({e})"
    found["plain"] = plain_formula
    return found, versions


def count_collectives(rank: int, folder: Path, peers: Path | None) -> None:
    """On one of two tensor-parallel ranks. Rank 0 writes {name: [forward, backward, same bits on both]} to `counted`."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(64, 1000, generator=generator)
    labels = torch.randint(0, 1000, (64,), generator=generator)
    counted = {}
    for name, statistics in vocab_parallel(peers).items():
        logits = whole.chunk(2, dim=1)[rank].clone().requires_grad_() * 1
        with counted_collectives() as calls:
            logprob, entropy = statistics(logits, labels)
            forward = calls.total()
            (logprob.sum() + entropy.sum()).backward()
            backward = calls.total() - forward
        both = [torch.empty(2, 64) for _ in range(2)]
        dist.all_gather(both, torch.stack((logprob, entropy)).detach())
        counted[name] = [forward, backward, torch.equal(*both)]
    if rank == 0:
        (folder / "counted").write_text(json.dumps(counted))
    dist.destroy_process_group()


def vocab_parallel(peers: Path | None) -> dict[str, Statistics]:
    """The alternatives for logits split over tensor-parallel ranks: ours, and verl's for Megatron."""
    if peers is not None:
        sys.path.append(str(peers))

    def ours(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        stats = token_stats(logits, labels, 1.0, dist.group.WORLD)
        return stats.logprob_R, stats.entropy_R

    found: dict[str, Statistics] = {OURS: ours}
    if importlib.util.find_spec("verl") is None:
        return found
    try:
        from megatron.core import parallel_state
        from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits
    except ImportError:
        return found
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)

    def verl(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        entropy = vocab_parallel_entropy(logits)
        return vocab_parallel_log_probs_from_logits(logits.clone(), labels), entropy  # which overwrites its logits

    found["verl"] = verl
    return found
