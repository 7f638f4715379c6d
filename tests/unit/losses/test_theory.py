"""The statements that the method rests on, checked numerically on softmax policies in fp64.

Where a statement of the paper holds only under a condition, or carries a misprint, the test says so and shows it.
Notation of the paper: logits phi, policy pi = softmax(phi), advantage A per action, entropy H, objective J = E_pi[A].
"""

import itertools

import pytest
import torch
from torch import Tensor

ACTIONS = 6


def policy(seed: int) -> tuple[Tensor, Tensor]:
    """Random logits and advantages."""
    generator = torch.Generator().manual_seed(seed)
    phi = torch.randn(ACTIONS, generator=generator, dtype=torch.float64) * 1.5
    return phi, torch.randn(ACTIONS, generator=generator, dtype=torch.float64)


def entropy(phi: Tensor) -> Tensor:
    logp = phi.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def gradient(function, phi: Tensor) -> Tensor:
    x = phi.clone().requires_grad_()
    function(x).backward()
    return x.grad


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum()


SEEDS = pytest.mark.parametrize("seed", range(8))


@SEEDS
def test_lemma_3_1_closed_form_of_the_kl_regularised_step(seed: int) -> None:
    """pi_k exp(A / beta) / Z maximises E_p[A] - beta KL(p || pi_k): stationary, and above every other policy tried."""
    phi, advantage = policy(seed)
    for beta in (0.3, 1.0, 5.0):
        pi_k = phi.softmax(-1)
        best = phi + advantage / beta  # logits of pi_k exp(A / beta), up to Z

        def objective(x: Tensor, pi_k=pi_k, beta=beta) -> Tensor:
            p = x.softmax(-1)
            return (p * advantage).sum() - beta * kl(p, pi_k)

        assert gradient(objective, best).abs().max() <= 1e-12
        generator = torch.Generator().manual_seed(seed)
        for scale in (0.01, 0.1, 1.0):
            other = best + scale * torch.randn(ACTIONS, generator=generator, dtype=torch.float64)
            assert objective(other) < objective(best)


@SEEDS
def test_equation_8_is_the_distance_to_that_policy(seed: int) -> None:
    """KL(pi || pi*) = (beta KL(pi || pi_k) - E_pi[A]) / beta + ln Z; the paper drops ln Z, which pi does not change."""
    phi, advantage = policy(seed)
    other, _ = policy(seed + 100)
    beta, pi, pi_k = 0.7, other.softmax(-1), phi.softmax(-1)
    log_z = (pi_k * (advantage / beta).exp()).sum().log()
    right = (beta * kl(pi, pi_k) - (pi * advantage).sum()) / beta + log_z
    torch.testing.assert_close(kl(pi, (phi + advantage / beta).softmax(-1)), right)


@SEEDS
def test_equation_1_lacks_a_minus(seed: int) -> None:
    phi, _ = policy(seed)
    pi, logp = phi.softmax(-1), phi.log_softmax(-1)
    printed = pi * (logp + entropy(phi))
    torch.testing.assert_close(gradient(entropy, phi), -printed)


@SEEDS
def test_equation_3_policy_gradient(seed: int) -> None:
    phi, advantage = policy(seed)
    pi = phi.softmax(-1)
    expected = pi * (advantage - (pi * advantage).sum())
    torch.testing.assert_close(gradient(lambda x: (x.softmax(-1) * advantage).sum(), phi), expected)


@SEEDS
def test_equation_13_lacks_a_logarithm(seed: int) -> None:
    """The printed -sum pi grad ln pi is 0 for every policy; with a factor ln pi inside, it is the gradient of the entropy."""
    phi, _ = policy(seed)
    pi, logp = phi.softmax(-1), phi.log_softmax(-1)
    jacobian = torch.autograd.functional.jacobian(lambda x: x.log_softmax(-1), phi)  # [action, logit]
    assert (-(pi[:, None] * jacobian).sum(0)).abs().max() <= 1e-15
    torch.testing.assert_close(-((pi * logp)[:, None] * jacobian).sum(0), gradient(entropy, phi))


def inner_product(phi: Tensor, action: int, advantage: float) -> Tensor:
    """<grad H, grad J> where only `action` has an advantage: one sampled action, as in the paper's cases."""
    return gradient(entropy, phi) @ gradient(lambda x: x.softmax(-1)[action] * advantage, phi)


@SEEDS
def test_lemma_3_2_holds_for_the_likely_action_and_not_for_rare_ones(seed: int) -> None:
    """The sign is -sign(A) for the likeliest action, as stated. For a rare one it is the opposite: making it likelier (A > 0)
    raises the entropy, pushing it down (A < 0) lowers it. The paper's first case (A < 0, probability to 0) states the contrary;
    it follows there from Eq. 1 without its minus and from the baseline E[A] left out of the sum.
    """
    phi, _ = policy(seed)
    likely, rare = int(phi.argmax()), int(phi.argmin())
    for advantage in (0.5, 2.0):
        assert inner_product(phi, likely, advantage) < 0 < inner_product(phi, likely, -advantage)
        assert inner_product(phi, rare, -advantage) < 0 < inner_product(phi, rare, advantage)


@SEEDS
def test_theorem_3_1_entropy_falls_after_reinforcing_the_likely_action(seed: int) -> None:
    """dH = alpha <grad H, grad J> to first order, so its sign is that of Lemma 3.2, with the same condition."""
    phi, _ = policy(seed)
    likely = int(phi.argmax())
    for advantage in (1.0, -1.0):
        step = gradient(lambda x, a=advantage: x.softmax(-1)[likely] * a, phi)
        for alpha in (1e-2, 1e-4):
            change = entropy(phi + alpha * step) - entropy(phi)
            assert change.sign() == -torch.tensor(advantage).sign()
        torch.testing.assert_close(change / alpha, inner_product(phi, likely, advantage), rtol=1e-3, atol=1e-9)


@SEEDS
def test_equation_18_holds_for_the_natural_gradient_step_only(seed: int) -> None:
    """dH = -Cov(ln pi, A) / beta for phi += A / beta, with an error that falls with 1 / beta. For the plain gradient step that
    Eq. 16 prints, it is another number."""
    phi, advantage = policy(seed)
    pi, logp = phi.softmax(-1), phi.log_softmax(-1)
    covariance = (pi * logp * advantage).sum() - (pi * logp).sum() * (pi * advantage).sum()
    errors = []
    for beta in (1e2, 1e4):
        change = entropy(phi + advantage / beta) - entropy(phi)
        errors.append((change * beta + covariance).abs().item())
    assert errors[1] <= 0.02 * errors[0] + 1e-9
    plain = gradient(lambda x: (x.softmax(-1) * advantage).sum(), phi)
    change = (entropy(phi + plain / 1e4) - entropy(phi)) * 1e4
    assert (change + covariance).abs() > 1e-2 * covariance.abs()


VOCABULARY, LENGTH = 3, 3


class Tree:
    """A policy over sequences of LENGTH tokens with logits of its own after every prefix: small enough to enumerate."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        prefixes = [p for n in range(LENGTH) for p in itertools.product(range(VOCABULARY), repeat=n)]
        self.row = {p: i for i, p in enumerate(prefixes)}
        self.phi = torch.randn(len(prefixes), VOCABULARY, generator=generator, dtype=torch.float64)
        self.sequences = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
        self.advantage = torch.randn(len(self.sequences), generator=generator, dtype=torch.float64)

    def token_logprobs(self, phi: Tensor) -> Tensor:
        """[sequence, position]."""
        logp = phi.log_softmax(-1)
        return torch.stack([torch.stack([logp[self.row[s[:t]], s[t]] for t in range(LENGTH)]) for s in self.sequences])


@SEEDS
def test_appendix_b_needs_the_cross_token_product(seed: int) -> None:
    """E_old[A sum_t grad ln pi_t prod_j r_j] is the gradient of J; with each token's own ratio alone, as in GRPO, it is not."""
    tree, old = Tree(seed), Tree(seed + 50)
    exact = gradient(lambda x: (tree.token_logprobs(x).sum(1).exp() * tree.advantage).sum(), tree.phi)

    x = tree.phi.clone().requires_grad_()
    logprobs, old_logprobs = tree.token_logprobs(x), tree.token_logprobs(old.phi)
    ratios = (logprobs - old_logprobs).detach().exp()
    weight = old_logprobs.sum(1).exp() * tree.advantage
    (with_product,) = torch.autograd.grad(
        (weight[:, None] * ratios.prod(1, keepdim=True) * logprobs).sum(), x, retain_graph=True
    )
    (own_ratio,) = torch.autograd.grad((weight[:, None] * ratios * logprobs).sum(), x)
    torch.testing.assert_close(with_product, exact, rtol=1e-10, atol=1e-14)
    assert (own_ratio - exact).norm() > 0.05 * exact.norm()


@SEEDS
def test_algorithm_1_line_21_lacks_the_sum_over_tokens(seed: int) -> None:
    """w_i enters the loss of every token of its sequence, so 1 / |y_i| cancels; the printed line keeps it."""
    generator = torch.Generator().manual_seed(seed)
    length, advantage = 5, 0.7
    old = torch.randn(length, generator=generator, dtype=torch.float64)
    x = (old + 0.3 * torch.randn(length, generator=generator, dtype=torch.float64)).requires_grad_()
    w = ((x - old).sum() / length).exp()
    (w * advantage).expand(length).sum().backward()  # lines 15 and 18, times M
    torch.testing.assert_close(x.grad, (w * advantage).detach().expand(length))
    printed = (w * advantage / length).detach()  # line 21, with grad pi / pi = grad ln pi
    torch.testing.assert_close(x.grad, length * printed.expand(length))
