"""A task whose prompts were made in the scorer's worker, once, and are then held here as plain text.

The coordinator needs every prompt, but imports neither a task's library nor a person's file. What it gets is text,
bounded in number and bytes; rewards stay in the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, cast

from .catalog import make_task, prompts_from_worker
from .scorer import TaskUnusable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .sandbox import SandboxTask
    from .scorer import ProcessScorer
    from .task import Prompt, Split, Task, TaskSpec

PROMPTS_MAX = 200_000
"""Of both splits together. A run of a thousand steps with R/n = 32 sees 32 000."""

PROMPTS_BYTES_MAX = 256 << 20
"""Held in the coordinator's memory for as long as the run lasts."""

PIECE_PROMPTS = 64
"""Asked for in one go: the caller can be cancelled, and shows a sign of life, this often."""


class MaterialisedTask:
    """Prompts held as text. A prompt keeps the index under which its worker scores it.

    That index may differ from its place here: held-out prompts that word for word are training prompts are left out.
    """

    def __init__(self, name: str, train: Sequence[Prompt], heldout: Sequence[Prompt]) -> None:
        """Raises TaskUnusable when no held-out prompt is left."""
        self.name = name
        trained = {(prompt.text, prompt.prefill) for prompt in train}
        kept = tuple(prompt for prompt in heldout if (prompt.text, prompt.prefill) not in trained)
        self.left_out = len(heldout) - len(kept)
        """Held-out prompts that are training prompts, too."""
        if not kept or not train:
            raise TaskUnusable(f"each of the {len(heldout)} held-out prompts of {name} is a training prompt, too")
        self._prompts: Mapping[Split, tuple[Prompt, ...]] = {"train": tuple(train), "heldout": kept}

    @property
    def train_size(self) -> int:
        """Number of training prompts."""
        return len(self._prompts["train"])

    @property
    def heldout_size(self) -> int:
        """Number of held-out prompts that are no training prompts."""
        return len(self._prompts["heldout"])

    def prompt(self, split: Split, index: int) -> Prompt:
        """Prompt at place `index` of `split`; score it under its own `index`. Raises IndexError outside the split."""
        if index < 0:
            raise IndexError(f"no prompt {index}")
        return self._prompts[split][index]

    def score(self, prompt: Prompt, response: str) -> NoReturn:  # noqa: ARG002  # the protocol's
        """Never here: raises RuntimeError."""
        raise RuntimeError(f"responses to {self.name} are scored in the scorer's process only ({prompt.index})")


async def materialise(scorer: ProcessScorer, spec: TaskSpec) -> Task | SandboxTask:
    """The task as the coordinator holds it: the catalogue's own, or the worker's prompts where only it can say them.

    Raises TaskUnusable or another ValueError, fit to show a person, and ScorerUnavailable.
    """
    task = make_task(spec)
    if not prompts_from_worker(spec):
        return task
    sizes = await scorer.sizes(spec)
    if sizes.train + sizes.heldout > PROMPTS_MAX:
        raise TaskUnusable(f"{spec.name} has {sizes.train + sizes.heldout} prompts, above the {PROMPTS_MAX} of a run")
    held: dict[Split, list[Prompt]] = {"train": [], "heldout": []}
    bytes_ = 0
    for split, size in (("train", sizes.train), ("heldout", sizes.heldout)):
        split = cast("Split", split)
        for first in range(0, size, PIECE_PROMPTS):
            piece = await scorer.prompts(spec, split, first, min(PIECE_PROMPTS, size - first))
            bytes_ += sum(len(prompt.text.encode()) + len(prompt.prefill.encode()) for prompt in piece)
            if bytes_ > PROMPTS_BYTES_MAX:
                raise TaskUnusable(f"the prompts of {spec.name} are more than {PROMPTS_BYTES_MAX} bytes in all")
            held[split] += piece
    return MaterialisedTask(spec.name, held["train"], held["heldout"])
