from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.join import JoinString, parse_join_string

PEER = Identity(b"\x01" * 32).peer_id
OTHER = PEER[:-1] + "3"  # one wrong character: no key has this name
GOOD = f"echo2://{PEER}@203.0.113.7:4001,[2001:db8::1]:4002,pool.example.org:4003/sums-1?token=aB3_-9{'0' * 30}"


def test_reads_every_kind_of_address():
    """IPv4, bracketed IPv6 and a host name become the multiaddrs a transport dials."""
    join = parse_join_string(GOOD)
    assert join == JoinString(
        peer=PEER,
        addresses=("/ip4/203.0.113.7/tcp/4001", "/ip6/2001:db8::1/tcp/4002", "/dns/pool.example.org/tcp/4003"),
        token="aB3_-9" + "0" * 30,
        run="sums-1",
    )
    assert join.coordinator.peer == PEER
    assert str(join) == GOOD


@pytest.mark.parametrize("wrap", ["  {}\n", '"{}"', "<{}>", "'{}'\r\n", "`{}`"])
def test_survives_being_pasted(wrap):
    """Blanks, quotes and line ends around a pasted join string do no harm."""
    assert parse_join_string(wrap.format(GOOD)) == parse_join_string(GOOD)


def test_survives_a_line_break_inside():
    """A mail program's line break in the middle does no harm."""
    assert parse_join_string(GOOD[:60] + "\n  " + GOOD[60:]) == parse_join_string(GOOD)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must start with echo2://"),
        ("http://x", "must start with echo2://"),
        (f"echo2://{PEER}", "no '@'"),
        ("echo2://Qm@1.2.3.4:1/r?token=t", "'Qm' is not a peer id"),
        (f"echo2://{PEER}@1.2.3.4/r?token=t", "'1.2.3.4' is not HOST:PORT"),
        (f"echo2://{PEER}@1.2.3.4:0/r?token=t", "'0' is not a number from 1 to 65535"),
        (f"echo2://{PEER}@1.2.3.4:99999/r?token=t", "'99999' is not a number"),
        (f"echo2://{PEER}@1.2.3.400:1/r?token=t", "1.2.3.400 is not an IP address"),
        (f"echo2://{PEER}@\u0661.\u0661.\u0661.\u0661:1/r?token=t", "is neither a host name nor an IP address"),
        (f"echo2://{PEER}@[{'a:' * 300}]:1/r?token=t", "is neither a host name nor an IP address"),
        (f"echo2://{PEER}@{'a' * 600}:1/r?token=t", "is neither a host name nor an IP address"),
        (f"echo2://{'1' * 100_000}@1.2.3.4:1/r?token=t", "is not a peer id"),
        (f"echo2://{OTHER}@1.2.3.4:1/r?token=t", "is not a peer id"),
        (f"echo2://{PEER}@2001:db8::1:80/r?token=t", "IPv6 goes in brackets"),
        (f"echo2://{PEER}@1.2.3.4:1", "the run's name is missing"),
        (f"echo2://{PEER}@1.2.3.4:1/a$b?token=t", "'a$b' is not a run's name"),
        (f"echo2://{PEER}@1.2.3.4:1/r", "?token=... is missing"),
        (f"echo2://{PEER}@1.2.3.4:1/r?token=", "?token=... is missing"),
        (f"echo2://{PEER}@1.2.3.4:1/r?token=a&b", "characters that no token has"),
        (
            f"echo2://{PEER}@1.2.3.4:1/r?token=29",
            "changed: its token has 2 characters, and every token has 36; copy it",
        ),
        (f"{GOOD[:-1]}", "its token has 35 characters"),
        (f"{GOOD}0", "its token has 37 characters"),
        (f"echo2://{PEER}@{','.join(['1.2.3.4:1'] * 17)}/r?token=t", "more than 16 addresses"),
    ],
)
def test_says_which_part_is_wrong(text, says):
    """Each way a join string can be cut or changed has its own sentence."""
    with pytest.raises(ConfigurationError) as caught:
        parse_join_string(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_repr_hides_the_token():
    """A join string in a log line or a traceback does not give the token away."""
    assert "aB3" not in repr(parse_join_string(GOOD))


def test_refuses_to_write_an_address_it_could_not_read():
    """A QUIC address has no HOST:PORT form."""
    with pytest.raises(ConfigurationError, match="cannot be put in a join string"):
        str(JoinString(peer=PEER, addresses=("/ip4/1.2.3.4/udp/4001/quic-v1",), token="t", run="r"))


@given(st.text(max_size=200))
def test_any_text_is_an_answer_or_a_configuration_error(text):
    """No text at all makes the parser raise anything else."""
    for candidate in (text, "echo2://" + text, f"echo2://{PEER}@{text}", f"echo2://{PEER}@1.2.3.4:1/{text}"):
        with contextlib.suppress(ConfigurationError):
            assert parse_join_string(candidate).coordinator.peer == PEER


@given(
    seed=st.binary(min_size=32, max_size=32),
    ports=st.lists(st.integers(1, 65535), min_size=1, max_size=16),
    run=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    token=st.from_regex(r"[A-Za-z0-9._~-]{36}", fullmatch=True),
)
def test_round_trip(seed, ports, run, token):
    """Writing and reading give back the same join string."""
    addresses = tuple(f"/ip4/198.51.100.{port % 256}/tcp/{port}" for port in ports)
    join = JoinString(peer=Identity(seed).peer_id, addresses=addresses, token=token, run=run)
    assert parse_join_string(str(join)) == join


def test_a_pool_without_tokens_has_a_join_string_too():
    """It says `none`: one that lost its end is still found out."""
    text = f"echo2://{PEER}@203.0.113.7:4001/sums-1?token=none"
    join = parse_join_string(text)
    assert (join.token, str(join)) == ("", text)
