"""Hello: who may take part. A key is let in once; from then on the key is the admission.

| asks     | is let in when                                                                                   |
|----------|--------------------------------------------------------------------------------------------------|
| learner  | its key is the one the run's configuration names; it needs no token                              |
| new node | mode `open`: always. `token`: it brings one that is known, in time and not spent. `hand`: it     |
|          | brings such a token, or else waits for the operator (`applied`); at most `applied_max` wait      |
| node     | always, unless it is banned, or another process of its key is alive (`sessions`)                 |

What it is then, and what it gets, says `node_states`. A suspended node is let in to read its receipts and why it is
suspended. A pool with as many live nodes as one broadcast plan holds is full; so is an address or a network with as
many as `admission_limits` allows it. Whoever is turned away did no wrong: it is told why, and is no worse off the next
time.

The ledger knows every node; memory keeps the KNOWN_MAX that were heard of last, and finds the others there at hello.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import sqlalchemy as sa

from echo2.p2p.errors import Refused
from echo2.p2p.messages import (
    NODES_MAX,
    WIRE_VERSION,
    PeerAddress,
    RunDescriptor,
    Sampling,
    Standing,
    Welcome,
)

from . import schema, sessions
from .admission_limits import HELLO_BURST, HELLO_SECONDS, HelloRate, NewKeys, check_room
from .history import Delete, insert, update
from .loading import load_node, load_receipts
from .node_states import NEW
from .placement import record_placed
from .pool import KNOWN_MAX, NodeEntry
from .records import record, storable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from echo2.p2p.messages import Hello, Signed
    from echo2.p2p.transport import Transport

    from .history import Change
    from .house import House
    from .node_life import NodeLife
    from .node_records import Moves
    from .node_states import NodeEvent
    from .office import Office
    from .placement import Placement


log = logging.getLogger(__name__)

INCARNATION_BYTES = 16

FULL_SECONDS = 60.0
"""When a node that found the pool full may come again: places get free as nodes go."""

APPLIED_FULL_SECONDS = 600.0
"""When a node may come again that found too many others waiting for the operator: people are slow."""


KNOWN_SPARE = KNOWN_MAX // 100
"""Forgotten at once beyond what must be: finding them is a look at all."""

FIRST: dict[str, object] = {
    "state": "active",
    "reason": "",
    "home": None,
    "back": "active",
    "warmup_returned": 0,
    "warmup_failed": 0,
    "benchmark_rollouts": None,
    "benchmark_tokens": None,
}
"""A row that nothing was said of yet; a learner's stays so."""


class AdmissionDesk:
    """Answers hello."""

    def __init__(self, house: House, life: NodeLife, placement: Placement, transport: Transport) -> None:
        self._house = house
        self._life = life
        self._placement = placement
        self._transport = transport
        self._rate = HelloRate()
        self._keys = NewKeys(house.config.admission.limits)
        self._recorded: dict[str, dict[str, object]] = {}
        self._incarnation = house.first.entropy(INCARNATION_BYTES)

    async def hello(self, peer: str, hello: Hello) -> Welcome:
        """Admit `peer`. Raises Refused."""
        wait = self._rate.count(peer, self._house.clock())
        if wait:
            raise Refused("too_often", f"at most {HELLO_BURST} hellos in {HELLO_BURST * HELLO_SECONDS:.0f} s", wait)
        if WIRE_VERSION not in hello.wire_versions:
            raise Refused(
                "wire_version",
                f"this coordinator speaks wire version {WIRE_VERSION}, {hello.software[:64]} speaks "
                f"{', '.join(map(str, hello.wire_versions))}; install the echo2 release the coordinator runs",
            )
        learns = hello.role == "learner"
        office, state = self._learner(peer, hello) if learns else self._node(peer, hello)
        return Welcome(
            wire_version=WIRE_VERSION,
            node_state=state,
            coordinator_time_seconds=office.wall(),
            heartbeat_seconds=office.config.heartbeat_seconds,
            descriptor=descriptor(office),
            standing=self._standing(office) if learns else None,
        )

    def _standing(self, office: Office) -> Standing:
        run = office.run
        current = run.current.manifest if run.current is not None else None
        return Standing(
            incarnation=self._incarnation,
            epoch=run.epoch_known or (0 if current is not None else None),
            published_epoch=current.epoch if current is not None else None,
            published_version=current.version if current is not None else None,
            learner_version=run.leases.learner_version,
            admitted_sequence=run.next_sequence - 1,
        )

    def _learner(self, peer: str, hello: Hello) -> tuple[Office, str]:
        office = self._house.of_learner(peer)
        if office is None:
            raise self._house.not_a_learner(peer)
        if self.find(peer) is not None:
            raise Refused(
                "learner_is_a_node",
                "this key is a node's of this pool; a learner needs a key of its own (another --home)",
            )
        office.known_learner(peer, office.run.name)
        self._record(peer, hello)
        office.run.learner_addresses = hello.addresses
        office.run.forget_plans()  # their root may have moved
        return office, "active"

    def _node(self, peer: str, hello: Hello) -> tuple[Office, str]:
        house = self._house
        if house.of_learner(peer) is not None:
            raise Refused("not_a_node", "this key is the run's learner; a node needs a key of its own")
        node, host, now = self.find(peer), self._transport.remote(peer), house.clock()
        if node is not None and node.state == "banned":
            self._life.refuse_soon(peer)
            raise house.first.banned(node)
        if hello.run is not None:
            house.office(hello.run)
        anew = node is not None and self._claim(node, hello, now)
        self._check_room(peer, host, now)
        if node is None:
            node = self._let_in(peer, hello, host, now)
        else:
            self._take_again(node, hello)
        if anew or (node.session is None and hello.session is not None):
            assert hello.session is not None, "a session was claimed"
            self._life.adopt(node, hello.session, _mark(hello))
        office = house.of_node(node)
        if node.addresses != hello.addresses:
            office.run.forget_plans()
        node.name, node.software, node.addresses = hello.name, hello.software, hello.addresses
        node.seen_at, node.host = now, host
        return office, node.state

    def _take_again(self, node: NodeEntry, hello: Hello) -> None:
        """A known node: what its hello changes. Raises Refused."""
        house, peer = self._house, node.peer
        bound, spent = self._binding(node, hello)
        wanted = hello.run or bound
        run, why = self._placement.choose(peer, node.run, wanted)
        if node.run and run != node.run:
            self._placement.move({peer: (run, why)})
        price = house.config.activation.price(peer, hello.price_micros_hour)
        moves = self._goes_on(node, price, house.offices[run], brought=bool(spent))
        placed = "" if node.run == run else why
        self._record(peer, hello, run, bound, placed=placed, moves=moves, changes=spent)
        node.price, node.run, node.wanted, node.bound = price, run, wanted, bound
        if moves is not None:
            self._life.apply([moves])

    def _binding(self, node: NodeEntry, hello: Hello) -> tuple[str | None, list[Change]]:
        """The only run that a known node may work for by its token, and the use of another token, where one is needed:
        by a node that has applied, and for another run. Raises Refused."""
        if node.state == "applied":
            with suppress(Refused):
                change, bound = _find(self._house, hello.token, hello.run)
                return bound, [change]
        if node.bound is None or (hello.run in {None, node.bound} and node.bound in self._house.offices):
            return node.bound, []
        if not hello.token:
            raise Refused(
                "token_run",
                f"this node was let in for the run {node.bound} alone; ask the operator for another join string",
            )
        change, bound = _find(self._house, hello.token, hello.run)
        return bound, [change]

    def find(self, peer: str) -> NodeEntry | None:
        """The node of this key, from the ledger if memory let go of it."""
        house = self._house
        node = house.pool.nodes.get(peer)
        if node is None:
            node = load_node(house.ledger, house.config, peer, house.offices)
            if node is not None:
                for office in house:
                    office.run.receipts |= load_receipts(house.ledger, office.run.name, [peer])
                self._remember(node)
        return node

    def _claim(self, node: NodeEntry, hello: Hello, now: float) -> bool:
        """Whether another process than before says hello. Raises Refused where the one before goes on."""
        if hello.session is None:
            return False
        try:
            return sessions.check(node, hello.session, _mark(hello), now, self._house.config.heartbeat_seconds)
        except Refused as refused:
            if refused.code == "identity_live":
                self._life.rival_refused(node)
            raise

    def _check_room(self, peer: str, host: str | None, now: float) -> None:
        house, heartbeat = self._house, self._house.config.heartbeat_seconds
        others = sum(1 for each in house.pool.live(now) if each.peer != peer)
        if others >= NODES_MAX:
            raise Refused(
                "pool_full",
                f"{others} live nodes are in this pool, which is as many as it takes; it tries again by itself",
                FULL_SECONDS,
            )
        near = (
            each.host
            for each in house.pool.nodes.values()
            if each.peer != peer and each.state != "left" and each.health(now, heartbeat) != "dead"
        )
        check_room(host, near, house.config.admission.limits)

    def _let_in(self, peer: str, hello: Hello, host: str | None, now: float) -> NodeEntry:
        """A key that was never here. Raises Refused."""
        house, mode = self._house, self._house.config.admission.mode
        self._keys.check(host, now)
        spent: list[Change] = []
        bound: str | None = None
        event, why = "joined", "this pool is open to anyone"
        if mode == "token" or (mode == "hand" and hello.token):
            try:
                change, bound = _find(house, hello.token, hello.run)
                spent, why = [change], "it brought a join token"
            except Refused:
                if mode == "token":
                    raise
        if mode == "hand" and not spent:
            event, why = "applied", "this pool's operator admits each new node by hand"
            spent = self._make_room()
        wanted = hello.run or bound
        run, placed = self._placement.choose(peer, "", wanted)
        price = house.config.activation.price(peer, hello.price_micros_hour)
        event_kind: NodeEvent = "applied" if event == "applied" else "joined"
        moves = self._life.moves(peer, NEW, event_kind, actor=peer, reason=why, price=price)
        self._record(peer, hello, run, bound, placed=placed, moves=moves, changes=spent)
        self._keys.count(host, now)
        for change in spent:
            if isinstance(change, Delete) and change.table == "nodes":
                for row in change.rows:
                    house.pool.nodes.pop(row[0], None)
        node = NodeEntry(peer, hello.name, hello.software, hello.addresses, standing=moves.standing)
        node.price, node.run, node.wanted, node.bound = price, run, wanted, bound
        self._remember(node)
        house.of_node(node).run.forget_plans()
        return node

    def _make_room(self) -> list[Change]:
        """For one more that waits: the longest silent goes. Raises Refused when none is silent."""
        house, now = self._house, self._house.clock()
        waiting = [node for node in house.pool.nodes.values() if node.state == "applied"]
        most = house.config.admission.applied_max
        if len(waiting) < most:
            return []
        heartbeat = house.config.heartbeat_seconds
        silent = [node for node in waiting if node.health(now, heartbeat) == "dead"]
        if not silent:
            raise Refused(
                "too_many_applied",
                f"{len(waiting)} nodes wait for the operator already; this one tries again by itself",
                APPLIED_FULL_SECONDS,
            )
        gone = min(silent, key=lambda node: node.seen_at or float("-inf"))
        log.info("%s waited for the operator and is forgotten: others wait", gone.name, extra={"peer": gone.peer})
        numbers = range(1, gone.standing.number + 1)
        return [
            Delete("node_transitions", [(gone.peer, number) for number in numbers]),
            Delete("nodes", [(gone.peer,)]),
        ]

    def _goes_on(self, node: NodeEntry, price: int, office: Office, *, brought: bool) -> Moves | None:
        """What a known node's hello makes of it: one that had left comes back; one that has applied has `brought` a
        token now; a volunteer asks for a price, and stands by until the scheduler calls it, or no longer does."""
        if node.state == "left":
            return self._life.moves(node.peer, node.standing, "returned", actor=node.peer, reason="it said hello")
        if node.state == "applied" and brought:
            why = "it brought a join token"
            return self._life.moves(node.peer, node.standing, "admitted", actor=node.peer, reason=why)
        if node.state == "active" and price and node.peer not in office.payroll.by_peer:
            return self._life.moves(node.peer, node.standing, "released", actor=node.peer, reason="it has a price")
        if node.state == "standby" and not price:
            why = "it asks for nothing any more"
            return self._life.moves(node.peer, node.standing, "activated", actor=node.peer, reason=why)
        return None

    def _remember(self, node: NodeEntry) -> None:
        """Keep it in memory; beyond the bound, those go that have nothing with us, the longest silent first."""
        house = self._house
        nodes = house.pool.nodes
        nodes[node.peer] = node
        while len(self._recorded) > KNOWN_MAX:
            del self._recorded[next(iter(self._recorded))]
        if len(nodes) <= KNOWN_MAX:
            return
        now, heartbeat = house.clock(), house.config.heartbeat_seconds
        busy = {entry.peer for office in house for entry in office.run.unfinished.values()}
        busy |= {one.account.peer for office in house for one in office.payroll.engaged.values()}
        idle = [
            each
            for each in nodes.values()
            if each is not node
            and each.peer not in busy
            and not any(office.run.leases.held_by(each.peer) for office in house)
            and each.health(now, heartbeat) == "dead"
        ]
        idle.sort(key=lambda each: each.seen_at or float("-inf"))
        for each in idle[: len(nodes) - KNOWN_MAX + KNOWN_SPARE]:
            del nodes[each.peer]
            for office in house:
                office.run.receipts.pop(each.peer, None)

    def _record(
        self,
        peer: str,
        hello: Hello,
        run: str | None = None,
        bound: str | None = None,
        *,
        placed: str = "",
        moves: Moves | None = None,
        changes: Sequence[Change] = (),
    ) -> None:
        """Put on record what this hello says that the last one, to this process, did not. Raises Refused.

        `placed`: why a node that was in no run is in this one.
        """
        wall = self._house.wall()
        table = schema.nodes
        said: dict[str, object] = {
            "role": hello.role,
            "name": hello.name,
            "software": storable(hello.software),
            "addresses": json.dumps(hello.addresses),
            "price": hello.price_micros_hour,
            "run": run,
            "wanted": hello.run or bound,
            "bound": bound,
        }
        mark = _mark(hello)
        if mark is not None:
            said["home"] = mark
        if moves is None and self._recorded.get(peer) == said:
            log.info("%s is back: %s", hello.role, hello.name, extra={"peer": peer})
            return
        values: dict[str, object] = {**said, "last_hello": wall}
        listed: list[Change] = []
        if moves is not None:
            values |= moves.values
            listed = moves.listed()
        new = moves is not None and moves.transitions[0].from_state == "new"
        with self._house.ledger.transaction() as connection:
            if connection.scalar(sa.select(table.c.peer).where(table.c.peer == peer)):
                # New and there already: it was the learner of a run that is gone.
                change: Change = update("nodes", [peer], (FIRST if new else {}) | values)
            else:
                change = insert("nodes", FIRST | {"peer": peer, "first_hello": wall} | values)
            action = "hello"
            if new:
                assert moves is not None
                action = "node applied" if moves.standing.state == "applied" else "node admitted"
            record(
                connection,
                [*changes, change, *listed],
                wall=wall,
                actor=peer,
                action=action,
                subject=peer,
                reason=hello.name,
                kind="audit" if new else "flow",
            )
            if placed and run is not None and self._placement.several:
                record_placed(connection, peer, "", run, placed, wall)
        self._recorded[peer] = said
        if placed and run is not None and self._placement.several:
            self._placement.note(peer, "", run, placed)
        log.info("%s %s %s", hello.role, f"{action[5:]}:" if new else "is back:", hello.name, extra={"peer": peer})


def descriptor(office: Office) -> Signed:
    """The run, signed, with the learner's present addresses."""
    run, card = office.config.run, office.prompts.text.card
    return office.identity.sign(
        "run",
        RunDescriptor(
            run=run.name,
            task=run.task,
            model=card.name,
            tokenizer_sha256=bytes.fromhex(card.tokenizer_sha256),
            vocabulary_size=card.vocabulary_size,
            context_tokens=card.context_tokens,
            learner=PeerAddress(peer=run.learner, addresses=office.run.learner_addresses),
            staleness_max=run.S,
            publish_period=run.kappa,
            rollouts_per_step=run.R,
            group_size=run.n,
            steps=run.steps,
            sampling=train_sampling(office),
        ),
    )


def train_sampling(office: Office) -> Sampling:
    """How training rollouts are drawn."""
    run = office.config.run
    return Sampling(
        temperature=run.temperature,
        top_k=run.top_k,
        top_p=run.top_p,
        min_p=run.min_p,
        tokens_max=run.tokens_max,
        stop_ids=office.prompts.text.card.stop_ids,
    )


def _find(house: House, token: str, run: str | None) -> tuple[Change, str | None]:
    """The token used once, by the coordinator's time, and the only run that it is for. Raises Refused."""
    if not token:
        raise Refused("token_missing", "a new node joins with a token; ask the operator for a join string")
    table = schema.tokens
    with house.ledger.reading() as connection:
        row = connection.execute(sa.select(table).where(table.c.hash == _hash(token))).first()
    if row is None:
        raise Refused(
            "token_unknown",
            "this coordinator made no such token; copy the join string again, whole, or ask the operator for a new one",
        )
    if row.expires is not None and house.wall() >= row.expires:
        raise Refused("token_expired", "the join token has expired; ask the operator for a new join string")
    if row.used >= row.quota:
        raise Refused("token_spent", "the join token is used up; ask the operator for a new join string")
    if row.run is not None and run not in {None, row.run}:
        raise Refused("token_run", f"the join token is for the run {row.run}, not {run}; ask for another join string")
    if row.run is not None:
        house.office(row.run)
    # Nobody else spends: one coordinator has the ledger.
    return update("tokens", [row.hash], {"used": row.used + 1}), row.run


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _mark(hello: Hello) -> bytes | None:
    """As it is kept: whoever reads the ledger cannot pass for the node's home."""
    return None if hello.home is None else hashlib.sha256(hello.home).digest()
