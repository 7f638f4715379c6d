"""The checks that stand between a wrong engine and the update, and whether they work in a run: told at start and in reports."""

from __future__ import annotations

from dataclasses import dataclass

from tepo_megatron.config import Config


@dataclass(frozen=True)
class SafetyCheck:
    """One check of a run.

    Args:
        name: of the check.
        works: False where it is off, or cannot work in this run.
        state: what it compares, or why it does not.
    """

    name: str
    works: bool
    state: str

    def __str__(self) -> str:
        return f"{self.name}: {'' if self.works else 'OFF, '}{self.state}"


def safety_checks(cfg: Config) -> list[SafetyCheck]:
    """Return every check of the engine's weights, with its state in a run of this config."""
    return [
        SafetyCheck("log-probs of engine and actor (sync.max_logprob_diff)", *_log_probs(cfg)),
        SafetyCheck("versions that servers echo", *_versions(cfg)),
        SafetyCheck("checksums of what servers hold (sync.verify_every)", *_checksums(cfg)),
    ]


def checks_that_are_off(cfg: Config) -> list[str]:
    """Return a line for the user for each check that does not work in a run of this config."""
    return [f"safety check {check}" for check in safety_checks(cfg) if not check.works]


def _log_probs(cfg: Config) -> tuple[bool, str]:
    rollout, sync = cfg.rollout, cfg.sync
    if rollout.only:
        return False, "rollout.only=true trains nothing: the engine's log-probs are recorded as they are"
    if rollout.replay is not None:
        return False, (
            "rollout.replay has no engine, and the weights that sampled are another run's; only rollouts recorded as of the "
            "newest version are compared with this run's actor"
        )
    share = "every token" if sync.compared_tokens is None else f"about {sync.compared_tokens} tokens of each server and version"
    if sync.compared_tokens is not None and not rollout.max_staleness and cfg.training.old_logprobs == "actor":
        share = "every token"  # no pass of its own, which alone that bounds
    return True, f"{share} under the weights that sampled it; the run ends above {sync.max_logprob_diff:g} nats"


def _versions(cfg: Config) -> tuple[bool, str]:
    if cfg.rollout.only or cfg.rollout.replay is not None:
        return False, "no weights are sent" if cfg.rollout.only else "rollout.replay has no engine"
    return True, "an answer of another version than was sent is sampled again; it only shows what the server was told"


def _checksums(cfg: Config) -> tuple[bool, str]:
    if cfg.rollout.only or cfg.rollout.replay is not None:
        return False, "no weights are sent" if cfg.rollout.only else "rollout.replay has no engine"
    if not cfg.sync.verify_every:
        return False, "sync.verify_every=0 asks for none"
    state = f"at every delivery whose version is a multiple of {cfg.sync.verify_every}"
    if cfg.platform == "cpu" and cfg.rollout.engine == "vllm":
        state += "; vLLM on a CPU tells none of linear layers"
    return True, state
