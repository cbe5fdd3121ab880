"""Hello: who may take part. Tokens admit nodes once; from then on the key is the admission.

| asks     | is let in when                                                                     |
|----------|------------------------------------------------------------------------------------|
| learner  | its key is the one the run's configuration names; it needs no token                |
| node     | its key was admitted before; or it brings a token that is known, in time, not spent |

A suspended node is let in to read its receipts and why it is suspended; it gets no leases. A pool with as many live
nodes as one broadcast plan holds is full. Whoever is turned away did no wrong: it is told why, and is no worse off the
next time.
"""

from __future__ import annotations

import hashlib
import json
import logging
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

from . import schema
from .history import insert, update
from .pool import NodeEntry
from .records import record, storable

if TYPE_CHECKING:
    from echo2.p2p.messages import Hello, Signed

    from .history import Change
    from .office import Office


log = logging.getLogger(__name__)

INCARNATION_BYTES = 16

FULL_SECONDS = 60.0
"""When a node that found the pool full may come again: places get free as nodes go."""


HELLO_BURST = 20
HELLO_SECONDS = 2.0
"""Hellos of one key: so many at once, then one in so many seconds. A daemon says one when it starts, when its addresses
change and after each lost connection; each may cost a transaction, a new plan and a signature."""

KEYS_MAX = 10_000
"""Whose hellos are counted; beyond, those that were heard of longest ago are forgotten. A key costs a handshake."""


class HelloRate:
    """A token bucket for each key; pure, `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}

    def count(self, peer: str, now: float) -> float:
        """0.0 when this hello may be answered, and counts; else after how many seconds the next one may."""
        full_at = max(self._full_at.pop(peer, now), now)
        wait = full_at - now - (HELLO_BURST - 1) * HELLO_SECONDS
        self._full_at[peer] = full_at if wait > 0 else full_at + HELLO_SECONDS
        while len(self._full_at) > KEYS_MAX:
            del self._full_at[next(iter(self._full_at))]
        return max(wait, 0.0)


class AdmissionDesk:
    """Answers hello."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._rate = HelloRate()
        self._recorded: dict[str, dict[str, str | int]] = {}
        self._incarnation = office.entropy(INCARNATION_BYTES)

    async def hello(self, peer: str, hello: Hello) -> Welcome:
        """Admit `peer`. Raises Refused."""
        wait = self._rate.count(peer, self._office.clock())
        if wait:
            raise Refused("too_often", f"at most {HELLO_BURST} hellos in {HELLO_BURST * HELLO_SECONDS:.0f} s", wait)
        if WIRE_VERSION not in hello.wire_versions:
            raise Refused(
                "wire_version",
                f"this coordinator speaks wire version {WIRE_VERSION}, {hello.software[:64]} speaks "
                f"{', '.join(map(str, hello.wire_versions))}; install the echo2 release the coordinator runs",
            )
        state = self._learner(peer, hello) if hello.role == "learner" else self._node(peer, hello)
        office = self._office
        return Welcome(
            wire_version=WIRE_VERSION,
            node_state=state,
            coordinator_time_seconds=office.wall(),
            heartbeat_seconds=office.config.heartbeat_seconds,
            descriptor=self.descriptor(),
            standing=self._standing() if hello.role == "learner" else None,
        )

    def _standing(self) -> Standing:
        run = self._office.run
        current = run.current.manifest if run.current is not None else None
        return Standing(
            incarnation=self._incarnation,
            epoch=run.epoch_known or (0 if current is not None else None),
            published_epoch=current.epoch if current is not None else None,
            published_version=current.version if current is not None else None,
            learner_version=run.leases.learner_version,
            admitted_sequence=run.next_sequence - 1,
        )

    def descriptor(self) -> Signed:
        """The run, signed, with the learner's present addresses."""
        office = self._office
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

    def _learner(self, peer: str, hello: Hello) -> str:
        office = self._office
        office.known_learner(peer, office.run.name)
        self._record(peer, hello, known=True)
        office.run.learner_addresses = hello.addresses
        office.run.forget_plans()  # their root may have moved
        return "active"

    def _node(self, peer: str, hello: Hello) -> str:
        office = self._office
        if peer == office.config.run.learner:
            raise Refused("not_a_node", "this key is the run's learner; a node needs a key of its own")
        node = office.pool.nodes.get(peer)
        others = sum(1 for each in office.pool.live(office.clock()) if each.peer != peer)
        if others >= NODES_MAX:
            raise Refused(
                "pool_full",
                f"{others} live nodes are in this pool, which is as many as it takes; it tries again by itself",
                FULL_SECONDS,
            )
        self._record(peer, hello, known=node is not None)
        if node is None:
            node = office.pool.nodes[peer] = NodeEntry(peer, hello.name, hello.software, hello.addresses)
        node.price = office.config.activation.price(peer, hello.price_micros_hour)
        node.standby = bool(node.price) and peer not in office.payroll.by_peer
        if node.addresses != hello.addresses:
            office.run.forget_plans()
        node.name, node.software, node.addresses = hello.name, hello.software, hello.addresses
        node.seen_at = office.clock()
        return node.state

    def _record(self, peer: str, hello: Hello, *, known: bool) -> None:
        """Put on record what this hello says that the last one, to this process, did not. Raises Refused."""
        wall = self._office.wall()
        table = schema.nodes
        said: dict[str, str | int] = {
            "role": hello.role,
            "name": hello.name,
            "software": storable(hello.software),
            "addresses": json.dumps(hello.addresses),
            "price": hello.price_micros_hour,
        }
        if known and self._recorded.get(peer) == said:
            log.info("%s is back: %s", hello.role, hello.name, extra={"peer": peer})
            return
        values = {**said, "last_hello": wall}
        with self._office.ledger.transaction() as connection:
            found = connection.scalar(sa.select(table.c.peer).where(table.c.peer == peer))
            first = {"peer": peer, "state": "active", "reason": "", "first_hello": wall}
            change: Change = update("nodes", [peer], values) if found else insert("nodes", first | values)
            record(
                connection,
                [change] if known else [_spend(connection, hello.token, wall), change],
                wall=wall,
                actor=peer,
                action="hello" if known else "node admitted",
                subject=peer,
                reason=hello.name,
                kind="flow" if known else "audit",
            )
        self._recorded[peer] = said
        log.info("%s %s %s", hello.role, "is back:" if known else "admitted:", hello.name, extra={"peer": peer})


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


def _spend(connection: sa.Connection, token: str, wall: float) -> Change:
    """The token used once, by the coordinator's time. Raises Refused."""
    if not token:
        raise Refused("token_missing", "a new node joins with a token; ask the operator for a join string")
    table = schema.tokens
    row = connection.execute(sa.select(table).where(table.c.hash == _hash(token))).first()
    if row is None:
        raise Refused(
            "token_unknown",
            "this coordinator made no such token; copy the join string again, whole, or ask the operator for a new one",
        )
    if row.expires is not None and wall >= row.expires:
        raise Refused("token_expired", "the join token has expired; ask the operator for a new join string")
    if row.used >= row.quota:
        raise Refused("token_spent", "the join token is used up; ask the operator for a new join string")
    return update("tokens", [row.hash], {"used": row.used + 1})  # nobody else spends: one coordinator has the ledger


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
