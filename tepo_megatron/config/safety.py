"""List the checks that protect an update from an engine with wrong weights, and whether each works in a run.

The start of a run and the reports show the result.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tepo_megatron.config import Config, RolloutConfig, SyncConfig

TOO_WIDE = 0.5  # nats; stale or mixed weights rarely reach this mean
COLD = 0.1  # below this temperature nearly every token is the most likely one


@dataclass(frozen=True)
class SafetyCheck:
    """One safety check of a run."""

    name: str
    works: bool  # False if the check is off or cannot work in this run
    state: str  # what the check compares, or why it does not work

    def __str__(self) -> str:
        return f"{self.name}: {'' if self.works else 'OFF, '}{self.state}"


def safety_checks(cfg: Config) -> list[SafetyCheck]:
    """Return every check of the engine's weights, with its state in a run of this config."""
    rollout, sync, steps = cfg.rollout, cfg.sync, cfg.training.steps
    log_probs = _log_probs(rollout, sync, cfg.training.old_logprobs)
    checks = {"log-probs of engine and actor (sync.max_logprob_diff)": log_probs}
    if _delivers(rollout) and (cfg.data.eval is not None or cfg.evaluation.benchmarks):
        checks["log-probs of evaluations"] = _evaluations(steps - 1 - rollout.max_staleness)
    if rollout.replay_experts and not rollout.only:
        checks["the engine's choice of experts (rollout.replay_experts)"] = _experts(rollout, sync)
    checks["versions that servers echo"] = _versions(rollout)
    checks["checksums of what servers hold (sync.verify_every)"] = _checksums(rollout, sync, steps, cfg.platform)
    return [SafetyCheck(name, works, state) for name, (works, state) in checks.items()]


def checks_that_are_off(checks: Iterable[SafetyCheck]) -> list[str]:
    """Return one line of text for each of the checks that does not work."""
    return [f"safety check {check}" for check in checks if not check.works]


def _delivers(rollout: RolloutConfig) -> bool:
    return not rollout.only and rollout.replay is None


def _log_probs(rollout: RolloutConfig, sync: SyncConfig, old_logprobs: str) -> tuple[bool, str]:
    if rollout.only:
        return False, "rollout.only=true trains nothing: the engine's log-probs are recorded as they are"
    if rollout.replay is not None:
        return False, (
            "rollout.replay has no engine, and the weights that sampled are another run's, which this run's may rightly leave; "
            "gate/logprob_diff_mean has the difference of rollouts recorded as of the newest version"
        )
    if sync.max_logprob_diff >= TOO_WIDE:
        return False, (
            f"sync.max_logprob_diff={sync.max_logprob_diff:g} is more than stale weights move a log-prob; set it below "
            f"{TOO_WIDE:g}, near the usual gate/logprob_diff_mean"
        )
    share = "every token" if sync.compared_tokens is None else f"about {sync.compared_tokens} tokens of each server and version"
    if sync.compared_tokens is not None and not rollout.max_staleness and old_logprobs == "actor":
        share = "every token"  # the limit applies only to a comparison pass, which does not run here
    state = f"{share} under the weights that sampled it; the run ends above {sync.max_logprob_diff:g} nats"
    if rollout.filter_uniform_groups:
        state += "; groups that rollout.filter_uniform_groups drops are neither learned from nor compared"
    if rollout.temperature < COLD:
        state += f"; at rollout.temperature={rollout.temperature:g} most tokens are nearly certain, and stale weights show less"
    return True, state


def _evaluations(newest: int) -> tuple[bool, str]:
    return False, (
        "they are not compared. Wrong weights of a server show when training samples that version, perhaps never for versions "
        f"after {max(0, newest)}; sync.verify_every=1 compares checksums of every version"
    )


def _experts(rollout: RolloutConfig, sync: SyncConfig) -> tuple[bool, str]:
    state = (
        "the actor takes it over, so that a wrong choice is not seen; a stale router is, by the weights that it gives the "
        "chosen experts"
    )
    if rollout.on_weight_update == "continue":
        state += "; tokens of older weights are compared with the choice of the newest that went on with their response"
    if _delivers(rollout) and sync.verify_every:
        state += "; the checksums (sync.verify_every) are of routers too"
    return False, state


def _versions(rollout: RolloutConfig) -> tuple[bool, str]:
    if not _delivers(rollout):
        return False, "no weights are sent" if rollout.only else "rollout.replay has no engine"
    return True, "an answer of another version than was sent is sampled again; it only shows which version the server was given"


def _checksums(rollout: RolloutConfig, sync: SyncConfig, steps: int, platform: str) -> tuple[bool, str]:
    every = sync.verify_every
    if not _delivers(rollout):
        return False, "no weights are sent" if rollout.only else "rollout.replay has no engine"
    if not every:
        return False, "sync.verify_every=0 asks for none"
    if every > steps:
        return False, f"sync.verify_every={every} is more than training.steps={steps}: no update is checked"
    state = f"at every delivery whose version is a multiple of {every}, or that passes one over"
    if every > 1:
        state += "; a tensor that took an update since the last check, and not the newest, passes"
    if every > 1 and sync.delta != "none":
        state += "; with sync.delta, of what is sent at that delivery"
    if rollout.server.precision is not None:
        state += "; rollout.server.precision is set, so only a server that took none of the changes is noticed"
    if platform == "cpu" and rollout.engine == "vllm":
        state += "; vLLM on a CPU tells none of linear layers"
    return True, state
