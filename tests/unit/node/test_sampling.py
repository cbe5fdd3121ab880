"""Seeded sampling: hand-worked values, and properties that hold for any logits."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from echo2.node.sampling import draw, keyed, uniform, uniforms
from echo2.p2p.messages import Sampling

SEED = bytes(range(32))
LOGITS = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], dtype=np.float64)).astype(np.float32)

rows = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(2, 12)),
    elements=st.floats(-30, 30, width=32),
)
near_ends = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53, 2**-53]))


def sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, tokens_max=4, stop_ids=())


def token(u, **filters):
    tokens, _ = draw(LOGITS, np.array([u]), sampling(**filters))
    return int(tokens[0])


@pytest.mark.parametrize(
    ("sample", "t", "message"),
    [
        (0, 0, "00000000000000000000000000000000"),
        (1, 0, "01000000000000000000000000000000"),
        (3, 258, "03000000000000000201000000000000"),
    ],
)
def test_uniform_is_the_top_53_bits_of_the_keyed_hash(sample, t, message):
    """The counters are little-endian, the key is the seed, and the first 53 bits of the digest are the fraction."""
    digest = hashlib.blake2b(bytes.fromhex(message), key=SEED).digest()
    bits = "".join(f"{byte:08b}" for byte in digest)[:53]
    assert uniform(SEED, sample, t) == int(bits, 2) / 2**53


def test_uniform_golden_values():
    """Values fixed for good: another would be another protocol."""
    assert [uniform(SEED, 0, 0), uniform(SEED, 1, 0), uniform(SEED, 0, 1)] == [
        0.7460769846485147,
        0.2274378224400987,
        0.8394386909484982,
    ]


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 2**40)), min_size=1, max_size=8))
def test_many_uniforms_are_the_single_ones(pairs):
    """The vectorised form shares the keyed state and changes nothing."""
    got = uniforms([keyed(SEED)] * len(pairs), [s for s, _ in pairs], [t for _, t in pairs])
    assert got.tolist() == [uniform(SEED, s, t) for s, t in pairs]
    assert ((got >= 0) & (got < 1)).all()


@pytest.mark.parametrize(
    ("u", "expected"),
    [(0.0, 0), (0.4999, 0), (0.5001, 1), (0.7499, 1), (0.7501, 2), (0.8749, 2), (0.8751, 3), (1 - 2**-53, 3)],
)
def test_the_token_is_where_u_falls(u, expected):
    """Probabilities 1/2, 1/4, 1/8, 1/8 in vocabulary order; the log-probability is the token's own."""
    tokens, logprobs = draw(LOGITS, np.array([u]), sampling())
    assert tokens.tolist() == [expected]
    assert logprobs[0] == pytest.approx(math.log([0.5, 0.25, 0.125, 0.125][expected]), abs=1e-6)


def test_a_boundary_belongs_to_the_token_above_it():
    """Two equal logits split the interval exactly at 1/2, which is token 1's."""
    equal = np.zeros((1, 2), dtype=np.float32)
    assert draw(equal, np.array([0.5]), sampling())[0][0] == 1
    assert draw(equal, np.array([0.5 - 2**-54]), sampling())[0][0] == 0


def test_temperature_comes_first():
    """At T = 1/2 the probabilities square: 16, 4, 1, 1 of 22."""
    assert token(15.9 / 22, temperature=0.5) == 0
    assert token(16.1 / 22, temperature=0.5) == 1
    _, logprob = draw(LOGITS, np.array([0.0]), sampling(temperature=0.5))
    assert logprob[0] == pytest.approx(math.log(16 / 22), abs=1e-6)


def test_top_k_keeps_exactly_k_and_the_lower_id_of_a_tie():
    """Tokens 2 and 3 tie; with k = 3 only token 2 stays, and the mass is 4, 2, 1 of 7."""
    assert token(1 - 2**-53, top_k=3) == 2
    assert token(6.1 / 7, top_k=3) == 2
    assert token(5.9 / 7, top_k=3) == 1


def test_top_p_keeps_until_the_mass_is_reached():
    """p = 0.6 needs tokens 0 and 1 (0.5 is not enough); p = 0.4 needs token 0 alone."""
    assert token(1 - 2**-53, top_p=0.6) == 1
    assert token(1 - 2**-53, top_p=0.4) == 0


def test_top_p_acts_on_what_top_k_left():
    """After k = 2 the mass is 2/3, 1/3, so p = 0.6 is met by token 0 (it would not be, unnormalised)."""
    assert token(1 - 2**-53, top_k=2, top_p=0.6) == 0


def test_min_p_is_relative_to_the_likeliest():
    """min_p = 0.4 of 1/2 is 0.2: tokens 0 and 1 stay."""
    assert token(1 - 2**-53, min_p=0.4) == 1


def test_the_log_probability_is_before_the_filters():
    """Filtered to one token, its log-probability is still that of the whole distribution."""
    tokens, logprob = draw(LOGITS, np.array([0.9]), sampling(top_k=1))
    assert tokens[0] == 0
    assert logprob[0] == pytest.approx(math.log(0.5), abs=1e-6)


def test_logits_that_are_not_finite_are_refused():
    """NaN never becomes token 0."""
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite"):
            draw(np.array([[0.0, bad]], dtype=np.float32), np.array([0.5]), sampling())


def test_a_forbidden_token_is_never_drawn():
    """A logit of minus infinity at either end has no mass, at any u."""
    logits = np.array([[-np.inf, 0.0, -np.inf]], dtype=np.float32)
    for u in (0.0, 0.5, 1 - 2**-53):
        assert draw(logits, np.array([u]), sampling())[0][0] == 1


@given(rows, near_ends, st.floats(0.1, 4), st.integers(0, 13), st.floats(0.01, 1), st.floats(0, 0.99))
def test_filters_never_give_a_token_outside(logits, u, temperature, top_k, top_p, min_p):
    """Whatever the logits and u, the token is inside every filter and its log-probability is at most 0."""
    u_rows = np.full(len(logits), u)
    rule = sampling(temperature, top_k, top_p, min_p)
    tokens, logprobs = draw(logits, u_rows, rule)
    for row, drawn in zip(logits.astype(np.float64) / temperature, tokens, strict=True):
        scaled = row - row.max()
        p = np.exp(scaled) / np.exp(scaled).sum()
        above = (scaled > scaled[drawn]) | ((scaled == scaled[drawn]) & (np.arange(len(p)) < drawn))
        if top_k:
            assert above.sum() < top_k
        assert p[above].sum() < top_p + 1e-9
        assert p[drawn] >= min_p * p.max() - 1e-12
    assert (logprobs <= 1e-6).all()


@given(rows, near_ends)
def test_a_batch_is_its_rows(logits, u):
    """Rows do not influence one another."""
    rule = sampling(0.7, 5, 0.9, 0.01)
    together = draw(logits, np.full(len(logits), u), rule)
    for row in range(len(logits)):
        alone = draw(logits[row : row + 1], np.array([u]), rule)
        assert (together[0][row], together[1][row]) == (alone[0][0], alone[1][0])


def test_empirical_frequencies_are_the_probabilities():
    """20,000 draws with seeded u match softmax within five standard errors."""
    count = 20_000
    u = uniforms([keyed(SEED)] * count, range(count), [0] * count)
    tokens, _ = draw(np.repeat(LOGITS, count, axis=0), u, sampling())
    for index, p in enumerate([0.5, 0.25, 0.125, 0.125]):
        assert abs((tokens == index).mean() - p) < 5 * math.sqrt(p * (1 - p) / count)
