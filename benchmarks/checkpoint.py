"""Measure how long training waits for a checkpoint, compared with plain copies of the same state to host memory.

    python -m benchmarks.checkpoint [--model demo|100m|HF_DIRECTORY] [--saves 3] [--platform cpu] [--precision bf16] [--tp 1]
                                    [--json FILE]
    torchrun --nproc-per-node 2 -m benchmarks.checkpoint --model 100m

Prints one line per save: milliseconds for which `save()` blocked rank 0, those of two plain copies, tensor by tensor, the
quotients, and the time until the checkpoint was complete. Each of the three comes right after an optimizer step, as a save
does.

    kept    copy into memory that is allocated already: page-locked if the actor is on a GPU
    fresh   copy into newly allocated memory

The fair comparison is with `kept`, because a save also writes into memory that it keeps. The first save describes the state and
allocates that memory, so its comparison is the fresh copy. At the end: seconds to check the last checkpoint and to load it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tepo_megatron.config.io import validate
from tepo_megatron.platform import Platform, activate

if TYPE_CHECKING:
    from tepo_megatron.actor.actor import Actor

SHAPES = {
    "demo": {  # as in examples/arithmetic: 0.6 M parameters
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
    },
    "100m": {
        "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 10, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32_000,
    },
}  # fmt: skip


def main() -> None:
    """Build the actor, save checkpoints and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, 100m, or a Hugging Face directory")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary one of rank 0")
    parser.add_argument("--json", type=Path, help="write blocked, kept, fresh, complete of each save there too, in seconds")
    args = parser.parse_args()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        measure(args, activate(args.platform), Path(temporary))


def measure(args: argparse.Namespace, platform: Platform, temporary: Path) -> None:
    """Time `args.saves` checkpoints of a model, and reading the last one."""
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.checkpoint.checkpoints import Checkpoints
    from tepo_megatron.checkpoint.state import saved_slices
    from tepo_megatron.config import CheckpointConfig
    from tepo_megatron.distributed import parallel
    from tepo_megatron.distributed.objects import broadcast_object

    model = _write_model(args.model, temporary) if args.model in SHAPES else Path(args.model)
    world = int(os.environ["WORLD_SIZE"])
    cfg = validate({
        "name": "benchmark", "platform": args.platform, "model": {"path": str(model), "precision": args.precision},
        "data": {"train": "unused", "max_prompt_tokens": 8}, "rollout": {"max_response_tokens": 8},
        "training": {"max_tokens_per_microbatch": 64}, "parallel": {"tp": args.tp, "dp": world // args.tp},
    })  # fmt: skip
    groups = parallel.initialize(cfg.parallel, platform, cfg.seed)
    actor = Actor.open(cfg, groups)
    for chunk in actor.chunks:
        chunk.zero_grad_buffer()
    actor.start_step(1)
    actor.optimizer.step()  # creates the moments
    parameters = sum(b.parameter.numel() for b in actor.bindings)
    size = sum(piece.data.nbytes for piece in saved_slices(actor))
    if groups.is_main:
        print(f"{args.model}: {parameters / 1e6:.1f} M parameters and {size / 2**20:.0f} MiB of state on rank 0 of {world}")
    plain = _PlainCopies(actor)
    saves: list[dict[str, float]] = []
    folder = broadcast_object(args.folder or temporary / "checkpoints", groups.host)
    with Checkpoints.open(folder, CheckpointConfig(keep_last=1), groups) as checkpoints:
        for step in range(1, args.saves + 1):
            kept, fresh = plain.kept(), plain.fresh()
            actor.optimizer.step()
            checkpoints.save(step, actor, {"step": step})
            saved = checkpoints.wait()
            assert saved is not None
            saves.append({"blocked": saved.blocked_seconds, "kept": kept, "fresh": fresh, "complete": saved.seconds})
        if groups.is_main:
            _print_saves(saves)
        start = time.perf_counter()
        found = checkpoints.newest()
        checking = time.perf_counter() - start
        assert found is not None
        checkpoints.load(found, actor)
        if groups.is_main:
            print(f"checked in {checking:.3f} s, loaded in {time.perf_counter() - start - checking:.3f} s")
            if args.json:
                args.json.write_text(json.dumps(saves))
    parallel.shutdown()


def _print_saves(saves: list[dict[str, float]]) -> None:
    for step, save in enumerate(saves, 1):
        blocked, kept, fresh = save["blocked"], save["kept"], save["fresh"]
        print(
            f"save {step}: blocked {blocked * 1e3:.2f} ms; copy kept {kept * 1e3:.2f} ms ({blocked / kept:.2f}x), "
            f"fresh {fresh * 1e3:.2f} ms ({blocked / fresh:.2f}x); complete after {save['complete'] * 1e3:.0f} ms"
        )
    if len(saves) > 1:
        medians = {name: statistics.median(s[name] for s in saves[1:]) for name in ("blocked", "kept", "fresh")}
        print("medians after the first: " + ", ".join(f"{name} {x * 1e3:.2f} ms" for name, x in medians.items()))


class _PlainCopies:
    """Plain copies of this rank's state, tensor by tensor. Its methods return seconds; each copy follows an optimizer step."""

    def __init__(self, actor: Actor) -> None:
        from tepo_megatron.checkpoint.state import saved_slices

        self._optimizer = actor.optimizer
        self._from = [piece.data for piece in saved_slices(actor)]
        self._to = [torch.zeros_like(data, device="cpu", pin_memory=data.is_cuda) for data in self._from]

    def kept(self) -> float:
        """Copy into memory that was written to before."""

        def copy() -> None:
            for to, data in zip(self._to, self._from, strict=True):
                to.copy_(data, non_blocking=True)

        return self._seconds(copy)

    def fresh(self) -> float:
        """Copy into memory that is allocated tensor by tensor, and freed."""
        return self._seconds(lambda: [data.to("cpu", copy=True) for data in self._from])

    def _seconds(self, copy: Callable[[], object]) -> float:
        self._optimizer.step()
        cuda = self._from[0].is_cuda
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        copies = copy()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        del copies  # not timed
        return seconds


def _write_model(name: str, folder: Path) -> Path:
    """Write a random model of that shape; every rank writes its own, with the same seed."""
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[name], max_position_embeddings=512, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder / "model"


if __name__ == "__main__":
    main()
