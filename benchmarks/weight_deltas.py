"""Measure what `sync.delta=elements` sends for each delivery of real training in bf16, compared with whole weights.

    python -m benchmarks.weight_deltas [--quick] [--demo .cache/demo/seed-0] [--deliveries 4]

Each case trains the actor itself: rollouts are sampled from the current weights and graded, TEPO's loss gives gradients, and
Megatron's AdamW steps on fp32 master weights, of which the bf16 weights are the rounded copy. After the updates of each rollout
batch all tensors are encoded against the last delivery as a sender does it, decoded as a server does it, and compared bit for
bit.

    demo    the demo's model (python -m examples.arithmetic.base_model --seed 0 --out .cache/demo/seed-0), arithmetic problems,
            4 updates a delivery
    random  a random Qwen3 of 48 M parameters with initializer_range 0.02, the scale of trained models' weights; a response is
            right if most of its token ids are even; 8 updates a delivery and the learning rate of the paper, and others

changed: share of the elements whose bits changed. sent: bytes of mask, values and whole tensors over those of all weights.
encode, decode: CPU seconds of one thread per GB of weights, with the checksums. copy: the same of writing all weights to a file
in shared memory, in alternation. The tables go to benchmarks/results/weight_deltas.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import pyarrow
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks._hf_rollouts import PROMPT_TOKENS, RANDOM_TOKENS, SAMPLES, arithmetic_rollouts, even_rollouts
from benchmarks._weights import QUICK, SHAPE, copy_seconds
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config, validate
from tepo_megatron.platform import activate
from tepo_megatron.types import TrainBatch
from tepo_megatron.weight_sync.delta_encoder import DeltaEncoder
from tepo_megatron.weight_sync.element_deltas import Bits, Encoding, bits_of, checksum, decode, encode
from tepo_megatron.weight_sync.receiver.base_tensors import BaseTensors

if TYPE_CHECKING:
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.distributed.parallel import ParallelDims

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks/results/weight_deltas.md"
LEARNING_RATES = {"demo": [3e-5], "random": [5e-7, 1e-6, 3e-5]}
PROMPTS = {"demo": 32, "random": 8}
REPETITIONS = 5


@dataclass
class Delivery:
    """The figures of one delivery.

    Attributes:
        changed: Share of the elements whose bits changed.
        sent: Bytes sent over bytes of all weights.
        codecs: Bytes over bytes of all weights with each way of `CODECS`; of the last delivery alone.
        seconds: See `cpu_seconds`; of the last delivery alone.
    """

    changed: float
    sent: float
    codecs: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


def zstd(data: Any) -> int:
    """Return the bytes of zstd, level 1."""
    return len(pyarrow.Codec("zstd", compression_level=1).compress(np.ascontiguousarray(data), asbytes=True))


def byte_planes(bits: Bits) -> Bits:
    """Return all first bytes, then all second bytes, and so on."""
    return np.ascontiguousarray(bits.view(np.uint8).reshape(-1, bits.itemsize).T)


def gaps_and_values(difference: Bits) -> int:
    """Return the bytes of the distances between changed elements, in 16 bits each, and of their values."""
    places = np.flatnonzero(difference)
    gaps = np.minimum(np.diff(places, prepend=-1), 2**16 - 1).astype(np.uint16)
    return zstd(byte_planes(gaps)) + zstd(byte_planes(difference[places]))


def mask_and_values(difference: Bits) -> int:
    """Return the bytes of what is sent: a bit for each element, and the values of those that changed."""
    changed = difference != 0
    return zstd(np.packbits(changed)) + zstd(byte_planes(difference[changed]))


CODECS: dict[str, Callable[[Bits], int]] = {
    "mask and values (used)": mask_and_values,
    "gaps and values": gaps_and_values,
    "XOR in byte planes": lambda difference: zstd(byte_planes(difference)),
    "XOR": zstd,
}


def cpu_seconds(base: dict[str, Bits], now: dict[str, Bits]) -> list[float]:
    """Return the CPU seconds per GB of weights to encode, to decode, and to write all weights to a file in shared memory.

    They are medians of alternating repetitions, in one thread, with the checksums of both ends.
    """
    whole = torch.from_numpy(np.concatenate([bits.view(np.uint8) for bits in now.values()]))
    measured = []
    for _ in range(REPETITIONS):
        times = [time.process_time()]
        sums = {name: checksum(bits) for name, bits in now.items()}
        deltas = {name: encode(base[name], bits) for name, bits in now.items()}
        times.append(time.process_time())
        for name, delta in deltas.items():
            if delta is not None:
                how = Encoding((), "", sums[name], 0, delta.changed, delta.mask_bytes)
                assert checksum(decode(base[name], np.frombuffer(delta.payload, np.uint8), how)) == how.crc32
        times.append(time.process_time())
        copy_seconds(whole)
        times.append(time.process_time())
        measured.append([(end - start) * 1e9 / whole.nbytes for start, end in itertools.pairwise(times)])
    return [statistics.median(column) for column in zip(*measured, strict=True)]


class Wire:
    """A sender and a receiver without a transport, and the weights of the last delivery."""

    def __init__(self) -> None:
        self._encoder, self._bases = DeltaEncoder(), BaseTensors()
        self._last: dict[str, Bits] = {}

    def deliver(self, tensors: dict[str, torch.Tensor], is_last: bool) -> Delivery:
        """Encode, decode and compare the weights."""
        first, size = not self._last, sum(t.nbytes for t in tensors.values())
        encodings: dict[str, Encoding] = {}
        sent = list(self._encoder.encode(iter(tensors.items()), not first, encodings))
        decoded = self._bases.decode((name, tensor, encodings[name]) for name, tensor in sent)
        self._bases.keep(decoded)
        assert all(np.array_equal(bits_of(decoded[n].tensor), bits_of(t)) for n, t in tensors.items()), "not the same bits"
        now = {name: bits_of(tensor).copy() for name, tensor in tensors.items()}
        differences = [now[name] ^ self._last[name] for name in now] if not first else []
        elements = sum(bits.size for bits in now.values())
        changed = sum(int(np.count_nonzero(d)) for d in differences) / elements
        nbytes = sum(tensor.nbytes for _, tensor in sent)
        found = Delivery(changed, nbytes / size)
        if is_last:
            found.codecs = {name: sum(map(compress, differences)) / size for name, compress in CODECS.items()}
            found.seconds = cpu_seconds(self._last, now)
        self._last = now
        return found


def config_of(case: str, model: Path, lr: float) -> Config:
    """Return the config of a case in bf16."""
    if case == "demo":
        keys = {"model.path": model, "model.precision": "bf16", "parallel.tp": 1, "optimizer.warmup_steps": 0}
        keys |= {"optimizer.lr": lr, "sync.max_logprob_diff": 0.1}
        return load_config(ROOT / "examples/demo.yaml", [f"--{key}={value}" for key, value in keys.items()])
    return validate({
        "name": "deltas", "platform": "cpu", "model": {"path": str(model), "precision": "bf16"},
        "data": {"train": "unused", "max_prompt_tokens": PROMPT_TOKENS},
        "rollout": {
            "prompts_per_step": PROMPTS["random"], "samples_per_prompt": SAMPLES, "max_response_tokens": RANDOM_TOKENS,
        },
        "objective": {"name": "tepo"}, "optimizer": {"lr": lr},
        "training": {"epochs": 1, "minibatch_prompts": 1, "max_tokens_per_microbatch": 2048},
    })  # fmt: skip


def train(case: str, model: Path, lr: float, groups: ParallelDims, deliveries: int) -> list[Delivery]:
    """Train one case and return the figures of each delivery after the first."""
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.losses import build_objective
    from tepo_megatron.losses.advantages import group_advantages

    torch.manual_seed(0)
    cfg = config_of(case, model, lr)
    actor, objective, wire = Actor.open(cfg, groups), build_objective(cfg.objective), Wire()
    sampler = arithmetic_rollouts(model) if case == "demo" else even_rollouts(model, actor.arch.vocab_size)
    wire.deliver(weights := whole_weights(actor), is_last=False)
    found = []
    for step in range(1, deliveries + 1):
        rollouts = sampler.sample(weights, PROMPTS[case])
        advantages_B = group_advantages(rollouts, objective.advantage)
        batch = TrainBatch.build(rollouts, advantages_B)
        actor.start_step(step)
        batch = actor.attach_old_stats(batch)
        for minibatch in batch.epochs(cfg.training.epochs, cfg.training.minibatch_prompts, seed=step):
            actor.update(minibatch, objective)
        actor.finish_step()
        found.append(wire.deliver(weights := whole_weights(actor), is_last=step == deliveries))
        print(f"{case}, lr {lr:g}, delivery {step}: {found[-1]}", flush=True)
    return found


def whole_weights(actor: Actor) -> dict[str, torch.Tensor]:
    """Return copies of all weights by Hugging Face name."""
    from tepo_megatron.weights.gather import iterate_hf

    return {name: tensor.detach().clone() for name, tensor in iterate_hf(actor.bindings, actor.arch, actor.groups.tp)}


def table(results: dict[tuple[str, float], list[Delivery]], parameters: dict[str, int]) -> str:
    """Return the Markdown tables."""
    rows = [["model", "learning rate", "delivery", "changed", "sent"], ["---"] * 5]
    for (case, lr), found in results.items():
        for i, x in enumerate(found, 1):
            rows.append([f"{case}, {parameters[case] / 1e6:.1f} M", f"{lr:g}", str(i), f"{x.changed:.2%}", f"{x.sent:.2%}"])
    head = ["model", "learning rate", *CODECS, "encode", "decode", "copy"]
    codecs = [head, ["---"] * len(head)]
    for (case, lr), found in results.items():
        last = found[-1]
        figures = [*(f"{last.codecs[name]:.2%}" for name in CODECS), *(f"{seconds:.2f}" for seconds in last.seconds)]
        codecs.append([case, f"{lr:g}", *figures])
    return "\n\n".join("\n".join("| " + " | ".join(row) + " |" for row in one) for one in (rows, codecs))


def report(results: dict[tuple[str, float], list[Delivery]], parameters: dict[str, int], where: dict[str, Any]) -> str:
    """Return the page with the tables."""
    tables, other = table(results, parameters).split("\n\n")
    return f"""# What a delivery sends with `sync.delta: elements`

Measured by `python -m benchmarks.weight_deltas`: real updates in bf16 with fp32 master weights (AdamW, TEPO's loss, rollouts
sampled from the current weights). Every delivery was decoded and is bit for bit what was sent.

{tables}

**The figure depends on the learning rate over the size of the weights.** A bf16 number has 8 bits of precision: a weight near
0.02 is a multiple of 1.2e-4 (of 7.6e-6 near 0.001). AdamW moves a master weight by at most about the learning rate in
each update. An update below half a unit in the last place changes no bit of the bf16 copy, until several add up. So fewer bits
change at lower learning rates, with larger weights, with fewer updates for each delivery, and once the gradients' signs
alternate. The models are small, and `random` is untrained; large trained models were not measured.

The last delivery in other ways, each with zstd level 1 and without whole tensors. Then CPU seconds of one thread per GB of
weights, with the checksums, and those of writing all weights to a file in shared memory (medians of {REPETITIONS}):

{other}

{json.dumps(where)}
"""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny random model, two deliveries; writes nothing")
    parser.add_argument("--demo", type=Path, default=Path(".cache/demo/seed-0"), help="folder of the demo's model")
    parser.add_argument("--deliveries", type=int, default=4)
    args = parser.parse_args()
    disable_progress_bar()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29513")):
        os.environ.setdefault(name, value)
    platform = activate("cpu")
    from benchmarks.results import surroundings
    from tepo_megatron.distributed import parallel

    results: dict[tuple[str, float], list[Delivery]] = {}
    parameters: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {"random": Path(folder)} if args.quick else {"demo": args.demo, "random": Path(folder)}
        torch.manual_seed(0)
        shape = QUICK if args.quick else SHAPE
        made = Qwen3ForCausalLM(Qwen3Config(**shape, max_position_embeddings=512, tie_word_embeddings=True))
        made.save_pretrained(folder)
        groups = None
        for case, model in models.items():
            for lr in LEARNING_RATES[case][: 1 if args.quick else None]:
                groups = groups or parallel.initialize(config_of(case, model, lr).parallel, platform, 0)
                results[case, lr] = train(case, model, lr, groups, 2 if args.quick else args.deliveries)
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
            parameters[case] = sum(p.numel() for p in loaded.parameters())
        parallel.shutdown()
    page = report(results, parameters, surroundings())
    print(page)
    if not args.quick:
        OUT.write_text(page)


if __name__ == "__main__":
    main()
