"""`echo2 export`: a run as files, read from the ledger, while the coordinator runs or after.

    rollouts.jsonl      one object a rollout, in the order of arrival
    steps.csv           one row a training step
    evaluations.csv     one row a held-out evaluation
    *.png               reward, staleness, bubble, drops

The ledger is opened for reading only and read in one transaction, so that the files agree with each other; the
coordinator goes on writing beside it. Rollouts are streamed: memory holds a few hundred of them, whatever the run. Each
file is written under another name and renamed when it is whole.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import sqlalchemy as sa

from echo2.p2p.codec import decode_record, unpack_logprobs, unpack_tokens
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.messages import StepMetrics
from echo2.tasks.scorer import PlayItem, ScorerUnavailable, TaskUnusable, open_scorer

from . import schema
from .ledger import SECRET_BYTES, open_ledger_to_read
from .loading import TERMS
from .prompts import FolderText, PromptBook
from .records import details_in
from .task_loading import load_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import TextIO

    from echo2.tasks.scorer import Scorer

    from .config import RunConfig
    from .prompts import Kind

BATCH_ROLLOUTS = 256
"""Decoded and written at once."""

ROLLOUTS_FILE, STEPS_FILE, EVALUATIONS_FILE = "rollouts.jsonl", "steps.csv", "evaluations.csv"

LISTS = ("staleness_counts", "drops", "kl_by_node", "updates_skipped", "culprits")
"""Fields of a step that are no single number: in the table as JSON."""


@dataclass(slots=True)
class Exported:
    """What the files hold, for the plots and for whoever asked. `lost`: by state and kind of reason."""

    rollouts: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    steps: list[StepMetrics] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    staleness_max: int = 0


async def export_run(
    run: RunConfig,
    ledger_url: str,
    out: Path,
    *,
    arrays: bool,
    password: str | None = None,
    tell: Callable[[int], None] = lambda _count: None,
) -> Exported:
    """Write the tables. `arrays`: token ids and log-probabilities too. `tell` hears how many rollouts are written.

    Raises ConfigurationError.
    """
    text = FolderText(run.model_dir)
    _make(out)
    try:
        async with open_scorer(run.spec) as scorer:
            task = await load_task(run, scorer, text)
            with closing(open_ledger_to_read(ledger_url, password=password)) as ledger, ledger.reading() as connection:
                secret = _check(connection, run)
                book = PromptBook(run=run.name, task=task, spec=run.spec, text=text, seed=run.seed, secret=secret)
                exported = Exported(staleness_max=run.S)
                _steps(connection, run.name, out, exported)
                _evaluations(connection, run.name, out, exported)
                with _file(out / ROLLOUTS_FILE) as file:
                    writer = _Rollouts(connection, run, book, scorer, arrays=arrays)
                    await writer.write(file, exported, tell)
                return exported
    except TaskUnusable as error:
        raise ConfigurationError(str(error)) from error
    except ScorerUnavailable as error:
        raise ConfigurationError(f"the scorer cannot be started: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"cannot write to {out}: {error.strerror}") from error


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write to {out}: {error.strerror}") from error


def _check(connection: sa.Connection, run: RunConfig) -> bytes:
    """The ledger has this run, begun with these terms. Returns the secret that its seeds are of."""
    table = schema.runs
    row = connection.execute(sa.select(table).where(table.c.run == run.name)).first()
    if row is None:
        known = ", ".join(connection.scalars(sa.select(table.c.run))) or "none"
        raise ConfigurationError(f"the ledger has no run {run.name!r}; it has {known}")
    recorded = json.loads(row.terms)
    for name in TERMS:
        if recorded.get(name) != getattr(run, name):
            raise ConfigurationError(
                f"run {run.name} was begun with {name} = {recorded.get(name)}, the configuration now says "
                f"{getattr(run, name)}: the prompts would be others"
            )
    secret = connection.scalar(sa.select(schema.meta.c.value).where(schema.meta.c.key == "secret"))
    if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
        raise ConfigurationError("the ledger is damaged: the secret that every seed is made of is missing or torn")
    return secret


class _Rollouts:
    """Writes the rollouts of a run, batch after batch."""

    def __init__(
        self, connection: sa.Connection, run: RunConfig, book: PromptBook, scorer: Scorer, *, arrays: bool
    ) -> None:
        self._connection = connection
        self._run = run
        self._book = book
        self._scorer = scorer
        self._arrays = arrays
        nodes = schema.nodes
        self._names = {row.peer: row.name for row in connection.execute(sa.select(nodes.c.peer, nodes.c.name))}

    async def write(self, file: TextIO, exported: Exported, tell: Callable[[int], None]) -> None:
        table = schema.rollouts
        content = schema.contents
        columns = [
            sa.func.coalesce(column, sa.literal(b"")).label(column.name)  # empty for what never passed intake
            for column in (content.c.tokens, content.c.logprobs, content.c.spans)
        ]
        joined = sa.select(table, *columns).outerjoin(content, content.c.id == table.c.id)
        query = joined.where(table.c.run == self._run.name).order_by(table.c.id)
        rows = iter(self._connection.execute(query.execution_options(yield_per=BATCH_ROLLOUTS)))
        while batch := list(islice(rows, BATCH_ROLLOUTS)):
            prompts = await self._prompts(batch)
            responses = self._book.decode([row.tokens for row in batch])
            for row, response in zip(batch, responses, strict=True):
                line = self._line(row, prompts[row.kind, row.ordinal], response)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                if row.state in ("rejected", "stale", "withdrawn", "duplicate"):
                    exported.lost[_kind(row.state, row.reason)] += 1
            exported.rollouts += len(batch)
            tell(exported.rollouts)

    async def _prompts(self, batch: Sequence[sa.Row[Any]]) -> Mapping[tuple[Kind, int], str]:
        """Texts in the model's template; of several turns the openings."""
        book, card = self._book, self._book.text.card
        keys: list[tuple[Kind, int]] = list(dict.fromkeys((row.kind, row.ordinal) for row in batch))
        if book.sandbox is None:
            found = {key: book.prompt(*key) for key in keys}
            return {key: card.wrap(prompt.text) + prompt.prefill for key, prompt in found.items()}
        plays = await self._scorer.play([PlayItem(book.spec, book.environment(*key)) for key in keys])
        return {
            key: card.wrap(play.observations[0] if play.observations else "")
            for key, play in zip(keys, plays, strict=True)
        }

    def _line(self, row: sa.Row[Any], prompt: str, response: str) -> dict[str, Any]:
        tokens = unpack_tokens(row.tokens).tolist()
        spans = unpack_tokens(row.spans).tolist()
        line: dict[str, Any] = {
            "kind": row.kind,
            "group": row.ordinal,
            "sample": row.sample,
            "prompt": prompt,
            "response": response if tokens else None,
            "finish": row.finish,
            "tokens": len(tokens),
            "reward": row.reward,
            "details": details_in(row.details) or {},
            "state": row.state,
            "reason": row.reason,
            "version": row.version,
            "step": row.step,
            "staleness": None if row.step is None or row.kind == "eval" else row.step - row.version,
            "node": row.peer,
            "node_name": self._names.get(row.peer, ""),
            "lease": row.lease_id.hex(),
            "received": row.received,
        }
        if spans:
            line["spans"] = spans
        if self._arrays:
            line["token_ids"] = tokens
            line["logprobs"] = [round(float(value), 6) for value in unpack_logprobs(row.logprobs)]
        return line


def _steps(connection: sa.Connection, run: str, out: Path, exported: Exported) -> None:
    table = schema.steps
    query = sa.select(table).where(table.c.run == run).order_by(table.c.step)
    columns = [*StepMetrics.model_fields, "epoch", "reported"]
    with _file(out / STEPS_FILE) as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in connection.execute(query):
            metrics = decode_record(row.metrics, StepMetrics)
            exported.steps.append(metrics)
            values = metrics.model_dump()
            for name in LISTS:
                values[name] = json.dumps(values[name], default=lambda value: cast("bytes", value).hex())
            writer.writerow({**values, "epoch": row.epoch, "reported": row.reported})


def _evaluations(connection: sa.Connection, run: str, out: Path, exported: Exported) -> None:
    """Of those under way: what is scored so far."""
    table, rollouts = schema.evaluations, schema.rollouts
    columns = ["version", "purpose", "samples", "size", "count", "mean", "complete", "reason"]
    with _file(out / EVALUATIONS_FILE) as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in connection.execute(sa.select(table).where(table.c.run == run).order_by(table.c.version)):
            count, mean = row._mapping["count"], row.mean
            if row.finished is None:
                scored = sa.and_(
                    rollouts.c.run == run, rollouts.c.kind == "eval", rollouts.c.version == row.version,
                    rollouts.c.state == "evaluated",
                )  # fmt: skip
                count, mean = connection.execute(
                    sa.select(sa.func.count(), sa.func.avg(rollouts.c.reward)).where(scored)
                ).one()
            values = {
                "version": row.version, "purpose": row.purpose, "samples": row.samples, "size": row.size,
                "count": count, "mean": mean, "complete": row.finished is not None and not row.reason,
                "reason": row.reason if row.finished is not None else "under way",
            }  # fmt: skip
            exported.evaluations.append(values)
            writer.writerow(values)


def _kind(state: str, reason: str) -> str:
    """State and reason without its numbers, so that the kinds stay few."""
    short = re.split(r"[^A-Za-z_ ']", reason, maxsplit=1)[0].strip()[:32]
    return f"{state}: {short}" if short else state


@contextmanager
def _file(path: Path) -> Iterator[TextIO]:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        yield file
    partial.replace(path)
