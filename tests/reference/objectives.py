"""Every objective in fp64, one token at a time with Python's own conditions; shares no code with the product.

A method is a `Method`, a minibatch a list of `Response`s and the current log-probs and entropies of their tokens, one response
after another. `evaluate` returns the loss with its graph, and how far every compared number lay from its threshold: within fp32
rounding of one, fp32 and fp64 may rightly decide differently, so cases too near to one are left out by who draws them.

loss = -sum a [ c lambda S(ratio, A) - beta M KL(l - l_old) - rho |l - l_old| - ref_beta KL(l - l_ref) + alpha H ]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.parts import Conditions, Method, Response, Token, clamped, number
from tests.reference.weightings import batch_weights


@dataclass
class Outcome:
    """The result of an evaluation.

    Attributes:
        magnitude: Sum of the absolute values that the loss adds up.
        margin: Least distance of a compared number to its threshold (of ratios: in nats).
        shares: Share of the tokens that each condition affects.
    """

    loss: Tensor
    magnitude: float
    margin: float
    shares: dict[str, float]


def evaluate(
    method: Method, responses: list[Response], logprob_N: Tensor, entropy_N: Tensor, teacher_kl_N: Tensor | None = None
) -> Outcome:
    """Return the loss of a minibatch, differentiable with respect to logprob_N, entropy_N and teacher_kl_N."""
    conditions = Conditions(limit=method.log_ratio_limit)
    tokens = collect(method, responses, logprob_N, entropy_N, conditions)
    for token in tokens:
        token.surrogate, token.clipped = surrogate(method, token, conditions)
    weights = batch_weights(method, tokens, conditions)
    loss, magnitude, masked = number(0.0), 0.0, 0
    exact = [number(0.0)] * len(tokens) if teacher_kl_N is None else list(teacher_kl_N.unbind())
    for token, (weight, penalty), exact_kl in zip(tokens, weights, exact, strict=True):
        parts = [token.correction * weight * token.surrogate]
        if in_kl_mask(method, token, conditions):
            parts.append(-method.beta * divergence(method.kl, token.x, token.x, conditions))
            masked += 1
        if penalty:
            parts.append(-penalty * abs(token.x))
        if method.ref_beta and method.ref_kl == "full":
            parts.append(-method.ref_beta * exact_kl)
        elif method.ref_beta and method.ref_kl_in == "loss":
            parts.append(-method.ref_beta * divergence(method.ref_kl, token.logprob - token.ref, token.x, conditions))
        if method.entropy_coefficient:
            parts.append(method.entropy_coefficient * token.entropy)
        for part in parts:
            loss = loss - token.share * part
            magnitude += abs(token.share * part.item())
    count = max(1, len(tokens))
    shares = {
        "clipped": sum(t.clipped for t in tokens) / count,
        "masked": masked / count,
        "weighted": sum(w < 0.99 or p > 0 for w, p in weights) / count,
        "corrected": sum(abs(t.correction - 1) > 0.01 for t in tokens) / count,
    }
    return Outcome(loss, magnitude, conditions.margin, shares)


def collect(
    method: Method, responses: list[Response], logprob_N: Tensor, entropy_N: Tensor, conditions: Conditions
) -> list[Token]:
    """Return the tokens of all responses, with the quantities of their own response."""
    logprobs, entropies = list(logprob_N.unbind()), list(entropy_N.unbind())
    total = len(logprobs)
    tokens: list[Token] = []
    of_prompt: dict[int, int] = {}
    for response in responses:
        of_prompt[response.prompt] = of_prompt.get(response.prompt, 0) + len(response.old)
    for response in responses:
        n = len(response.old)
        own = [logprobs.pop(0) for _ in range(n)]
        x = [own[t] - response.old[t] for t in range(n)]
        own_entropies, a = [entropies.pop(0) for _ in range(n)], []
        for entropy in own_entropies:
            bonus = min(method.advantage_alpha * entropy.item(), abs(response.advantage) / method.advantage_kappa)
            a.append(response.advantage + bonus if method.advantage_alpha else response.advantage)
        held = [held_back(method, a[t], x[t], conditions) for t in range(n)]
        log_ratio = log_ratios(method.ratio, [held[t][0] for t in range(n)])
        for t in range(n):
            tokens.append(
                Token(
                    a=a[t],
                    logprob=own[t],
                    entropy=own_entropies[t],
                    clipped=held[t][1],
                    x=x[t],
                    y=clamped(log_ratio[t], conditions),
                    old_entropy=response.old_entropy[t],
                    ref=response.ref[t],
                    key=response.keys[t],
                    correction=correction(method, response, t, conditions),
                    share={
                        "token_mean": 1 / total,
                        "sequence_mean_token_mean": 1 / (len(responses) * n),
                        "sequence_mean_token_sum": 1 / len(responses),
                        "sequence_mean_token_sum_norm": 1 / (len(responses) * method.max_response_tokens),
                        "prompt_mean_token_mean": 1 / (len(of_prompt) * of_prompt[response.prompt]),
                    }[method.aggregate],
                )
            )
    assert not logprobs and not entropies
    return tokens


def held_back(method: Method, a: float, x: Tensor, conditions: Conditions) -> tuple[Tensor, bool]:
    """Return a token's log-ratio as GMPO clips it before the mean (other methods do not), and whether it was clipped."""
    if method.surrogate != "clip_tokens":
        return x, False
    low = math.log(1 - method.clip_low) if method.clip_low < 1 else -math.inf
    high = math.log(1 + method.clip_high)
    if a > 0 and conditions.above(x.item(), high):
        return number(high), True
    if a < 0 and conditions.above(low, x.item()):
        return number(low), True
    return x, False


def log_ratios(kind: str, x: list[Tensor]) -> list[Tensor]:
    """Return the log of the ratio of each token of a response."""
    if kind == "token":
        return x
    if kind == "none":
        return [number(0.0)] * len(x)
    running, means = number(0.0), []
    for t in range(len(x)):
        running = running + x[t]
        means.append(running / (t + 1))
    return {"prefix": means, "sequence": means[-1:] * len(x)}[kind]


def correction(method: Method, response: Response, t: int, conditions: Conditions) -> float:
    """Return c, the factor that the mismatch between l_old and l_rollout puts on the token's surrogate."""
    x = [o - r for o, r in zip(response.old, response.rollout, strict=True)]
    if method.correction == "none":
        return 1.0
    of_sequence = {"geometric_mask": sum(x) / len(x), "sequence_mis": sum(x)}
    log_c = clamped(number(of_sequence.get(method.correction, x[t])), conditions).item()
    if method.correction == "tis":
        return min(math.exp(log_c), method.correction_high)
    too_low = method.correction_low > 0 and conditions.above(math.log(method.correction_low), log_c)
    too_high = conditions.above(log_c, math.log(method.correction_high))
    if too_low or too_high:
        return 0.0
    return {"geometric_mask": 1.0, "icepop": math.exp(log_c), "sequence_mis": math.exp(log_c)}[method.correction]


def surrogate(method: Method, token: Token, conditions: Conditions) -> tuple[Tensor, bool]:
    """Return S, and whether one of the bounds (the dual clip is one) replaced the ratio."""
    r, a = torch.exp(token.y), token.a
    if method.surrogate == "reinforce":
        return a * token.logprob, False
    if method.surrogate in ("unclipped", "clip_tokens"):
        return r * a, token.clipped
    if method.surrogate == "soft_gate":
        tau = method.tau_positive if a > 0 else method.tau_negative
        return a * 4 / (tau * (1 + torch.exp(-tau * (r - 1)))), False
    if method.surrogate in ("trust_region_tv", "trust_region_kl"):
        leaves = leaves_trust_region(method, token, conditions)
        return (number(0.0) if leaves else r * a), leaves
    over = conditions.above(token.y.item(), math.log(1 + method.clip_high))
    under = method.clip_low < 1 and conditions.above(math.log(1 - method.clip_low), token.y.item())
    bounded = number(1 + method.clip_high) if over else number(1 - method.clip_low) if under else r
    if method.surrogate == "stop_gradient":
        return bounded.item() * a * token.logprob, over or under
    if method.surrogate == "clip_eq4":
        return (bounded if bounded.item() < r.item() else r) * a, over
    assert method.surrogate == "clip"
    clipped = bounded.item() * a < r.item() * a
    value = bounded * a if clipped else r * a
    if method.dual_clip is not None and a < 0 and conditions.above(token.y.item(), math.log(method.dual_clip)):
        return number(method.dual_clip * a), True
    return value, clipped


def leaves_trust_region(method: Method, token: Token, conditions: Conditions) -> bool:
    """Return whether DPPO drops the token: it is too far from the old policy, and its update would move it further."""
    pi, mu = math.exp(token.logprob.item()), math.exp(token.logprob.item() - token.x.item())
    distance = abs(pi - mu)
    if method.surrogate == "trust_region_kl":
        other_pi, other_mu = max(1 - pi, 1e-20), max(1 - mu, 1e-20)
        distance = mu * -token.x.item() + other_mu * math.log(other_mu / other_pi)
    away = (token.a > 0 and conditions.above(token.x.item(), 0.0)) or (token.a < 0 and conditions.above(0.0, token.x.item()))
    # as logarithms: what counts for fp32 is the relative distance to the limit
    return away and conditions.above(math.log(max(distance, 1e-300)), math.log(method.max_divergence))


def in_kl_mask(method: Method, token: Token, conditions: Conditions) -> bool:
    """Return M."""
    if method.kl_mask in ("none", "all"):
        return method.kl_mask == "all"
    change = token.entropy.item() - token.old_entropy
    positive, negative = conditions.above(token.a, 0.0), conditions.above(0.0, token.a)
    falls = conditions.above(-method.kl_entropy_tolerance, change)
    rises = conditions.above(change, method.kl_entropy_tolerance)
    return {
        "falling_entropy": positive and falls,
        "rising_entropy": negative and rises,
        "both": (positive and falls) or (negative and rises),
    }[method.kl_mask]


def divergence(kind: str, x: Tensor, log_ratio: Tensor, conditions: Conditions) -> Tensor:
    """Return the estimator of KL(pi || other) from x = l - l_other."""
    y = clamped(x, conditions)
    if kind == "k1":
        return x
    if kind == "k2":
        return x * x / 2
    if kind == "k3":  # with q = other / pi: q - 1 - ln q
        return torch.exp(-y) - 1 + x
    if kind == "k3_importance_weighted":  # r (q - 1 - ln q) with r = pi / old
        return torch.exp(clamped(log_ratio, conditions)) * (torch.exp(-y) - 1 + y)
    assert kind == "abs"
    return abs(x)
