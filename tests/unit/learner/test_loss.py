"""The objective, against numpy written from the formula and against numbers worked by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo2.learner.loss import LOG_RATIO_MAX, Objective, grpo_loss, importance_weights, k3, kl_estimate, token_scales

OBJECTIVE = Objective(clip_low=0.2, clip_high=0.3, ratio_cap=2.0)


def log(*values):
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def numpy_loss(responses, objective):
    """The loss of one update from the equations of DESIGN section 10, response by response and token by token.

    A response is (advantage, tokens), a token (log pi_theta, log pi_old, log pi_sampler, log pi_ref).
    """
    total = sum(len(tokens) for _, tokens in responses)
    loss = 0.0
    for advantage, tokens in responses:
        scale = {
            "token": 1 / total,
            "sequence": 1 / (len(responses) * len(tokens)),
            "constant": 1 / (len(responses) * (objective.aggregation_tokens or 1)),
        }[objective.aggregation]
        for theta, old, sampler, reference in tokens:
            weight = np.exp(old - sampler)
            if objective.ratio_cap is not None:
                weight = min(weight, objective.ratio_cap)
            ratio = np.exp(theta - old)
            bounded = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
            surrogate = min(ratio * advantage, bounded * advantage)
            difference = reference - theta
            kl = np.exp(difference) - difference - 1
            loss -= scale * weight * (surrogate - objective.kl_weight * kl)
    return loss


def torch_loss(responses, objective):
    """The same by the code under test, and log pi_theta with its gradient."""
    columns = [token for _, tokens in responses for token in tokens]
    theta, old, sampler, reference = (vector(*column) for column in zip(*columns, strict=True))
    lengths = torch.tensor([len(tokens) for _, tokens in responses])
    theta.requires_grad_()
    parts = grpo_loss(
        theta,
        old,
        importance_weights(old, sampler, objective.ratio_cap),
        vector(*(advantage for advantage, _ in responses)).repeat_interleave(lengths),
        objective,
        reference,
        token_scales(lengths, objective, torch.float64).repeat_interleave(lengths),
    )
    parts.loss_sum.backward()
    return parts, theta.grad


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


def test_without_truncation_the_ratio_stands():
    """C switched off: a ratio of 3 weighs 3, and one beyond any float is infinite."""
    assert importance_weights(log(0.6), log(0.2), None).tolist() == pytest.approx([3.0])
    assert importance_weights(vector(0.0), vector(-1e6), None).tolist() == [math.inf]


def test_scales_by_hand():
    """Responses of 1 and 3 tokens: each of 4 the same; each response half; each over a constant of 8."""
    lengths = torch.tensor([1, 3])
    assert token_scales(lengths, Objective()).tolist() == [0.25, 0.25]
    assert token_scales(lengths, Objective(aggregation="sequence")).tolist() == pytest.approx([1 / 2, 1 / 6])
    constant = Objective(aggregation="constant", aggregation_tokens=8)
    assert token_scales(lengths, constant).tolist() == [1 / 16, 1 / 16]


def test_the_two_sides_of_the_clip_are_counted_apart():
    """Three tokens leave the range; only those whose advantage pushed them out count."""
    theta, old = log(0.75, 0.75, 0.25, 0.25, 0.1), log(0.5, 0.5, 0.5, 0.5, 0.5)
    parts = loss_of(theta, old, old, vector(1.0, -1.0, -1.0, 1.0, -1.0))
    assert (int(parts.clipped_low), int(parts.clipped_high), parts.clipped) == (2, 1, 3)


def test_a_lower_range_of_one_does_not_clip():
    """clip_low = 1 switches that side off."""
    objective = Objective(clip_low=1.0)
    parts = loss_of(log(0.001), log(0.9), log(0.9), vector(-2.0), objective)
    assert float(parts.loss_sum) == pytest.approx(2.0 * 0.001 / 0.9)
    assert parts.clipped == 0


@pytest.mark.parametrize(
    ("theta", "sampler", "advantage", "bad"),
    [
        (-1.0, -1.0, 1.0, 0),
        (math.nan, -1.0, 1.0, 1),
        (-1.0, -1.0, math.inf, 1),
        (8.0, -1.0, -1.0, 1),  # rho of e^9 on the side that is not clipped
        (8.0, -1.0, 1.0, 0),  # on the side that is
        (-1.0, -9.0, 1.0, 1),  # w of e^8
        (999.0, -1.0, 1.0, 1),  # infinite
    ],
)
def test_bad_tokens_are_counted(theta, sampler, advantage, bad):
    """Not finite, or over a thousand times its weight and not clipped away."""
    parts = loss_of(vector(theta), vector(-1.0), vector(sampler), vector(advantage), Objective(ratio_cap=None))
    assert int(parts.bad) == bad


def test_a_truncated_ratio_is_no_bad_token():
    """A node may claim what it likes: with C it weighs C and stops nothing."""
    parts = loss_of(vector(-1.0), vector(-1.0), vector(-80.0), vector(1.0))
    assert int(parts.bad) == 0


numbers = st.floats(-3.0, -0.01)
token = st.tuples(numbers, numbers, numbers, numbers)
responses = st.lists(st.tuples(st.floats(-3, 3), st.lists(token, min_size=1, max_size=5)), min_size=1, max_size=5)
objectives = st.builds(
    Objective,
    clip_low=st.one_of(st.floats(0.05, 0.5), st.just(1.0)),
    clip_high=st.floats(0.05, 2.0),
    ratio_cap=st.one_of(st.none(), st.floats(0.5, 4.0)),
    kl_weight=st.sampled_from([0.0, 0.01, 0.5]),
    aggregation=st.sampled_from(["token", "sequence", "constant"]),
    aggregation_tokens=st.integers(1, 64),
)


@given(responses, objectives)
def test_each_switch_agrees_with_the_equations(responses, objective):
    """Clip on either side, C or none, KL or none, each aggregation, over batches of any shape."""
    parts, _ = torch_loss(responses, objective)
    assert float(parts.loss_sum.detach()) == pytest.approx(numpy_loss(responses, objective), rel=1e-6, abs=1e-9)


STEP = 1e-6


@settings(max_examples=50)
@given(responses, objectives, st.data())
def test_the_gradient_agrees_with_finite_differences(responses, objective, data):
    """Central differences of the equations in float64, away from the corners of clip, where there is no gradient."""
    for advantage, tokens in responses:
        for theta, old, *_ in tokens:
            assume(abs(np.exp(theta - old) - (1 - objective.clip_low)) > 1e-4)
            assume(abs(np.exp(theta - old) - (1 + objective.clip_high)) > 1e-4)
        assume(advantage == 0 or abs(advantage) > 1e-3)
    row = data.draw(st.integers(0, len(responses) - 1))
    place = data.draw(st.integers(0, len(responses[row][1]) - 1))

    def moved(by):
        copy = [(advantage, [list(token) for token in tokens]) for advantage, tokens in responses]
        copy[row][1][place][0] += by
        return numpy_loss(copy, objective)

    difference = (moved(STEP) - moved(-STEP)) / (2 * STEP)
    _, gradient = torch_loss(responses, objective)
    index = sum(len(tokens) for _, tokens in responses[:row]) + place
    assert float(gradient[index]) == pytest.approx(difference, rel=1e-4, abs=1e-7)
