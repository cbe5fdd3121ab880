"""`echo2 task check`: is a task fit for a run? What a run would find out late and dearly, found out in seconds.

Everything runs where it runs in production, in the scorer's worker, and under bubblewrap besides where that works. A
**problem** is what would spoil a run (exit code 1); a **note** is what its author should know.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from echo2.p2p.errors import ConfigurationError
from echo2.tasks import bubblewrap
from echo2.tasks.catalog import make_task, prompts_from_worker
from echo2.tasks.materialised import PROMPTS_MAX
from echo2.tasks.scorer import (
    ITEM_SECONDS_MAX,
    PlayItem,
    ScoreItem,
    ScorerUnavailable,
    TaskUnusable,
    open_scorer,
)
from echo2.tasks.task import TaskSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from echo2.tasks.scorer import ProcessScorer, TaskSizes
    from echo2.tasks.task import Prompt, Split

PROMPTS_TRIED = 20
PROMPTS_SHOWN = 3
HELDOUT_TRIED = 200
"""Held-out prompts looked for among as many training prompts: enough to notice a split that is none."""

PROMPTS_SECONDS = 10.0

SAMPLED_PROMPTS = 10
SLOW_SHARE = 0.25
"""A reward that takes more of its limit is noted: a loaded machine is several times slower."""

SHOWN_CHARACTERS_MAX = 100

HASH_SEEDS = (0, 20_251)
"""Of the two processes compared: sets and dictionaries of texts come in another order."""

BAD_ANSWERS: Mapping[str, str] = {
    "nothing": "",
    "blanks": " \n\t ",
    "100 kB of one letter": "a" * 100_000,
    "100 kB of digits": "9" * 100_000,
    "NUL": "\0",
    "half a surrogate pair": "\ud800",
    "not a number": "nan",
    "a power tower": "9**9**9**9",
    "a power tower in LaTeX": r"$\boxed{9^{9^{9^{9}}}}$",
    "nested braces": r"\boxed{" * 5000 + "}" * 5000,
    "nested fractions": r"$\frac{" * 1000,
    "nested lists": "[" * 5000,
    "nested brackets": "(" * 5000 + "1" + ")" * 5000,
    "a factorial": "factorial(10**9)",
    "code": "__import__('os').system('echo')",
}


@dataclass(slots=True)
class Report:
    """Lines as they are found; `tell` shows each at once."""

    tell: Callable[[str], None]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """What would spoil a run."""
        self.problems.append(text)
        self.tell(f"  PROBLEM: {text}")

    def note(self, text: str) -> None:
        """What the author should know."""
        self.notes.append(text)
        self.tell(f"  note: {text}")

    def __bool__(self) -> bool:
        return not self.problems


def spec_of(target: str, options: Sequence[str], folder: Path) -> TaskSpec:
    """The task that the command line means: a Python file, or a name; options as KEY=VALUE, VALUE in JSON or plain.

    Raises ConfigurationError.
    """
    values: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigurationError(f"--option {option!r} must be KEY=VALUE")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    try:
        if target.endswith(".py") or "/" in target:
            if not (folder / target).is_file():
                raise ConfigurationError(f"there is no file {target}")
            values, target = {"path": target} | values, "file"
        if isinstance(path := values.get("path"), str):
            values["path"] = str((folder / path).absolute())
        spec = TaskSpec(target, values)
        make_task(spec)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return spec


async def check_task(spec: TaskSpec, tell: Callable[[str], None], *, item_seconds: float = ITEM_SECONDS_MAX) -> Report:
    """Try the task, telling line by line. Raises ConfigurationError when no scorer can be started at all."""
    report = Report(tell)
    tell(f"task {spec}")
    findings: list[Any] = []
    try:
        for hash_seed in (*HASH_SEEDS, HASH_SEEDS[0]):
            first = not findings
            if len(findings) == 2 and (findings[0] == findings[1] or spec.name == "file"):
                break  # a third is only to tell, of a library's data set, chance from order
            started = trio.current_time()
            async with open_scorer(spec, item_seconds=item_seconds, wrap=True, hash_seed=hash_seed) as scorer:
                if first:
                    tell(f"  loaded in {trio.current_time() - started:.1f} s")
                    _tell_protection(scorer, report)
                sizes = await scorer.sizes(spec)
                look = _look_at_episodes if sizes.turns_max else _look_at_prompts
                findings.append(
                    await look(scorer, spec, sizes, report if first else Report(lambda _line: None), item_seconds)
                )
    except TaskUnusable as error:
        report.problem(str(error))
    except ScorerUnavailable as error:
        raise ConfigurationError(f"{error}; does the task end its process while it is loaded?") from error
    else:
        tell("two processes")
        if findings[0] == findings[1]:
            tell("  the same prompts and the same rewards in both")
        elif len(findings) == 3 and findings[0] == findings[2]:
            report.note("prompts come out otherwise where sets are ordered otherwise; all workers of a run order alike")
        else:
            report.problem(
                "prompts or rewards differ between two processes: is something drawn from a set, from hash(), from the "
                "clock or from a random generator without a seed?"
            )
    count = len(report.problems)
    tell("fit for a run" if report else f"not fit for a run: {count} problem{'s' if count > 1 else ''}")
    return report


def _tell_protection(scorer: ProcessScorer, report: Report) -> None:
    report.tell(f"  protected by: {', '.join(scorer.confinement) or 'nothing'}")
    if missing := bubblewrap.missing():
        report.note(
            f"not under bubblewrap, so the file can read what you can while it is loaded: {missing}. While it scores, "
            f"{'it can open no file and no socket' if 'seccomp' in scorer.confinement else 'nothing else protects'}"
        )
    elif "seccomp" not in scorer.confinement:
        report.note("without seccomp: a response that takes over the scorer can read what bubblewrap shows")


async def _look_at_prompts(
    scorer: ProcessScorer, spec: TaskSpec, sizes: TaskSizes, report: Report, item_seconds: float
) -> list[Any]:
    """Everything about a single-turn task; what must be the same in another process."""
    report.tell(f"prompts: {sizes.train} for training, {sizes.heldout} held out")
    if sizes.train + sizes.heldout > PROMPTS_MAX:
        report.problem(f"a run has at most {PROMPTS_MAX} prompts")
    started = trio.current_time()
    prompts = await _first_prompts(scorer, spec, "train", min(sizes.train, HELDOUT_TRIED))
    heldout = await _first_prompts(scorer, spec, "heldout", min(sizes.heldout, HELDOUT_TRIED))
    total = (trio.current_time() - started) / (len(prompts) + len(heldout)) * (sizes.train + sizes.heldout)
    if prompts_from_worker(spec) and total > PROMPTS_SECONDS:
        report.note(f"all the prompts take about {_time(total)} to make, at each start of the coordinator")
    for prompt in (*prompts[:PROMPTS_SHOWN], *heldout[:1]):
        begun = f", begun with {_shown(prompt.prefill)}" if prompt.prefill else ""
        report.tell(f"  {prompt.split} {prompt.index}: {_shown(prompt.text)}{begun}")
    if not all(prompt.text.strip() for prompt in (*prompts, *heldout)):
        report.problem("a prompt is empty")
    both = {(p.text, p.prefill) for p in prompts} & {(p.text, p.prefill) for p in heldout}
    if both:
        report.note(f"of the first {len(heldout)} held-out prompts, {len(both)} are training prompts, too")

    samples: list[tuple[ScoreItem, float]] = []
    for prompt in (*prompts[:SAMPLED_PROMPTS], *heldout[:SAMPLED_PROMPTS]):
        pairs = await scorer.samples(spec, prompt.split, prompt.index)
        samples += [(ScoreItem(spec, prompt.split, prompt.index, text), reward) for text, reward in pairs]
    report.tell(f"sample answers: {len(samples)}" if samples else "sample answers: the task offers none")
    scored = [await _timed_score(scorer, item) for item, _ in samples]
    for (item, wanted), (score, _seconds) in zip(samples, scored, strict=True):
        if score[1] or abs(score[0] - wanted) > 1e-9:
            why = f" ({score[1]})" if score[1] else ""
            report.problem(
                f"{item.split} {item.index}: {_shown(item.response)} should earn {wanted:g} and earns {score[0]:g}{why}"
            )
    ordinary = [await _timed_score(scorer, ScoreItem(spec, p.split, p.index, "42")) for p in prompts[:PROMPTS_TRIED]]
    for score, _seconds in ordinary:
        if score[1]:
            report.problem(f"the response '42' is not scored: {score[1]}")
            break
    _tell_times(report, [seconds for _, seconds in (*scored, *ordinary)], item_seconds)
    report.tell("bad answers, to the first training prompt")
    bad = []
    best, cut = 0.0, 0
    for name, text in BAD_ANSWERS.items():
        score, seconds = await _timed_score(scorer, ScoreItem(spec, "train", 0, text))
        bad.append(score if seconds < item_seconds * SLOW_SHARE else None)  # how far it came in that time may vary
        _tell_bad(report, name, score, seconds)
        best = max(best, score[0])
        cut += seconds >= item_seconds
    if best > 0:
        report.note(f"bad answers earn up to {best:g}: is that meant?")
    if cut:
        report.note(f"{cut} bad answers ended the worker: that costs {item_seconds:g} s and another start, each time")
    compared = [score if seconds < item_seconds * SLOW_SHARE else None for score, seconds in (*scored, *ordinary)]
    return [sizes, prompts[:PROMPTS_TRIED], heldout[:PROMPTS_TRIED], [item for item, _ in samples], compared, bad]


async def _look_at_episodes(
    scorer: ProcessScorer, spec: TaskSpec, sizes: TaskSizes, report: Report, item_seconds: float
) -> list[Any]:
    """As `_look_at_prompts`, of a task that is played over several turns."""
    report.tell(f"episodes: {sizes.train} for training, {sizes.heldout} held out, {sizes.turns_max} turns at most")
    seeds = [number.to_bytes(32, "big") for number in range(PROMPTS_TRIED)]
    plays = []
    times = []
    for seed in seeds:
        started = trio.current_time()
        plays += await scorer.play([PlayItem(spec, seed), PlayItem(spec, seed, ("1",), truncated=False)])
        times.append((trio.current_time() - started) / 2)
    for play in plays[: 2 * PROMPTS_SHOWN : 2]:
        report.tell(f"  opening: {_shown(play.observations[0] if play.observations else '')}")
    for play in plays:
        if play.reason:
            report.problem(f"an episode failed: {play.reason}")
            break
    _tell_times(report, times, item_seconds)
    report.tell("bad actions, as the first of an episode that is then cut off")
    bad = []
    for name, text in BAD_ANSWERS.items():
        started = trio.current_time()
        [opened] = await scorer.play([PlayItem(spec, seeds[0], (text,))])
        [cut] = await scorer.play([PlayItem(spec, seeds[0], (text,), truncated=not opened.done)])
        seconds = (trio.current_time() - started) / 2
        bad.append(cut if seconds < item_seconds * SLOW_SHARE else None)
        _tell_bad(report, name, (cut.reward, cut.reason), seconds)
        if any(text in seen for seen in cut.observations[1:] if len(text) > len("code")):
            report.problem(
                f"an observation repeats the model's own words ({name}): it could write markers of the model"
            )
    return [sizes, plays, bad]


async def _first_prompts(scorer: ProcessScorer, spec: TaskSpec, split: Split, count: int) -> list[Prompt]:
    """The first prompts: some, and then as many as come within `PROMPTS_SECONDS`."""
    prompts: list[Prompt] = []
    started = trio.current_time()
    while len(prompts) < count and (not prompts or trio.current_time() - started < PROMPTS_SECONDS):
        prompts += await scorer.prompts(spec, split, len(prompts), min(PROMPTS_TRIED, count - len(prompts)))
    return prompts


async def _timed_score(scorer: ProcessScorer, item: ScoreItem) -> tuple[tuple[float, str], float]:
    # The prompt first: what is timed must not be the start of another worker, after one that was killed.
    await scorer.prompts(TaskSpec.of(item.task), item.split, item.index, 1)
    started = trio.current_time()
    [score] = await scorer.score([item])
    return (score.reward, score.reason), trio.current_time() - started


def _tell_times(report: Report, times: Sequence[float], limit: float) -> None:
    median, largest = statistics.median(times), max(times)
    report.tell(f"time of a reward: median {_time(median)}, largest {_time(largest)}; the limit is {limit:g} s")
    if median > limit * SLOW_SHARE:
        report.problem(f"an ordinary reward takes {_time(median)}: on a busy machine it will be cut off at {limit:g} s")
    elif largest > limit * SLOW_SHARE:
        report.note(f"some rewards take {_time(largest)}; at {limit:g} s they are cut off and earn 0")


def _tell_bad(report: Report, name: str, score: tuple[float, str], seconds: float) -> None:
    reward, reason = score
    report.tell(f"  {name:<24} reward {reward:<6g} {_time(seconds):>8}{'  ' + _shown(reason) if reason else ''}")


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _shown(text: str) -> str:
    """One line of a text that nobody vouches for: control characters of a terminal stay out."""
    plain = json.dumps(text, ensure_ascii=True)
    return plain if len(plain) <= SHOWN_CHARACTERS_MAX else f'{plain[:SHOWN_CHARACTERS_MAX]}..."'
