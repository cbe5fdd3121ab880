"""What is told of a step: to the coordinator, and in bytes."""

import pytest

from echo2.learner.interfaces import Batch, Group, TrainStats
from echo2.learner.outbox import FINISHED_PER_REPORT, STEPS_PER_REPORT
from echo2.learner.status import step_metrics
from echo2.p2p.codec import encode_frame, encode_record, pack_logprobs, pack_tokens
from echo2.p2p.identity import Identity
from echo2.p2p.messages import (
    CULPRITS_MAX,
    STALENESS_BINS,
    STEP_DROPS_MAX,
    STEP_NODES_MAX,
    AdmittedRollout,
    Culprit,
    DropCount,
    Finished,
    LearnerReport,
    NodeMismatch,
)

PEER = Identity(b"n" * 32).peer_id
LEASE = b"l" * 16


def rollout(sample, *, version=0, reward=0.0, length=2):
    return AdmittedRollout(
        sequence=1,
        lease_id=LEASE,
        ordinal=0,
        sample=sample,
        peer=PEER,
        version=version,
        prompt_tokens=pack_tokens([1]),
        tokens=pack_tokens([2] * length),
        logprobs=pack_logprobs([-0.5] * length),
        finish="stop",
        temperature=1.0,
        reward=reward,
    )


def stats(**changes):
    return TrainStats(
        **{
            "loss": 0.0,
            "ratio_mean": 1.0,
            "clip_share": 0.0,
            "kl_sampler_learner": 0.0,
            "entropy": 1.0,
            "gradient_norm": 1.0,
            "groups_without_spread": 0,
            "updates": 2,
        }
        | changes
    )


def metrics(batch, measured=None, **more):
    return step_metrics(batch, measured or stats(), train_seconds=1.0, idle_seconds=0.0, **more)


def test_rewards_lengths_and_staleness_by_hand():
    """Rewards 0, 0, 3 have mean 1 and deviation sqrt(2); versions 5, 5 and 3 at step 5 are of staleness 0, 0 and 2."""
    batch = Batch(
        5, (Group(0, (rollout(0, version=5), rollout(1, version=5, length=7), rollout(2, version=3, reward=3.0))),)
    )
    told = metrics(batch, drops={("late", 4): 2, ("lost version", 8): 5})
    assert (told.reward_mean, told.reward_std) == pytest.approx((1.0, 2**0.5))
    assert (told.response_tokens_mean, told.response_tokens_max) == (pytest.approx(11 / 3), 7)
    assert told.staleness_counts == (2, 0, 1)
    assert told.drops == (
        DropCount(reason="lost version", tokens_max=8, count=5),
        DropCount(reason="late", tokens_max=4, count=2),
    )


def test_only_what_was_drawn_is_the_length_of_a_response():
    """Two tokens drawn, three of the environment's, one drawn."""
    episode = rollout(0, length=6).model_copy(update={"spans": (2, 3, 1)})
    assert metrics(Batch(0, (Group(0, (episode,)),))).response_tokens_max == 3


def test_very_stale_rollouts_share_the_last_bin():
    """A staleness budget of a thousand does not make a histogram of a thousand."""
    told = metrics(Batch(900, (Group(0, (rollout(0, version=900), rollout(1), rollout(2))),)))
    assert len(told.staleness_counts) == STALENESS_BINS
    assert (told.staleness_counts[0], told.staleness_counts[-1]) == (1, 2)


def test_what_the_trainer_measured_is_passed_on():
    """The worst nodes first, with how much their mean rests on; culprits by name."""
    peers = [Identity(index.to_bytes(2, "big") * 16).peer_id for index in range(STEP_NODES_MAX + 5)]
    culprit = Culprit(lease_id=LEASE, sample=1, peer=PEER, reason="because")
    measured = stats(
        kl_by_node={peer: float(index) for index, peer in enumerate(peers)},
        tokens_by_node=dict.fromkeys(peers, 7),
        ratio_max=3.0,
        truncated_share=0.25,
        clip_share_low=0.125,
        clip_share_high=0.5,
        kl_reference=0.1,
        updates_skipped=("why",),
        culprits=(culprit,),
    )
    told = metrics(Batch(0, (Group(0, (rollout(0),)),)), measured)
    assert len(told.kl_by_node) == STEP_NODES_MAX
    assert told.kl_by_node[0] == NodeMismatch(peer=peers[-1], kl=float(len(peers) - 1), tokens=7)
    assert (told.ratio_max, told.truncated_share, told.clip_share_low, told.clip_share_high) == (3.0, 0.25, 0.125, 0.5)
    assert (told.kl_reference, told.updates, told.updates_skipped) == (0.1, 2, ("why",))
    assert told.culprits == (culprit,)


def test_the_largest_report_fits_its_frame():
    """As many steps and rollouts as one report takes, each with as much to say as it may."""
    one = metrics(Batch(0, (Group(0, (rollout(0),)),)))
    big = one.model_copy(
        update={
            "kl_by_node": (NodeMismatch(peer=PEER, kl=0.1, tokens=2**40),) * STEP_NODES_MAX,
            "staleness_counts": (2**40,) * STALENESS_BINS,
            "drops": (DropCount(reason="lost version", tokens_max=2**17, count=2**40),) * STEP_DROPS_MAX,
            "updates_skipped": ("a ratio has exploded or is not finite",) * 64,
            "culprits": (Culprit(lease_id=LEASE, sample=1, peer=PEER, reason="r" * 512),) * CULPRITS_MAX,
        }
    )
    assert len(encode_record(big)) < 32 * 1024
    entry = Finished(lease_id=LEASE, sample=1, state="consumed", step=2**40, reason="r" * 256)
    report = LearnerReport(
        run="r",
        epoch=1,
        version=2,
        finished=(entry,) * FINISHED_PER_REPORT,
        steps=(big,) * STEPS_PER_REPORT,
        status="s" * 512,
    )
    assert len(encode_frame(report)) < LearnerReport.BYTES_MAX
