"""What nodes will see of a run: prompts in the model's template, how answers are drawn, and never a right answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError
from echo2.tasks.scorer import PlayItem, ScorerUnavailable, TaskUnusable, open_scorer

from .prompts import FolderText, PromptBook
from .task_loading import check_task, load_task

if TYPE_CHECKING:
    from echo2.tasks.sandbox import SandboxTask
    from echo2.tasks.scorer import Scorer
    from echo2.tasks.task import Task
    from echo2.tasks.token_text import ModelText

    from .config import RunConfig
    from .prompts import Kind

EXAMPLES = 3

MEASURED = 64
"""Prompts of each kind whose length is taken: enough to see the long ones, a second at most."""

TOKEN_BYTES = 4

NO_SECRET = bytes(32)
"""Stands for the coordinator's secret: the openings of a sandbox are examples, those of the run are others."""


@dataclass(frozen=True, slots=True)
class SeenPrompt:
    """One prompt as a node has it. Of several turns: the opening."""

    text: str
    tokens: int
    tokens_max: int


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a lease of this run carries, in words. `longest_prompt_tokens` is of the prompts looked at."""

    model: str
    context_tokens: int
    train: int
    heldout: int
    prompts: tuple[SeenPrompt, ...]
    longest_prompt_tokens: int
    sampling: dict[str, float | int | list[int]]
    turns: str = ""
    problems: tuple[str, ...] = ()


async def look(run: RunConfig) -> Seen:
    """Load the task as a coordinator would, and see. Raises ConfigurationError."""
    check_task(run)
    text = FolderText(run.model_dir)
    try:
        async with open_scorer(run.spec) as scorer:
            return await seen_of(run, await load_task(run, scorer, text), text, scorer)
    except TaskUnusable as error:
        raise ConfigurationError(str(error)) from error
    except ScorerUnavailable as error:
        raise ConfigurationError(f"the scorer cannot be started: {error}") from error


async def seen_of(run: RunConfig, task: Task | SandboxTask, text: ModelText, scorer: Scorer) -> Seen:
    """What nodes see of `task`: its first training prompts, in the order of the run."""
    book = PromptBook(run=run.name, task=task, spec=run.spec, text=text, seed=run.seed, secret=NO_SECRET)
    measured: list[tuple[Kind, int]] = [("train", g) for g in range(min(MEASURED, task.train_size))]
    measured += [("eval", g) for g in range(min(MEASURED, task.heldout_size))]
    await book.open(measured, scorer)
    lengths = {key: len(book.tokens(*key)) // TOKEN_BYTES for key in measured}
    shown = [ordinal for kind, ordinal in measured if kind == "train"][:EXAMPLES]
    prompts = [
        SeenPrompt(
            text=await _text(book, ordinal, scorer),
            tokens=lengths["train", ordinal],
            tokens_max=max(0, book.tokens_max("train", ordinal, run.tokens_max)),
        )
        for ordinal in shown
    ]
    card = text.card
    rules = book.episode_rules(run.tokens_max, run.turn_tokens_max)
    turns = ""
    if rules is not None:
        turns = f"up to {rules.turns_max} turns of {rules.turn_tokens_max} tokens, played on the node as {run.spec}"
    too_long = sum(length >= card.context_tokens for length in lengths.values())
    return Seen(
        model=card.name,
        context_tokens=card.context_tokens,
        train=task.train_size,
        heldout=task.heldout_size,
        prompts=tuple(prompts),
        longest_prompt_tokens=max(lengths.values()),
        sampling={
            "temperature": run.temperature,
            "top_k": run.top_k,
            "top_p": run.top_p,
            "min_p": run.min_p,
            "tokens_max": run.tokens_max,
            "stop_ids": list(card.stop_ids),
        },
        turns=turns,
        problems=(f"{too_long} of {len(lengths)} prompts fill the model's context and are left out",)
        if too_long
        else (),
    )


async def _text(book: PromptBook, ordinal: int, scorer: Scorer) -> str:
    """A training prompt with the template around it."""
    card = book.text.card
    if book.sandbox is None:
        prompt = book.prompt("train", ordinal)
        return card.wrap(prompt.text) + prompt.prefill
    (play,) = await scorer.play([PlayItem(book.spec, book.environment("train", ordinal))])
    return card.wrap(play.observations[0])
