"""Weights of tokens that follow from the whole minibatch; plain numbers, token by token."""

from __future__ import annotations

import math

from tests.reference.parts import Conditions, Method, Token, clamped


def batch_weights(method: Method, tokens: list[Token], conditions: Conditions) -> list[tuple[float, float]]:
    """Return (lambda, rho) of each token, from all tokens of the minibatch."""
    out = [(1.0, 0.0)] * len(tokens)
    if method.weighting == "none" or not tokens:
        return out
    if method.weighting == "steer":
        return steer(method, tokens, conditions)
    mean_a = sum(t.a for t in tokens) / len(tokens)
    mean_l = sum(t.logprob.item() for t in tokens) / len(tokens)
    cov = [(t.a - mean_a) * (t.logprob.item() - mean_l) for t in tokens]
    count = max(1, math.floor(method.cov_share * len(tokens)))
    if method.weighting == "clip_cov":
        candidates = [
            i
            for i, t in enumerate(tokens)
            if conditions.above(cov[i], method.cov_low) and conditions.above(method.cov_high, cov[i]) and not t.clipped
        ]
        for i in sorted(candidates, key=lambda i: tokens[i].key)[:count]:
            out[i] = (0.0, 0.0)
        return out
    assert method.weighting == "kl_cov"
    ranked = sorted(range(len(tokens)), key=lambda i: (-cov[i], tokens[i].key))
    for i in ranked[:count]:
        out[i] = (1.0, method.cov_beta)
    if count < len(tokens):
        conditions.above(cov[ranked[count - 1]], cov[ranked[count]])
    return out


def steer(method: Method, tokens: list[Token], conditions: Conditions) -> list[tuple[float, float]]:
    """Return STEER's lambda, from the expected change of entropy by each token."""
    omega = []
    for t in tokens:
        ratio, pi = math.exp(clamped(t.x, conditions).item()), math.exp(t.logprob.item())
        omega.append(abs(t.a * ratio * (1 - pi) * (math.log(pi) + t.entropy.item())))
    k = -math.log(method.steer_lambda_min) / max(*omega, 0.02)
    return [(min(max(math.exp(-k * o), method.steer_lambda_min), 1.0), 0.0) for o in omega]
