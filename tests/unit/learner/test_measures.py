"""The numbers of a step, against the formulas worked by hand, and the rollouts that stop an update."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.learner.batch import BatchArrays
from echo2.learner.culprits import find_culprits
from echo2.learner.loss import RATIO_EXPLODED, Objective, grpo_loss
from echo2.learner.measures import UpdateResult, step_stats
from echo2.p2p.identity import Identity
from echo2.p2p.messages import CULPRITS_MAX, Culprit

NODES = [Identity(bytes([letter]) * 32).peer_id for letter in b"ab"]


def k3(log_ratio):
    return math.exp(log_ratio) - 1 - log_ratio


def arrays(sampler, lengths=(1, 2)):
    """Rollouts of one prompt token and `lengths` sampled ones, by two nodes in turn."""
    shape = len(lengths), 1 + max(lengths)
    mask = np.zeros(shape, dtype=np.bool_)
    dense = np.zeros(shape, dtype=np.float32)
    for row, length in enumerate(lengths):
        mask[row, 1 : 1 + length] = True
    dense[mask] = sampler
    return BatchArrays(
        tokens=np.zeros(shape, dtype=np.int64),
        mask=mask,
        sampler_logprobs=dense,
        advantages=np.ones(len(lengths), dtype=np.float32),
        temperature=np.ones(len(lengths), dtype=np.float32),
        group=np.zeros(len(lengths), dtype=np.int64),
        nodes=tuple(NODES[row % 2] for row in range(len(lengths))),
        keys=tuple((bytes([row]) * 16, row) for row in range(len(lengths))),
        groups_without_spread=3,
    )


def on_mask(batch, values):
    dense = np.full(batch.mask.shape, np.nan, dtype=np.float32)  # what is not sampled must not count
    dense[batch.mask] = values
    return dense


def measure(batch, old, *, entropy=0.5, reference=None, ratio_cap=2.0, updates=()):
    return step_stats(
        batch,
        old=on_mask(batch, old),
        entropy=on_mask(batch, entropy),
        reference=None if reference is None else on_mask(batch, reference),
        ratio_cap=ratio_cap,
        updates=updates,
    )


def test_ratios_and_kl_by_hand():
    """Ratios of 1, 4 and 1/2, the first by one node, the others by another."""
    batch = arrays([math.log(0.4), math.log(0.1), math.log(0.6)])
    old = [math.log(0.4), math.log(0.4), math.log(0.3)]
    reference = [math.log(0.2), math.log(0.4), math.log(0.3)]
    stats = measure(batch, old, entropy=[0.1, 0.2, 0.6], reference=reference)
    assert stats.ratio_mean == pytest.approx((1 + 2 + 0.5) / 3)
    assert stats.ratio_max == pytest.approx(4)
    assert stats.truncated_share == pytest.approx(1 / 3)
    assert stats.kl_sampler_learner == pytest.approx((k3(math.log(4)) + k3(math.log(0.5))) / 3, rel=1e-6)
    assert stats.kl_by_node[NODES[0]] == pytest.approx(0.0, abs=1e-12)
    assert stats.kl_by_node[NODES[1]] == pytest.approx((k3(math.log(4)) + k3(math.log(0.5))) / 2, rel=1e-6)
    assert stats.tokens_by_node == {NODES[0]: 1, NODES[1]: 2}
    assert stats.kl_reference == pytest.approx(k3(math.log(0.5)) / 3, rel=1e-6)
    assert stats.entropy == pytest.approx(0.3)
    assert stats.groups_without_spread == 3


def test_without_c_nothing_is_truncated():
    """The mean is of the ratios as they are."""
    stats = measure(arrays([math.log(0.4), math.log(0.1), math.log(0.6)]), [math.log(0.4)] * 2 + [-1.0], ratio_cap=None)
    assert stats.truncated_share == 0.0
    assert stats.ratio_mean == pytest.approx((1 + 4 + math.exp(-1) / 0.6) / 3)
    assert stats.kl_reference is None


def test_updates_are_averaged_and_their_clipped_tokens_shared_out():
    """Over the updates made; one left out counts in no mean and is told with its reason."""
    updates = (
        UpdateResult(loss=1.0, tokens=6, clipped_low=1, clipped_high=2, gradient_norm=0.5),
        UpdateResult(loss=3.0, tokens=4, clipped_low=0, clipped_high=1, gradient_norm=1.5),
        UpdateResult(fault="why", culprits=((1, "because"),)),
    )
    batch = arrays([-1.0, -1.0, -1.0])
    stats = measure(batch, [-1.0] * 3, updates=updates)
    assert (stats.loss, stats.gradient_norm, stats.updates) == (2.0, 1.0, 2)
    assert (stats.clip_share, stats.clip_share_low, stats.clip_share_high) == pytest.approx((0.4, 0.1, 0.3))
    assert stats.updates_skipped == ("why",)
    assert stats.culprits == (Culprit(lease_id=b"\1" * 16, sample=1, peer=NODES[1], reason="because"),)


@pytest.mark.parametrize("old", [math.nan, math.inf, -math.inf, -1e30, 200.0])
def test_every_number_shown_is_finite(old):
    """Whatever the policy says of a token."""
    stats = measure(arrays([-1.0, -1e30, 0.0]), [old, old, -1.0], entropy=math.nan, reference=[old] * 3, ratio_cap=None)
    for value in (
        stats.ratio_mean, stats.ratio_max, stats.kl_sampler_learner, stats.kl_reference, stats.entropy,
        stats.truncated_share, *stats.kl_by_node.values(),
    ):  # fmt: skip
        assert math.isfinite(value)


def test_of_many_culprits_the_first_are_named():
    """A step in which every rollout is bad does not make a message of any size."""
    batch = arrays([-1.0] * 40, lengths=(1,) * 40)
    spoilt = UpdateResult(fault="why", culprits=tuple((row, "because") for row in range(40)))
    assert len(measure(batch, [-1.0] * 40, updates=(spoilt,)).culprits) == CULPRITS_MAX


def culprits(*tokens, objective=Objective(ratio_cap=None), reference=None):  # noqa: B008 - frozen
    """Tokens of (row, log pi_theta, log pi_old, w, A)."""
    rows, *columns = zip(*tokens, strict=True)
    names = ("logprobs", "old", "weights", "advantages")
    return find_culprits(
        rows=np.array(rows),
        objective=objective,
        reference=None if reference is None else np.array(reference, dtype=np.float32),
        **{name: np.array(column, dtype=np.float32) for name, column in zip(names, columns, strict=True)},
    )


GOOD = (0, -1.0, -1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ((7, math.nan, -1.0, 1.0, 1.0), "no finite log-probability"),
        ((7, -1.0, -math.inf, 1.0, 1.0), "no finite log-probability"),
        ((7, -1.0, -1.0, 1.0, math.inf), "advantage is not finite"),
        ((7, -1.0, -1.0, math.inf, 1.0), "what its node reported"),
        ((7, -1.0, -1.0, 2000.0, 1.0), "what its node reported"),
        ((7, -1.0, -9.0, 1.0, -1.0), "the step has made a token over 1000 times as likely"),
    ],
)
def test_each_cause_names_the_rollout(token, words):
    """The row of the bad token and why; good ones are not named, before or behind it."""
    ((row, reason),) = culprits(GOOD, token, (9, *GOOD[1:]))
    assert row == 7
    assert words in reason


def test_a_reference_out_of_proportion_is_a_cause():
    """Where the KL to it is infinite, either way; and only when the KL has a weight."""
    objective, far = Objective(kl_weight=0.1), (1, -200.0, -200.0, 1.0, 1.0)
    assert [row for row, _ in culprits(GOOD, far, objective=objective, reference=[-1.0, -1.0])] == [1]
    assert [row for row, _ in culprits(GOOD, objective=objective, reference=[-math.inf])] == [0]
    assert culprits(GOOD, far, reference=[-1.0, -1.0]) == ()


def test_good_tokens_have_no_culprit():
    """A clipped token may move as far as it likes."""
    assert culprits(GOOD, (1, -1.0, -9.0, 1.0, 1.0)) == ()


odd = st.one_of(st.floats(-10, 0, width=32), st.sampled_from([math.nan, math.inf, -math.inf, -150.0, 0.0]))
tokens = st.tuples(
    st.integers(0, 3),
    odd,
    odd,
    st.one_of(st.floats(0, 2, width=32), st.sampled_from([math.inf, 5000.0])),
    st.one_of(st.floats(-2, 2, width=32), st.sampled_from([math.inf, 0.0])),
    odd,
)


@settings(max_examples=300)
@given(st.lists(tokens, min_size=1, max_size=8), st.sampled_from([0.0, 0.1]))
def test_the_loss_and_the_search_agree(tokens, kl_weight):
    """Some rollout is named if and only if the loss has counted a bad token."""
    objective = Objective(kl_weight=kl_weight)
    *triples, reference = zip(*tokens, strict=True)
    vectors = [torch.tensor(column, dtype=torch.float32) for column in triples[1:]]
    away = torch.tensor(reference, dtype=torch.float32) if kl_weight else None
    parts = grpo_loss(*vectors, objective, away)
    found = culprits(*zip(*triples, strict=True), objective=objective, reference=reference if kl_weight else None)
    assert bool(found) == bool(int(parts.bad))


def test_the_largest_c_is_no_explosion():
    """What may be set as C may be used: at rho = 1 such a token trains."""
    assert culprits((0, -1.0, -1.0, RATIO_EXPLODED, 1.0)) == ()
