"""The whole node service under virtual time, in a pool that does what the test says."""

from __future__ import annotations

import re

import pytest
import trio

from echo2.node.fake_engine import FakeEngine
from echo2.node.lifecycle import State
from echo2.node.spool import SpoolFull
from echo2.node.status import table
from echo2.p2p.codec import END, encode_frame
from echo2.p2p.errors import ConfigurationError, Refused
from echo2.p2p.identity import Identity
from echo2.p2p.messages import Ack, PeerAddress
from echo2.p2p.nat_view import NatView, ReachabilityView

MINUTES = 120.0
STRANGER = Identity(b"\x09" * 32)


async def until(holds, seconds=MINUTES):
    """Wait for a condition of the outside, in virtual time."""
    with trio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110 - the outside has no event to wait on
            await trio.sleep(0.05)


async def not_now(peer, request):
    raise Refused("full", "not now", retry_seconds=5.0)


async def test_from_hello_to_receipts(autojump_clock, pool):
    """A node joins, fetches the snapshot, works, and ends up with a receipt for every rollout it handed in."""
    await pool.publish(0)
    pool.work = 10
    async with pool.node() as node:
        await until(lambda: node.status.receipts == {"consumed": 20})
        status = node.status
    assert (status.state, status.version, status.installs) == ("working", 0, 1)
    assert (status.rollouts_generated, status.rollouts_submitted, status.spooled) == (20, 20, 0)
    assert status.waiting_for == "paced: version 0 has its share"
    assert {piece.lease_id for piece in pool.received} == set(pool.leased)
    assert all(piece.manifest_hash == pool.published[2] for piece in pool.received)


class FakeNat:
    """Found to be reachable when the test says so."""

    def __init__(self):
        self.addresses = ()
        self.changed = None
        self.asked_again = 0

    async def run(self, changed):
        self.changed = changed
        await trio.sleep_forever()

    def check_soon(self):
        self.asked_again += 1

    def view(self):
        return NatView(ReachabilityView(reachable=bool(self.addresses), proved=self.addresses), (), ())


async def test_only_proved_addresses_are_announced_and_at_once(autojump_clock, pool):
    """The first hello claims none; proof brings another hello, without a pause and without leaving the pool."""
    nat = FakeNat()
    async with pool.node(nat=nat) as node:
        await until(lambda: nat.changed is not None)
        assert [hello.addresses for hello in pool.hellos] == [()]
        nat.addresses = ("/ip4/192.0.2.1/tcp/4001",)
        proved_at = trio.current_time()
        nat.changed()
        await until(lambda: len(pool.hellos) == 2)
        assert trio.current_time() - proved_at < 0.2
        assert pool.hellos[1].addresses == node.status.addresses == nat.addresses
        assert node.status.nat == nat.view()
        await trio.sleep(60)
        assert (len(pool.hellos), nat.asked_again) == (2, 0)


async def test_a_coordinator_that_came_back_is_asked_again_whether_it_reaches_this_node(autojump_clock, pool):
    """It may have forgotten what it found; until it has looked, nobody is told of this node's addresses."""
    nat = FakeNat()
    async with pool.node(nat=nat):
        await until(lambda: nat.changed is not None)
        await pool.kill_coordinator()
        await trio.sleep(30)
        await pool.start_coordinator()
        await until(lambda: nat.asked_again == 1)


async def test_a_peer_that_breaks_the_chunk_protocol_is_reported_to_the_transport(autojump_clock, pool):
    """The transport refuses whoever does it again and again."""
    async with pool.node(), pool.network.transport(STRANGER) as stranger:
        await until(lambda: pool.hellos)
        node = pool.network.find(pool.identity.peer_id)
        stream = await stranger.open(PeerAddress(peer=node.peer_id, addresses=node.addresses), "chunks")
        await stream.send_all(encode_frame(Ack()) + END)
        await until(lambda: node.offences == {STRANGER.peer_id: 1})


async def test_an_install_is_told_at_once_and_heartbeats_are_not_a_storm(autojump_clock, pool):
    """The held reply is cut short by the install's own heartbeat; otherwise about one each ten seconds."""
    async with pool.node() as node:
        await until(lambda: pool.beats)
        await trio.sleep(35)
        assert len(pool.beats) <= 5
        published_at = trio.current_time()
        await pool.publish(0)
        await until(lambda: pool.beats[-1][1].version == 0)
        assert trio.current_time() - published_at < 2
        assert node.status.version == 0
        count = len(pool.beats)
        await trio.sleep(60)
        assert len(pool.beats) - count <= 8
    sequences = [body.sequence for _, body in pool.beats]
    assert sequences == sorted(set(sequences))


async def test_heartbeats_say_how_far_the_next_snapshot_is_until_it_is_in_use(autojump_clock, pool):
    """While it is fetched and loaded; afterwards the manifest hash says it, and nothing more is added."""
    pool.engine = FakeEngine(load_seconds=20)
    async with pool.node():
        manifest_hash = await pool.publish(0)
        await until(lambda: pool.beats and pool.beats[-1][1].version == 0)
        await trio.sleep(30)
    said = [body.fetching for _, body in pool.beats]
    assert said[0] is None
    assert {one.manifest_hash for one in said if one is not None} == {manifest_hash}
    whole = next(one for one in said if one is not None and one.chunks_held == 2)
    assert (whole.cells, whole.sources) == (b"\x03", ())
    assert [one for (_, body), one in zip(pool.beats, said, strict=True) if body.version == 0 and one is not None] == []


async def test_leases_in_hand_are_generated_before_other_weights_are_loaded(autojump_clock, pool):
    """Every slice is made with the snapshot its lease names, however the publications fall."""
    await pool.publish(0)
    pool.work = 200
    pool.engine.rollout_seconds = 0.03
    async with pool.node(batch_seconds=1.0) as node:
        for version in range(1, 6):
            await trio.sleep(1.3)
            await pool.publish(version)
        await until(lambda: node.status.version == 5 and pool.work == 0 and len(pool.received) == 200)
    for piece in pool.received:
        assert piece.manifest_hash == pool.leased[piece.lease_id].manifest_hash
    assert len({piece.manifest_hash for piece in pool.received}) > 3
    assert len(pool.store.snapshots()) == 2


async def test_a_paused_node_stays_paused_over_a_restart_and_goes_on_when_told(autojump_clock, pool):
    """Pause completes what is in hand, asks for nothing more and fetches nothing; resume does all of it."""
    await pool.publish(0)
    pool.work = 1000
    async with pool.node() as node:
        await until(lambda: pool.received)
        pool.commands.write("pause")
        await until(lambda: node.situation.state is State.PAUSED and node.status.leases_held == 0)
        await until(lambda: node.status.spooled == 0)
        asked = len(pool.asked)
        await pool.publish(2)
        await trio.sleep(60)
        assert (len(pool.asked), node.status.version) == (asked, 0)
    async with pool.node() as node:
        await trio.sleep(60)
        assert node.status.state == "paused"
        assert len(pool.asked) == asked
        pool.commands.write("run")
        await until(lambda: node.status.version == 2 and len(pool.asked) > asked)


async def test_finish_completes_sends_collects_and_stops(autojump_clock, pool):
    """`run` returns; nothing is left in hand or in the spool; the next start is not a finish."""
    await pool.publish(0)
    pool.work = 1000
    async with pool.network.transport(pool.identity) as transport:
        service = pool.service(transport)
        with trio.fail_after(MINUTES):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(service.run)
                await until(lambda: pool.received)
                pool.commands.write("finish")
    status = service.status
    assert status.state == "stopped"
    assert set(pool.leased) == {piece.lease_id for piece in pool.received}
    assert (status.spooled, status.receipts_waiting) == (0, 0)
    assert pool.commands.read() == "run"


async def test_finish_does_not_wait_for_ever(autojump_clock, pool):
    """With the coordinator gone the node stops after its bound, and the spool keeps what was not sent."""
    await pool.publish(0)
    pool.work = 4
    pool.instead["rollouts"] = not_now
    async with pool.network.transport(pool.identity) as transport:
        service = pool.service(transport)
        with trio.fail_after(2000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(service.run)
                await until(lambda: service.status.spooled)
                pool.commands.write("finish")
    assert service.status.spooled == 8
    assert "not now" in service.status.last_error


async def test_a_final_no_ends_the_node_with_one_sentence(autojump_clock, pool):
    """A wrong token cannot be mended by trying again."""
    pool.hello_refusal = Refused("token_unknown", "this coordinator made no such token; ask the operator")
    async with pool.network.transport(pool.identity) as transport:
        service = pool.service(transport)
        with pytest.raises(ConfigurationError, match="refuses this node: this coordinator made no such token"):
            await service.run()
    assert service.status.state == "stopped"
    assert "no such token" in service.status.last_error
    assert len(pool.hellos) == 1


async def test_a_node_that_took_part_before_waits_for_a_coordinator_that_forgot_it(autojump_clock, pool):
    """Its token is unknown to a new ledger: it shows why and keeps asking, also after a restart, until it is let in."""
    await pool.publish(0)
    pool.work = 2
    async with pool.node() as node:
        await until(lambda: node.status.rollouts_submitted)
    pool.hello_refusal = Refused("token_unknown", "this coordinator made no such token; ask the operator")
    before = len(pool.hellos)
    async with pool.node() as node:
        await trio.sleep(600)
        assert node.status.state == "joining"
        assert "no such token" in node.status.last_error
        assert 5 < len(pool.hellos) - before < 100
        pool.hello_refusal = None
        await until(lambda: node.status.state == "working")


async def test_a_no_for_now_is_asked_again(autojump_clock, pool):
    """A coordinator that is busy says when to come back."""
    pool.hello_refusal = Refused("busy", "too many nodes at once", retry_seconds=20.0)
    async with pool.node() as node:
        await trio.sleep(15)
        assert len(pool.hellos) == 1
        assert node.status.state == "joining"
        pool.hello_refusal = None
        await until(lambda: node.status.state == "installing")
        assert len(pool.hellos) == 2


async def test_a_coordinator_that_comes_back_finds_everything(autojump_clock, pool):
    """Killed in the middle of work and started again a minute later: the node joins by itself, nothing is lost."""
    await pool.publish(0)
    pool.work = 400
    async with pool.node() as node:
        await until(lambda: len(pool.received) > 20)
        await pool.kill_coordinator()
        await until(lambda: node.status.state == "joining")
        await trio.sleep(60)
        assert node.status.state == "joining"
        assert "cannot" in node.status.last_error
        await pool.start_coordinator()
        back_at = trio.current_time()
        await until(lambda: node.status.state == "working")
        assert trio.current_time() - back_at < 40
        await until(lambda: pool.work == 0 and node.status.spooled == 0 and node.status.leases_held == 0)
    acknowledged = {piece.lease_id for piece in pool.received}
    lost = set(pool.leased) - acknowledged  # only grants whose reply was cut
    assert len(lost) <= 64
    assert node.status.rollouts_generated == 2 * len(acknowledged)


async def test_a_restart_uses_the_snapshot_on_disk(autojump_clock, pool):
    """No download when the newest whole snapshot is here already."""
    await pool.publish(0)
    async with pool.node() as node:
        await until(lambda: node.status.version == 0)
    asked = pool.manifests_asked
    pool.work = 3
    async with pool.node() as node:
        await until(lambda: len(pool.received) == 3)
        assert node.status.installs == 1
    assert pool.manifests_asked == asked


async def test_rollouts_not_acknowledged_before_a_kill_are_sent_after_it(autojump_clock, pool):
    """The spool outlives the process."""
    await pool.publish(0)
    pool.work = 4
    pool.instead["rollouts"] = not_now
    async with pool.node() as node:
        await until(lambda: node.status.spooled == 8)
    del pool.instead["rollouts"]
    async with pool.node() as node:
        await until(lambda: node.status.rollouts_submitted == 8)
    assert len(pool.received) == 4


async def test_a_snapshot_that_cannot_be_loaded_changes_nothing(autojump_clock, pool):
    """The old one stays in use, the reason is shown, the next one is taken."""
    await pool.publish(0)
    async with pool.node() as node:
        await until(lambda: node.status.version == 0)
        await pool.publish(2)
        pool.engine.refused.add(pool.published[1].snapshot_sha256)
        await until(lambda: "cannot be used" in node.status.last_error)
        pool.work = 2
        await until(lambda: len(pool.received) == 2)
        assert (node.status.version, node.status.state) == (0, "working")
        asked = pool.manifests_asked
        await trio.sleep(120)
        assert pool.manifests_asked == asked
        await pool.publish(4)
        await until(lambda: node.status.version == 4)


async def test_the_same_bytes_under_a_higher_epoch_are_not_loaded_again(autojump_clock, pool):
    """A learner that resumed publishes its checkpoint's version anew: only the name changes."""
    await pool.publish(2, data=b"same" * 1000)
    async with pool.node() as node:
        await until(lambda: node.status.version == 2)
        await pool.publish(2, epoch=1, data=b"same" * 1000)
        await until(lambda: node.status.epoch == 1)
    assert pool.engine.loads == 1


async def test_a_broken_engine_blocks_the_node_and_says_why(autojump_clock, pool):
    """No leases are taken meanwhile; when it works again the node goes on."""
    await pool.publish(0)
    pool.work = 1000
    pool.engine.failures = 1
    async with pool.node() as node:
        await until(lambda: node.status.state == "blocked")
        assert node.status.waiting_for == "the engine process was killed by signal 9"
        asked = len(pool.asked)
        await trio.sleep(30)
        assert len(pool.asked) <= asked + 1
        await until(lambda: len(pool.received) > 10)
        assert node.status.state == "working"


async def test_a_full_disk_blocks_and_loses_nothing(autojump_clock, pool, monkeypatch):
    """The batch waits in memory until there is room, and nothing more is asked for."""
    await pool.publish(0)
    pool.work = 1000
    pool.lease_seconds = 600.0
    add, full = pool.spool.add, True

    def fill(finished):
        if full:
            raise SpoolFull("the disk takes no more")
        add(finished)

    monkeypatch.setattr(pool.spool, "add", fill)
    async with pool.node() as node:
        await until(lambda: node.status.state == "blocked")
        assert node.status.waiting_for == "the disk takes no more"
        await trio.sleep(30)
        held = len(pool.leased)
        await trio.sleep(30)
        assert len(pool.leased) == held
        full = False
        await until(lambda: node.status.state == "working")
        await until(lambda: len(pool.received) > held)
    assert set(list(pool.leased)[:held]) <= {piece.lease_id for piece in pool.received}


async def test_an_expired_lease_is_not_worked_on(autojump_clock, pool):
    """Its slot is someone else's by now; it is counted and shown."""
    await pool.publish(0)
    pool.engine.rollout_seconds = 30.0
    pool.lease_seconds = 20.0
    pool.work = 10
    async with pool.node() as node:
        await until(lambda: node.status.leases_expired, seconds=3000)
        assert "expired" in node.status.last_error


async def test_an_order_that_cannot_be_run_here_does_not_cost_the_others(autojump_clock, pool):
    """The batch is run again lease by lease; the refused one is counted and shown."""
    await pool.publish(0)

    async def one_too_long(peer, request):
        reply = await pool.usual["leases"](peer, request)
        if len(reply.leases) > 1 and not node.status.leases_refused:
            long = reply.leases[0].model_copy(update={"prompt_tokens": bytes(4 * 2_000)})
            return reply.model_copy(update={"leases": (long, *reply.leases[1:])})
        return reply

    pool.engine = FakeEngine(sequence_tokens_max=1000)
    pool.instead["leases"] = one_too_long
    pool.work = 8
    async with pool.node() as node:
        await until(lambda: len(pool.received) == 7)
        assert node.status.leases_refused == 1
        assert "need more than 1000 tokens" in node.status.last_error


@pytest.mark.parametrize("what", ["signer", "sequence", "session", "peer"])
async def test_a_notice_that_is_not_for_this_heartbeat_is_not_obeyed(autojump_clock, pool, what):
    """A forged or replayed notice moves nothing, whatever version it names."""
    await pool.publish(0)
    if what == "signer":
        pool.notice_signer = Identity(bytes([9]) * 32)
    else:
        wrong = {"sequence": 10**6, "session": bytes(16), "peer": Identity(bytes([9]) * 32).peer_id}
        pool.notice_changes = {what: wrong[what]}
    async with pool.node() as node:
        await trio.sleep(25)
        assert node.status.protocol_errors >= 2
        assert node.status.version is None
        assert pool.manifests_asked == 0


async def test_a_suspended_node_shows_the_coordinators_verdict(autojump_clock, pool):
    """Looks healthy, earns nothing: not here."""
    pool.notice_changes = {"node_state": "suspended"}
    await pool.publish(0)
    async with pool.node() as node:
        await until(lambda: node.status.state == "blocked")
        assert node.status.waiting_for == "the coordinator has suspended this node"
        pool.notice_changes = {}
        await until(lambda: node.status.state == "working")


async def test_a_suspended_nodes_owner_is_told_why_and_for_how_long(autojump_clock, pool):
    """In the words of the coordinator; a home clock may be wrong, so it is a time that is left."""
    pool.notice_changes = {
        "node_state": "suspended", "node_reason": "12 of its last 200 leases were not answered",
        "node_expires_seconds": 3000.0,
    }  # fmt: skip
    await pool.publish(0)
    async with pool.node() as node:
        await until(lambda: node.status.state == "blocked")
        words = "the coordinator has suspended this node for 50 min more: 12 of its last 200 leases were not answered"
        assert node.status.waiting_for == words
        assert ("standing", words) in table(node.status.model_dump())


async def test_a_node_that_has_applied_waits_for_the_operator(autojump_clock, pool):
    """It asks for nothing but what is new, no more often than its heartbeats; admitted, it works."""
    pool.notice_changes = {"node_state": "applied"}
    pool.work = 3
    async with pool.node() as node:
        await trio.sleep(600)
        assert node.status.state == "blocked"
        assert "the operator of this pool has yet to admit this node" in node.status.waiting_for
        assert len(pool.beats) <= 62
        assert not pool.asked
        assert not pool.manifests_asked
        pool.notice_changes = {}
        await pool.publish(0)
        await until(lambda: node.status.receipts == {"consumed": 6})


async def test_a_banned_node_stops_with_the_coordinators_words(autojump_clock, pool):
    """There is nothing to wait for; its status keeps why."""
    pool.notice_changes = {"node_state": "banned", "node_reason": "forged rewards"}
    async with pool.network.transport(pool.identity) as transport:
        service = pool.service(transport)
        with pytest.raises(ConfigurationError, match="the coordinator has banned this node: forged rewards"):
            await service.run()
        assert ("standing", "the coordinator has banned this node: forged rewards") in table(
            service.status.model_dump()
        )


async def test_a_node_in_probation_shows_how_far_it_is(autojump_clock, pool):
    """7 of 10 leases."""
    pool.notice_changes = {"node_state": "probation", "warmup_returned": 7, "warmup_leases": 10}
    await pool.publish(0)
    async with pool.node() as node:
        await until(lambda: node.status.node_state == "probation")
        words = "in probation: 7 of its first 10 leases have come back"
        assert ("standing", words) in table(node.status.model_dump())


async def test_what_the_coordinator_warns_of_is_shown_and_logged_once(autojump_clock, pool, caplog):
    """A second machine with the same key is the owner's to know, on the machine that goes on."""
    pool.notice_changes = {"warning": "a second process with this node's key was refused"}
    async with pool.node() as node:
        await trio.sleep(60)
        assert ("warning", "a second process with this node's key was refused") in table(node.status.model_dump())
        assert caplog.text.count("the coordinator says: a second process") == 1
        pool.notice_changes = {}
        await until(lambda: not node.status.warning)


async def test_a_process_whose_key_is_alive_elsewhere_waits_and_says_so(autojump_clock, pool):
    """It is the spare: it takes over when the other one is over."""
    pool.hello_refusal = Refused("identity_live", "another process uses this node's key", 20.0)
    await pool.publish(0)
    async with pool.node() as node:
        await trio.sleep(120)
        assert node.status.waiting_for == "another process uses this node's key"
        assert len(pool.hellos) <= 8
        assert {hello.session for hello in pool.hellos} == {pool.hellos[0].session}
        pool.hello_refusal = None
        await until(lambda: node.status.state == "working")


async def test_a_process_that_stops_in_order_says_goodbye(autojump_clock, pool):
    """Its last heartbeat says that it has stopped, in the session it had."""
    await pool.publish(0)
    async with pool.node() as node:
        await until(lambda: node.status.state == "working")
        session = pool.beats[-1][1].session
        await node.goodbye()
        assert (pool.beats[-1][1].state, pool.beats[-1][1].session) == ("stopped", session)


@pytest.mark.parametrize("state", ["finished", "stopped"])
async def test_after_the_run_the_owner_is_told_that_it_is_over(autojump_clock, pool, state):
    """Not that leases are waited for: none will come."""
    await pool.publish(0)
    pool.work = 3
    async with pool.node() as node:
        await until(lambda: node.status.receipts == {"consumed": 6})
        pool.notice_changes = {"run_state": state}
        await until(lambda: node.status.run_state == state)
        assert node.status.waiting_for == (
            f"nothing: the run is {state}, there is no more work; `echo2-node finish` ends this node"
        )


async def test_a_second_process_with_the_same_key_stops_the_first(autojump_clock, pool):
    """Two machines with one key would steal each other's leases: the older one ends, with the reason."""

    async def ended(peer, heartbeat):
        raise Refused("session_ended", "another process has gone on with this key since")

    pool.instead["heartbeat"] = ended
    async with pool.network.transport(pool.identity) as transport:
        with pytest.raises(ConfigurationError, match="key is in use elsewhere"), trio.fail_after(MINUTES):
            await pool.service(transport).run()


async def test_a_lease_beyond_the_samples_of_a_group_costs_the_reply_only(pool):
    """An order that no rollout could answer is the coordinator's fault: counted, and the node works on."""
    await pool.publish(0)
    pool.work = 1

    async def too_far(peer, message):
        del pool.instead["leases"]
        reply = await pool.usual["leases"](peer, message)
        (lease,) = reply.leases
        pool.work = 1
        return reply.model_copy(update={"leases": (lease.model_copy(update={"sample_first": 255}),)})

    pool.instead["leases"] = too_far
    async with pool.node() as node:
        await until(lambda: pool.received)
        assert node.status.protocol_errors == 1
        assert node.status.state == "working"


async def test_an_engine_that_does_not_come_back_is_named(autojump_clock, pool):
    """The owner sees what the engine is at and for how long, the coordinator that this node is no help just now."""
    pool.engine = FakeEngine(load_seconds=20, rollout_seconds=1)
    async with pool.node() as node:
        await pool.publish(3)
        await until(lambda: node.status.waiting_for.startswith("the engine: loading snapshot 3 since "))
        await until(lambda: node.status.waiting_for == "the engine: loading snapshot 3 since 15 s")
        pool.work = 40
        await until(lambda: node.status.leases_held)
        assert node.status.waiting_for == ""
        await until(lambda: node.status.waiting_for == "the engine: a batch of 16 since 11 s")
        await until(lambda: pool.beats[-1][1].state == "stalled" or node.status.rollouts_generated)
    assert pool.beats[-1][1].state == "working"


async def test_a_stalled_node_says_so(autojump_clock, pool):
    """A batch that takes ten times what it should is told to the coordinator with the next sign of life."""
    pool.engine = FakeEngine(rollout_seconds=100)
    await pool.publish(0)
    pool.work = 2
    async with pool.node() as node:
        await until(lambda: node.status.leases_held)
        await until(lambda: pool.beats[-1][1].state == "stalled", seconds=60)


async def test_an_error_is_shown_until_it_is_over(autojump_clock, pool):
    """What went wrong is on show with its age while it lasts, and gone once the same thing works."""
    pool.instead["rollouts"] = not_now
    await pool.publish(0)
    pool.work = 3
    async with pool.node() as node:
        await until(lambda: node.status.last_error.startswith("submit: not now"))
        await trio.sleep(3)
        assert node.status.last_error_seconds > 0
        shown = dict(table(node.status.model_dump()))
        assert re.fullmatch(r"submit: not now \[full\]  \(\d+ s before\)", shown["last error"])
        del pool.instead["rollouts"]
        await until(lambda: node.status.rollouts_submitted)
        assert (node.status.last_error, node.status.last_error_seconds) == ("", None)
        assert "last error" not in dict(table(node.status.model_dump()))
