"""Every pair of switches that affect the gate is refused, or stale log-probs end the step, or `safety.py` says why not.

What `safety.py` says is held against what the product's own `learn` does with rollouts of other weights than they say.
"""

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tepo_megatron.base.errors import ConfigError, SyncError
from tepo_megatron.base.types import Rollout, TrainBatch
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.config.safety import safety_checks
from tepo_megatron.service.method import resolve
from tests.gate.world import parts_of
from tests.parallel import cases
from tests.parallel.test_gate import sampled
from tests.worlds import run_world

Tree = dict[str, dict[str, Any]]
LIMIT = 1e-3
SWITCHES: dict[str, dict[str, Tree]] = {
    "staleness": {str(k): {"rollout": {"max_staleness": k}} for k in (0, 1, 3)},
    "on_weight_update": {name: {"rollout": {"on_weight_update": name}} for name in ("finish", "continue", "restart")},
    "colocate": {name: {"rollout": {"colocate": name == "yes"}} for name in ("no", "yes")},
    "servers": {
        "own": {}, "one": {"rollout": {"servers": 1}},
        "urls": {"rollout": {"server": {"urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}}},
        "rendezvous": {"rollout": {"server": {"rendezvous": "folder"}}, "sync": {"transport": {"folder": "shared"}}},
    },
    "transport": {
        "shm": {}, "group": {"sync": {"transport": "group"}}, "ipc": {"sync": {"transport": "ipc"}},
        "delta": {"sync": {"delta": "layers"}},
    },
    "source": {
        "engine": {}, "replay": {"rollout": {"replay": "rollouts"}}, "only": {"rollout": {"only": True}},
        "function": {"rollout": {"function": "agent.py:agent"}},
    },
    "temperature": {str(t): {"rollout": {"temperature": t}} for t in (1.0, 0.5, 0.05)},
    "filter": {name: {"rollout": {"filter_uniform_groups": name == "yes"}} for name in ("no", "yes")},
    "experts": {"no": {}, "replayed": {"rollout": {"replay_experts": True}}},
    "updates": {
        "several": {"training": {"epochs": 1, "minibatch_prompts": 2}},
        "one": {"training": {"epochs": 1, "minibatch_prompts": 6}},
    },
    "stream": {name: {"training": {"stream": name}} for name in ("off", "prompt", "arrival")},
    "old_logprobs": {name: {"training": {"old_logprobs": name}} for name in ("actor", "rollout")},
    "correction": {"none": {}} | {name: {"objective": {"correction": name}} for name in ("tis", "geometric_mask", "icepop")},
    "reference": {
        "none": {}, "loss": {"objective": {"ref_kl": {"beta": 0.1}}},
        "reward": {"objective": {"ref_kl": {"beta": 0.1, "where": "reward"}, "advantage": "mean"}},
    },
    "weighting": {"none": {}, "steer": {"objective": {"weighting": "steer"}}},
    "compared": {"all": {}, "some": {"sync": {"compared_tokens": 30}}},
    "limit": {"tight": {"sync": {"max_logprob_diff": LIMIT}}, "wide": {"sync": {"max_logprob_diff": 2.0}}},
    "verify": {str(every): {"sync": {"verify_every": every}} for every in (0, 1, 3, 1000)},
    "evaluation": {"no": {}, "yes": {"data": {"eval": "eval.jsonl"}}},
}  # fmt: skip
# changes that a pair may need in order to be allowed, tried in turn
FOR_OTHERS: tuple[dict[str, str], ...] = (
    {}, {"staleness": "1"}, {"servers": "rendezvous"}, {"updates": "one"}, {"filter": "yes"},
)  # fmt: skip


def config(model: str, choice: Mapping[str, str]) -> Config:
    """Return the config of these values, the first of each switch that is not named. Raises ConfigError."""
    tree: Tree = {
        "model": {"path": model, "precision": "fp32"},
        "data": {"train": "unused", "max_prompt_tokens": 8},
        "rollout": {"prompts_per_step": 6, "samples_per_prompt": 2, "max_response_tokens": 30, "servers": 2},
        "training": {"max_tokens_per_microbatch": 128, "steps": 8},
        "objective": {"name": "grpo"},
    }
    for switch, values in SWITCHES.items():
        for section, keys in values[choice.get(switch, next(iter(values)))].items():
            tree.setdefault(section, {}).update(keys)
    cfg = validate({"name": "switches", "platform": "cpu", **tree})
    resolve(cfg)
    return cfg


def pairs(model: str) -> Iterator[tuple[dict[str, str], Config | None]]:
    """Yield each pair of values of two switches, with the config that it was allowed in; None: it is refused in all."""
    for one, other in itertools.combinations(SWITCHES, 2):
        for values in itertools.product(SWITCHES[one], SWITCHES[other]):
            pair, found = dict(zip((one, other), values, strict=True)), None
            for more in FOR_OTHERS:
                try:
                    found = config(model, more | pair)
                except ConfigError:
                    continue
                break
            yield pair, found


def as_learn_reads(cfg: Config) -> Config:
    """Return the config with every key that `learn` does not read set to its default."""
    from tepo_megatron.config import DataConfig, RolloutConfig

    read = ("max_staleness", "temperature", "replay", "prompts_per_step", "samples_per_prompt", "max_response_tokens")
    given = {name: getattr(cfg.rollout, name) for name in read}
    rollout = RolloutConfig(**given, filter_uniform_groups=cfg.training.stream != "prompt")
    sync = replace(validate({"name": "n", "model": {"path": "m"}, "data": {"train": "t"}}).sync,
                   max_logprob_diff=cfg.sync.max_logprob_diff, compared_tokens=cfg.sync.compared_tokens)  # fmt: skip
    return replace(cfg, rollout=rollout, sync=sync, data=DataConfig(train="unused", max_prompt_tokens=8))


def stopped(rank: int, configs: list[Config], batch: TrainBatch) -> list[list[bool]]:
    """Return for each config whether `learn` ends on stale rollouts that say to be of the newest version; where rollouts may be
    a step old, on such that say to be of the version before; last, whether it ends on rollouts of the weights that they say.
    """
    from tepo_megatron.losses import build_objective
    from tepo_megatron.monitor.tracer import Clock
    from tepo_megatron.trainer.driver import StepLog
    from tepo_megatron.trainer.gate import WeightsGate
    from tepo_megatron.trainer.learning import learn

    actor = cases.open_actor(configs[0])
    actor.keep_reference()

    def weights() -> list[torch.Tensor]:
        actor.finish_step()
        return [b.parameter.detach().clone() for b in actor.bindings]

    def put(them: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for binding, tensor in zip(actor.bindings, them, strict=True):
                binding.parameter.copy_(tensor)

    of = [weights()]
    actor.start_step(1)
    actor.update(batch, build_objective(configs[0].objective))
    of.append(weights())

    @functools.cache
    def logprobs(version: int, temperature: float) -> torch.Tensor:
        put(of[version])
        return actor.logprobs(batch).clone()

    def graded(said: int, really: int, cfg: Config) -> list[Rollout]:
        actor.cfg = cfg
        rollouts = sampled(logprobs(really, cfg.rollout.temperature), batch, said, 2)
        return [replace(r, reward=float(i % 2), score=float(i % 2)) for i, r in enumerate(rollouts)]

    found = []
    for cfg in configs:
        row = []
        for said, really in [(1, 0), *([(0, 1)] if cfg.rollout.max_staleness else []), (1, 1)]:
            rollouts, gate = graded(said, really, cfg), WeightsGate(cfg.rollout, cfg.training, cfg.sync, actor, actor.groups)
            for version in (0, 1):
                put(of[version])
                gate.delivered(version)
            actor.start_step(2)
            try:
                objective, parts = build_objective(cfg.objective), parts_of(rollouts, 2, cfg)
                learn(parts, 2, actor, objective, cfg.training, StepLog(), Clock(), gate)
            except SyncError as e:
                assert "sync.max_logprob_diff" in str(e)
                row.append(True)
            else:
                row.append(False)
        found.append(row)
    return found


@pytest.mark.full
def test_no_pair_of_switches_turns_the_gate_off_without_a_word(case: cases.Case) -> None:
    batch = replace(case.batches[0], old_logprobs_N=None, old_entropies_N=None, update=0)
    allowed = [(pair, cfg) for pair, cfg in pairs(str(case.model)) if cfg is not None]
    trained = [(pair, cfg) for pair, cfg in allowed if not cfg.rollout.only]
    asked = {json.dumps(repr(as_learn_reads(cfg))): as_learn_reads(cfg) for _, cfg in trained}
    (rows,) = run_world(1, stopped, list(asked.values()), batch)
    outcome = dict(zip(asked, rows, strict=True))
    silent, wrong = [], []
    for pair, cfg in trained:
        *stale, healthy = outcome[json.dumps(repr(as_learn_reads(cfg)))]
        works = safety_checks(cfg)[0].works
        if not all(stale) and works:
            silent.append(pair)
        if healthy or (all(stale) and not works):
            wrong.append(pair)
    print(f"{len(allowed)} pairs allowed, {len(asked)} kinds of step, {sum(len(row) for row in rows)} steps")
    assert not silent, "stale rollouts pass, and safety.py says that the gate works"
    assert not wrong, "healthy rollouts end the step, or safety.py says that the gate is off and it is not"
