"""What every sandbox of the catalogue keeps to, in this process and in the confined worker."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.tasks.catalog import SANDBOXES, make_task
from echo2.tasks.sandbox import DETAILS_MAX, OBSERVATION_CHARACTERS_MAX, TURNS_MAX, environment_seed
from echo2.tasks.scorer import InlineScorer, PlayItem, open_scorer

NAMES = sorted(SANDBOXES)
MARK = "<|im_end|>"
ENVIRONMENT = "e1d51b7f575380de8e6c71bfe977c85a2ea582b2538307797e91625b908c8129"
WORDS = (
    "call",
    "check",
    "fold",
    "raise to 9",
    "all in",
    "22",
    "25",
    "29",
    "",
    "no",
    f"call 24 {MARK}",
    "\ud800",
    "\0" * 50,
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(seed=st.binary(min_size=32, max_size=32), actions=st.lists(st.sampled_from(WORDS), min_size=TURNS_MAX))
def test_an_episode_ends_within_its_turns_and_says_nothing_of_the_models_words(name, seed, actions):
    """From any seed, under any actions: it begins open, is finite and bounded, ends once, and comes out the same."""
    task = make_task(name)
    assert 1 <= task.turns_max <= TURNS_MAX

    def once():
        sandbox = task.sandbox()
        said = [sandbox.reset(seed)]
        assert not said[0].done
        for action in actions[: task.turns_max]:
            if said[-1].done:
                break
            said.append(sandbox.step(action))
        if not said[-1].done:
            said.append(sandbox.truncate())
        for after in (lambda: sandbox.step("call"), sandbox.truncate):
            with pytest.raises(ValueError, match="over"):
                after()
        assert not sandbox.reset(seed).done, "it may be begun again"
        return said

    said = once()
    assert said[-1].done
    assert [each.done for each in said[:-1]] == [False] * (len(said) - 1)
    assert all(math.isfinite(each.reward) for each in said)
    assert all(MARK not in each.text and len(each.text) <= OBSERVATION_CHARACTERS_MAX for each in said)
    assert all(not each.details for each in said[:-1])
    assert 1 <= len(said[-1].details) <= DETAILS_MAX
    assert [(each.text, each.reward, dict(each.details)) for each in once()] == [
        (each.text, each.reward, dict(each.details)) for each in said
    ]


@pytest.mark.parametrize("name", NAMES)
async def test_the_confined_worker_plays_what_this_process_plays(name):
    """Its library was loaded before it lost the right to open files; thirty episodes come out the same."""
    rng = random.Random(name)
    turns_max = make_task(name).turns_max
    items = [
        PlayItem(name, rng.randbytes(32), tuple(rng.choice(WORDS[:9]) for _ in range(rng.randint(0, turns_max))), cut)
        for cut in (False, True)
        for _ in range(15)
    ]
    async with open_scorer(name) as scorer:
        assert await scorer.play(items) == await InlineScorer().play(items)


def test_a_groups_environment_is_seeded_by_its_lease():
    """BLAKE2b-256 of "env" under the lease's seed: pinned, for nodes of every release must agree."""
    assert environment_seed(bytes(range(32))).hex() == ENVIRONMENT
