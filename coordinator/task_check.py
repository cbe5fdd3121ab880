"""`echo2 task check`: is a task fit for a run? What a run would find out late and dearly, found out in seconds.

Everything runs where it runs in production, in the scorer's worker, and under bubblewrap besides where that works. A
**problem** is what would spoil a run (exit code 1); a **note** is what its author should know.
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass, field
from random import Random
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
from echo2.tasks.scorer_wire import printable
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

COPIED_PROMPTS = 20
COPIES_MAX = 3
"""Expressions of one prompt that are tried as answers."""

COPIED_CHARACTERS_MAX = 4096

ORDER_SEED = 1
"""In what order the second process is asked: a reward must not depend on what was scored before."""

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
        """What would spoil a run. A task's own words may be in it, which a terminal must not obey."""
        text = printable(text)
        self.problems.append(text)
        self.tell(f"  PROBLEM: {text}")

    def note(self, text: str) -> None:
        """What the author should know."""
        text = printable(text)
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
            if len(findings) == 2 and (_alike(*findings) or spec.name == "file"):
                break  # a third is only to tell, of a library's data set, chance from order
            started = trio.current_time()
            async with open_scorer(spec, item_seconds=item_seconds, wrap=True, hash_seed=hash_seed) as scorer:
                if first:
                    tell(f"  loaded in {trio.current_time() - started:.1f} s")
                    _tell_protection(scorer, report)
                sizes = await scorer.sizes(spec)
                look = _look_at_episodes if sizes.turns_max else _look_at_prompts
                quiet = report if first else Report(lambda _line: None)
                order = None if first else Random(ORDER_SEED)
                findings.append(await look(scorer, spec, sizes, quiet, item_seconds, order))
    except TaskUnusable as error:
        report.problem(str(error))
    except ScorerUnavailable as error:
        raise ConfigurationError(printable(str(error))) from error
    else:
        tell("two processes")
        if _alike(findings[0], findings[1]):
            tell("  the same prompts and the same rewards in both, whatever was scored before")
        elif len(findings) == 3 and _alike(findings[0], findings[2]):
            report.note("prompts come out otherwise where sets are ordered otherwise; all workers of a run order alike")
        else:
            report.problem(
                "prompts or rewards differ between two processes: is something drawn from a set, from hash(), from the "
                "clock or from a random generator without a seed, or kept from one call of score() to the next?"
            )
    count = len(report.problems)
    tell("fit for a run" if report else f"not fit for a run: {count} problem{'s' if count > 1 else ''}")
    return report


def _alike(first: Any, second: Any) -> bool:
    """Whether two processes found the same; None stands for what came too late to say, and is like anything."""
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_alike, first, second))
    return first is None or second is None or bool(first == second)


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
    scorer: ProcessScorer, spec: TaskSpec, sizes: TaskSizes, report: Report, item_seconds: float, order: Random | None
) -> list[Any]:
    """Everything about a single-turn task; what must be the same in another process.

    `order` shuffles the order of everything that is scored.
    """
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
    ordinary = [ScoreItem(spec, p.split, p.index, "42") for p in prompts[:PROMPTS_TRIED]]
    again = [ordinary[0]] * 3
    copies = [
        ScoreItem(spec, p.split, p.index, text)
        for p in (_spread(prompts, COPIED_PROMPTS) if order is None else ())  # one process tells whether they earn
        for text in copies_of(p.text + p.prefill)
    ]
    bad = [ScoreItem(spec, "train", 0, text) for text in BAD_ANSWERS.values()]
    groups = [[item for item, _ in samples], ordinary, again, copies, bad]

    def tell(group: int, place: int, score: tuple[float, str], seconds: float) -> None:
        if groups[group] is bad:  # at once: each of them may take its time
            if place == 0:
                report.tell("bad answers, to the first training prompt")
            _tell_bad(report, list(BAD_ANSWERS)[place], score, seconds)

    times = await _timed_scores(scorer, groups, order, tell)
    scored, plain, repeated, copied, spoilt = times
    for (item, wanted), (score, _seconds) in zip(samples, scored, strict=True):
        if score[1] or abs(score[0] - wanted) > 1e-9:
            why = f" ({score[1]})" if score[1] else ""
            report.problem(
                f"{item.split} {item.index}: {_shown(item.response)} should earn {wanted:g} and earns {score[0]:g}{why}"
            )
    for score, _seconds in plain:
        if score[1]:
            report.problem(f"the response '42' is not scored: {score[1]}")
            break
    earned = sorted({score[0] for score, seconds in (plain[0], *repeated) if seconds < item_seconds * SLOW_SHARE})
    if len(earned) > 1:
        report.problem(
            f"the response '42' to the first prompt earns now {earned[0]:g}, now {earned[-1]:g}: is something kept "
            "from one call of score() to the next?"
        )
    _tell_times(report, [seconds for _, seconds in (*scored, *plain)], item_seconds)
    _tell_copies(report, copies, copied)
    best = max(score[0] for score, _ in spoilt)
    cut = sum(seconds >= item_seconds for _, seconds in spoilt)
    if best > 0:
        report.note(f"bad answers earn up to {best:g}: is that meant?")
    if cut:
        report.note(f"{cut} bad answers ended the worker: that costs {item_seconds:g} s and another start, each time")
    compared = [
        [score if seconds < item_seconds * SLOW_SHARE else None for score, seconds in group]
        for group in (scored, plain, repeated, spoilt)
    ]  # of what takes long, how far it came in that time may vary
    return [sizes, prompts[:PROMPTS_TRIED], heldout[:PROMPTS_TRIED], [item for item, _ in samples], compared]


_MATHEMATICS = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SUM = re.compile(r"[-(]{0,8}\d[\d.]*(?:[)\s]{0,8}[-+*/^][-(\s]{0,8}\d[\d.]*)+\){0,8}")


def copies_of(prompt: str) -> list[str]:
    """Answers that only repeat a prompt: the whole, and its mathematical expressions, bare and in a box."""
    prompt = prompt[:COPIED_CHARACTERS_MAX]
    found = [next(filter(None, match.groups())).strip() for match in _MATHEMATICS.finditer(prompt)]
    found += [match[0].strip() for match in _SUM.finditer(_MATHEMATICS.sub(" ", prompt))]
    expressions = list(dict.fromkeys(text for text in found if text))[:COPIES_MAX]
    boxed = [rf"\boxed{{{text}}}" for text in expressions]
    return list(dict.fromkeys((prompt, *expressions, *boxed)))


def _tell_copies(report: Report, items: Sequence[ScoreItem], scored: Sequence[tuple[tuple[float, str], float]]) -> None:
    paid = [(item, score[0]) for item, (score, _) in zip(items, scored, strict=True) if score[0] > 0]
    prompts = {item.index for item in items}
    report.tell(f"prompts given back as answers: {len(items)}, to {len(prompts)} training prompts")
    if paid:
        item, reward = max(paid, key=lambda pair: pair[1])
        report.note(
            f"an answer that only repeats something of the prompt earns up to {reward:g}, at "
            f"{len({item.index for item, _ in paid})} of {len(prompts)} prompts; train {item.index}: "
            f"{_shown(item.response)}: is that meant?"
        )


def _spread(prompts: Sequence[Prompt], count: int) -> Sequence[Prompt]:
    """About `count` of them, from the first to the last: a task's kinds of prompts often stand in a row."""
    return prompts[:: max(1, len(prompts) // count)][:count]


async def _timed_scores(
    scorer: ProcessScorer,
    groups: Sequence[Sequence[ScoreItem]],
    order: Random | None,
    tell: Callable[[int, int, tuple[float, str], float], None],
) -> list[list[tuple[tuple[float, str], float]]]:
    """Score and seconds of every item, where the item stands; scored in the order given, or in another."""
    places = [(group, place) for group, items in enumerate(groups) for place in range(len(items))]
    if order is not None:
        order.shuffle(places)
    found = {}
    for group, place in places:
        found[group, place] = await _timed_score(scorer, groups[group][place])
        tell(group, place, *found[group, place])
    return [[found[group, place] for place in range(len(items))] for group, items in enumerate(groups)]


async def _look_at_episodes(
    scorer: ProcessScorer, spec: TaskSpec, sizes: TaskSizes, report: Report, item_seconds: float, order: Random | None
) -> list[Any]:
    """As `_look_at_prompts`, of a task that is played over several turns."""
    report.tell(f"episodes: {sizes.train} for training, {sizes.heldout} held out, {sizes.turns_max} turns at most")
    seeds = [number.to_bytes(32, "big") for number in range(PROMPTS_TRIED)]
    if order is not None:
        order.shuffle(seeds)
    played = {}
    times = []
    for seed in seeds:
        started = trio.current_time()
        played[seed] = await scorer.play([PlayItem(spec, seed), PlayItem(spec, seed, ("1",), truncated=False)])
        times.append((trio.current_time() - started) / 2)
    plays = [play for seed in sorted(played) for play in played[seed]]
    seeds.sort()
    for play in plays[: 2 * PROMPTS_SHOWN : 2]:
        report.tell(f"  opening: {_shown(play.observations[0] if play.observations else '')}")
    for play in plays:
        if play.reason:
            report.problem(f"an episode failed: {play.reason}")
            break
    _tell_times(report, times, item_seconds)
    report.tell("bad actions, as the first of an episode that is then cut off")
    bad = []
    opening = plays[0].observations[0] if plays[0].observations else ""
    for name, text in {**BAD_ANSWERS, "the opening": opening}.items():
        started = trio.current_time()
        [opened] = await scorer.play([PlayItem(spec, seeds[0], (text,))])
        [cut] = await scorer.play([PlayItem(spec, seeds[0], (text,), truncated=not opened.done)])
        seconds = (trio.current_time() - started) / 2
        bad.append(cut if seconds < item_seconds * SLOW_SHARE else None)
        _tell_bad(report, name, (cut.reward, cut.reason), seconds)
        if name == "the opening":
            if cut.reward > 0:
                report.note(f"an action that only repeats the opening earns {cut.reward:g}: is that meant?")
        elif any(text in seen for seen in cut.observations[1:] if len(text) > len("code")):
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
