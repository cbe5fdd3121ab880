"""The exposition of a populated coordinator, its conventions and bounds; dashboard and alert rules name only what is
in it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import httpx
import pytest
import trio
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from echo2.coordinator.measures import LABELS_MAX, OTHER, Histogram, Measures
from echo2.coordinator.metrics import NODES_SHOWN_MAX, REASONS_MAX, exposition, make_registry
from echo2.coordinator.pool import DEAD_HEARTBEATS, LATE_HEARTBEATS
from echo2.coordinator.served import ServedRest
from echo2.coordinator.views import NodeView, PoolView
from echo2.p2p.errors import Refused

PACKAGING = Path(__file__).parents[3] / "packaging"
DASHBOARD = PACKAGING / "grafana" / "echo2.json"
RULES = PACKAGING / "prometheus" / "echo2.rules.yml"
SCRAPE = PACKAGING / "prometheus" / "prometheus.yml"

PROMQL_WORDS = frozenset({"sum", "by", "rate", "increase", "max", "min", "and", "or", "unless", "on", "ignoring", "le"})

UNITS = (
    "_seconds",
    "_ratio",
    "_bytes",
    "_steps",
    "_nats",
    "_per_second",
    "_per_hour",
    "_per_rollout",
    "_mean",
    "_info",
)
COUNTS = frozenset(
    {
        *("echo2_nodes", "echo2_node_leases_held", "echo2_rollouts_pending", "echo2_rollouts_outstanding"),
        *("echo2_rollouts_reserved", "echo2_rollouts_reserved_max", "echo2_run_nodes", "echo2_run_weight"),
    }
)
FLAGS = frozenset({"echo2_trouble", "echo2_run_state", "echo2_learner_connected"})
VERSIONS = frozenset({"echo2_policy_version", "echo2_learner_version"})


def families_of(views):
    return list(text_string_to_metric_families(exposition(make_registry(views)).decode()))


def samples_of(views):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families_of(views)
        for sample in family.samples
    }


async def populated(world, tools, check):
    """A coordinator in whose short life everything happens that a family tells of; `check` is called at its end."""
    world.activation = {"prices": {tools.identity(11).peer_id: 0.5}, "period_seconds": 60.0}
    async with (
        world.serving() as service,
        world.learner() as learner,
        world.node(10) as node,
        world.node(11) as paid,
        world.node(12) as dies,
    ):
        await learner.hello()
        await learner.publish()
        with pytest.raises(Refused):
            await node.hello("no token")
        for each in (node, paid, dies):
            await each.join()
        await node.work(samples=16)
        await dies.lease()
        while not (await learner.fetch(wait=1.0)).rollouts:
            while await node.work(samples=4):
                pass
        rollouts = service._office.run.admitted.values()
        steps = [
            tools.metrics(step, 8).model_copy(update={"staleness_counts": (6, 2), "staleness": 1}) for step in range(2)
        ]
        learner.version = 2
        await learner.report([tools.done(rollout, step=1) for rollout in list(rollouts)[:4]], steps)
        await learner.report([], steps)  # sent again
        wrong = (await node.lease(2)).leases
        if wrong:
            await node.submit(tools.answer(wrong[0], digits=[1] * 9))
        for _ in range(10):
            await trio.sleep(10)
            await node.heartbeat()
        app = ServedRest(_app, service.measures, trio.current_time)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            await client.get("/v1/pool")
        check(service)


class _Route:
    path = "/v1/nodes/{peer}"


async def _app(scope, _receive, send):
    scope["route"] = _Route()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.slow_on_postgresql
async def test_dashboard_and_rules_name_only_metrics_that_exist(autojump_clock, world, tools):
    """Every name in a PromQL expression is in the exposition of a coordinator in whose pool things have happened."""

    def check(service):
        known = {sample.name for family in families_of(service) for sample in family.samples}
        expressions = [*dashboard_expressions(), *rule_expressions()]
        assert len(expressions) > 40
        unknown = {name for text in expressions for name in names_in(text)} - known
        assert not unknown - {"up"}, sorted(unknown)

    await populated(world, tools, check)


@pytest.mark.slow_on_postgresql
async def test_what_happened_is_counted(autojump_clock, world, tools):
    """Worked by hand: a refused hello, a dead node's lease and its three heartbeats, two steps reported twice."""

    def check(service):
        found = samples_of(service)
        assert found["echo2_hello_refusals_total", (("code", "token_unknown"),)] == 1
        assert found["echo2_wire_requests_total", (("outcome", "ok"), ("protocol", "publish"))] == 1
        assert found["echo2_learner_steps_total", ()] == 2
        assert found["echo2_learner_train_seconds_total", ()] == 4
        assert found["echo2_learner_idle_seconds_total", ()] == 2
        assert found["echo2_rollout_staleness_steps_bucket", (("le", "0.0"),)] == 12
        assert found["echo2_rollout_staleness_steps_count", ()] == 16
        assert found["echo2_leases_ended_total", (("outcome", "released"),)] >= 1
        assert found["echo2_leases_ended_total", (("outcome", "returned"),)] >= 4
        granted = sum(value for (name, _), value in found.items() if name == "echo2_leases_granted_total")
        ended = sum(value for (name, _), value in found.items() if name == "echo2_leases_ended_total")
        assert granted == ended
        assert found["echo2_heartbeats_missed_total", ()] >= 6  # of the dead one, and of the paid one
        assert found["echo2_nodes", (("health", "dead"), ("state", "active"))] == 1
        assert found["echo2_broadcast_duration_seconds_count", ()] == 1
        assert found["echo2_broadcast_complete_ratio", ()] == 1
        assert found["echo2_ledger_commit_duration_seconds_count", ()] > 10
        assert found["echo2_rollouts_total", (("reason", ""), ("state", "consumed"))] == 4
        assert found["echo2_build_info", (("version", found_version(found)),)] == 1

    await populated(world, tools, check)


def found_version(found):
    return next(dict(labels)["version"] for name, labels in found if name == "echo2_build_info")


@pytest.mark.slow_on_postgresql
async def test_names_follow_the_conventions(autojump_clock, world, tools):
    """HELP for each, `_total` for counters and for nothing else, a base unit at the end, no other library's series."""

    def check(service):
        for family in families_of(service):
            name = family.name
            assert len(family.documentation) > 2, name
            if name.startswith("process_"):
                continue
            assert name.startswith("echo2_"), name
            totals = [sample.name for sample in family.samples if sample.name.endswith("_total")]
            if family.type == "counter":
                assert len(totals) == len(family.samples), name
            else:
                assert not totals, name
                assert name.endswith(UNITS) or name in COUNTS | FLAGS | VERSIONS, name
            assert not name.endswith(("_ms", "_minutes", "_percent", "_mib")), name
            assert family.documentation[-1] == ".", name

    await populated(world, tools, check)


class BigPool:
    """Ten thousand nodes, and words of the learner in the reasons."""

    def __init__(self):
        self.measures = Measures()

    def pool_view(self):
        return PoolView(
            coordinator="c", addresses=(), nodes_healthy=1, nodes_late=0, nodes_dead=0, nodes_suspended=0, mu_pool=1.0,
            mu_min=None, t_bcast_seconds=None, t_train_seconds=None, trouble="", protocol_errors=0,
            refused={f"stale: reason {number}": 1 for number in range(10_000)},
        )  # fmt: skip

    def nodes_view(self):
        return [
            NodeView(
                peer=f"peer-{number}", name='"} evil 1\n#', software="x" * 9999, addresses=(), state="active",
                state_reason="", health="healthy" if number > 9000 else "dead",
                last_seen_seconds=10_000.0 - number if number % 2 else None, node_says="", epoch=0, version=0,
                version_lag=0, mu=1.0, tokens_per_second=1.0, leases_held=0, samples_held=0, accepted=number,
                rejected=0, evaluated=0, rollouts={}, protocol_errors=0, reason="", price_hour=0.1,
            )
            for number in range(10_000)
        ]  # fmt: skip

    def runs_view(self):
        return []


def test_labels_are_bounded_in_a_pool_of_ten_thousand():
    """The thousand heard of last have series of their own, most of the reasons are `other`, and the sums are whole."""
    pool = BigPool()
    for number in range(10_000):
        pool.measures.answered("hello", f"code-{number}")
        pool.measures.served(f"/{number}", 200, 0.1)
    families = {family.name: family for family in families_of(pool)}
    peers = {sample.labels["peer"] for sample in families["echo2_node_mu_rollouts_per_second"].samples}
    assert len(peers) == NODES_SHOWN_MAX
    assert "peer-9999" in peers
    assert "peer-9998" not in peers  # never heard of by this process
    reasons = families["echo2_rollouts"].samples
    assert len(reasons) <= REASONS_MAX + 2
    assert sum(sample.value for sample in reasons) == 10_000
    assert sum(sample.value for sample in families["echo2_wire_requests"].samples) == 10_000
    assert len(families["echo2_wire_requests"].samples) <= LABELS_MAX + 1
    assert {OTHER} < {sample.labels["route"] for sample in families["echo2_rest_request_duration_seconds"].samples}
    assert sum(len(family.samples) for family in families.values()) < 12 * NODES_SHOWN_MAX
    assert families["echo2_node_info"].samples[0].labels["name"] == '"} evil 1\n#'
    assert sum(sample.value for sample in families["echo2_nodes"].samples) == 10_000


def test_what_is_not_measured_is_left_out():
    """A pool that needs nothing yet shows no 0 for its need; prices are known."""
    pool = BigPool()
    names = {sample.name for family in families_of(pool) for sample in family.samples}
    assert not names & {"echo2_mu_min_rollouts_per_second", "echo2_mu_target_rollouts_per_second"}
    assert "echo2_spend_dollars_per_hour" in names


def test_missed_heartbeats_by_hand():
    """One at 1.5, another at 2.5, the third with death; heard of again, the count begins anew."""
    measures = Measures()
    for heartbeats, total in (
        (1.0, 0),
        (1.5, 1),
        (2.0, 1),
        (2.5, 2),
        (3.0, 2),
        (3.1, 3),
        (90.0, 3),
        (0.0, 3),
        (1.6, 4),
    ):
        measures.silent("p", heartbeats, late=LATE_HEARTBEATS, dead=DEAD_HEARTBEATS)
        assert measures.heartbeats_missed == total, heartbeats


@given(values=st.lists(st.floats(0, 100), max_size=50))
def test_a_histogram_is_cumulative(values):
    """Its buckets rise to the count of all, each holds what is at most its bound, and the sum is that of the values."""
    histogram = Histogram((1.0, 10.0))
    for value in values:
        histogram.observe(value)
    expected = [("1.0", sum(v <= 1 for v in values)), ("10.0", sum(v <= 10 for v in values)), ("+Inf", len(values))]
    assert histogram.cumulative() == expected
    assert histogram.sum == pytest.approx(sum(values))
    assert histogram.count == len(values)


# the files for operators


def dashboard_expressions():
    board = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in panels_of(board) for target in panel.get("targets", ())]


def panels_of(board):
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def rule_expressions():
    return [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def names_in(expression):
    """Metric names: words outside label matchers, label lists, ranges and strings."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', "", expression)
    bare = re.sub(r"\b(by|on|ignoring|without|group_left|group_right)\s*\([^)]*\)", "", bare)
    words = set(re.findall(r"(?<![\w$.])[a-zA-Z_:][\w:]*(?![\w:]|\s*\()", bare))
    return {word for word in words if word not in PROMQL_WORDS and not word.startswith("$")}


def test_the_names_in_an_expression_are_found():
    """Functions, labels, strings and durations are none."""
    text = 'sum by (le) (rate(echo2_a_bucket{run=~"$run", x="echo2_no"}[5m])) / echo2_b > 0.5 and on (run) up == 0'
    assert names_in(text) == {"echo2_a_bucket", "echo2_b", "up"}


def test_every_panel_says_what_it_is_for():
    """One sentence each, in the rows an operator's questions are in; the data source is a variable everywhere."""
    board = json.loads(DASHBOARD.read_text())
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == [
        "Is the learner starving?",
        *("Pool", "Rollouts", "Broadcast", "Money", "The coordinator's own health"),
    ]
    assert board["schemaVersion"] >= 38
    panels = [panel for panel in panels_of(board) if panel["type"] != "row"]
    assert len(panels) >= 24
    assert Counter(panel["id"] for panel in panels_of(board)).most_common(1)[0][1] == 1
    for panel in panels:
        assert re.fullmatch(r"[A-Z0-9][^\n]{20,}\.", panel["description"]), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
    assert next(variable["name"] for variable in board["templating"]["list"]) == "datasource"


def test_every_panel_has_its_place():
    """No two overlap, and none is wider than the screen."""
    taken = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_rules_tell_whom_they_wake_what_to_do():
    """Each has a severity, a summary and a description; the scrape example reads them and needs no more."""
    alerts = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in alerts} >= {
        "Echo2LearnerStarving", "Echo2PoolTooSlow", "Echo2LedgerInTrouble", "Echo2NoNode", "Echo2BroadcastTooSlow",
        "Echo2LeasesExpire",
    }  # fmt: skip
    for rule in alerts:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "description"}
    scrape = yaml.safe_load(SCRAPE.read_text())
    assert scrape["rule_files"] == [RULES.name]
    assert scrape["scrape_configs"][0]["metrics_path"] == "/metrics"
