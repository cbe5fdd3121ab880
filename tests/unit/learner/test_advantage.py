"""Group-normalised advantages."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echo2.learner.advantage import EPSILON, group_advantages, labelled_advantages

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


def test_hand_worked_group():
    """Rewards 1, 0, 0, 1: mean 0.5, standard deviation 0.5, so plus and minus one (less epsilon's share)."""
    result = group_advantages([[1.0, 0.0, 0.0, 1.0]])
    one = 0.5 / (0.5 + EPSILON)
    np.testing.assert_allclose(result.values, [one, -one, -one, one], rtol=1e-15)
    assert result.groups_without_spread == 0


def test_hand_worked_group_of_three():
    """Rewards 0, 0, 3: mean 1, population standard deviation sqrt(2)."""
    np.testing.assert_allclose(
        group_advantages([[0.0, 0.0, 3.0]], epsilon=0.0).values, [-(0.5**0.5), -(0.5**0.5), 2**0.5], rtol=1e-14
    )


def test_without_standard_deviation():
    """Without the division, an advantage is the reward less the mean."""
    result = group_advantages([[0.0, 0.0, 3.0], [1.0, 0.0]], divide_by_std=False)
    np.testing.assert_allclose(result.values, [-1, -1, 2, 0.5, -0.5])


def test_equal_rewards_give_exact_zeros_and_are_counted():
    """0.1 three times has a mean that rounding may put beside 0.1; the advantage is zero all the same."""
    result = group_advantages([[0.1, 0.1, 0.1], [0.0, 1.0], [5.0]])
    assert result.values[:3].tolist() == [0, 0, 0]
    assert result.values[5] == 0
    assert result.groups_without_spread == 2


def test_no_groups():
    """Nothing in, nothing out."""
    assert group_advantages([]).values.shape == (0,)


@given(st.lists(rewards, min_size=1, max_size=5), st.booleans())
def test_each_group_stands_alone(groups, divide):
    """A group's advantages sum to zero, keep the order of its rewards and do not depend on other groups."""
    together = group_advantages(groups, divide_by_std=divide).values
    start = 0
    for group in groups:
        part = together[start : start + len(group)]
        start += len(group)
        np.testing.assert_array_equal(part, group_advantages([group], divide_by_std=divide).values)
        assert abs(part.sum()) < 1e-6
        order = np.argsort(group, kind="stable")
        assert (np.diff(part[order]) >= 0).all()


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), max_size=24), st.booleans())
def test_labels_name_the_rewards_that_are_compared(rollouts, divide):
    """Each advantage from the equation, over the rewards of the same label wherever they stand."""
    rewards = np.array([reward for reward, _ in rollouts])
    labels = np.array([label for _, label in rollouts], dtype=np.int64)
    result = labelled_advantages(rewards, labels, divide_by_std=divide)
    flat = 0
    for label in set(labels.tolist()):
        flat += len({reward for reward, other in rollouts if other == label}) == 1
    for index, (reward, label) in enumerate(rollouts):
        peers = [other for other, its in rollouts if its == label]
        mean = sum(peers) / len(peers)
        spread = (sum((other - mean) ** 2 for other in peers) / len(peers)) ** 0.5
        expected = (reward - mean) / (spread + EPSILON if divide else 1.0)
        if min(peers) == max(peers):
            assert result.values[index] == 0.0
        else:
            assert abs(result.values[index] - expected) < 1e-6 * max(1.0, abs(expected))
    assert result.groups_without_spread == flat
