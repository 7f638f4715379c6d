"""The objectives against formulas written out per sequence in fp64: values and gradients, clipping and masks active."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.losses import OBJECTIVES, build_objective
from tepo_megatron.losses.objective import LossInputs, Objective
from tepo_megatron.losses.ratio import sequence_ratio
from tepo_megatron.losses.surrogate import SURROGATES, Bounds
from tepo_megatron.ops.segments import Segments
from tepo_megatron.types import Denominators, TokenStats


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def naive(objective: Objective, sequences: list[dict], logprob: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """-J, sequence by sequence and token by token, with Python's own min, max and conditions."""
    total_tokens = sum(len(s["old"]) for s in sequences)
    parts = []
    at = 0
    for s in sequences:
        n, a = len(s["old"]), s["advantage"]
        x = [logprob[at + t] - s["old"][t] for t in range(n)]
        mean_x = sum(x) / n
        for t in range(n):
            a = s["advantage"]
            if objective.advantage_alpha:
                h = entropy[at + t].item()
                a = a + min(objective.advantage_alpha * h, abs(a) / objective.advantage_kappa)
            log_r = {"sequence": mean_x, "token": x[t], "none": number(0.0)}[objective.ratio]
            r = torch.exp(log_r) if abs(log_r.item()) <= 20 else number(math.exp(math.copysign(20, log_r.item())))
            low, high = 1 - objective.clip_low, 1 + objective.clip_high
            bounded = r if low <= r.item() <= high else number(min(max(r.item(), low), high))
            if objective.surrogate == "clip":
                value = r * a if r.item() * a <= bounded.item() * a else bounded * a
                if objective.dual_clip is not None and a < 0 and value.item() < objective.dual_clip * a:
                    value = number(objective.dual_clip * a)
            elif objective.surrogate == "stop_gradient":
                value = bounded.item() * a * logprob[at + t]
            elif objective.surrogate == "reinforce":
                value = a * logprob[at + t]
            elif objective.surrogate == "clip_eq4":
                value = (r if r.item() <= bounded.item() else bounded) * a
            else:
                value = r * a
            rising = entropy[at + t].item() - s["old_entropy"][t]
            inside = {
                "none": False,
                "all": True,
                "falling_entropy": a > 0 and rising < 0,
                "rising_entropy": a < 0 and rising > 0,
                "both": (a > 0 and rising < 0) or (a < 0 and rising > 0),
            }[objective.kl_mask]
            if inside:
                y = x[t] if abs(x[t].item()) <= 20 else number(math.copysign(20, x[t].item()))
                kl = {
                    "k1": x[t],
                    "k2": x[t] ** 2 / 2,
                    "k3": torch.exp(-y) - 1 + x[t],
                    "k3_reverse": torch.exp(y) * y - torch.exp(y) + 1,
                    "abs": abs(x[t]),
                }[objective.kl]
                value = value - objective.beta * kl
            value = value + objective.entropy_coefficient * entropy[at + t]
            weight = {
                "token_mean": 1 / total_tokens,
                "sequence_mean_token_mean": 1 / (n * len(sequences)),
                "sequence_mean_token_sum": 1 / len(sequences),
            }[objective.aggregate]
            parts.append(weight * value)
        at += n
    return -sum(parts)


def random_case(seed: int, spread: float = 0.5) -> tuple[list[dict], torch.Tensor]:
    """Ragged sequences (length 1 included), advantages of both signs and zero, dH of both signs, ratios beyond the clip."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda n: torch.randn(n, generator=g, dtype=torch.float64)  # noqa: E731
    sequences, logprob = [], []
    for i in range(9):
        n = [1, 5, 17, 2, 30, 1, 8, 3, 12][i]
        drift = [0.5, -0.5, 0.4, 0.9, -0.45, 0.0, 0.3, -0.8, 0.4][i]
        old = -rand(n).abs() - 0.1
        logprob.append(old + drift + spread * rand(n))
        sequences.append({
            "old": old,
            "advantage": [1.2, -0.7, 0.5, -1.0, -0.4, 0.8, 0.0, 0.9, -0.2][i],
            "entropy": rand(n).abs(),
            "old_entropy": rand(n).abs(),
        })  # fmt: skip
    return sequences, torch.cat(logprob)


def inputs_of(sequences: list[dict], dtype: torch.dtype) -> LossInputs:
    lengths = torch.tensor([len(s["old"]) for s in sequences])
    segments = Segments(torch.repeat_interleave(lengths), lengths.to(dtype))
    return LossInputs(
        advantage_R=segments.spread(torch.tensor([s["advantage"] for s in sequences], dtype=dtype)),
        old_logprob_R=torch.cat([s["old"] for s in sequences]).to(dtype),
        old_entropy_R=torch.cat([s["old_entropy"] for s in sequences]).to(dtype),
        segments=segments,
        whole=Denominators(lengths.sum().to(dtype), torch.tensor(float(len(sequences)), dtype=dtype)),
    )


def entropies(sequences: list[dict]) -> torch.Tensor:
    return torch.cat([s["entropy"] for s in sequences])


def ours(objective: Objective, sequences: list[dict], logprob: torch.Tensor, dtype: torch.dtype):
    """The output, and its gradients with respect to the log-probs and to the entropies."""
    x = logprob.detach().to(dtype, copy=True).requires_grad_()
    h = entropies(sequences).to(dtype, copy=True).requires_grad_()
    out = objective(TokenStats(x, h), inputs_of(sequences, dtype))
    out.loss.backward()
    return out, x.grad, torch.zeros_like(h) if h.grad is None else h.grad


def surrogates() -> st.SearchStrategy[dict]:
    """Ratio and surrogate that go together."""
    clips = st.fixed_dictionaries({
        "ratio": st.sampled_from(["token", "sequence"]),
        "surrogate": st.sampled_from(["clip_eq4", "unclipped", "stop_gradient"]),
    })  # fmt: skip
    dual = st.fixed_dictionaries({
        "ratio": st.sampled_from(["token", "sequence"]),
        "surrogate": st.just("clip"),
        "dual_clip": st.sampled_from([None, 1.3, 3.0]),
    })  # fmt: skip
    plain = st.fixed_dictionaries({"ratio": st.sampled_from(["none", "token"]), "surrogate": st.just("reinforce")})
    return clips | dual | plain


PARTS = st.builds(
    lambda choice, **parts: Objective(**choice, **parts),
    choice=surrogates(),
    aggregate=st.sampled_from(["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"]),
    kl=st.sampled_from(["k1", "k2", "k3", "k3_reverse", "abs"]),
    kl_mask=st.sampled_from(["all", "falling_entropy", "rising_entropy", "both"]),
    clip_low=st.sampled_from([0.1, 0.2, 1.0]),
    clip_high=st.sampled_from([0.2, 0.28]),
    beta=st.sampled_from([0.01, 1.0]),
    entropy_coefficient=st.sampled_from([0.0, 0.1, -0.1]),
    advantage_alpha=st.sampled_from([0.0, 0.4]),
    advantage_kappa=st.sampled_from([2.0, 5.0]),
)


def check(objective: Objective, seed: int, spread: float = 0.5) -> None:
    sequences, logprob = random_case(seed, spread)
    x, h = logprob.clone().requires_grad_(), entropies(sequences).clone().requires_grad_()
    expected = naive(objective, sequences, x, h)
    expected.backward()
    h_grad = torch.zeros_like(h) if h.grad is None else h.grad
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        out, grad, entropy_grad = ours(objective, sequences, logprob, dtype)
        assert abs(out.loss.item() - expected.item()) <= tolerance * max(1.0, abs(expected.item()))
        assert (grad - x.grad).norm() <= tolerance * x.grad.norm()
        assert (entropy_grad - h_grad).norm() <= tolerance * h_grad.norm()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_row_of_the_table(name: str) -> None:
    for seed in range(5):
        check(OBJECTIVES[name], seed)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(objective=PARTS, seed=st.integers(0, 50))
def test_every_combination_of_parts(objective: Objective, seed: int) -> None:
    check(objective, seed)


def test_the_cases_test_something() -> None:
    sequences, logprob = random_case(0)
    out, _, _ = ours(OBJECTIVES["tepo"], sequences, logprob, torch.float64)
    clipped, tokens = out.metrics["loss/clip_fraction"]
    masked, _ = out.metrics["tepo/kl_mask_share"]
    assert clipped / tokens > 0.2 and 0.1 < masked / tokens < 0.9


def test_extreme_log_ratios_stay_finite() -> None:
    sequences, logprob = random_case(0)
    for shift in (60.0, -60.0):
        for name in OBJECTIVES:
            out, grad, _ = ours(OBJECTIVES[name], sequences, logprob + shift, torch.float32)
            assert math.isfinite(out.loss.item()) and bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("surrogate", ["clip", "clip_eq4", "unclipped", "stop_gradient"])
def test_both_forms_of_the_sequence_ratio_have_one_gradient(surrogate: str) -> None:
    """The stop-gradient form, which needs no collective in backward, is exact while A is constant over a sequence."""
    sequences, logprob = random_case(3)
    inputs = inputs_of(sequences, torch.float64)
    objective = Objective(ratio="sequence", surrogate=surrogate)
    grads = []
    for constant_factors in (True, False):
        x = logprob.clone().requires_grad_()
        ratio = sequence_ratio(x - inputs.old_logprob_R, inputs.segments, constant_factors)
        bounds = Bounds(objective.clip_low, objective.clip_high)
        value, _ = SURROGATES[surrogate](ratio, x, inputs.advantage_R, bounds)
        value.sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-13)


def test_unclipped_gradient_is_w_a_over_d() -> None:
    """dJ/dl_t = w_i A_i / D: line 21 of Algorithm 1 has a spurious 1/|y_i| beside it."""
    sequences, logprob = random_case(4)
    out, grad, _ = ours(OBJECTIVES["tepo_alg1"], sequences, logprob, torch.float64)
    inputs = inputs_of(sequences, torch.float64)
    torch.testing.assert_close(-grad, out.ratio_R * inputs.advantage_R / inputs.whole.tokens)


@pytest.mark.parametrize("name", ["tepo", "tepo_eq4", "tepo_alg1", "grpo", "cispo", "gpg", "reinforce", "kl_undifferentiated"])
def test_ratio_one_gives_the_plain_policy_gradient(name: str) -> None:
    sequences, _ = random_case(5)
    old = torch.cat([s["old"] for s in sequences])
    _, grad, _ = ours(OBJECTIVES[name], sequences, old, torch.float64)
    inputs = inputs_of(sequences, torch.float64)
    torch.testing.assert_close(-grad, inputs.advantage_R / inputs.whole.tokens)


def test_eq4_to_the_letter_lets_a_wrong_answer_grow() -> None:
    """Where A < 0 and w > 1 + eps, Eq. 4 has no gradient; the pessimistic clip pushes down."""
    sequences = [
        {
            "old": torch.zeros(3).double(),
            "advantage": -1.0,
            "entropy": torch.ones(3),
            "old_entropy": torch.ones(3),
        }
    ]
    logprob = torch.full((3,), 0.5, dtype=torch.float64)
    _, eq4, _ = ours(OBJECTIVES["tepo_eq4"], sequences, logprob, torch.float64)
    _, pessimistic, _ = ours(OBJECTIVES["tepo"], sequences, logprob, torch.float64)
    assert eq4.abs().max() == 0 and (pessimistic > 0).all()


def test_entropy_tolerance_counts_small_changes_as_none() -> None:
    sequences, logprob = random_case(6)
    masked = [
        ours(OBJECTIVES["tepo"].replace(kl_entropy_tolerance=t), sequences, logprob, torch.float64)[0]
        .metrics["tepo/kl_mask_share"][0]
        .item()
        for t in (0.0, 0.3, 100.0)
    ]
    assert masked[0] > masked[1] > masked[2] == 0


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"name": "tpeo"}, "objective.name='tpeo' is unknown"),
        ({"ratio": "sentence"}, "objective.ratio='sentence' is unknown; use one of token, sequence"),
        ({"name": "tepo_no_kl", "beta": 0.1}, "no effect under objective.kl_mask=none"),
        ({"clip_low": 1.5}, "objective.clip_low=1.5 must lie in"),
        ({"dual_clip": 0.5}, "objective.dual_clip=0.5 must be above 1"),
        ({"name": "cispo", "dual_clip": 3.0}, "goes with objective.surrogate=clip, not stop_gradient"),
        ({"ratio": "none"}, "objective.ratio=none leaves objective.surrogate=clip without gradient"),
        ({"advantage": "median"}, "objective.advantage='median' is unknown; use one of std, mean, leave_one_out, gpg"),
    ],
)
def test_contradictions_are_refused(cfg: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_objective(ObjectiveConfig(**cfg))


def test_config_replaces_parts() -> None:
    built = build_objective(ObjectiveConfig(name="tepo", beta=1.0, aggregate="sequence_mean_token_mean"))
    assert built == OBJECTIVES["tepo"].replace(beta=1.0, aggregate="sequence_mean_token_mean")


def test_a_new_method_is_a_function_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def squared(ratio_R, logprob_R, advantage_R, bounds):
        return ratio_R.square() * advantage_R, torch.zeros_like(ratio_R, dtype=torch.bool)

    monkeypatch.setitem(SURROGATES, "squared", squared)
    monkeypatch.setitem(OBJECTIVES, "mine", Objective(ratio="token", surrogate="squared"))
    sequences, logprob = random_case(0)
    out, grad, _ = ours(build_objective(ObjectiveConfig(name="mine")), sequences, logprob, torch.float64)
    inputs = inputs_of(sequences, torch.float64)
    torch.testing.assert_close(-grad, 2 * out.ratio_R.square() * inputs.advantage_R / inputs.whole.tokens)


def test_entropy_inside_the_advantage_is_capped_and_keeps_its_sign() -> None:
    sequences, _ = random_case(2)
    row = OBJECTIVES["entropy_advantage"].replace(advantage_alpha=10.0)
    assert not row.has_constant_factors and OBJECTIVES["tepo"].has_constant_factors
    _, grad, _ = ours(row, sequences, torch.cat([s["old"] for s in sequences]), torch.float64)
    inputs = inputs_of(sequences, torch.float64)
    assert bool((-grad * inputs.advantage_R >= 0).all())


def test_dual_clip_bounds_the_cost_of_a_wrong_answer_that_became_likelier() -> None:
    sequences = [{"old": torch.zeros(4).double(), "advantage": -1.0, "entropy": torch.ones(4), "old_entropy": torch.ones(4)}]
    logprob = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    out, grad, _ = ours(OBJECTIVES["grpo"].replace(dual_clip=3.0), sequences, logprob, torch.float64)
    assert (grad != 0).tolist() == [True, True, False, False]  # e^1 < 3 < e^2
    assert out.loss.item() == pytest.approx((1 + math.e + 3 + 3) / 4)
