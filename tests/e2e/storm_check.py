"""Whether a run that was struck is whole: its sums, taken from the files of each daemon and from none's own summary."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing

from echo2.node.receipts import checked, kept_receipts

ENDS = ("consumed", "rejected", "stale", "withdrawn", "duplicate")
UNFINISHED = ("held", "admitted")


def rows(path, query):
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


def what_differs(places, *, steps, names, staleness_max, coordinator, peers):
    """All that does not add up, in words. The daemons have ended."""
    ledger = places.coordinator / "state" / "ledger.sqlite3"
    spools = {name: places.node(name) / "spool.sqlite" for name in names}
    return [
        *_run(ledger, steps, staleness_max),
        *_rollouts(ledger),
        *_learner(places.learner / "home" / "checkpoints", ledger),
        *(wrong for name in names for wrong in _spool(name, spools[name], ledger)),
        *(wrong for name in names for wrong in _receipts(name, spools[name], ledger, coordinator, peers[name])),
    ]


def _run(ledger, steps, staleness_max):
    (state,) = rows(ledger, "SELECT state FROM runs")[0]
    if state != "finished":
        yield f"the run's state is {state}"
    seen = [row[0] for row in rows(ledger, "SELECT step FROM steps ORDER BY step")]
    if seen != list(range(steps)):
        yield f"the ledger's steps are {seen}, not 0 to {steps - 1}"
    evaluations = rows(ledger, "SELECT purpose, size, count, finished FROM evaluations")
    if sorted(row[0] for row in evaluations) != ["baseline", "final"] or any(
        row[2] < row[1] or row[3] is None for row in evaluations
    ):
        yield f"the evaluations are {evaluations}"
    late = rows(
        ledger, f"SELECT COUNT(*), MAX(step - version) FROM rollouts WHERE step - version > {staleness_max} "
        "AND state = 'consumed'"
    )[0]  # fmt: skip
    if late[0]:
        yield f"{late[0]} rollouts were consumed up to {late[1]} steps stale, S is {staleness_max}"


def _rollouts(ledger):
    states = Counter(dict(rows(ledger, "SELECT state, COUNT(*) FROM rollouts WHERE kind = 'train' GROUP BY state")))
    if unknown := set(states) - {*ENDS, *UNFINISHED}:
        yield f"training rollouts of the states {sorted(unknown)}"
    if twice := rows(ledger, "SELECT lease_id FROM rollouts GROUP BY lease_id, sample HAVING COUNT(*) > 1"):
        yield f"{len(twice)} rollouts are in the ledger twice"
    slots = rows(
        ledger,
        "SELECT ordinal, sample, COUNT(*) FROM rollouts WHERE kind = 'train' AND state = 'consumed' "
        "GROUP BY ordinal, sample HAVING COUNT(*) > 1",
    )
    if slots:
        yield f"consumed twice: (group, sample, times) {slots[:5]}"
    undecided = rows(
        ledger,
        "SELECT COUNT(*) FROM rollouts WHERE (state IN ('held', 'admitted')) = (receipt_sequence IS NOT NULL)",
    )[0][0]
    if undecided:
        yield f"{undecided} rollouts with a terminal state and no receipt, or the other way round"


def _learner(checkpoints, ledger):
    newest = max(checkpoints.iterdir(), key=lambda each: each.name)
    progress = json.loads((newest / "progress.json").read_text())
    trained = {
        (ordinal, sample)
        for first, stop, mask in progress["consumed"]
        for ordinal in range(first, stop)
        for sample in range(int(mask, 16).bit_length())
        if int(mask, 16) >> sample & 1
    }
    found = set(rows(ledger, "SELECT ordinal, sample FROM rollouts WHERE kind = 'train' AND state = 'consumed'"))
    if trained != found:
        yield (
            f"consumed by the learner and not in the ledger: {_some(trained - found)}; "
            f"in the ledger and not by the learner: {_some(found - trained)}"
        )


def _spool(name, spool, ledger):
    waiting = rows(spool, "SELECT COUNT(*) FROM slice WHERE record IS NOT NULL")[0][0]
    if waiting:
        yield f"{name} ended with {waiting} slices that are not acknowledged"
    recorded = {bytes(row[0]): row[1] for row in rows(ledger, "SELECT lease_id, COUNT(*) FROM rollouts GROUP BY 1")}
    for lease, samples, state in rows(spool, "SELECT lease_id, samples, state FROM slice WHERE record IS NULL"):
        if recorded.get(bytes(lease)) != samples:
            yield (
                f"{name} was told that the {samples} rollouts of lease {bytes(lease).hex()} are safe ({state}), "
                f"the ledger has {recorded.get(bytes(lease), 0)}"
            )


def _receipts(name, spool, ledger, coordinator, peer):
    kept = checked(kept_receipts(spool), coordinator, peer)
    yield from (f"{name}: {bad}" for bad in kept.bad)
    found = rows(ledger, "SELECT lease_id, sample, state FROM rollouts")
    states = {(bytes(lease), sample): state for lease, sample, state in found}
    told: dict[tuple[bytes, int], str] = {}
    for _, receipt in kept.receipts:
        key, state = (receipt.lease_id, receipt.sample), receipt.state
        which = f"for sample {receipt.sample} of lease {receipt.lease_id.hex()}"
        if told.setdefault(key, state) != state:
            yield f"{name} has receipts of two states {which}: {told[key]}, {state}"
        if states.get(key) != state:
            yield f"{name} has a receipt `{state}` {which}, the ledger says {states.get(key)}"


def _some(items):
    listed = sorted(items)
    return f"{len(listed)} ({', '.join(map(str, listed[:5]))})" if listed else "none"
