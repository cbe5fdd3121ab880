"""From rollouts to arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.learner.batch import PAD, collate, fault, split_groups
from echo2.learner.interfaces import Batch, Group
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.messages import AdmittedRollout

PEER = "12D3KooWQPfBmCkGTXPoCXzwPpGP7AZ9KTbB6sVg4aN8AsxKGoBf"


def rollout(
    ordinal=0, sample=0, prompt=(5, 6), response=(7, 8), logprobs=None, reward=0.0, version=0, temperature=1.0, spans=()
):
    return AdmittedRollout(
        sequence=1,
        lease_id=ordinal.to_bytes(8, "big") + sample.to_bytes(8, "big"),
        ordinal=ordinal,
        sample=sample,
        peer=PEER,
        version=version,
        prompt_tokens=pack_tokens(prompt),
        tokens=pack_tokens(response),
        logprobs=pack_logprobs([-0.5] * len(response) if logprobs is None else logprobs),
        finish="stop",
        temperature=temperature,
        reward=reward,
        spans=spans,
    )


def test_hand_worked_batch():
    """Prompt, response, padding: the mask is on the response alone, log-probabilities stand on their tokens."""
    batch = Batch(
        3,
        (
            Group(
                4,
                (
                    rollout(prompt=(1, 2), response=(3,), logprobs=(-0.25,), reward=1.0),
                    rollout(sample=1, prompt=(1, 2), response=(4, 5, 6), logprobs=(-1, -2, -3), temperature=0.5),
                ),
            ),
            Group(9, (rollout(prompt=(9,), response=(8,), logprobs=(-0.75,), reward=1.0),)),
        ),
    )
    arrays = collate(batch, divide_by_std=False)
    assert arrays.tokens.tolist() == [[1, 2, 3, PAD, PAD], [1, 2, 4, 5, 6], [9, 8, PAD, PAD, PAD]]
    assert arrays.mask.astype(int).tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert arrays.sampler_logprobs.tolist() == [[0, 0, -0.25, 0, 0], [0, 0, -1, -2, -3], [0, -0.75, 0, 0, 0]]
    assert arrays.advantages.tolist() == [0.5, -0.5, 0.0]
    assert arrays.temperature.tolist() == [1.0, 0.5, 1.0]
    assert arrays.group.tolist() == [0, 0, 1]
    assert arrays.groups_without_spread == 1


def test_rewards_are_compared_within_the_grouping():
    """Two groups that began alike and one that did not: apart; the two together; all together."""
    batch = Batch(
        0,
        (
            Group(0, (rollout(0, 0, reward=0.0), rollout(0, 1, reward=0.0))),
            Group(7, (rollout(7, 0, reward=2.0), rollout(7, 1, reward=2.0))),
            Group(9, (rollout(9, 0, prompt=(1,), reward=5.0), rollout(9, 1, prompt=(1,), reward=3.0))),
        ),
    )
    by = {name: collate(batch, grouping=name, divide_by_std=False) for name in ("prompt", "initial_state", "batch")}
    assert by["prompt"].advantages.tolist() == [0, 0, 0, 0, 1, -1]
    assert by["initial_state"].advantages.tolist() == [-1, -1, 1, 1, 1, -1]
    assert by["batch"].advantages.tolist() == [-2, -2, 0, 0, 3, 1]
    assert [by[name].groups_without_spread for name in by] == [2, 0, 0]
    assert by["batch"].group.tolist() == [0, 0, 1, 1, 2, 2]
    assert by["prompt"].keys[3] == (batch.rollouts[3].lease_id, 1)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (rollout(prompt=()), "empty"),
        (rollout(response=()), "empty"),
        (rollout(response=(7, 8), logprobs=(-1,)), "2 tokens with 1"),
        (rollout(response=(10,)), "outside the vocabulary"),
        (rollout(prompt=(-1,)), "outside the vocabulary"),
        (rollout(prompt=(1,) * 20), "in a context of 16"),
        (rollout().model_copy(update={"tokens": b"abc"}), "fours"),
        (rollout(response=(7,), logprobs=(float("nan"),)), "finite"),
        (rollout(response=(7, 8), logprobs=(-1, 0.01)), "a log-probability of 0.01"),
        (rollout(response=(7, 8), logprobs=(50, -1)), "a log-probability of 50"),
        (rollout(response=(7, 8, 9), spans=(0, 3, 0)), "a turn in which nothing was drawn"),
        (rollout(response=(7, 8, 9), spans=(1, 2, 0)), "a turn in which nothing was drawn"),
        (rollout(response=(7, 8, 9), spans=(1, 1)), "spans of 2 tokens for 3"),
        (rollout(response=(7, 8, 9)).model_copy(update={"spans": (3, -1, 1)}), "nothing was drawn"),
    ],
)
def test_a_rollout_that_would_end_the_process_is_found_out(bad, words):
    """Whatever is wrong with a rollout is said in words."""
    assert words in fault(bad, vocabulary_size=10, context_tokens=16)


def test_a_good_rollout_has_no_fault():
    """A rollout within the vocabulary and the context passes."""
    assert fault(rollout(), vocabulary_size=10, context_tokens=16) is None
    several = rollout(response=(7, 8, 9), logprobs=(0.0005, 0, -1), spans=(1, 1, 1))
    assert fault(several, vocabulary_size=10, context_tokens=16) is None
    assert fault(rollout(response=(7, 8), spans=(1, 0, 1)), vocabulary_size=10, context_tokens=16) is None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.integers(1, 3), st.randoms())
def test_minibatches_share_out_every_rollout_once(sizes, parts, rng):
    """Every row is in exactly one minibatch; groups stay whole whenever there are enough of them."""
    groups = tuple(Group(g, tuple(rollout(g, s) for s in range(size))) for g, size in enumerate(sizes))
    arrays = collate(Batch(0, groups))
    order = np.array(rng.sample(range(len(sizes)), len(sizes)))
    minibatches = split_groups(arrays, parts, order)
    assert sorted(np.concatenate(minibatches).tolist()) == list(range(sum(sizes)))
    assert len(minibatches) == min(parts, sum(sizes) if len(sizes) < parts else len(sizes))
    if len(sizes) >= parts:
        homes = [set(arrays.group[rows].tolist()) for rows in minibatches]
        assert sum(map(len, homes)) == len(sizes)
        assert max(map(len, homes)) - min(map(len, homes)) <= 1
