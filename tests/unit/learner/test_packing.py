"""How rollouts lie in packed micro-batches: every sampled token once, under its own prefix, within the budget."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echo2.learner.packing import packs


def arrays(rows, masks):
    width = max(map(len, rows))
    tokens = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), bool)
    for index, (row, sampled) in enumerate(zip(rows, masks, strict=True)):
        tokens[index, : len(row)] = row
        mask[index, : len(row)] = sampled
    return tokens, mask


def contexts(pack):
    """What each place of the packed row can see, itself included, as tokens; and whether positions count from 0."""
    seen, stem, end = [], [], 0
    for length, alone in zip(pack.lengths, pack.alone, strict=True):
        own = pack.tokens[end : end + length].tolist()
        before = [] if alone else stem
        if alone:
            stem = own
        seen += [before + own[: place + 1] for place in range(length)]
        end += length
    assert end == len(pack.tokens)
    assert pack.positions.tolist() == [len(context) - 1 for context in seen]
    return seen


def test_a_prompt_is_laid_down_once_for_its_samples():
    """Two samples of the prompt 7 8, worked by hand: the stem, then each response but for its last token."""
    tokens, mask = arrays([[7, 8, 1, 2, 3], [7, 8, 4, 5]], [[0, 0, 1, 1, 1], [0, 0, 1, 1]])
    (pack,) = packs(tokens, mask, np.array([0, 0]), np.array([0, 1]), tokens_max=100)
    assert pack.tokens.tolist() == [7, 8, 1, 2, 4]
    assert pack.positions.tolist() == [0, 1, 2, 3, 2]
    assert pack.lengths == (2, 2, 1)
    assert pack.alone == (True, False, False)
    assert pack.source.tolist() == [1, 2, 3, 1, 4]
    assert pack.rows.tolist() == [0, 0, 0, 1, 1]
    assert pack.columns.tolist() == [2, 3, 4, 2, 3]


def test_rollouts_of_different_prompts_share_nothing():
    """Without a common first token each stands by itself, even within a group."""
    tokens, mask = arrays([[7, 1, 2], [8, 1, 2]], [[0, 1, 1], [0, 1, 1]])
    (pack,) = packs(tokens, mask, np.array([0, 0]), np.array([0, 1]), tokens_max=100)
    assert pack.tokens.tolist() == [7, 1, 8, 1]
    assert pack.alone == (True, True)


def test_equal_rollouts_are_computed_once():
    """The same response drawn twice has no branch, and both of its copies are scored."""
    tokens, mask = arrays([[7, 1, 2], [7, 1, 2]], [[0, 1, 1], [0, 1, 1]])
    (pack,) = packs(tokens, mask, np.array([0, 0]), np.array([0, 1]), tokens_max=100)
    assert pack.tokens.tolist() == [7, 1]
    assert pack.source.tolist() == [0, 1, 0, 1]


def test_a_rollout_longer_than_the_budget_stands_alone():
    """The budget bounds memory; it never loses a rollout."""
    tokens, mask = arrays([[7] + [1] * 9, [8, 2], [9, 3]], [[0] + [1] * 9, [0, 1], [0, 1]])
    made = list(packs(tokens, mask, np.array([0, 1, 2]), np.arange(3), tokens_max=4))
    assert [len(pack.tokens) for pack in made] == [9, 2]


def test_rows_without_sampled_tokens_are_left_out():
    """Nothing to score is nothing to compute."""
    tokens, mask = arrays([[7, 1], [7, 1]], [[0, 0], [0, 0]])
    assert list(packs(tokens, mask, np.array([0, 0]), np.arange(2), tokens_max=4)) == []


@st.composite
def batches(draw):
    rows, masks, group = [], [], []
    for label in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
        for _ in range(draw(st.integers(1, 4))):
            response = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
            drawn = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
            rows.append(prompt + response)
            masks.append([False] * len(prompt) + drawn)
            group.append(label)
    return (*arrays(rows, masks), np.array(group))


@given(batches(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_each_sampled_token_is_scored_once_under_its_own_prefix(batch, tokens_max, random):
    """Over any lengths, masks and budgets: what predicts a token has seen exactly the tokens before it."""
    tokens, mask, group = batch
    rows = np.array(random.sample(range(len(tokens)), random.randint(1, len(tokens))))
    scored = []
    for pack in packs(tokens, mask, group, rows, tokens_max=tokens_max):
        seen = contexts(pack)
        for source, row, column in zip(pack.source, pack.rows, pack.columns, strict=True):
            assert seen[source] == tokens[row, :column].tolist()
            scored.append((row, column))
        assert len(pack.tokens) <= tokens_max or len(np.unique(pack.rows)) == 1
        assert len(pack.tokens) <= sum(int(column) for column in [mask[r].nonzero()[0].max() for r in set(pack.rows)])
    assert sorted(scored) == sorted((row, column) for row in rows for column in mask[row].nonzero()[0])
