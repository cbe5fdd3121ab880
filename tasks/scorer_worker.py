"""The process every reward and every environment runs in: reads requests on stdin, answers each item on stdout.

Started by `scorer.open_scorer`, and talks only to it, as `scorer_wire` says. The end of its stdin ends it. It keeps no
state between items.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgpack

from .catalog import is_sandbox_task, make_task
from .confinement import confine, confine_before_loading
from .sandbox import OBSERVATION_CHARACTERS_MAX, TURNS_MAX
from .scorer_wire import (
    LENGTH,
    PROMPT_CHARACTERS_MAX,
    SAMPLE_CHARACTERS_MAX,
    SAMPLES_MAX,
    SIZE_MAX,
    Play,
    checked_score,
    details_trouble,
    failed_play,
    frame,
    plain_text,
    reward_trouble,
    writable,
)
from .task import Prepared, Sampled, Score, TaskSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .sandbox import Observation, SandboxTask
    from .task import Split, Task

    AnyTask = Task | SandboxTask


class Unusable(Exception):
    """Stands for a task that could not be loaded; the text is why."""


def load(spec: TaskSpec, stage: Callable[[str], None] = lambda _name: None) -> AnyTask | Unusable:
    """The task, ready to score: everything it needs is imported and read, so that it needs no file later.

    `stage` is told what comes next, a name of `STAGES`: where that hangs or ends the process, our parent knows why.
    """
    stage("load")
    try:
        task = make_task(spec)
        if isinstance(task, Prepared):
            task.prepare()
    except ValueError as error:
        return Unusable(plain_text("", error))
    except BaseException as error:  # noqa: BLE001  # a person's file may call sys.exit()
        return Unusable(plain_text(f"the task {spec.name!r} cannot be loaded: {type(error).__name__}: ", error))
    with contextlib.suppress(BaseException):  # what a first call imports or reads; its trouble will show again
        if is_sandbox_task(task):
            stage("reset")
            cast("SandboxTask", task).sandbox().reset(bytes(32))
        else:
            single = cast("Task", task)
            for split in ("heldout", "train"):
                stage("prompt")
                prompt = single.prompt(split, 0)
                stage("score")
                single.score(prompt, "1")
    return task


def evaluate(task: Task, split: Split, index: int, response: str) -> Score:
    """The score of one response. Never raises: what goes wrong is reward 0 with its reason."""
    try:
        score = task.score(task.prompt(split, index), response)
        return checked_score(score.reward, score.reason)
    except BaseException as error:  # noqa: BLE001  # SystemExit too: a scorer must not be able to end the batch
        return Score(0.0, _raised(error))


def play(task: SandboxTask, seed: bytes, actions: Sequence[str], *, truncated: bool) -> Play:
    """One episode from its seed. Never raises: what goes wrong ends it with reward 0 and the reason (`Play`)."""
    seen: list[Observation] = []
    texts: list[str] = []

    def take(observation: Observation) -> None:
        if len(observation.text) > OBSERVATION_CHARACTERS_MAX:
            raise ValueError(f"an observation is longer than {OBSERVATION_CHARACTERS_MAX} characters")
        seen.append(observation)
        texts.append(writable(observation.text))

    try:
        if len(actions) > min(TURNS_MAX, task.turns_max):
            return failed_play(f"{len(actions)} actions are more than the {task.turns_max} turns of an episode")
        sandbox = task.sandbox()
        take(sandbox.reset(seed))
        for action in actions:
            if seen[-1].done:
                return failed_play("an action came after the end of the episode", tuple(texts))
            take(sandbox.step(action))
        if truncated:
            if seen[-1].done:
                return failed_play("the episode had already ended when it was cut off", tuple(texts))
            take(sandbox.truncate())
            if not seen[-1].done:
                return failed_play("the environment went on after it was cut off", tuple(texts))
        reward = _number(sum(_number(observation.reward) for observation in seen))
        done = bool(seen[-1].done)
        details = {str(name): _number(value) for name, value in seen[-1].details.items()} if done else {}
        if trouble := reward_trouble(reward) or details_trouble(details):
            return failed_play(trouble, tuple(texts))
        return Play(tuple(texts), done, reward, "", details)
    except BaseException as error:  # noqa: BLE001  # as in `evaluate`
        return failed_play(_raised(error), tuple(texts))


def serve(source: BinaryIO, sink: BinaryIO, tasks: Sequence[AnyTask | Unusable]) -> None:
    """Answer requests until `source` ends. `sink` must not buffer: each reply is due at once."""
    while (request := read_frame(source)) is not None:
        operation, items = request
        answer = OPERATIONS[operation]
        for place, *arguments in items:
            sink.write(frame(answer(tasks[place], *arguments)))


def read_frame(source: BinaryIO) -> Any | None:
    """The next request, or None at the end."""
    header = source.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return msgpack.unpackb(source.read(LENGTH.unpack(header)[0]))


def _answer_score(task: Any, split: Split, index: int, response: bytes) -> list[Any]:
    score = Score(0.0, str(task)) if isinstance(task, Unusable) else evaluate(task, split, index, _decoded(response))
    return [score.reward, score.reason]


def _answer_play(task: Any, seed: bytes, actions: list[bytes], truncated: bool) -> list[Any]:
    if isinstance(task, Unusable):
        played = failed_play(str(task))
    else:
        played = play(task, seed, [_decoded(action) for action in actions], truncated=truncated)
    return [list(played.observations), played.done, played.reward, played.reason, dict(played.details)]


def _guarded(answer: Callable[..., Any]) -> Callable[..., list[Any]]:
    """[what `answer` returns, ""], or [None, why not]."""

    def guarded(task: Any, *arguments: Any) -> list[Any]:
        if isinstance(task, Unusable):
            return [None, str(task)]
        try:
            return [answer(task, *arguments), ""]
        except BaseException as error:  # noqa: BLE001  # as in `evaluate`
            return [None, _raised(error)]

    return guarded


@_guarded
def _answer_sizes(task: AnyTask) -> list[int]:
    sizes = [task.train_size, task.heldout_size]
    if not all(isinstance(size, int) and 1 <= size <= SIZE_MAX for size in sizes):
        raise ValueError(f"the sizes {sizes} are not whole numbers from 1 to {SIZE_MAX}")
    return [*sizes, cast("SandboxTask", task).turns_max if is_sandbox_task(task) else 0]


@_guarded
def _answer_prompts(task: Task, split: Split, index: int) -> list[str]:
    prompt = task.prompt(split, index)
    if not isinstance(prompt.text, str) or not isinstance(prompt.prefill, str):
        raise TypeError("a prompt's text and prefill must be strings")
    if len(prompt.text) + len(prompt.prefill) > PROMPT_CHARACTERS_MAX:
        raise ValueError(f"a prompt is longer than {PROMPT_CHARACTERS_MAX} characters")
    if writable(prompt.text) != prompt.text or writable(prompt.prefill) != prompt.prefill:
        raise ValueError("a prompt holds lone surrogates, which no tokenizer reads")
    return [prompt.text, prompt.prefill]


@_guarded
def _answer_samples(task: Any, split: Split, index: int) -> list[Any]:
    if not isinstance(task, Sampled):
        return []
    prompt = cast("Task", task).prompt(split, index)
    pairs = [(writable(text), _number(reward)) for text, reward in task.samples(prompt)]
    if len(pairs) > SAMPLES_MAX or any(len(text) > SAMPLE_CHARACTERS_MAX for text, _ in pairs):
        raise ValueError(f"samples are at most {SAMPLES_MAX} of at most {SAMPLE_CHARACTERS_MAX} characters a prompt")
    return pairs


OPERATIONS: Mapping[str, Callable[..., list[Any]]] = {
    "score": _answer_score,
    "play": _answer_play,
    "sizes": _answer_sizes,
    "prompts": _answer_prompts,
    "samples": _answer_samples,
}


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _number(value: Any) -> float:
    """Whole numbers will do for rewards of an environment: `chips` are some. A bool is a mistake."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{type(value).__name__} is no number")
    return float(value)


def _raised(error: BaseException) -> str:
    return plain_text(f"the scorer raised {type(error).__name__}: ", error)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move stdin and stdout to descriptors of our own, so that a scorer's print() cannot reach the protocol."""
    source, sink = os.dup(0), os.dup(1)
    null = _open_null()
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    return os.fdopen(source, "rb"), cast("BinaryIO", os.fdopen(sink, "wb", buffering=0))


def _open_null() -> int:
    """Where prints go. A linker run as root with `-o /dev/null` leaves a plain file, which we may not write to."""
    for path in (os.devnull, "/dev/zero"):
        with contextlib.suppress(OSError):
            null = os.open(path, os.O_RDWR)
            if stat.S_ISCHR(os.fstat(null).st_mode):
                return null
            os.close(null)
    return os.open(os.devnull, os.O_RDWR)


def main() -> None:
    """Load the tasks that the first frame names, then answer requests."""
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A service manager signals the whole group: dying of it would cost an honest item its reward.
        signal.signal(ending, signal.SIG_IGN)
    source, sink = _take_pipes()
    wanted = read_frame(source)
    layers = confine_before_loading()

    def teller(place: int) -> Callable[[str], None]:
        return lambda name: cast("None", sink.write(frame([place, name])))

    tasks = [load(TaskSpec.from_json(*spec), teller(place)) for place, spec in enumerate(wanted or ())]
    layers += confine()
    sink.write(frame([list(layers), [str(task) if isinstance(task, Unusable) else "" for task in tasks]]))
    serve(source, sink, tasks)


if __name__ == "__main__":
    main()
