"""`echo2 export`: what the files hold, while the coordinator runs and after, and what memory it takes."""

import csv
import json
from contextlib import closing

import matplotlib.image
import pytest
import sqlalchemy as sa
import trio

from echo2.coordinator import export_run as module
from echo2.coordinator import schema
from echo2.coordinator.database import sqlite_url
from echo2.coordinator.export_plots import draw
from echo2.coordinator.export_run import Exported, export_run
from echo2.coordinator.ledger import open_ledger, open_ledger_to_read
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.messages import DropCount, StepMetrics


@pytest.fixture
def here(world, monkeypatch):
    """The world's own task and text in the place of the model folder and the scorer's process."""

    async def load_task(*_):
        return world.task

    class NoScorer:
        async def __aenter__(self):
            return None

        async def __aexit__(self, *_):
            return None

    monkeypatch.setattr(module, "FolderText", lambda _: world.text)
    monkeypatch.setattr(module, "load_task", load_task)
    monkeypatch.setattr(module, "open_scorer", lambda _: NoScorer())
    world.run_settings = {"eval_every": 1, "eval_share": 0.5}
    return world


async def some_steps(world, learner, node, tools, steps=2):
    await learner.hello()
    await learner.publish()
    await node.join()
    while not world.run.evaluations[0].complete:
        await node.work()
        await trio.sleep(1.0)
    (bad, *_) = (await node.lease(2)).leases
    await node.submit(tools.answer(bad, digits=[1] * 9))  # too long: rejected
    for number in range(steps):
        while len(learner.consumed) < 8:
            await node.work(samples=4)
            learner.consumed += (await learner.fetch(wait=1.0)).rollouts
        batch, learner.consumed = learner.consumed[:8], learner.consumed[8:]
        await learner.train(batch)
        await learner.publish(version=number + 1)
        await node.join(hello=False)


async def exported(world, out, **options):
    found = await export_run(world.config().run, world.url, out, arrays=False, **options)
    lines = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    return found, lines


async def test_the_files_are_written_beside_a_running_coordinator(autojump_clock, here, tools, tmp_path):
    """Every rollout with its texts, reward, state and reason; steps; evaluations with those under way."""
    out = tmp_path / "out"
    async with here.serving(), here.learner() as learner, here.node(10) as node:
        await some_steps(here, learner, node, tools)
        found, lines = await exported(here, out)
        counts = here.run.rollouts
        states = [line["state"] for line in lines if line["kind"] == "train"]
        assert {state: states.count(state) for state in set(states)} == {
            state: count for state, count in counts.model_dump().items() if count and state != "submitted"
        }
        assert len(lines) == counts.submitted + here.run.evaluated
    consumed = [line for line in lines if line["state"] == "consumed"]
    assert len(consumed) == 16
    for line in consumed:
        assert line["prompt"] == line["response"]  # the right answer repeats the digit
        assert (line["reward"], line["tokens"], line["node_name"]) == (1.0, 2, "volunteer")
        assert line["staleness"] == line["step"] - line["version"]
        assert len(line["lease"]) == 32
    rejected = [line for line in lines if line["state"] == "rejected"]
    assert rejected
    assert rejected[0]["response"] is None
    assert rejected[0]["reason"]
    assert sum(found.lost.values()) == len(rejected)
    steps = list(csv.DictReader((out / "steps.csv").open()))
    assert [row["step"] for row in steps] == ["0", "1"]
    assert set(steps[0]) == {*StepMetrics.model_fields, "epoch", "reported"}
    evaluations = list(csv.DictReader((out / "evaluations.csv").open()))
    assert (evaluations[0]["purpose"], evaluations[0]["mean"], evaluations[0]["complete"]) == (
        "baseline",
        "1.0",
        "True",
    )
    assert evaluations[-1]["reason"] == "under way"
    assert not list(out.glob(".*"))


async def test_token_ids_come_when_asked_for(autojump_clock, here, tools, tmp_path):
    """And log-probabilities, as many."""
    async with here.serving(), here.learner() as learner, here.node(10) as node:
        await some_steps(here, learner, node, tools, steps=1)
    await export_run(here.config().run, here.url, tmp_path / "out", arrays=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["state"] == "consumed")
    assert first["token_ids"][-1] == tools.stop
    assert first["logprobs"] == [-0.5, -0.5]


async def test_memory_holds_a_batch_and_no_more(autojump_clock, here, tools, tmp_path, monkeypatch):
    """Rollouts are decoded and written a batch at a time; every one of them comes, in the order of arrival."""
    monkeypatch.setattr(module, "BATCH_ROLLOUTS", 3)
    async with here.serving(), here.learner() as learner, here.node(10) as node:
        await some_steps(here, learner, node, tools)
    decoded, decode = [], here.text.decode
    monkeypatch.setattr(here.text, "decode", lambda tokens: decoded.append(len(tokens)) or decode(tokens))
    told = []
    found, lines = await exported(here, tmp_path / "out", tell=told.append)
    assert max(decoded) == 3
    assert told[-1] == found.rollouts == len(lines) == sum(decoded)
    assert [line["received"] for line in lines] == sorted(line["received"] for line in lines)


async def test_the_ledger_is_only_read(autojump_clock, here, tools, tmp_path):
    """A write through it is refused, and the file is as it was."""
    async with here.serving(), here.learner() as learner, here.node(10) as node:
        await some_steps(here, learner, node, tools, steps=1)
    before = here.path.read_bytes() if here.path.exists() else b""
    await exported(here, tmp_path / "out")
    assert not before or here.path.read_bytes() == before
    ledger = open_ledger_to_read(here.url)
    with pytest.raises(sa.exc.DBAPIError, match=r"read-?only"), ledger._engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM rollouts"))
    ledger.close()


async def test_what_cannot_be_exported_is_said(autojump_clock, here, tmp_path):
    """No ledger, another run, other terms: the prompts would be others."""
    run = here.config().run
    with pytest.raises(ConfigurationError, match="there is no ledger"):
        await export_run(run, sqlite_url(tmp_path / "nothing.sqlite3"), tmp_path / "out", arrays=False)
    async with here.serving():
        pass
    with pytest.raises(ConfigurationError, match="the ledger has no run 'other'; it has r1"):
        await export_run(run.model_copy(update={"name": "other"}), here.url, tmp_path / "out", arrays=False)
    with pytest.raises(ConfigurationError, match="begun with seed = 0, the configuration now says 5"):
        await export_run(run.model_copy(update={"seed": 5}), here.url, tmp_path / "out", arrays=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot write to"):
        await export_run(run, here.url, tmp_path / "file" / "out", arrays=False)
    with closing(open_ledger(here.url)) as ledger, ledger.transaction() as damaged:
        damaged.execute(sa.update(schema.meta).where(schema.meta.c.key == "secret").values(value=b"\0"))
    with pytest.raises(ConfigurationError, match="the secret that every seed is made of is missing or torn"):
        await export_run(run, here.url, tmp_path / "out", arrays=False)
    (tmp_path / "junk").write_bytes(b"not a database at all, but long enough to look like one" * 100)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        open_ledger_to_read(sqlite_url(tmp_path / "junk"))


def step(number, **changes):
    return StepMetrics(
        **{
            "step": number, "rollouts": 8, "groups": 2, "groups_without_spread": 0, "staleness": 2,
            "staleness_mean": 0.5, "reward_mean": 0.25, "loss": 0.1, "ratio_mean": 1.0, "clip_share": 0.0,
            "kl_sampler_learner": 0.001, "entropy": 0.5, "response_tokens_mean": 3.0, "gradient_norm": 1.0,
            "train_seconds": 2.0, "idle_seconds": 1.0,
        } | changes
    )  # fmt: skip


@pytest.mark.parametrize("many", [False, True])
def test_every_plot_is_a_picture(tmp_path, many):
    """With drops, old rollouts and evaluations that ended early, and with none of these."""
    drops = (DropCount(reason="stale", tokens_max=8, count=2), DropCount(reason="withdrawn", tokens_max=8, count=1))
    full = {"staleness_counts": (1, 2, 3, 0, 1, 1), "drops": drops, "reward_mean": -2.0} if many else {}
    found = Exported(rollouts=30, steps=[step(number, **full) for number in range(4)], staleness_max=3)
    if many:
        found.lost.update({"stale: too old": 8, "rejected": 3})
        base = {"purpose": "interim", "samples": 2, "size": 4, "count": 4, "complete": True, "reason": ""}
        found.evaluations = [
            base | {"version": 0, "mean": 0.2}, base | {"version": 2, "mean": 0.4, "complete": False},
            base | {"version": 4, "mean": None, "complete": False},
        ]  # fmt: skip
    made = draw(tmp_path, found, title="r")
    assert [path.name for path in made] == ["reward.png", "staleness.png", "bubble.png", "drops.png"]
    for path in made:
        height, width, _ = matplotlib.image.imread(path).shape
        assert height > 300
        assert width > 900
    assert draw(tmp_path, Exported(), title="r") == []
