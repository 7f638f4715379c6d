"""Compare the log-probs of engine and actor: they show whether the engine serves the weights that were sent."""

from tepo_megatron.config import SyncConfig
from tepo_megatron.errors import SyncError


def check_mismatch(
    mean_logprob_diff: float, version: int, cfg: SyncConfig, server: str = "", tokens: int | None = None
) -> None:
    """Raise SyncError if the engine's log-probs show that it serves other weights than the version it echoes.

    Args:
        mean_logprob_diff: Mean |rollout - actor| in nats, under the weights of `version`.
        version: The version of the weights.
        cfg: Has the limit.
        server: The server that sampled the tokens; "": unknown.
        tokens: Number of tokens, all of one server, with the margin of `SyncConfig.allowed_difference`. None: all of a step.
    """
    limit = cfg.max_logprob_diff if tokens is None else cfg.allowed_difference(tokens)
    if not mean_logprob_diff <= limit:  # nan too
        where = "" if tokens is None else f" over {tokens} tokens{f' of {server}' if server else ''}"
        raise SyncError(
            f"mean |rollout - actor| log-prob difference is {mean_logprob_diff:.2e} nats at version {version}{where}, above "
            f"sync.max_logprob_diff={cfg.max_logprob_diff}: {server or 'the engine'} does not serve the weights that were sent "
            f"(or, in low precision, the gate is too tight: raise sync.max_logprob_diff)"
        )
