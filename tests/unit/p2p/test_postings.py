from __future__ import annotations

import hashlib
from itertools import pairwise

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from echo2.p2p.errors import BadSignature
from echo2.p2p.identity import Identity, open_signed
from echo2.p2p.postings import ORIGIN, Chain, Posting, Statement, check_statement, contradiction, hash_of, posting_hash

PEERS = [Identity(bytes([number]) * 32).peer_id for number in (1, 2)]
COORDINATOR = Identity(bytes([9]) * 32)


def posted(chain, peer=0, amount=5, reason="for work", **changes):
    """The next posting of a list of them."""
    fields = {
        "id": len(chain) + 1,
        "run": "r",
        "peer": PEERS[peer],
        "kind": "credit",
        "unit": "credit",
        "amount_micros": amount,
        "quantity": 1,
        "actor": "coordinator",
        "reason": reason,
        "wall_micros": 1_700_000_000_000_000,
        "previous": chain[-1].hash if chain else ORIGIN,
    } | changes
    return Posting(**fields, hash=posting_hash(list(fields.values())))


def chain_of(*amounts):
    chain = []
    for place, amount in enumerate(amounts):
        chain.append(posted(chain, place % 2, amount))
    return chain


def checked(postings):
    chain = Chain()
    for posting in postings:
        if not chain.add(posting):
            break
    return chain


def statement(chain, peer=0, after=0, **changes):
    mine = tuple(posting for posting in chain if posting.peer == PEERS[peer] and posting.id > after)
    facts = {"head_id": chain[-1].id, "head_hash": chain[-1].hash} if chain else {"head_id": 0, "head_hash": ORIGIN}
    facts = {"peer": PEERS[peer], "after": after, "postings": mine, "wall_micros": 1} | facts | changes
    return Statement(**facts)


def test_the_hash_is_that_of_the_specification():
    """SHA-256 of the domain and the msgpack list of the fields, worked out by hand."""
    (first,) = chain_of(5)
    plain = [1, "r", PEERS[0], "credit", "credit", 5, 1, "coordinator", "for work", 1_700_000_000_000_000, bytes(32)]
    assert first.hash == hashlib.sha256(b"echo2/posting/1\0" + msgpack.packb(plain)).digest() == hash_of(first)


def test_a_whole_chain_holds():
    """Its length and its newest hash are told."""
    chain = chain_of(1, -2, 3)
    found = checked(chain)
    assert (found.count, found.head, found.fault) == (3, chain[-1].hash, "")


@given(
    st.lists(st.integers(-(2**53), 2**53), min_size=1, max_size=6),
    st.data(),
)
def test_any_change_of_any_posting_is_found_and_named(amounts, data):
    """One field of one posting is another: that posting is named; what came before it still holds."""
    chain = chain_of(*amounts)
    place = data.draw(st.integers(0, len(chain) - 1))
    changes = {
        "amount_micros": (chain[place].amount_micros + 1) if chain[place].amount_micros < 2**53 else 0,
        "peer": PEERS[(place + 1) % 2],
        "reason": "for nothing",
        "quantity": 2,
        "unit": "usd",
        "wall_micros": 3,
        "previous": b"x" * 32,
        "hash": b"y" * 32,
    }
    name = data.draw(st.sampled_from(sorted(changes)))
    false = chain[place].model_copy(update={name: changes[name]})
    found = checked([*chain[:place], false, *chain[place + 1 :]])
    assert found.count == place
    assert f"posting {place + 1} (" in found.fault


@given(st.integers(2, 6), st.data())
def test_a_missing_posting_is_found_and_named(length, data):
    """One is taken out of the middle, or the first."""
    chain = chain_of(*range(length))
    place = data.draw(st.integers(0, length - 2))
    found = checked([*chain[:place], *chain[place + 1 :]])
    assert found.fault.startswith(f"posting {place + 1} is missing")


def test_a_chain_written_anew_from_the_middle_does_not_join():
    """Even with hashes computed again: the next one does not follow."""
    chain = chain_of(1, 2, 3)
    forged = posted(chain[:1], 1, amount=7)
    assert "posting 3" in checked([chain[0], forged, chain[2]]).fault
    assert "does not follow" in checked([chain[0], forged, chain[2]]).fault


def test_amounts_are_integers_within_bounds():
    """No float, nothing that JSON or a double would round."""
    for amount in (0.5, 2**53 + 1, "5"):
        with pytest.raises(ValidationError):
            posted([], amount=amount)


def test_a_statement_holds_whatever_others_are_posted_between():
    """Signed, then checked with no network."""
    chain = chain_of(1, 2, 3, 4, 5)
    signed = COORDINATOR.sign("statement", statement(chain, after=1))
    opened = open_signed(signed, COORDINATOR.peer_id, "statement", Statement)
    assert [posting.id for posting in opened.postings] == [3, 5]
    assert check_statement(opened) == ""
    assert check_statement(statement([])) == ""
    with pytest.raises(BadSignature):
        open_signed(signed, PEERS[0], "statement", Statement)


def test_what_is_wrong_with_a_statement_is_said():
    """Another's posting, one that was changed, one out of order, one that is not of the chain it claims."""
    chain = chain_of(1, 2, 3)
    mine = statement(chain).postings
    altered = mine[0].model_copy(update={"amount_micros": 9})
    assert check_statement(statement(chain, postings=(chain[1],))) == "posting 2 is another node's"
    assert "posting 1 was changed" in check_statement(statement(chain, postings=(altered,)))
    assert check_statement(statement(chain, postings=mine[::-1])) == "posting 1 is out of order"
    assert check_statement(statement(chain, after=3, postings=mine)) == "posting 1 is out of order"
    assert "not of the chain that ends with 2" in check_statement(statement(chain, head_id=2))
    assert "not of the chain that ends with 3" in check_statement(statement(chain, head_hash=b"x" * 32))
    alone = [posted([], 0)]
    alone.append(posted(alone, 0, previous=b"x" * 32))
    assert check_statement(statement(alone)) == "posting 2 does not follow from posting 1"


def test_two_statements_of_different_chains_contradict_each_other():
    """A coordinator that wrote its books anew is caught by what it signed before."""
    before, after = chain_of(1, 2, 3), chain_of(1, 9, 3)
    assert contradiction([statement(before[:1]), statement(before)]) == ""
    assert contradiction([statement(before, 1), statement(after, 1)]).startswith("posting 2 has 2 hashes")
    assert contradiction([statement(before), statement(after)]).startswith("posting 2 has 2 hashes")


def test_a_chain_has_no_end_of_its_own():
    """What was checked so far is told after each."""
    chain = Chain()
    heads = [chain.head]
    for posting in chain_of(1, 2):
        assert chain.add(posting)
        heads.append(chain.head)
    assert heads[0] == ORIGIN
    assert all(one != other for one, other in pairwise(heads))
