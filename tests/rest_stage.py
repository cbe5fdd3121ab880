"""REST on a stage: a service of fixed views, everything else as it is, with an access token for each role."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import httpx

from echo2.coordinator import accounts
from echo2.coordinator.access import AccessBook
from echo2.coordinator.accounts import Entry
from echo2.coordinator.api import make_api
from echo2.coordinator.books import Books
from echo2.coordinator.broadcast_view import BroadcastView
from echo2.coordinator.config import CoordinatorConfig
from echo2.coordinator.event_feed import EventFeed
from echo2.coordinator.ledger import open_ledger
from echo2.coordinator.rest_gate import Door
from echo2.coordinator.rest_guard import Rooms
from echo2.coordinator.rest_limits import Limits, Rate
from echo2.coordinator.rest_sessions import Sessions
from echo2.coordinator.run_judge import Judge
from echo2.coordinator.tokens import TokenRow
from echo2.coordinator.views import (
    AppealView,
    EvaluationView,
    EventView,
    NodeView,
    PoolView,
    RolloutCounts,
    RunView,
    StepView,
    TransitionView,
)
from echo2.p2p.errors import Refused
from echo2.p2p.identity import Identity
from echo2.tasks.model_card import ModelCard

TOKEN = "operators-own-token"
PEER = Identity(b"\x02" * 32).peer_id
STRANGER = Identity(b"\x03" * 32).peer_id
AUTH = {"Authorization": f"Bearer {TOKEN}"}
BASE = "http://127.0.0.1:8080"
WALL = 1_700_000_000.0

NO_BROADCAST = BroadcastView(run="sums", waiting="no snapshot is published yet")

UNLIMITED = Limits(*[Rate(10**6, 10**6)] * 4)


def step(number):
    return StepView(
        step=number, reward_mean=number / 100, staleness=2, staleness_mean=1.5, kl=0.01, ratio_mean=1.0,
        clip_share=0.01, entropy=0.5, loss=0.1, response_tokens_mean=3.0, rollouts=128, groups_without_spread=2,
        train_seconds=3.0,
        idle_seconds=0.2,
    )  # fmt: skip


class FakeDesk:
    """Two fixed views, and a list of the changes asked for."""

    def __init__(self):
        self.changes = []
        self.trouble = ""
        self.steps = 5
        self.nodes = 1
        self.state = "running"
        self.fault = None
        self.events = []
        self.add_event()

    def pool_view(self):
        return PoolView(
            coordinator=PEER, addresses=("/ip4/127.0.0.1/tcp/1",), nodes_healthy=1, nodes_late=0, nodes_dead=0,
            nodes_suspended=0, mu_pool=2.5, mu_min=None, t_bcast_seconds=0.5, t_train_seconds=None,
            refused={"rejected: manifest": 3}, protocol_errors=1, trouble=self.trouble,
        )  # fmt: skip

    def nodes_view(self):
        gone = ("suspend_node", PEER) in [change[:2] for change in self.changes]
        return tuple(
            NodeView(
                peer=PEER if number == 0 else Identity(number.to_bytes(32)).peer_id, name=f"n{number}",
                software="echo2 0.1", addresses=(),
                state="suspended" if gone and number == 0 else "active",
                state_reason="", health="healthy", last_seen_seconds=1.0,
                node_says="generating", epoch=0, version=2, version_lag=0, mu=1.5,
                tokens_per_second=9.0, leases_held=1, samples_held=2, accepted=10, rejected=1, evaluated=0,
                rollouts=RolloutCounts(submitted=11, consumed=10, rejected=1), protocol_errors=0, reason="",
            )
            for number in range(self.nodes)
        )  # fmt: skip

    def nodes_of(self, run):
        self.run_view(run)
        return list(self.nodes_view())

    def runs_view(self):
        return (self.run_view("sums"),)

    def node_view(self, peer):
        return next((node for node in self.nodes_view() if node.peer == peer), None) or {}[peer]

    def run_view(self, run):
        if run != "sums":
            raise KeyError(run)
        return RunView(
            run="sums", task="sums", model="tiny", state=self.state, state_reason="", learner=PEER,
            learner_connected=True, learner_status="training", epoch=0, version=2, learner_version=3, steps=100,
            staleness_max=3, publish_period=2, rollouts_per_step=256, group_size=8, waiting="", reserved=5,
            reserved_max=9, outstanding=1, rollouts=RolloutCounts(submitted=11, consumed=10, rejected=1), evaluated=4,
            evaluations=(EvaluationView(version=0, purpose="baseline", size=4, count=4, mean=0.25, complete=True),),
            series=(), reward_mean=0.5, staleness=1, kl=0.001, bubble=0.1, t_train_seconds=None, t_bcast_seconds=0.5,
            staleness_estimate=2,
        )  # fmt: skip

    def create_token(self, *, uses, expires_seconds, actor, reason, run=None):
        if run not in {None, "sums"}:
            raise KeyError(run)
        self.changes.append(("create_token", uses, expires_seconds, actor, reason))
        return "new-token"

    def suspend_node(self, peer, *, actor, reason, expires_seconds=None):
        self.changes.append(("suspend_node", peer, actor, reason))

    def restore_node(self, peer, *, actor, reason):
        self.changes.append(("restore_node", peer, actor, reason))

    def admit_node(self, peer, *, actor, reason):
        self.changes.append(("admit_node", peer, actor, reason))

    def drain_node(self, peer, *, actor, reason):
        self.changes.append(("drain_node", peer, actor, reason))

    def ban_node(self, peer, *, actor, reason, expires_seconds=None):
        self.changes.append(("ban_node", peer, actor, reason, expires_seconds))

    def unban_node(self, peer, *, actor, reason):
        self.changes.append(("unban_node", peer, actor, reason))

    def transitions_view(self, peer):
        made = {"number": 1, "event": "joined", "from_state": "new", "to_state": "probation", "actor": peer}
        return [TransitionView(**made, reason="it brought a join token", wall_seconds=WALL, expires_seconds=None)]

    def broadcast_view(self, limit, run=None):
        if run not in {None, "sums"}:
            raise KeyError(run)
        return NO_BROADCAST

    def appeals_view(self):
        return [
            AppealView(
                id=1, run="sums", peer=PEER, name="n0", subject="suspension", text="why?", state="open", answer="",
                posting=None, created_seconds=WALL, resolved_seconds=None,
            )
        ]  # fmt: skip

    def resolve_appeal(self, id_, upheld, *, actor, reason, amount_micros=0, unit="usd"):
        if id_ != 1:
            raise KeyError(id_)
        self.changes.append(("resolve_appeal", id_, upheld, actor, reason, amount_micros, unit))
        state = "upheld" if upheld else "refused"
        return self.appeals_view()[0].model_copy(update={"state": state, "answer": reason, "resolved_seconds": WALL})

    def decisions_view(self):
        return [
            {
                "at": 1.0, "run": "sums", "action": "activate", "chosen": [PEER], "mu_pool": 2.5, "mu_target": None,
                "price_after": 550_000, "reason": "the pool is too slow",
            }
        ]  # fmt: skip

    def events_view(self, *, limit, before):
        return [event for event in reversed(self.events) if before is None or event.id < before][:limit]

    def events_behind(self, after, *, limit):
        return [event for event in self.events if event.id > after][:limit]

    def newest_event(self):
        return self.events[-1].id if self.events else 0

    def add_event(self, reason="r"):
        number = self.newest_event() + 2
        event = EventView(
            id=number, wall_seconds=1.0, actor="operator", action="token made", subject="x", reason=reason
        )
        self.events.append(event)

    def steps_view(self, run, *, after, limit):
        self.run_view(run)
        return [step(number) for number in range(self.steps) if number > after][:limit]

    def tokens_view(self):
        return [TokenRow("00112233aabb", 3, 1, 1.0, None)]

    def revoke_token(self, hash_start, *, actor, reason):
        (row,) = [row for row in self.tokens_view() if row.hash_start == hash_start] or [{}[hash_start]]
        self.changes.append(("revoke_token", hash_start, actor, reason))
        return replace(row, expires=5.0)

    async def create_run(self, run, *, actor, reason):
        if run.name == "sums":
            raise Refused("run_exists", "the ledger has a run 'sums' already; take another name")
        self.changes.append(("create_run", run, actor, reason))
        return self.run_view("sums").model_copy(update={"run": run.name, "weight": run.weight, "state": "ready"})

    def pause_run(self, run, *, actor, reason):
        self.changes.append(("pause_run", run, actor, reason))

    def resume_run(self, run, *, actor, reason):
        if self.state != "paused":
            raise Refused("not_paused", "the run is running, not paused")
        self.state = "running"
        self.changes.append(("resume_run", run, actor, reason))

    def stop_run(self, run, *, actor, reason):
        if self.fault:
            raise self.fault
        self.changes.append(("stop_run", run, actor, reason))


class Text:
    """A tokeniser of single characters."""

    card = ModelCard(
        name="small", architecture="llama", tokenizer_sha256="0" * 64, vocabulary_size=256, context_tokens=64,
        stop_ids=(0,),
    )  # fmt: skip

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return ["".join(map(chr, response)) for response in tokens]


def checked(settings, _source):
    """What the learner's program says of its tables, without starting it."""
    return {
        "objective": {"updates_per_step": 2}, "train": {"learning_rate": 1e-5}, "adapter": None, "metrics": {},
        "domain": "f32", "seed": 0, "threads": 1, "checkpoints_kept": 3, "partial_seconds": 1.0,
    } | settings  # fmt: skip


CONFIG = CoordinatorConfig(
    run={"name": "sums", "task": "arithmetic", "model_dir": "/models/small", "learner": PEER, "steps": 10}
)


class Stage:
    """The API over a ledger in `folder`. `wall` and `now` move only when a test moves them."""

    def __init__(self, folder, *, url="", door=None, limits=UNLIMITED, stream_seconds=0.0):
        self.desk = FakeDesk()
        self.wall, self.now = WALL, 1000.0
        self.url = url or f"sqlite:///{folder / 'ledger.sqlite3'}"
        self.ledger = open_ledger(self.url)
        entropy = random.Random(1).randbytes
        self.access = AccessBook(
            self.ledger,
            own={"operator": hashlib.sha256(TOKEN.encode()).digest()},
            wall=lambda: self.wall,
            entropy=entropy,
        )
        self.sessions = Sessions(entropy)
        self.rooms = Rooms(
            desk=self.desk,
            access=self.access,
            sessions=self.sessions,
            books=Books(self.url),
            feed=EventFeed(self.desk, stream_seconds=stream_seconds),
            judge=Judge(CONFIG, Text(), self.desk.pool_view, check=checked),
            limits=limits,
            join=lambda token, run="sums": f"echo2://{PEER}@1.2.3.4:1/{run}?token={token}",
            clock=lambda: self.now,
        )
        self.app = make_api(self.rooms, door=door or Door(), version="0.1.0")

    def client(self, base=BASE, address="127.0.0.1", **headers):
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=(address, 1))
        return httpx.AsyncClient(transport=transport, base_url=base, headers=headers)

    def token(self, role, name="", expires_seconds=None):
        """An access token as a header."""
        token = self.access.create(
            name or f"a-{role}", role, expires_seconds=expires_seconds, actor="test", reason="test"
        )
        return {"Authorization": f"Bearer {token}"}

    def post_credits(self, *amounts, peer=PEER):
        with self.ledger.transaction() as connection:
            entries = [Entry("sums", peer, "credit", "credit", amount, 1, "test", "for a test") for amount in amounts]
            accounts.append(connection, entries, wall=self.wall)

    def close(self):
        self.ledger.close()


def is_problem(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == status
    assert set(body) == {"type", "title", "status", "detail"}
    return body["detail"]
