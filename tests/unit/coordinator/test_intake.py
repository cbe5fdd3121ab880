from __future__ import annotations

import math

import pytest

from echo2.coordinator.intake import SliceRules, check_owner, check_slice
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.messages import RolloutRecord, Slice

LEASE, MANIFEST, STOP, VOCABULARY = b"l" * 16, b"m" * 32, 2, 15

RULES = SliceRules(
    samples=range(4, 6),
    manifest_hash=MANIFEST,
    prompt_tokens=3,
    tokens_max=4,
    stop_ids=(STOP, 3),
    vocabulary_size=VOCABULARY,
    context_tokens=64,
)


def rollout(sample=4, tokens=(5, 6, STOP), logprobs=None, finish="stop"):
    values = [-0.5] * len(tokens) if logprobs is None else logprobs
    return RolloutRecord(sample=sample, tokens=pack_tokens(tokens), logprobs=pack_logprobs(values), finish=finish)


def received(*first, manifest=MANIFEST):
    rollouts = first or (rollout(),)
    return Slice(lease_id=LEASE, manifest_hash=manifest, rollouts=(*rollouts, rollout(sample=5)))


GOOD = {
    "ends with a stop token": received(),
    "ends with the other stop token": received(rollout(tokens=(5, 3))),
    "is a stop token alone": received(rollout(tokens=(STOP,))),
    "is as long as ordered": received(rollout(tokens=(5, 6, 7, 8), finish="length")),
    "stops at the last place": received(rollout(tokens=(5, 6, 7, STOP))),
    "has a log-probability a rounding above zero": received(rollout(logprobs=[0.0, 1e-5, -3.0])),
}

BAD = {
    "a sample is missing": ("incomplete", Slice(lease_id=LEASE, manifest_hash=MANIFEST, rollouts=(rollout(),))),
    "a sample comes twice": ("incomplete", received(rollout(), rollout())),
    "a sample was not ordered": ("incomplete", received(rollout(sample=3))),
    "another snapshot": ("manifest", received(manifest=b"x" * 32)),
    "ragged tokens": ("size", received(rollout().model_copy(update={"tokens": b"\x05\0\0\0\x02"}))),
    "no tokens": ("size", received(rollout(tokens=(), logprobs=[]))),
    "one log-probability short": ("size", received(rollout(logprobs=[-1.0, -1.0]))),
    "longer than ordered": ("size", received(rollout(tokens=(5, 5, 5, 5, STOP)))),
    "a token at the vocabulary's size": ("token_range", received(rollout(tokens=(5, VOCABULARY, STOP)))),
    "a negative token": ("token_range", received(rollout(tokens=(5, -1, STOP)))),
    "says stop without a stop token": ("termination", received(rollout(tokens=(5, 6)))),
    "says length and is shorter": ("termination", received(rollout(tokens=(5, 6), finish="length"))),
    "says length and ends with a stop token": (
        "termination",
        received(rollout(tokens=(5, 6, 7, STOP), finish="length")),
    ),
    "a stop token in the middle": ("termination", received(rollout(tokens=(5, STOP, STOP)))),
    "a stop token in the middle of a full one": (
        "termination",
        received(rollout(tokens=(5, STOP, 6, 7), finish="length")),
    ),
    "a log-probability is NaN": ("logprobs", received(rollout(logprobs=[-1.0, math.nan, -1.0]))),
    "a log-probability is minus infinity": ("logprobs", received(rollout(logprobs=[-1.0, -math.inf, -1.0]))),
    "a log-probability above zero": ("logprobs", received(rollout(logprobs=[-1.0, 0.1, -1.0]))),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_slice_passes(name):
    """A slice that is as the lease ordered passes every check."""
    assert check_slice(GOOD[name], RULES) is None


@pytest.mark.parametrize("name", BAD)
def test_a_bad_slice_is_refused_with_its_reason(name):
    """Each violation is refused under its own code, with a detail for the node's owner."""
    code, bad = BAD[name]
    rejection = check_slice(bad, RULES)
    assert rejection is not None
    assert (rejection.code, bool(rejection.detail)) == (code, True)


def test_a_context_that_overflows_is_never_valid():
    """Prompt and response must fit the model's context, whatever was ordered."""
    tight = SliceRules(RULES.samples, MANIFEST, 62, 4, RULES.stop_ids, VOCABULARY, 64)
    rejection = check_slice(received(), tight)
    assert rejection is not None
    assert rejection.code == "prompt"


def test_the_first_failing_check_is_the_one_named():
    """The order is the table's: another snapshot is said before a bad token."""
    rejection = check_slice(received(rollout(tokens=(99, STOP)), manifest=b"x" * 32), RULES)
    assert rejection is not None
    assert rejection.code == "manifest"


def test_a_lease_serves_its_own_node_only():
    """An unknown lease and another node's lease are refused alike."""
    assert check_owner("me", "me") is None
    for owner in (None, "other"):
        rejection = check_owner(owner, "me")
        assert rejection is not None
        assert rejection.code == "lease"
