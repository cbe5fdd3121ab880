"""From the ledger to memory when the coordinator starts: after a `kill -9` as after a clean end.

Leases that were out stay valid, with their whole duration again: their nodes may be working on them. Held rollouts are
scored again. Nothing acknowledged is lost, and nothing is counted twice.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from echo2.p2p.codec import decode_record
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import payload_hash
from echo2.p2p.messages import Manifest

from . import accounts, records, schema
from .cells import check, check_cell, sound, texts
from .history import insert
from .leases import LeaseBook, LeaseEntry, LeaseRules
from .node_states import WITHDRAWING, Standing
from .payroll import Payroll, load_payroll
from .pool import KNOWN_MAX, NodeEntry, Pool, Tally
from .probation import Benchmark, Probation
from .run_book import EvaluationProgress, Published, RunBook
from .slots import Span

if TYPE_CHECKING:
    from collections.abc import Collection

    from .config import CoordinatorConfig
    from .counters import Numbers
    from .ledger import Ledger
    from .prompts import PromptBook

TERMS = (
    *("task", "task_options", "learner", "seed", "S", "kappa", "R", "n"),
    *("tokens_max", "turn_tokens_max", "temperature", "top_k", "top_p", "min_p"),
)
"""What the rollouts and versions of a run already recorded depend on. The rest may change between two starts."""

UNFINISHED_COLUMNS = (
    *(
        schema.rollouts.c[name]
        for name in (
            *("id", "lease_id", "sample", "peer", "kind", "ordinal", "version", "state", "reason", "finish"),
            *("claimed_reward", "reward"),
        )
    ),
    *(schema.contents.c[name] for name in ("tokens", "logprobs")),
)
"""What `RolloutEntry` has as the ledger has it."""

IS_NODE = schema.nodes.c.role != "learner"


def load_pool(ledger: Ledger, config: CoordinatorConfig, runs: Collection[str]) -> Pool:
    """The nodes that said hello last, and all that have rollouts of these runs with us; none was heard of yet."""
    pool = Pool(config.heartbeat_seconds)
    table, rollouts = schema.nodes, schema.rollouts
    with ledger.reading() as connection, ledger.loading(table):
        latest = sa.select(table.c.peer).where(IS_NODE).order_by(table.c.last_hello.desc()).limit(KNOWN_MAX)
        busy = sa.select(rollouts.c.peer).where(rollouts.c.run.in_(runs), records.UNFINISHED)
        some = sa.or_(table.c.peer.in_(latest), table.c.peer.in_(busy))
        for node in _nodes(connection, config, some):
            pool.nodes[node.peer] = node
    for node in pool.nodes.values():
        _settle(node, runs)
    return pool


def load_node(ledger: Ledger, config: CoordinatorConfig, peer: str, runs: Collection[str]) -> NodeEntry | None:
    """One that memory let go of; None when there never was one."""
    with ledger.reading() as connection, ledger.loading(schema.nodes):
        node = next(iter(_nodes(connection, config, schema.nodes.c.peer == peer)), None)
    if node is not None:
        _settle(node, runs)
    return node


def _settle(node: NodeEntry, runs: Collection[str]) -> None:
    """Of a run that is gone it is in none, and hello places it; unless there is one only, and it may work for that."""
    if node.bound is not None and node.bound not in runs:
        node.run = ""
    elif len(runs) == 1:
        (node.run,) = runs
    elif node.run not in runs:
        node.run = ""


def _nodes(connection: sa.Connection, config: CoordinatorConfig, some: sa.ColumnElement[bool]) -> list[NodeEntry]:
    table, moves = schema.nodes, schema.node_transitions
    wanted = sa.select(table.c.peer).where(IS_NODE, some)
    newest = sa.select(moves.c.peer, sa.func.max(moves.c.number).label("number")).where(moves.c.peer.in_(wanted))
    top = newest.group_by(moves.c.peer).subquery()
    is_top = sa.and_(moves.c.peer == top.c.peer, moves.c.number == top.c.number)
    made = {row.peer: row for row in sound(connection.execute(sa.select(moves).join(top, is_top)), moves)}
    order = (table.c.first_hello, table.c.peer)
    found = connection.execute(sa.select(table).where(IS_NODE, some).order_by(*order))
    return [_node(row, made.get(row.peer), config) for row in sound(found, table)]


def load_receipts(ledger: Ledger, run: str, peers: Collection[str]) -> Counter[str]:
    """How far the receipts of these nodes are in a run."""
    table = schema.rollouts
    last = sa.select(table.c.peer, sa.func.max(table.c.receipt_sequence)).where(table.c.run == run)
    if len(peers) == 1:
        last = last.where(table.c.peer.in_(peers))
    with ledger.reading() as connection, ledger.loading(table):
        found = {peer: number for peer, number in connection.execute(last.group_by(table.c.peer)) if number}
        for sequence in found.values():
            check_cell(table.c.receipt_sequence, sequence)
    return Counter({peer: number for peer, number in found.items() if peer in peers})


def _node(row: Any, move: Any, config: CoordinatorConfig) -> NodeEntry:
    standing = Standing(row.state, back=row.back, reason=row.reason)
    if move is not None:
        standing = replace(
            standing, event=move.event, actor=move.actor, since=move.wall, expires=move.expires, number=move.number
        )
    measured = None
    if row.benchmark_rollouts is not None and row.benchmark_tokens is not None:
        measured = Benchmark(row.benchmark_rollouts, row.benchmark_tokens)
    return NodeEntry(
        row.peer,
        row.name,
        row.software,
        texts(row.addresses),
        standing=standing,
        home=row.home,
        probation=Probation(row.warmup_returned, row.warmup_failed, benchmark=measured),
        run=row.run or "",
        wanted=row.wanted,
        bound=row.bound,
        price=config.activation.price(row.peer, row.price),
    )


def load_run(
    ledger: Ledger,
    config: CoordinatorConfig,
    prompts: PromptBook,
    pool: Pool,
    tally: Tally,
    numbers: Numbers,
    *,
    now: float,
    wall: float,
    settings: str | None = None,
) -> RunBook:
    """The run of `config`, begun now if the ledger does not know it; `settings`: what it was created with, over REST.

    Raises ConfigurationError if its terms changed.
    """
    rules = LeaseRules(
        group_size=config.run.n,
        rollouts_per_step=config.run.R,
        steps=config.run.steps,
        staleness_max=config.run.S,
        slice_samples=config.run.slice_samples,
    )
    run = RunBook(config.run.name, LeaseBook(rules), numbers)
    run.receipts = load_receipts(ledger, run.name, pool.nodes.keys())
    with ledger.transaction() as connection:
        with ledger.loading(schema.runs):
            _load_row(connection, run, _terms(config, prompts), wall, settings)
        with ledger.loading(schema.nodes):
            _load_learner(connection, run, config.run.learner)
        with ledger.loading(schema.manifests):
            _load_published(connection, run)
        with ledger.loading(schema.steps):
            run.steps = {metrics.step: metrics for metrics in records.load_steps(connection, run.name)}
        with ledger.loading(schema.rollouts):
            _load_tally(connection, run, tally)
        with ledger.loading(schema.evaluations):
            _load_evaluations(connection, run, config.run.eval_share)
        with ledger.loading(schema.rollouts):
            _load_rollouts(connection, run, pool)
        with ledger.loading(schema.leases):
            _load_leases(connection, run, now, config.run.lease_seconds)
        with ledger.loading(schema.postings):
            accounts.newest(connection)  # what is posted next goes on from it
    book = run.leases
    book.consumed = tally.train["consumed"]
    book.queued = tally.train["held"] + tally.train["admitted"]
    if config.run.steps < max(book.learner_version, run.version or 0):
        raise ConfigurationError(
            f"run {run.name} is already at version {max(book.learner_version, run.version or 0)}; "
            f"run.steps = {config.run.steps} is below that"
        )
    run.measure()
    return run


def _terms(config: CoordinatorConfig, prompts: PromptBook) -> dict[str, object]:
    card = prompts.text.card
    values: dict[str, object] = {name: getattr(config.run, name) for name in TERMS}
    return values | {"model": card.name, "tokenizer_sha256": card.tokenizer_sha256}


def load_pay(
    ledger: Ledger, config: CoordinatorConfig, pool: Pool, run: RunBook, *, now: float, wall: float
) -> Payroll:
    """What the run's nodes are owed, and what is out with them. A node that is activated does not stand by."""
    payroll = Payroll(run.name, config.credit.rates(), config.run.spending, pool, run.leases, numbers=run.numbers)
    with ledger.reading() as connection, ledger.loading(schema.accounts):
        load_payroll(connection, payroll, run.unfinished.values(), now=now, wall=wall)
    return payroll


def _load_row(
    connection: sa.Connection, run: RunBook, terms: dict[str, object], wall: float, settings: str | None
) -> None:
    table = schema.runs
    row = connection.execute(sa.select(table).where(table.c.run == run.name)).first()
    if row is None:
        begun = {"run": run.name, "terms": json.dumps(terms), "state": "ready", "reason": "", "created": wall}
        learner = {"learner_epoch": 0, "learner_version": 0, "learner_status": "", "settings": settings}
        facts = {"actor": "coordinator", "action": "run begun", "subject": run.name}
        records.record(connection, [insert("runs", begun | learner)], wall=wall, kind="flow", **facts)
        return
    check(row, table.columns)
    recorded = json.loads(row.terms)
    for name, value in terms.items():
        if recorded.get(name) != value:
            raise ConfigurationError(
                f"run {run.name} was begun with {name} = {recorded.get(name)}, the configuration now says {value}; "
                "set it back, or begin a run of another name"
            )
    run.state, run.reason = row.state, row.reason
    run.learner_epoch, run.learner_status = row.learner_epoch, row.learner_status
    run.leases.learner_version = row.learner_version


def _load_learner(connection: sa.Connection, run: RunBook, learner: str) -> None:
    table = schema.nodes
    addresses = connection.scalar(sa.select(table.c.addresses).where(table.c.peer == learner))
    run.learner_addresses = texts(addresses) if addresses is not None else ()


def _load_published(connection: sa.Connection, run: RunBook) -> None:
    for signed, broadcast_seconds in records.load_manifests(connection, run.name):
        check_cell(schema.manifests.c.broadcast_seconds, broadcast_seconds)
        manifest = decode_record(signed.payload, Manifest)  # its signature held when it was recorded
        published = Published(manifest, signed, payload_hash(signed), None, broadcast_seconds)
        run.manifests[published.manifest_hash] = published
        run.current = published
    for published in list(run.manifests.values()):
        run.lose(*published.order)
    run.lose(run.learner_epoch, run.leases.learner_version)


def _load_tally(connection: sa.Connection, run: RunBook, tally: Tally) -> None:
    table = schema.rollouts
    lost = table.c.state.in_(("rejected", "duplicate", "stale", "withdrawn"))
    reason = sa.case((lost, table.c.reason), else_="")
    query = (
        sa.select(table.c.peer, table.c.kind, table.c.state, reason.label("why"), sa.func.count().label("number"))
        .where(table.c.run == run.name)
        .group_by(table.c.peer, table.c.kind, table.c.state, sa.text("why"))
    )
    for row in connection.execute(query):
        check(row, (table.c.peer, table.c.kind, table.c.state))
        tally.move(row.peer, row.kind, None, row.state, row.why, row.number)


def _load_evaluations(connection: sa.Connection, run: RunBook, eval_share: float) -> None:
    table, rollouts, leases = schema.evaluations, schema.rollouts, schema.leases
    of_lost = sa.select(leases.c.lease_id).where(leases.c.run == run.name, leases.c.manifest_hash.in_(run.leases.lost))
    found = connection.execute(sa.select(table).where(table.c.run == run.name).order_by(table.c.version))
    for row in sound(found, table):
        counted = sa.and_(
            rollouts.c.run == run.name,
            rollouts.c.kind == "eval",
            rollouts.c.version == row.version,
            rollouts.c.state == "evaluated",
            rollouts.c.lease_id.not_in(of_lost),
        )
        query = sa.select(sa.func.count(), sa.func.sum(rollouts.c.reward)).where(counted)
        scored = connection.execute(query).one()
        progress = EvaluationProgress(
            row.version,
            row.purpose,
            row.size,
            scored[0],
            scored[1] or 0.0,
            samples=row.samples,
            ended=row.finished is not None,
            reason=row.reason,
        )
        for text in connection.scalars(sa.select(rollouts.c.details).where(counted, rollouts.c.details.is_not(None))):
            progress.add(records.details_in(text))
        run.evaluations[row.version] = progress
        if not progress.ended:
            run.leases.open_evaluation(row.version, row.purpose, row.size // row.samples, row.samples, eval_share)


def _load_rollouts(connection: sa.Connection, run: RunBook, pool: Pool) -> None:
    table = schema.rollouts
    highest_id, highest_sequence = connection.execute(
        sa.select(sa.func.max(table.c.id), sa.func.max(table.c.admitted_sequence)).where(table.c.run == run.name)
    ).one()
    run.numbers.rollout_id = (connection.scalar(sa.select(sa.func.max(table.c.id))) or highest_id or 0) + 1
    run.next_sequence = (highest_sequence or 0) + 1
    run.delivered_sequence = highest_sequence or 0  # the learner may have seen any of them
    unfinished = records.load_unfinished(connection, run.name)
    for entry in unfinished:
        check(entry, UNFINISHED_COLUMNS)
        run.unfinished[entry.lease_id, entry.sample] = entry
        if entry.state == "held":
            run.held.append(entry)
    for entry in sorted((entry for entry in unfinished if entry.state == "admitted"), key=lambda e: e.sequence):
        run.admitted[entry.sequence] = entry
        if pool.nodes[entry.peer].standing.event in WITHDRAWING:
            run.withdraw[entry.lease_id, entry.sample] = False


def _load_leases(connection: sa.Connection, run: RunBook, now: float, lease_seconds: float) -> None:
    leases, rollouts, closed = schema.leases, schema.rollouts, schema.closed_groups
    open_ones = (run.leases.evaluation, run.leases.interim)
    open_versions = [evaluation.version for evaluation in open_ones if evaluation is not None]
    is_closed = sa.select(closed.c.ordinal).where(closed.c.run == run.name)

    def wanted(table: sa.Table) -> sa.ColumnElement[bool]:
        training = sa.and_(table.c.kind != "eval", table.c.ordinal.not_in(is_closed))
        evaluating = sa.and_(table.c.kind == "eval", table.c.version.in_(open_versions))
        return sa.and_(table.c.run == run.name, sa.or_(training, evaluating))

    arrived: dict[bytes, dict[int, bool]] = {}
    columns = (rollouts.c.lease_id, rollouts.c.sample, rollouts.c.state)
    for row in connection.execute(sa.select(*columns).where(wanted(rollouts))):
        check(row, columns)
        arrived.setdefault(row.lease_id, {})[row.sample] = row.state in {"held", "admitted", "evaluated"}
    entries = [
        LeaseEntry(
            lease_id=row.lease_id,
            peer=row.peer,
            kind=row.kind,
            span=Span(row.ordinal, row.sample_first, row.sample_count),
            version=row.version,
            manifest_hash=row.manifest_hash,
            tokens_max=row.tokens_max,
            granted_at=now,
            expires_at=now + lease_seconds,
            account=row.account,
        )
        for row in sound(connection.execute(sa.select(leases).where(wanted(leases)).order_by(leases.c.id)), leases)
        if row.kind == "train" or row.manifest_hash not in run.leases.lost
    ]
    run.leases.restore(
        [(entry, arrived.get(entry.lease_id)) for entry in entries],
        closed=connection.scalars(is_closed).all(),
        next_slot=_next_slot(connection, run.name),
    )
    run.leases.lose(run.leases.lost)


def _next_slot(connection: sa.Connection, run: str) -> tuple[int, int]:
    table = schema.leases
    end = (
        sa.select(table.c.ordinal, table.c.sample_first + table.c.sample_count)
        .where(table.c.run == run, table.c.kind == "train")
        .order_by(table.c.ordinal.desc(), (table.c.sample_first + table.c.sample_count).desc())
        .limit(1)
    )
    row = connection.execute(end).first()
    if row is None:
        return (0, 0)
    for value in row:
        check_cell(table.c.ordinal, value)
    return (row[0], row[1])
