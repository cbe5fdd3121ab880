"""Pay in whole runs in virtual time: kills, lost messages, and books that are right to the micro-dollar."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa
from sim.pinned import run_pinned

from echo2.coordinator import accounts, history, schema
from echo2.coordinator.pricing import payable
from echo2.coordinator.simulate import Scenario, Simulation, random_scenario
from echo2.node.receipts import Kept
from echo2.node.statements import faults, gaps, opened, reconciled
from echo2.p2p.identity import open_signed
from echo2.p2p.messages import ReceiptBatch, Signed

SEEDS = range(500, 504)
PRICES = (0.36, 3.6)


def play(scenario):
    simulation = Simulation(scenario)
    observed = run_pinned(simulation.run, seed=scenario.seed)
    return simulation, observed


def booked(simulation):
    """Micro-dollars posted; raises where a rollout is not booked exactly once, or an entry is not what is due."""
    with simulation.ledger.reading() as connection:
        rollouts = connection.execute(sa.select(schema.rollouts)).all()
        of_lease = dict(connection.execute(sa.select(schema.leases.c.lease_id, schema.leases.c.account)).all())
        found = {row.number: row for row in connection.execute(sa.select(schema.accounts))}
        posted = list(accounts.read(connection))
        assert accounts.verify(connection).fault == ""
        assert history.replay(history.read_bodies(connection)) == history.read_state(connection)
    counted, credits_due = dict.fromkeys(found, 0), 0
    for row in rollouts:
        if row.state not in {"held", "admitted"} and payable(row.state, in_time=bool(row.in_time)):
            credits_due += 1_000_000 if row.state in {"consumed", "evaluated"} else 500_000
            if of_lease[row.lease_id] is not None:
                counted[of_lease[row.lease_id]] += 1
    assert {number: row.rollouts for number, row in found.items()} == counted
    for row in found.values():
        assert row.entered == min(row.rollouts * (row.rho or 0) // 10**6, row.price * row.milliseconds // 3_600_000)
    usd = sum(each.amount_micros for each in posted if each.unit == "usd")
    assert usd == sum(row.entered for row in found.values())
    earned = [each.amount_micros for each in posted if (each.unit, each.kind) == ("credit", "credit")]
    assert sum(earned) == credits_due
    return usd


def paid(scenario):
    return replace(scenario, nodes=max(scenario.nodes, 3), prices=PRICES)


def test_a_paid_pool_and_what_its_nodes_hold_of_it():
    """Without faults: every node's own copy of its statement verifies, is whole, and agrees with its own receipts."""
    simulation, observed = play(paid(Scenario(seed=1)))
    assert observed.run_state == "finished"
    assert booked(simulation) > 0
    coordinator = simulation._identities["coordinator"].peer_id
    told = []
    for name, papers in simulation.papers.items():
        rows = papers._db.execute("SELECT payload, signature FROM statements ORDER BY after").fetchall()
        found = opened([Signed(payload=payload, signature=signature) for payload, signature in rows], coordinator)
        assert faults(found, simulation._identities[name].peer_id) + gaps(found) == []
        batches = [
            open_signed(signed, coordinator, "receipts", ReceiptBatch)
            for signed in simulation._spools[name].receipt_batches("simulated")
        ]
        kept = Kept(tuple(("simulated", receipt) for batch in batches for receipt in batch.receipts), ())
        told += reconciled(found, kept)
    assert [line for line in told if "ARE NOT" in line or "NONE IS" in line] == []
    assert sum("consumed" in line and "they agree" in line for line in told) >= 2


@pytest.mark.parametrize("seed", SEEDS)
def test_kills_and_losses_book_each_rollout_once(seed):
    """Any process killed at any time, pieces of streams lost, every report sent again: the books are right."""
    simulation, observed = play(paid(random_scenario(seed)))
    assert observed.run_state == "finished"
    booked(simulation)


@pytest.mark.parametrize("seed", [501, 503])
def test_a_budget_holds_through_kills(seed):
    """However it goes, the nodes are not posted a micro-dollar more; the volunteer carries the run to its end."""
    scenario = replace(paid(random_scenario(seed)), budget=0.003)
    simulation, observed = play(scenario)
    assert observed.run_state == "finished"
    assert 0 < booked(simulation) <= 3_000  # without a budget it would be 5,163 and 20,251
