"""From an ordinal to the tokens of its prompt, and from a response's tokens to its text."""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from typing import TYPE_CHECKING, Literal, cast

from echo2.p2p.codec import pack_tokens, unpack_tokens
from echo2.p2p.errors import ConfigurationError, Refused
from echo2.tasks.catalog import is_sandbox_task
from echo2.tasks.curriculum import train_index
from echo2.tasks.episode import EpisodeRules
from echo2.tasks.model_card import TOKENIZER_FILE, load_model_card
from echo2.tasks.sandbox import environment_seed
from echo2.tasks.scorer import PlayItem, ScorerUnavailable
from echo2.tasks.token_text import TokenText

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from echo2.tasks.sandbox import SandboxTask
    from echo2.tasks.scorer import Play, Scorer
    from echo2.tasks.task import Prompt, Split, Task, TaskSpec
    from echo2.tasks.token_text import ModelText

    Kind = Literal["train", "eval"]

PROMPTS_CHECKED = 256
"""Prompts of each split that are tried at start-up: enough to meet every symbol of a task, done in milliseconds."""

TOKEN_BYTES = 4

PROMPTS_CACHED = 16_384
"""Tokenised prompts kept: more than are ever under way at once, a few MiB."""

OPEN_RETRY_SECONDS = 5.0
"""When to ask again after an environment's process failed: it is started anew by then."""


class FolderText(TokenText):
    """The text of a model folder. Raises ConfigurationError when it is none."""

    def __init__(self, folder: Path) -> None:
        try:
            super().__init__(load_model_card(folder), (folder / TOKENIZER_FILE).read_bytes())
        except (ValueError, OSError) as error:
            raise ConfigurationError(str(error)) from error


def check_prompts(task: Task, text: ModelText) -> None:
    """Raise ConfigurationError when the model's tokeniser drops or changes what the task asks. See `check_readable`."""
    sizes: dict[Split, int] = {"train": task.train_size, "heldout": task.heldout_size}
    for split, size in sizes.items():
        for index in range(min(size, PROMPTS_CHECKED)):
            prompt = task.prompt(split, index)
            whole = prompt.text + prompt.prefill
            check_readable(task.name, f"{split} prompt {index}", whole, text)


def check_readable(task: str, what: str, whole: str, text: ModelText) -> None:
    """Raise ConfigurationError when `whole` does not come back from the model's tokeniser.

    A tokeniser without an unknown token leaves out, silently, what it has no symbol for. Blanks are not compared: some
    tokenisers add or merge them, and no question turns on that.
    """
    (came_back,) = text.decode([text.encode(whole)])
    if "".join(came_back.split()) != "".join(whole.split()):
        lost = "".join(dict.fromkeys(symbol for symbol in whole if symbol not in came_back))
        fault = f"loses {lost[:64]!r}" if lost else f"makes {came_back[:100]!r} of it"
        raise ConfigurationError(
            f"the model {text.card.name} cannot read the task {task}: of {what}, "
            f"{whole[:100]!r}, its tokenizer {fault}; choose another task or model"
        )


class Unopened(Exception):
    """The prompt is an environment's opening that is not known yet: `PromptBook.open` it, then ask again."""

    def __init__(self, kind: Kind, ordinal: int) -> None:
        super().__init__(f"{kind} {ordinal}")
        self.kind: Kind = kind
        self.ordinal = ordinal


class PromptBook:
    """The prompts of one run: of a single-turn task its own, of a sandbox the openings of its episodes.

    Openings come from the scorer's worker, so they are fetched (`open`) before they are asked for. Pure apart from its
    cache and that.
    """

    def __init__(
        self, *, run: str, task: Task | SandboxTask, spec: TaskSpec, text: ModelText, seed: int, secret: bytes
    ) -> None:
        self.task = task
        self.spec = spec
        self.text = text
        self.sandbox = cast("SandboxTask", task) if is_sandbox_task(task) else None
        self._run = run
        self._seed = seed
        self._secret = secret
        self._encoded: OrderedDict[tuple[Kind, int], bytes] = OrderedDict()

    def prompt(self, kind: Kind, ordinal: int) -> Prompt:
        """Training ordinals follow the curriculum; an evaluation's ordinal is the held-out index itself."""
        task = cast("Task", self.task)
        if kind == "eval":
            return task.prompt("heldout", ordinal)
        return task.prompt("train", train_index(self._seed, ordinal, task.train_size))

    def tokens(self, kind: Kind, ordinal: int) -> bytes:
        """The prompt in its template, as raw int32. Raises Unopened for an episode's opening that was not fetched."""
        key = kind, ordinal
        known = self._encoded.get(key)
        if known is None:
            if self.sandbox is not None:
                raise Unopened(kind, ordinal)
            prompt = self.prompt(kind, ordinal)
            known = self._keep(key, self.text.card.wrap(prompt.text) + prompt.prefill)
        else:
            self._encoded.move_to_end(key)
        return known

    async def open(self, keys: Iterable[tuple[Kind, int]], scorer: Scorer) -> None:
        """Have the openings of these episodes, and nothing to do for other tasks.

        Raises Refused, so that whoever asked comes again, when the environment or its process fails.
        """
        missing = [key for key in dict.fromkeys(keys) if self.sandbox is not None and key not in self._encoded]
        if not missing:
            return
        items = [PlayItem(self.spec, self.environment(*key)) for key in missing]
        try:
            played = await scorer.play(items)
        except ScorerUnavailable as error:
            raise Refused("scorer_unavailable", str(error), OPEN_RETRY_SECONDS) from error
        assert self.sandbox is not None, "nothing is missing of other tasks"
        for key, play in zip(missing, played, strict=True):
            self._keep(key, self.text.card.wrap(_opening(self.spec, play)) + self.sandbox.prefill)

    def seed(self, kind: Kind, ordinal: int) -> bytes:
        """HMAC-SHA256 of run, kind and ordinal under the coordinator's secret: a reissue keeps it, nobody picks it."""
        return hmac.digest(self._secret, f"{self._run}\0{kind}\0{ordinal}".encode(), hashlib.sha256)

    def environment(self, kind: Kind, ordinal: int) -> bytes:
        """The seed of a group's environment."""
        return environment_seed(self.seed(kind, ordinal))

    def tokens_max(self, kind: Kind, ordinal: int, most: int) -> int:
        """Longest response to this prompt, at most `most`: a context that overflows is never valid. Raises Unopened."""
        return min(most, self.text.card.context_tokens - len(self.tokens(kind, ordinal)) // TOKEN_BYTES)

    def episode_rules(self, tokens_max: int, turn_tokens_max: int) -> EpisodeRules | None:
        """What an episode's tokens must keep to; None for a task of one turn."""
        if self.sandbox is None:
            return None
        card = self.text.card
        return EpisodeRules(
            tokens_max=tokens_max,
            turns_max=self.sandbox.turns_max,
            turn_tokens_max=turn_tokens_max,
            stop_ids=card.stop_ids,
            turn_prefix=tuple(self.text.encode(card.turn_prefix)),
            turn_suffix=tuple(self.text.encode(card.turn_suffix + self.sandbox.prefill)),
        )

    def decode(self, responses: Sequence[bytes]) -> list[str]:
        """Texts of responses given as raw int32."""
        return self.text.decode([unpack_tokens(response).tolist() for response in responses])

    def _keep(self, key: tuple[Kind, int], text: str) -> bytes:
        tokens = self._encoded[key] = pack_tokens(self.text.encode(text))
        if len(self._encoded) > PROMPTS_CACHED:
            self._encoded.popitem(last=False)
        return tokens


def _opening(spec: TaskSpec, play: Play) -> str:
    if play.reason or play.done or not play.observations:
        why = play.reason or "its opening is its end"
        raise Refused("environment_failed", f"the environment {spec} does not begin: {why}"[:512], OPEN_RETRY_SECONDS)
    return play.observations[0]
