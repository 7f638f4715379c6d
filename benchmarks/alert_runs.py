"""Make healthy runs and runs in which something is wrong, for the rules of `observability/alerts.py`.

    python -m benchmarks.alert_runs MODEL OUT [--only NAME ...] [--first-seed 0]

Each run is a real one of one rank: rollout service, grading, trainer and weight updates. Only the inference server is replaced:
the model of transformers samples in the rollout service. MODEL is the base model of `make demo`. OUT (jsonl.gz) gets the values
that the rules read. Runs that OUT holds already stay as they are. `--first-seed` is added to the seed of every run: the runs
from seed 0 on were looked at when the limits were chosen, so that only others say how often the rules are right.
"""

import argparse
import contextlib
import functools
import gzip
import io
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.observability import run_dir
from tepo_megatron.observability.alerts import KEY, RULES, judge
from tepo_megatron.platform import activate
from tepo_megatron.types import Prompt, Rollout, SamplingParams
from tepo_megatron.utils.quiet import quiet_upstream
from tests.e2e.scripted_worker import ScriptedEngine
from tests.scripted_groups import ScriptedGroups

KEYS = sorted({key for rule in RULES for key in rule.reads} | {"rollout/staleness", "seconds/wait"})
STEPS = 20
LATE_SECONDS = 2.0
COLLAPSE, CLIPPING = "entropy-collapse", "growing-clip-share"
SLOW = """import time
def slow(prompt, response, answer):
    time.sleep(0.05)
    return 0.0
"""
# name -> (keys that differ from the base, behaviour of the engine, alert that has to be raised)
HEALTHY: dict[str, dict[str, Any]] = {
    **{f"tepo-{seed}": {"seed": seed} for seed in range(6)},
    **{f"grpo-{seed}": {"seed": seed, "objective": {"name": "grpo"}} for seed in range(3)},
    **{f"dapo-{seed}": {"seed": seed, "objective": {"name": "dapo"}} for seed in range(2)},
    **{f"gspo-{seed}": {"seed": seed, "objective": {"name": "gspo"}} for seed in range(2)},
    "sapo-0": {"objective": {"name": "sapo"}},
    **{f"stream-{seed}": {"seed": seed, "training": {"stream": "arrival"}} for seed in range(2)},
    **{
        f"ahead-{seed}": {"seed": seed, "rollout": {"max_staleness": 1}, "objective": {"name": "tepo", "correction": "tis"}}
        for seed in range(2)
    },
    "high-lr-0": {"optimizer": {"lr": 1e-4}},
    "one-update-0": {"training": {"minibatch_prompts": 16}},
}
PLANTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "huge-learning-rate": ({"optimizer": {"lr": 3e-3}, "seed": 1}, "good", "length_explosion"),
    "stale-weights": ({"sync": {"max_logprob_diff": 100.0}, "optimizer": {"lr": 1e-4}}, "stale", "mismatch_growth"),
    "wide-clip-range": (
        {
            "objective": {"name": "grpo", "clip_low": 0.999, "clip_high": 1e6},
            "optimizer": {"lr": 2e-4},
            "training": {"epochs": 4},
        },
        *("good", "clip_zero"),
    ),
    "tiny-learning-rate": ({"optimizer": {"lr": 1e-9}, "logging": {"noise_floor_every": 1}}, "good", "mask_below_noise"),
    "long-responses": ({}, "longer", "length_explosion"),
    "all-right-or-all-wrong": ({}, "uniform", "groups_filtered"),
    "a-slow-server": ({}, "straggles", "stragglers"),
    "a-slow-grader": ({}, "grader", "idle_gpus"),
    "a-slow-delivery": ({}, "slow-sync", "slow_sync"),
}  # fmt: skip


class SamplingEngine(ScriptedEngine):
    """Samples with the model itself, all prompts of a call at once."""

    def __init__(self, cfg: Config, fault: str) -> None:
        os.environ["TEPO_TEST_ENGINE"] = fault
        super().__init__(cfg)
        self._fault = fault

    def open(self) -> ScriptedGroups:
        return LateGroups(self.generate, LATE_SECONDS if self._fault == "straggles" else 0.0)

    def finish_update(self) -> None:
        if self._fault == "slow-sync":
            time.sleep(LATE_SECONDS)
        super().finish_update()

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `Sampler.generate`."""
        each = [prompt for prompt in prompts for _ in range(sampling.samples)]
        width, chance = max(len(p.token_ids) for p in each), torch.Generator().manual_seed(seed)
        end = self._tokenizer.eos_token_id
        with self._weights:
            version = self.version
            ids = torch.tensor([[end] * (width - len(p.token_ids)) + list(p.token_ids) for p in each])
            seen = torch.tensor([[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in each])
            places, cache, given = seen.cumsum(1).sub(1).clamp(min=0), None, ids
            logprobs, ended = [], torch.zeros(len(each), dtype=torch.bool)
            least = 12 * max(0, version - 5) if self._fault == "longer" else 0
            for length in range(sampling.max_tokens):
                out = self._model(given, attention_mask=seen, position_ids=places, past_key_values=cache, use_cache=True)
                cache, scores = out.past_key_values, out.logits[:, -1].log_softmax(-1)
                token = torch.multinomial(scores.exp(), 1, generator=chance)
                if self._fault == "uniform":  # all samples of a group are the first one
                    token = token[:: sampling.samples].repeat_interleave(sampling.samples, 0)
                if length < least:
                    token[token == end] = ids[0, -1]
                logprobs.append(scores.gather(1, token))
                ids, given = torch.cat([ids, token], 1), token
                seen = torch.cat([seen, torch.ones_like(token)], 1)
                places = places[:, -1:] + 1
                ended |= token[:, 0] == end
                if bool(ended.all()):
                    break
        made = torch.cat(logprobs, 1)
        return [self._rollout(p, ids[i, width:], made[i], version, end) for i, p in enumerate(each)]

    def _rollout(self, prompt: Prompt, response: torch.Tensor, logprobs: torch.Tensor, version: int, end: int) -> Rollout:
        found = (response == end).nonzero()
        length = int(found[0]) + 1 if len(found) else len(response)
        start = len(prompt.token_ids)
        ids = torch.cat([torch.tensor(prompt.token_ids), response[:length]])
        mask = torch.arange(ids.numel()) >= start
        aligned = torch.cat([torch.zeros(start), logprobs[:length]])
        return Rollout(prompt.id, ids, mask, aligned, version, "stop" if len(found) else "length", prompt.answer)


class LateGroups(ScriptedGroups):
    """Groups the last of which comes late.

    Args:
        seconds: How late.
    """

    def __init__(self, generate: Any, seconds: float) -> None:
        super().__init__(generate)
        self._seconds = seconds

    def next(self) -> list[Rollout] | None:
        if len(self.there) == 1:
            time.sleep(self._seconds)
        return super().next()


def config(model: Path, output: Path, changes: dict[str, Any], fault: str) -> Config:
    """Return the config of a run."""
    tree: dict[str, Any] = {
        "name": "run", "output": str(output), "platform": "cpu", "model": {"path": str(model), "precision": "fp32"},
        "data": {"train": str(model / "train.jsonl"), "max_prompt_tokens": 16},
        "rollout": {"prompts_per_step": 16, "samples_per_prompt": 8, "max_response_tokens": 48, "max_generation_rounds": 1},
        "reward": {"workers": 1}, "objective": {"name": "tepo", "beta": 0.01}, "optimizer": {"lr": 3e-5, "warmup_steps": 5},
        "megatron": {"optimizer": {"adam_beta2": 0.99}}, "export_hf": False, "logging": {"noise_floor_every": 5},
        "training": {"steps": STEPS, "epochs": 1, "minibatch_prompts": 4, "max_tokens_per_microbatch": 8192},
        "sync": {"max_logprob_diff": 1e-4},
    }  # fmt: skip
    if fault == "grader":
        (output / "slow.py").write_text(SLOW)
        tree["reward"] = {"workers": 1, "terms": [{"type": "math"}, {"type": "custom", "function": f"{output}/slow.py:slow"}]}
    if fault == "longer":
        tree["rollout"]["max_response_tokens"] = 320
    for section, values in changes.items():
        tree[section] = tree[section] | values if isinstance(values, dict) and section in tree else values
    if "objective" in changes:
        tree["objective"] = changes["objective"]
    return validate(tree)


def _rank(_: int, cfg: Config, fault: str) -> None:
    platform = activate("cpu")
    from tepo_megatron.train import train  # see main

    quiet_upstream()
    torch.set_num_threads(1)
    make_engine: Any = functools.partial(SamplingEngine, fault=fault)
    with contextlib.redirect_stdout(io.StringIO()):
        train(cfg, platform, make_engine)


def run(model: Path, changes: dict[str, Any], fault: str) -> list[dict[str, Any]]:
    """Make a run, and return the values that the rules read, to 4 digits."""
    from tests.worlds import run_world  # see main

    with tempfile.TemporaryDirectory() as folder:
        cfg = config(model, Path(folder), changes, fault)
        run_dir.prepare(cfg)
        try:
            run_world(1, _rank, cfg, fault, timeout=900.0)
        except AssertionError as e:
            print(f"  {fault}: ended early: {str(e).strip().splitlines()[-1]}", flush=True)
        lines = (cfg.run_dir / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        online = {key.removeprefix(KEY) for record in records for key in record if key.startswith(KEY)}
        offline = {alert.rule.name for alert in judge((record["step"], record) for record in records)}
        assert online == offline, (online, offline)
    return [{"step": r["step"]} | {k: float(f"{r[k]:.4g}") for k in KEYS if r.get(k) is not None} for r in records]


def collapsing(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a healthy run's values with an entropy that falls by 15 % in each step from step 8 on, and the first reward."""
    start = records[0]
    fallen = [0.85 ** max(0, record["step"] - 8) * start["actor/entropy"] for record in records]
    rewards = [record["reward/mean"] for record in records[:5]]
    pairs = enumerate(zip(records, fallen, strict=True))
    return [record | {"actor/entropy": value, "reward/mean": rewards[i % 5]} for i, (record, value) in pairs]


def clipping(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a healthy run's values with a clip share that grows by 0.05 in each step from step 8 on."""
    return [r | {"loss/clip_fraction": r["loss/clip_fraction"] + 0.05 * max(0, r["step"] - 8)} for r in records]


def main() -> None:
    """Make the runs that OUT lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    activate("cpu")  # before Megatron-Core is imported
    known = [json.loads(line) for line in gzip.decompress(args.out.read_bytes()).splitlines()] if args.out.exists() else []
    healthy = {one["name"]: one["records"] for one in known}
    if COLLAPSE not in healthy and "tepo-0" in healthy:
        records = collapsing(healthy["tepo-0"])
        known.append(
            {"name": COLLAPSE, "expected": "entropy_collapse", "made": "altered (entropy, reward)", "records": records}
        )
    todo = {name: (changes, "good", None) for name, changes in HEALTHY.items()} | PLANTED
    for name, (changes, fault, expected) in todo.items():
        if any(one["name"] == name for one in known) or (args.only and name not in args.only):
            continue
        begun = time.monotonic()
        records = run(args.model, changes | {"seed": changes.get("seed", 0) + args.first_seed}, fault)
        known.append({"name": name, "expected": expected, "made": "run", "records": records})
        raised = [f"{alert.rule.name} at {alert.step}" for alert in judge((one["step"], one) for one in records)]
        print(f"{name}: {len(records)} steps, {time.monotonic() - begun:.0f} s; expected {expected}; {raised}", flush=True)
        with gzip.GzipFile(args.out, "wb", mtime=0) as file:
            file.write("".join(json.dumps(one) + "\n" for one in known).encode())


if __name__ == "__main__":
    main()
