"""`echo2 plan`: numbers worked by hand, how they move with S, and the command itself."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from echo2.coordinator import capacity
from echo2.coordinator.cli import app
from echo2.coordinator.plan_command import PlanSettings, read_plan
from echo2.coordinator.plan_text import table_of
from echo2.coordinator.planning import NodeClass, Setup, kappa_of, make_plan, rent, row_of
from echo2.p2p.errors import ConfigurationError

# By hand: kappa = 2, T_train = 10, T_bcast = 4, R = 32: mu_min = 64 / 16 = 4, mu_target = 4.4.
SETUP = Setup(
    train_seconds=10.0,
    broadcast_seconds=4.0,
    R=32,
    n=8,
    classes=(NodeClass("big", 10, 2.0, 400_000), NodeClass("small", 10, 0.5, 80_000), NodeClass("friend", 2, 0.4, 0)),
    learner_price=2_000_000,
    steps=100,
)
FLAGS = ["--train-seconds", "10", "--broadcast-seconds", "4", "--R", "32", "--n", "8"]
NODES = ["--node", "big:10:2.0:0.4", "--node", "small:10:0.5:0.08", "--node", "friend:2:0.4:0"]


def test_the_pool_to_rent_by_hand():
    """Friends make 0.8 for nothing; 3.6 are missing: eight small ones at $0.64, for a big one costs more a rollout."""
    row = row_of(SETUP, S=3, kappa=2)
    assert (row.mu_min, row.mu_target) == (4.0, pytest.approx(4.4))
    assert {kind.name: kind.count for kind in row.rented} == {"friend": 2, "small": 8}
    assert row.mu_pool == pytest.approx(4.8)
    assert (row.dollars_hour_pool, row.dollars_hour) == (pytest.approx(0.64), pytest.approx(2.64))
    assert row.enough


def test_price_staleness_and_lease_by_hand():
    """A step takes 10 s and costs $2.64 / 360. L: small 2 samples in 4 s, a friend 2 in 5 s, which is the longest.

    Delta = 2 + ceil((4 + 5 + 32 / 4.8) / 10) - 1 = 3; it fits: 4 + 5 + 6.7 <= (3 - 2 + 1) 10.
    """
    row = row_of(SETUP, S=3, kappa=2)
    assert (row.step_seconds, row.bound_by, row.bubble) == (10.0, "the learner", 0.0)
    assert row.dollars_step == pytest.approx(2.64 / 360)
    leases = {kind.name: (kind.lease_samples, kind.lease_seconds) for kind in row.rented}
    assert leases == {"small": (2, 4.0), "friend": (2, 5.0)}
    assert (row.lease_samples, row.lease_seconds) == (2, 5.0)
    assert (row.staleness_bound, row.staleness, row.feasible, row.advice) == (3, 3, True, ())
    assert row.seconds == pytest.approx(2 * 4 + 32 / 4.8 + 1000)
    assert row.dollars == pytest.approx(2.64 * (row.seconds or 0) / 3600)


def test_a_budget_that_is_too_small_says_what_to_change():
    """S = 2 at kappa = 2 has 10 s for 15.7."""
    row = row_of(SETUP, S=2, kappa=2)
    assert not row.feasible
    assert row.advice[0] == "S = 3, with kappa = 2 as it is"
    assert "kappa = 1: snapshots come more often" in row.advice


def test_a_broadcast_as_long_as_the_steps_between_two_is_said():
    """T_bcast = 25: kappa = 2 has 20 s. kappa = 3 would do; shown is a pool for R in T_train."""
    slow = Setup(**{field: getattr(SETUP, field) for field in SETUP.__dataclass_fields__} | {"broadcast_seconds": 25.0})
    row = row_of(slow, S=3, kappa=2)
    assert (row.mu_min, row.enough) == (None, False)
    assert row.mu_target == pytest.approx(1.1 * 3.2)
    assert "kappa = 3 (S = 4) would do, or a broadcast below 20 s" in row.advice[0]
    assert row_of(slow, S=4, kappa=3).enough


def test_too_few_nodes_are_said_with_what_would_do():
    """Two big ones make 4 of 4.4: one more, or R = 24, three groups of eight."""
    few = Setup(10.0, 4.0, 32, 8, (NodeClass("big", 2, 2.0, 400_000),))
    row = row_of(few, S=3, kappa=2)
    assert (row.enough, row.nodes) == (False, 2)
    assert row.advice[0] == "all nodes offered make 4 of 4.4 a second: 1 more big, or R = 24"


def test_the_table_goes_over_s_with_kappa_as_it_follows():
    """kappa = S - 1, at least 1; one that is set leaves out the budgets that it does not allow."""
    report = make_plan(SETUP, S=3, kappa=None, table_to=5)
    assert [(row.S, row.kappa) for row in report.table] == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 3), (5, 4)]
    assert report.asked == report.table[3]
    assert [row.S for row in make_plan(SETUP, S=3, kappa=3, table_to=5).table] == [2, 3, 4, 5]
    costs = [row.dollars_step for row in report.table]
    assert costs == sorted(costs, reverse=True)  # slack is what S buys


@given(
    train=st.floats(0.5, 500),
    broadcast=st.floats(0, 500),
    groups=st.integers(1, 200),
    kinds=st.lists(
        st.tuples(st.integers(1, 60), st.floats(0.01, 20), st.integers(0, 2_000_000)), min_size=1, max_size=4
    ),
    S=st.integers(0, 10),
)
def test_a_plan_keeps_to_what_must_hold(train, broadcast, groups, kinds, S):  # noqa: N803
    """It rents no more than is offered, reaches mu_target or takes all, and a lease is half a step or one sample."""
    classes = tuple(NodeClass(f"k{i}", *kind) for i, kind in enumerate(kinds))
    setup = Setup(train, broadcast, 8 * groups, 8, classes, learner_price=1)
    row = row_of(setup, S=S, kappa=kappa_of(S))
    assert row.mu_pool == pytest.approx(
        sum(kind.count * next(c.mu for c in classes if c.name == kind.name) for kind in row.rented)
    )
    assert all(0 < kind.count <= kind.offered for kind in row.rented)
    if row.mu_pool < row.mu_target * (1 - 1e-6):
        assert row.nodes == sum(kind.count for kind in classes)
        assert not row.enough
        assert row.advice
    assert row.lease_seconds <= max(capacity.lease_seconds_max(train), max(1 / c.mu for c in classes)) * (1 + 1e-9)
    assert row.dollars_hour >= row.dollars_hour_pool
    assert row.feasible or row.advice
    assert rent(setup, row.mu_target).price <= sum(kind.count * kind.price for kind in classes)


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_command_says_it_in_words_and_as_a_table():
    """Status 0 where it fits; every budget is a line."""
    done = run(*FLAGS, *NODES, "--learner-price", "2", "--steps", "100")
    assert done.exit_code == 0, done.output
    assert "rent       8 of 10 small, 2 of 2 friend" in done.output
    assert "$2.64 an hour, $0.64 of it for the pool; $0.00733 a step" in done.output
    assert "100 steps: 17 min, $0.74" in done.output
    assert "fits       yes" in done.output
    assert len([line for line in done.output.splitlines() if line.strip()[:1].isdigit()]) == 9


def test_the_command_in_json():
    """The whole report; status 1 where the plan does not fit."""
    done = run(*FLAGS, *NODES, "--S", "2", "--kappa", "2", "--json", "--table-to", "3")
    assert done.exit_code == 1
    report = json.loads(done.output)
    assert report["asked"]["advice"][0] == "S = 3, with kappa = 2 as it is"
    assert [row["S"] for row in report["table"]] == [1, 2, 3]
    assert report["setup"]["classes"][0] == {"name": "big", "count": 10, "mu": 2.0, "price": 400000}


def test_a_file_with_flags_over_it(tmp_path):
    """Rates may be said in tokens."""
    path = tmp_path / "plan.toml"
    path.write_text(
        "train_seconds = 10.0\nbroadcast_seconds = 4.0\nresponse_tokens = 100.0\n"
        '[[nodes]]\nname = "home"\ntokens_per_second = 200.0\n'
    )
    settings = read_plan(path, {"S": 5})
    assert (settings.S, settings.setup().classes) == (5, (NodeClass("home", 100, 2.0, 0),))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "a plan needs --train-seconds, --broadcast-seconds, --node NAME:COUNT:MU:PRICE"),
        ([*FLAGS, "--node", "big:2"], "is not NAME:COUNT:MU:PRICE"),
        ([*FLAGS, *NODES, "--kappa", "9"], "kappa = 9 must be at most S + 1 = 4"),
        ([*FLAGS, *NODES, "--R", "33"], "must be a multiple of n = 8"),
        ([*FLAGS, "--node", "big:2:0:0.1"], "rollouts_per_second"),
    ],
)
def test_a_mistake_is_one_line(arguments, said):
    """What is wrong, and what is allowed."""
    done = run(*arguments)
    assert isinstance(done.exception, ConfigurationError)
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_class_without_a_rate_is_refused(tmp_path):
    """Neither rollouts nor tokens."""
    with pytest.raises(ValueError, match="say rollouts_per_second"):
        PlanSettings(train_seconds=1.0, broadcast_seconds=0.0, nodes=({"name": "x"},))


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_every_column_on_a_narrow_screen(width):
    """What wraps is the list of nodes."""
    report = make_plan(SETUP, S=3, kappa=None, table_to=3)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table_of(report))
    head, *_ = [line for line in console.export_text().splitlines() if line.strip()]
    assert " ".join(head.split()) == "S kappa mu_min $/h step s $/step bubble stale lease s fits pool"
