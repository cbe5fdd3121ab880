"""Keys, peer ids and signatures."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.codec import encode_record
from echo2.p2p.errors import BadSignature, ConfigurationError
from echo2.p2p.identity import (
    Identity,
    check_peer_id,
    load_or_create_identity,
    open_signed,
    payload_hash,
    peer_id_of,
    public_key_of,
)
from echo2.p2p.messages import Signed, Ticket

ALICE = Identity(b"\x01" * 32)
BOB = Identity(b"\x02" * 32)
TICKET = Ticket(run="r", manifest_hash=bytes(32), peer=BOB.peer_id)


def test_peer_id_is_the_one_libp2p_computes():
    """Our peer id of a key equals libp2p's, so the transport proves the same name that signs."""
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    assert ALICE.peer_id == str(ID.from_pubkey(create_new_key_pair(ALICE.seed).public_key))


@given(st.binary(min_size=32, max_size=32))
def test_peer_id_round_trips(key):
    """A peer id holds the whole public key."""
    assert public_key_of(peer_id_of(key)) == key


@pytest.mark.parametrize("text", ["", "0", "Qm" + "a" * 44, ALICE.peer_id[:-1], ALICE.peer_id + "1", "é" * 50])
def test_what_is_not_a_peer_id_is_a_bad_signature(text):
    """Text that holds no Ed25519 key verifies nothing."""
    with pytest.raises(BadSignature):
        public_key_of(text)


def test_signed_opens_only_under_its_signer_and_label():
    """The right key and label open it; another of either does not."""
    signed = ALICE.sign("ticket", TICKET)
    assert open_signed(signed, ALICE.peer_id, "ticket", Ticket) == TICKET
    for signer, label in ((BOB.peer_id, "ticket"), (ALICE.peer_id, "plan")):
        with pytest.raises(BadSignature):
            open_signed(signed, signer, label, Ticket)


@given(st.integers(0, 8 * 64 - 1))
def test_any_flipped_bit_of_the_signature_is_caught(bit):
    """No bit of a signature is without meaning."""
    signed = ALICE.sign("ticket", TICKET)
    flipped = bytearray(signed.signature)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadSignature):
        open_signed(Signed(payload=signed.payload, signature=bytes(flipped)), ALICE.peer_id, "ticket", Ticket)


def test_signature_is_checked_before_the_payload_is_parsed():
    """Garbage under a wrong signature is a bad signature, not a malformed frame."""
    with pytest.raises(BadSignature):
        open_signed(Signed(payload=b"\xc1", signature=bytes(64)), ALICE.peer_id, "ticket", Ticket)


def test_labels_cannot_run_into_payloads():
    """A NUL ends the label: no payload makes one label's bytes equal another's."""
    signed = ALICE.sign("run", TICKET)
    assert signed.payload == encode_record(TICKET)
    assert payload_hash(signed) == payload_hash(ALICE.sign("ticket", TICKET))
    assert signed.signature != ALICE.sign("ticket", TICKET).signature


def test_seed_of_another_length_is_refused():
    """An identity is 32 bytes."""
    with pytest.raises(ConfigurationError):
        Identity(bytes(31))


def test_key_does_not_show_in_repr():
    """Printing an identity shows its public name only."""
    assert repr(ALICE) == f"Identity({ALICE.peer_id})"


def test_key_file_is_made_once_and_private(tmp_path):
    """The first use writes 32 bytes that only the owner can read; the second reads them."""
    path = tmp_path / "state" / "key"
    first = load_or_create_identity(path)
    assert path.read_bytes() == first.seed
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_create_identity(path).peer_id == first.peer_id
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


def test_key_file_others_can_read_is_refused(tmp_path):
    """The error says how to mend it."""
    path = tmp_path / "key"
    load_or_create_identity(path)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        load_or_create_identity(path)


def test_malformed_key_file_is_refused_and_kept(tmp_path):
    """A file of another length is never overwritten: it may be someone's key."""
    path = tmp_path / "key"
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="not a key file"):
        load_or_create_identity(path)
    assert path.read_bytes() == b"short"


def test_key_path_that_is_a_folder_is_refused(tmp_path):
    """What is no file is a configuration error, not a traceback."""
    (tmp_path / "key").mkdir(mode=0o700)
    with pytest.raises(ConfigurationError, match="cannot use the key file"):
        load_or_create_identity(tmp_path / "key")


def test_key_in_a_folder_that_cannot_be_made_is_refused(tmp_path):
    """A file where a folder should be, which stops root too, is a configuration error."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot use the key file"):
        load_or_create_identity(tmp_path / "file" / "key")


def test_most_typing_errors_in_a_peer_id_are_seen():
    """A peer id names a point of the curve: every real one does, about half of those with a wrong character do not."""
    real = [Identity(bytes([number]) * 32).peer_id for number in range(20)]
    assert [check_peer_id(peer) for peer in real] == real
    refused = 0
    for peer in real:
        with contextlib.suppress(BadSignature):
            check_peer_id(peer[:-1] + ("a" if peer[-1] != "a" else "b"))
            continue
        refused += 1
    assert refused == 9
    with pytest.raises(BadSignature):
        check_peer_id("1" * 100_000)
