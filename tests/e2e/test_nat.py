"""Node to node through NAT, in network namespaces; and our relay with py-libp2p's, both ways round.

What came of hole punching is written into the test's report (`record_testsuite_property`) and printed at its end.
"""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from e2e import nat_world
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.relay.circuit_v2.config import RelayConfig, RelayRole
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.resources import RelayLimits
from libp2p.relay.circuit_v2.transport import CircuitV2Transport
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import DialStrategy, open_libp2p_transport
from echo2.p2p.messages import PeerAddress
from echo2.p2p.relay import Relay
from echo2.p2p.relay_client import RelayClient, relayed_address
from echo2.p2p.relay_host import Libp2pHost

pytestmark = pytest.mark.e2e

BOUND_SECONDS = 90.0

HINDRANCE = nat_world.hindrance()
needs_namespaces = pytest.mark.skipif(bool(HINDRANCE), reason=HINDRANCE or "can")


@asynccontextmanager
async def at_home(a, b):
    """The world, and the nodes in its homes; the relay is there before them."""
    with nat_world.open_world(a, b) as world:
        async with nat_world.process(world, "relay", "relay") as relay:
            await relay.next("ready")
            async with (
                nat_world.process(world, "a", "node", "a") as at_a,
                nat_world.process(world, "b", "node", "b") as at_b,
            ):
                yield world, at_a, at_b


# (kind of a's NAT, kind of b's NAT, whether each may announce its address, whether hole punching makes it direct)
PAIRS = [
    ("masquerade", "masquerade", (False, False), True),
    ("full_cone", "masquerade", (True, False), True),
    ("full_cone", "symmetric", (True, False), True),
    ("symmetric", "full_cone", (False, True), True),
    ("masquerade", "symmetric", (False, False), False),
    ("symmetric", "symmetric", (False, False), False),
]


@needs_namespaces
@pytest.mark.parametrize(
    ("a", "b", "reachable", "direct"),
    [
        pytest.param(*pair, id=f"{pair[0]}-{pair[1]}", marks=[pytest.mark.slow] if number else [])
        for number, pair in enumerate(PAIRS)
    ],
)
async def test_nodes_behind_nat_meet_through_the_relay_and_then_directly_where_their_nats_allow(
    a, b, reachable, direct, record_testsuite_property
):
    """Relaying works for every pair; hole punching is tried for each, and both ends say what came of it."""
    with trio.fail_after(BOUND_SECONDS):
        async with at_home(a, b) as (world, at_a, at_b):
            nodes = {"a": at_a, "b": at_b}
            found = {home: await node.next("reachability") for home, node in nodes.items()}
            for home, node in nodes.items():
                await node.next("place")
                assert found[home]["reachable"] is reachable[home == "b"]
                announced = [f"/ip4/{world.public(home)}/tcp/{nat_world.PORT}"] if found[home]["reachable"] else []
                assert found[home]["proved"] == announced

            await at_a.tell("dial")
            relayed = await at_a.next("echoed")
            assert relayed["bytes"] == nat_world.DIALLED_BYTES
            assert "relay" in relayed["via"]

            outcome = {home: await node.last_punch() for home, node in nodes.items()}
            for home in nodes:
                record_testsuite_property(f"hole punching {a} - {b}, {home}", outcome[home])
                print(
                    f"{a} - {b}, {home}: {outcome[home]['result']}, {outcome[home]['tries']}: {outcome[home]['reason']}"
                )
                assert outcome[home]["result"] == ("direct" if direct else "failed")
                assert outcome[home]["reason"]
                assert direct or outcome[home]["tries"] == 3
            await at_a.tell("ask")
            asked = await at_a.next("echoed")
            assert asked["bytes"] == nat_world.ASKED_BYTES
            assert any(via != "relay" for via in asked["via"]) is direct


@needs_namespaces
async def test_a_node_that_can_be_dialled_is_dialled_and_needs_no_relay():
    """Without NAT the addresses are proved, and the other node uses them."""
    with trio.fail_after(BOUND_SECONDS):
        async with at_home("masquerade", "none") as (_, at_a, at_b):
            (address,) = (await at_b.next("reachability"))["proved"]
            await at_a.next("place")
            await at_a.tell(f"dial {address}")
            assert (await at_a.next("echoed"))["via"] == ["direct"]


# py-libp2p's own relay and ours.

RELAY, ALICE, BOB = (Identity(bytes([n]) * 32) for n in (11, 12, 13))
ANY_PORT = "/ip4/127.0.0.1/tcp/0"


@asynccontextmanager
async def stock(identity, roles):
    """An unmended host with py-libp2p's circuit relay in these roles."""
    keys = create_new_key_pair(identity.seed)
    noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
    host = new_host(key_pair=keys, sec_opt={NOISE_ID: noise})
    limits = RelayLimits(duration=600, data=1 << 20, max_circuit_conns=8, max_reservations=8)
    async with host.run([Multiaddr(ANY_PORT)]):
        protocol = CircuitV2Protocol(host, limits, allow_hop=bool(roles & RelayRole.HOP))
        async with background_trio_service(protocol):
            await protocol.event_started.wait()
            host.circuit = CircuitV2Transport(host, protocol, RelayConfig(roles=roles, limits=limits))
            yield host
            await host.close()


def address_of(host):
    address = str(host.get_addrs()[0]).split("/p2p/")[0]
    return PeerAddress(peer=host.get_id().to_base58(), addresses=(address,))


async def connect(host, peer):
    await host.get_network().dial_addr(Multiaddr(peer.addresses[0]), ID.from_base58(peer.peer))


def info_of(peer):
    return PeerInfo(ID.from_base58(peer.peer), [Multiaddr(one) for one in peer.addresses])


async def test_our_peers_meet_through_the_stock_relay():
    """Reserve, connect and a stream each way, with py-libp2p in the middle."""
    with trio.fail_after(BOUND_SECONDS):
        async with (
            stock(RELAY, RelayRole.HOP) as relay,
            open_libp2p_transport(BOB, [ANY_PORT]) as bob,
            open_libp2p_transport(ALICE, []) as alice,
        ):
            there = RelayClient(Libp2pHost(bob), wall=lambda: 0.0)
            there.serve()
            bob.set_handler("hello", nat_world.echo)
            reservation = await there.reserve(address_of(relay))
            assert reservation.expires_unix_seconds > 0
            here = RelayClient(Libp2pHost(alice), wall=lambda: 0.0)
            alice.dial_strategies.append(DialStrategy("relay", here.dial))
            through = PeerAddress(peer=BOB.peer_id, addresses=relayed_address(address_of(relay)))
            assert await nat_world.echoed(alice, through, 100_000) == 100_000


async def test_stock_peers_meet_through_our_relay():
    """py-libp2p's client takes a place at our relay, and another one reaches it there."""
    with trio.fail_after(BOUND_SECONDS):
        async with (
            open_libp2p_transport(RELAY, [ANY_PORT]) as relay,
            stock(BOB, RelayRole.STOP | RelayRole.CLIENT) as bob,
            stock(ALICE, RelayRole.STOP | RelayRole.CLIENT) as alice,
        ):
            served = Relay(Libp2pHost(relay), may_use=lambda peer: True, clock=trio.current_time, wall=lambda: 2e9)
            served.serve()
            ours = PeerAddress(peer=relay.peer_id, addresses=relay.addresses)

            async def echo_once(stream):
                await stream.write(await stream.read(5))
                await stream.close()

            bob.set_stream_handler("/echo2/hello/1", echo_once)
            await connect(bob, ours)
            stream = await bob.new_stream(ID.from_base58(ours.peer), ["/libp2p/circuit/relay/0.2.0/hop"])
            assert await bob.circuit._make_reservation(stream, ID.from_base58(ours.peer))
            assert served.view().reservations == 1

            await connect(alice, ours)
            raw = await alice.circuit.dial_peer_info(PeerInfo(bob.get_id(), []), relay_info=info_of(ours))
            await alice.upgrade_outbound_connection(raw, bob.get_id())
            stream = await alice.new_stream(bob.get_id(), ["/echo2/hello/1"])
            await stream.write(b"there")
            assert await stream.read(5) == b"there"
            assert served.view().circuits == 1


async def test_a_stock_peer_reaches_ours_through_our_relay():
    """The three parts need not be of one make."""
    with trio.fail_after(BOUND_SECONDS):
        async with (
            open_libp2p_transport(RELAY, [ANY_PORT]) as relay,
            open_libp2p_transport(BOB, []) as bob,
            stock(ALICE, RelayRole.STOP | RelayRole.CLIENT) as alice,
        ):
            Relay(Libp2pHost(relay), may_use=lambda peer: True, clock=trio.current_time, wall=lambda: 2e9).serve()
            ours = PeerAddress(peer=relay.peer_id, addresses=relay.addresses)
            bob.set_handler("hello", nat_world.echo)
            there = RelayClient(Libp2pHost(bob), wall=lambda: 2e9)
            there.serve()
            await there.reserve(ours)
            await connect(alice, ours)
            target = ID.from_base58(BOB.peer_id)
            raw = await alice.circuit.dial_peer_info(PeerInfo(target, []), relay_info=info_of(ours))
            await alice.upgrade_outbound_connection(raw, target)
            stream = await alice.new_stream(target, ["/echo2/hello/1"])
            await stream.write(b"there")
            assert await stream.read(5) == b"there"
