"""Compare the log-probs of engine and actor: they show whether the engine serves the weights that were sent."""

import math

from tepo_megatron.config import SyncConfig
from tepo_megatron.errors import SyncError


def allowed_difference(tokens: int, cfg: SyncConfig) -> float:
    """Return the mean |log-prob difference|, in nats, that a server's sample of tokens may have.

    It is `cfg.max_logprob_diff` with a margin for chance that shrinks with the number of tokens n: 4 / sqrt(n) for the spread
    of a mean, and 20 / n because in bf16 a single token may differ by a nat. At 1,000 tokens it is 1.15 times the limit.
    """
    return cfg.max_logprob_diff * (1 + 4 / math.sqrt(tokens) + 20 / tokens)


def check_mismatch(
    mean_logprob_diff: float, version: int, cfg: SyncConfig, server: str = "", tokens: int | None = None
) -> None:
    """Raise SyncError if the engine's log-probs show that it serves other weights than the version it echoes.

    Args:
        mean_logprob_diff: Mean |rollout - actor| in nats, under the weights of `version`.
        tokens: Number of tokens, all of one server (see `allowed_difference`); None: all tokens of a step, without that margin.
    """
    limit = cfg.max_logprob_diff if tokens is None else allowed_difference(tokens, cfg)
    if not mean_logprob_diff <= limit:  # nan too
        where = "" if tokens is None else f" over {tokens} tokens{f' of {server}' if server else ''}"
        raise SyncError(
            f"mean |rollout - actor| log-prob difference is {mean_logprob_diff:.2e} nats at version {version}{where}, above "
            f"sync.max_logprob_diff={cfg.max_logprob_diff}: {server or 'the engine'} does not serve the weights that were sent "
            f"(or, in low precision, the gate is too tight: raise sync.max_logprob_diff)"
        )
