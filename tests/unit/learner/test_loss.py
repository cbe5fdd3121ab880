"""The objective, against numpy written from the formula and against numbers worked by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo2.learner.loss import LOG_RATIO_MAX, Objective, grpo_loss, importance_weights, k3, kl_estimate

OBJECTIVE = Objective(clip_low=0.2, clip_high=0.3, ratio_cap=2.0)


def log(*values):
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def numpy_objective(theta, old, sampler, advantages, objective, reference=None):
    """J per token, token by token, from the formula of DESIGN section 10."""
    total = []
    for index in range(len(theta)):
        truncated = min(np.exp(old[index] - sampler[index]), objective.ratio_cap)
        ratio = np.exp(theta[index] - old[index])
        bounded = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
        value = min(ratio * advantages[index], bounded * advantages[index])
        if reference is not None:
            difference = reference[index] - theta[index]
            value -= objective.kl_weight * (np.exp(difference) - difference - 1)
        total.append(truncated * value)
    return np.array(total)


def loss_of(theta, old, sampler, advantages, objective=OBJECTIVE, reference=None):
    weights = importance_weights(old, sampler, objective.ratio_cap)
    return grpo_loss(theta, old, weights, advantages, objective, reference)


def test_hand_worked_tokens():
    """Inside the range, clipped above, clipped below, and the two sides where the surrogate does not clip."""
    old = log(0.5, 0.5, 0.5, 0.5, 0.5)
    theta = log(0.55, 0.75, 0.25, 0.25, 0.75)  # rho = 1.1, 1.5, 0.5, 0.5, 1.5
    advantages = vector(2.0, 2.0, -1.0, 2.0, -1.0)
    parts = loss_of(theta, old, old, advantages)
    expected = 1.1 * 2 + 1.3 * 2 + 0.8 * -1 + 0.5 * 2 + 1.5 * -1
    assert float(parts.loss_sum) == pytest.approx(-expected)
    assert parts.clipped == 2


def test_the_importance_ratio_is_truncated_at_c():
    """pi_learner,old / pi_sampler of 0.5, 1 and 3 weigh 0.5, 1 and C = 2; a ratio beyond any float weighs C too."""
    weights = importance_weights(log(0.2, 0.4, 0.6), log(0.4, 0.4, 0.2), 2.0)
    assert weights.tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert importance_weights(vector(0.0), vector(-1e6), 2.0).tolist() == pytest.approx([2.0])
    assert importance_weights(vector(-1e6), vector(0.0), 2.0).tolist() == [0.0]


def test_the_weight_applies_to_the_kl_term_too():
    """As the formula has it: the bracket of surrogate and KL is weighed as a whole."""
    objective = Objective(0.2, 0.2, 2.0, kl_weight=0.1)
    theta, old, sampler, reference = log(0.5), log(0.5), log(0.25), log(0.25)
    parts = loss_of(theta, old, sampler, vector(1.0), objective, reference)
    kl = 0.5 - math.log(0.5) - 1
    assert float(parts.loss_sum) == pytest.approx(-2.0 * (1.0 - 0.1 * kl))


def test_only_theta_has_a_gradient():
    """With rho = 1 the gradient of the loss by log pi_theta is -w A: the policy gradient; a clipped token has none."""
    theta = log(0.5, 0.5, 0.9).requires_grad_()
    old, sampler = log(0.5, 0.5, 0.5), log(0.25, 1.0, 0.5)
    loss_of(theta, old, sampler, vector(3.0, -1.0, 1.0)).loss_sum.backward()
    assert theta.grad.tolist() == pytest.approx([-2.0 * 3.0, 0.5 * 1.0, 0.0])


def test_zero_advantage_has_zero_gradient():
    """A group without spread moves nothing, whatever its ratios."""
    theta = log(0.1, 0.9).requires_grad_()
    loss_of(theta, log(0.5, 0.5), log(0.5, 0.5), vector(0.0, 0.0)).loss_sum.backward()
    assert theta.grad.tolist() == [0.0, 0.0]


def test_k3_by_hand():
    """KL shown for ratios of 1, 2 and 1/2: 0, 1 - log 2, log 2 - 1/2."""
    assert kl_estimate(log(0.3, 0.6, 0.3), log(0.3, 0.3, 0.6)).tolist() == pytest.approx(
        [0.0, 1 - math.log(2), math.log(2) - 0.5]
    )
    assert math.isfinite(float(kl_estimate(vector(0.0), vector(-1e5))[0]))
    assert float(kl_estimate(vector(0.0), vector(-1e5))[0]) == pytest.approx(math.exp(LOG_RATIO_MAX), rel=1e-6)


def test_k3_estimates_the_kl_of_two_distributions():
    """Its mean under q is KL(q || p), summed exactly over three symbols."""
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    values = k3(torch.from_numpy(np.log(p / q))).numpy()
    assert (q * values).sum() == pytest.approx((q * np.log(q / p)).sum())


numbers = st.floats(-3.0, -0.01)
token = st.tuples(numbers, numbers, numbers, numbers, st.floats(-3, 3))


@given(
    st.lists(token, min_size=1, max_size=12),
    st.floats(0.05, 0.5),
    st.floats(0.05, 0.5),
    st.floats(0.5, 4.0),
    st.sampled_from([0.0, 0.01, 0.5]),
)
def test_torch_and_numpy_agree(tokens, low, high, cap, kl_weight):
    """The vectorised loss is minus the sum of the formula, token by token."""
    theta, old, sampler, reference, advantages = (np.array(column) for column in zip(*tokens, strict=True))
    objective = Objective(low, high, cap, kl_weight)
    expected = numpy_objective(theta, old, sampler, advantages, objective, reference if kl_weight else None)
    tensors = [torch.from_numpy(values) for values in (theta, old, sampler, advantages)]
    parts = loss_of(*tensors, objective, torch.from_numpy(reference))
    assert float(parts.loss_sum) == pytest.approx(-expected.sum(), rel=1e-9, abs=1e-9)
