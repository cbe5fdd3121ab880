"""What every scorer promises, on the worker process and on the inline fake; then what only the process can promise."""

from __future__ import annotations

import os
import re
import runpy
import select
import sys
from pathlib import Path

import pytest
import trio

from echo2.tasks import scorer as scorer_module
from echo2.tasks.catalog import TASKS
from echo2.tasks.sandbox import TURNS_MAX, Observation
from echo2.tasks.scorer import (
    InlineScorer,
    Play,
    PlayItem,
    ScoreItem,
    ScorerUnavailable,
    TaskSizes,
    TaskUnusable,
    open_scorer,
)
from echo2.tasks.scorer_wire import STAGES
from echo2.tasks.scorer_worker import play
from echo2.tasks.task import Prompt, Score, TaskSpec

HOSTILE_FILE = Path(__file__).with_name("hostile_task.py")
HOSTILE = TaskSpec("file", {"path": str(HOSTILE_FILE)})
SHORT_SECONDS = 0.5


def hostile(action: str) -> ScoreItem:
    return ScoreItem(HOSTILE, "train", 0, action)


def sums(count: int) -> list[ScoreItem]:
    """Every second answer is right."""
    task = TASKS["arithmetic"]
    return [ScoreItem("arithmetic", "train", i, task.answer("train", i) if i % 2 == 0 else "no") for i in range(count)]


@pytest.fixture(params=["process", "inline"])
async def scorer(request):
    if request.param == "inline":
        yield InlineScorer({**TASKS, "file": runpy.run_path(str(HOSTILE_FILE))["task"]})
    else:
        async with open_scorer(HOSTILE, "arithmetic", item_seconds=5) as opened:
            yield opened


@pytest.fixture
async def process():
    async with open_scorer(HOSTILE, "arithmetic", item_seconds=SHORT_SECONDS, wrap=False) as opened:
        yield opened


def pid_of(process) -> int:
    return process._worker.pid


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_running(pid: int) -> bool:
    """False for a zombie too: a machine without an init process reaps late."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


# both


async def test_scores_come_back_in_the_order_of_the_items(scorer):
    """Item k of the reply belongs to item k of the batch, across several frames."""
    rewards = [score.reward for score in await scorer.score(sums(600))]
    assert rewards == [1.0, 0.0] * 300


async def test_an_empty_batch_is_answered_by_an_empty_list(scorer):
    """Nothing in, nothing out."""
    assert await scorer.score([]) == []


@pytest.mark.parametrize("value", ["nan", "infinite", "huge", "text", "nothing", "truth", "no score", "not a value"])
async def test_a_reward_that_is_no_finite_float_is_zero_with_a_reason(scorer, value):
    """NaN, infinity, wrong types and missing scores never reach the learner."""
    [score] = await scorer.score([hostile(value)])
    assert score.reward == 0.0
    assert score.reason


@pytest.mark.parametrize(("value", "reward"), [("half", 0.5), ("minus", -2.0)])
async def test_any_finite_float_is_a_reward(scorer, value, reward):
    """Rewards may be fractions or negative."""
    assert await scorer.score([hostile(value)]) == [Score(reward)]


@pytest.mark.parametrize("action", ["exit_politely", "long_reason", "unprintable", "surrogate"])
async def test_an_exception_costs_its_own_item_only(scorer, action):
    """Whatever a scorer raises, even SystemExit or something that cannot be printed, its neighbours are scored."""
    before, bad, after = await scorer.score([hostile("half"), hostile(action), hostile("half")])
    assert (before, after) == (Score(0.5), Score(0.5))
    assert bad.reward == 0.0
    assert 0 < len(bad.reason) <= 200


async def test_an_unknown_task_or_prompt_is_zero_with_a_reason(scorer):
    """The scorer answers for every item, whatever it names."""
    items = [ScoreItem("no-such-task", "train", 0, "55"), ScoreItem("arithmetic", "train", 10**9, "55")]
    assert [(score.reward, bool(score.reason)) for score in await scorer.score(items)] == [(0.0, True)] * 2


async def test_any_text_may_be_scored(scorer):
    """NUL, lone surrogates and the longest text scored are ordinary responses; a longer one is 0 with a reason."""
    texts = ["", "\0", "\ud800", "\U0001f600", "9" * (1 << 20), "9" * ((1 << 20) + 1)]
    scores = await scorer.score([ScoreItem("word-problems", "train", 0, text) for text in texts])
    assert [score.reward for score in scores] == [0.0] * 6
    assert [bool(score.reason) for score in scores] == [False] * 5 + [True]


# episodes


class Countdown:
    """Counts down from a number in the seed; the policy must say each one. What else it says is acted upon."""

    def reset(self, seed):
        self.left = seed[0]
        return Observation(str(self.left))

    def step(self, action):
        match action:
            case "nan":
                return Observation("", done=True, reward=float("nan"))
            case "long":
                return Observation("x" * 10_000)
            case "raise":
                raise RuntimeError("no")
            case "detail":
                return Observation("", done=True, details={"x": float("inf")})
        self.left -= 1
        right = action == str(self.left)
        if self.left == 0:
            return Observation("done", done=True, reward=float(right), details={"left": 0})
        return Observation(str(self.left), reward=0.5 * right)

    def truncate(self):
        return Observation("cut off", done=True, reward=-1, details={"left": self.left})


class CountdownTask:
    name = "countdown"
    train_size = heldout_size = 1
    turns_max = 4
    sandbox = Countdown


def played(*actions: str, truncated: bool = False) -> Play:
    return play(CountdownTask(), bytes([3, *[0] * 31]), actions, truncated=truncated)


@pytest.mark.parametrize(
    ("actions", "truncated", "expected"),
    [
        ((), False, Play(("3",), False, 0.0)),
        (("2",), False, Play(("3", "2"), False, 0.5)),
        (("2", "no", "0"), False, Play(("3", "2", "1", "done"), True, 1.5, "", {"left": 0.0})),
        (("2",), True, Play(("3", "2", "cut off"), True, -0.5, "", {"left": 2.0})),
        ((), True, Play(("3", "cut off"), True, -1.0, "", {"left": 3.0})),
    ],
)
def test_an_episode_is_its_observations_and_the_sum_of_their_rewards(actions, truncated, expected):
    """Opening first, one more for each action, the cut last; details come with the end."""
    assert played(*actions, truncated=truncated) == expected


@pytest.mark.parametrize(
    ("actions", "truncated", "reason"),
    [
        (("nan",), False, "the reward nan"),
        (("detail",), False, "detail x"),
        (("long",), False, "longer than"),
        (("raise",), False, "the scorer raised RuntimeError: no"),
        (("2", "1", "0", "0"), False, "after the end"),
        (("2", "1", "0"), True, "already ended"),
        (("2",) * 5, False, "more than the 4 turns"),
    ],
)
def test_what_goes_wrong_in_an_episode_ends_it_with_nothing_earned(actions, truncated, reason):
    """Reward 0, a reason, and what was seen until then."""
    result = played(*actions, truncated=truncated)
    assert (result.done, result.reward, dict(result.details)) == (True, 0.0, {})
    assert reason in result.reason


@pytest.mark.parametrize("seed", [b"", bytes(31), bytes(33)])
async def test_a_seed_of_another_length_plays_nothing(scorer, seed):
    """And many actions, or long ones, do not either."""
    plays = await scorer.play(
        [
            PlayItem("arithmetic", seed),
            PlayItem("arithmetic", bytes(32), ("x",) * (TURNS_MAX + 1)),
            PlayItem("arithmetic", bytes(32), ("x" * (1 << 20), "x")),
        ]
    )
    assert [(p.reward, p.done, bool(p.reason)) for p in plays] == [(0.0, True, True)] * 3


async def test_a_single_turn_task_plays_nothing(scorer):
    """It has no environment."""
    [result] = await scorer.play([PlayItem("arithmetic", bytes(32), ("1",))])
    assert (result.reward, result.done, bool(result.reason)) == (0.0, True, True)


# the process only


@pytest.mark.parametrize("action", ["loop", "sleep"])
async def test_an_item_that_takes_too_long_is_zero_and_the_rest_of_the_batch_is_scored(process, action):
    """A scorer that never returns costs its own item the time allowed, and nothing else."""
    first = pid_of(process)
    before, bad, after = await process.score([hostile("half"), hostile(action), hostile("half")])
    assert (before, after) == (Score(0.5), Score(0.5))
    assert bad == Score(0.0, f"the scorer took longer than {SHORT_SECONDS:g} s")
    assert pid_of(process) != first
    assert not is_alive(first)


@pytest.mark.parametrize("action", ["exit_at_once", "close_everything", "garbage_on_the_pipe"])
async def test_an_item_that_kills_or_corrupts_the_worker_is_zero_and_the_rest_is_scored(process, action):
    """The worker is replaced, and no item gets another's reward."""
    before, bad, after = await process.score([hostile("half"), hostile(action), hostile("half")])
    assert (before, after) == (Score(0.5), Score(0.5))
    assert bad.reward == 0.0
    assert bad.reason


@pytest.mark.parametrize("action", ["kill_itself", "allocate", "recurse", "recurse_in_c", "crash"])
async def test_a_worker_that_dies_or_runs_out_of_memory_costs_one_item(process, action):
    """SIGKILL to itself, 10 GB, bottomless recursion and a null pointer all end as reward 0 with a reason."""
    bad, after = await process.score([hostile(action), hostile("half")])
    assert bad.reward == 0.0
    assert bad.reason
    assert after == Score(0.5)


@pytest.mark.parametrize(
    "action",
    [
        *("kill_parent", "fork", "many_forks", "run_shell", "start_thread", "raise_in_a_thread"),
        *("open_socket", "read_file", "write_file", "delete_file"),
    ],
)
async def test_what_a_scorer_must_not_do_is_refused(process, action):
    """Signals, processes, threads, sockets and files are out of reach where the kernel offers seccomp."""
    if "seccomp" not in process.confinement:
        pytest.skip("no seccomp here: status says so")
    first = pid_of(process)
    bad, after = await process.score([hostile(action), hostile("half")])
    assert bad.reward == 0.0
    assert bad.reason
    assert after == Score(0.5)
    assert pid_of(process) == first


async def test_linux_holds_every_layer_but_perhaps_the_namespace(process):
    """The layers that need no privilege are there on any Linux that the project supports."""
    if sys.platform != "linux":
        pytest.skip("layers are Linux's")
    assert {"parent", "rlimits", "seccomp"} <= set(process.confinement)


async def test_a_worker_knows_the_sizes_and_prompts_of_its_tasks(process):
    """What the coordinator is told of tasks that it does not load itself."""
    spec = TaskSpec("arithmetic")
    assert await process.sizes(spec) == TaskSizes(600, 300)
    assert await process.prompts(spec, "train", 1, 2) == [
        Prompt("train", 1, "10+2="),
        Prompt("train", 2, "10+3="),
    ]
    assert await process.samples(spec, "heldout", 0) == [("11", 1.0), ("12", 0.0)]
    with pytest.raises(TaskUnusable, match="IndexError"):
        await process.prompts(spec, "train", 599, 2)
    assert await process.samples(HOSTILE, "train", 0) == []


async def test_another_task_is_loaded_when_its_first_item_comes(process):
    """In a fresh worker, which still knows the others."""
    first = pid_of(process)
    assert await process.score([ScoreItem("word-problems", "train", 0, "13")]) == [Score(1.0)]
    second = pid_of(process)
    assert await process.score([hostile("half"), *sums(1)]) == [Score(0.5), Score(1.0)]
    assert first != second == pid_of(process)


async def test_a_task_that_does_not_load_is_known_at_the_start():
    """The reason is the task's own; nothing is scored."""
    with pytest.raises(TaskUnusable, match="did you mean 'arithmetic'"):
        async with open_scorer("arithmetik"):
            pass


async def test_what_a_scorer_prints_never_reaches_the_protocol(process):
    """Standard output and error of the worker lead nowhere."""
    assert await process.score([hostile("print_garbage"), hostile("half")]) == [Score(1.0), Score(0.5)]


async def test_the_environment_holds_nothing_of_the_parents(monkeypatch):
    """A password in the coordinator's environment is not in the worker's."""
    monkeypatch.setenv("ECHO2_SECRET", "hunter2")
    async with open_scorer(HOSTILE, wrap=False) as process:
        assert await process.score([hostile("environment")]) == [Score(0.5)]


async def test_cancelling_a_batch_leaves_no_process_and_no_stale_reply(process):
    """The next batch is scored by a fresh worker."""
    first = pid_of(process)
    with trio.move_on_after(0.1):
        await process.score([hostile("half"), hostile("sleep")])
    assert not is_alive(first)
    assert await process.score([hostile("minus")]) == [Score(-2.0)]


async def test_closing_kills_the_worker_even_when_cancelled():
    """No orphan after an orderly end, nor after cancellation in the middle of a hanging item."""
    async with open_scorer(HOSTILE, wrap=False) as process:
        first = pid_of(process)
    assert not is_alive(first)
    with trio.CancelScope() as scope:
        async with open_scorer(HOSTILE, wrap=False) as process:
            second = pid_of(process)
            scope.deadline = trio.current_time() + 0.1
            await process.score([hostile("loop")])
    assert not is_alive(second)


@pytest.mark.parametrize("wrap", [False, True])
async def test_a_worker_dies_with_its_parent(wrap):
    """Even in an endless loop, and under bubblewrap: a SIGKILLed coordinator leaves nothing running."""
    if sys.platform != "linux":
        pytest.skip("needs Linux's parent-death signal")
    program = (
        "import trio, pathlib\n"
        "from echo2.tasks.scorer import ScoreItem, open_scorer\n"
        "from echo2.tasks.task import TaskSpec\n"
        f"hostile = TaskSpec('file', {{'path': {str(HOSTILE_FILE)!r}}})\n"
        "async def main():\n"
        f"    async with open_scorer(hostile, item_seconds=600, wrap={wrap}) as s:\n"
        "        children = pathlib.Path(f'/proc/{s._worker.pid}/task/{s._worker.pid}/children').read_text().split()\n"
        "        print(s._worker.pid, *children, flush=True)\n"
        "        await s.score([ScoreItem(hostile, 'train', 0, 'loop')])\n"
        "trio.run(main)\n"
    )
    parent = await trio.lowlevel.open_process([sys.executable, "-c", program], stdout=-1)
    workers = [int(pid) for pid in (await parent.stdout.receive_some(64)).split()]
    pidfds = [os.pidfd_open(worker) for worker in workers]
    parent.kill()
    await parent.wait()
    await parent.stdout.aclose()
    for worker, pidfd in zip(workers, pidfds, strict=True):
        await trio.to_thread.run_sync(select.select, [pidfd], [], [], 5)
        os.close(pidfd)
        assert not is_running(worker)


async def test_the_worker_is_started_by_a_thread_that_stays(monkeypatch):
    """Linux kills it with the thread that started it, and threads of trio's pool end when idle."""

    async def refuse(*args, **kwargs):
        raise AssertionError("a thread of the pool")

    monkeypatch.setattr(trio.to_thread, "run_sync", refuse)
    async with open_scorer() as process:
        assert await process.score(sums(1)) == [Score(1.0)]


async def test_batches_of_several_callers_do_not_mix(process):
    """Callers take turns, and each gets its own scores."""
    results = {}

    async def call(name: str, count: int) -> None:
        results[name] = await process.score([hostile(name)] * count)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, "half", 300)
        nursery.start_soon(call, "minus", 300)
    assert results == {"half": [Score(0.5)] * 300, "minus": [Score(-2.0)] * 300}


async def test_a_worker_is_replaced_after_its_share_of_items(process, monkeypatch):
    """A scorer library that leaks cannot grow for ever."""
    monkeypatch.setattr(scorer_module, "WORKER_ITEMS_MAX", 10)
    first = pid_of(process)
    await process.score([hostile("half")] * 10)
    assert pid_of(process) == first
    await process.score([hostile("half")])
    assert pid_of(process) != first


async def test_a_worker_is_replaced_before_it_has_used_up_its_time(process, monkeypatch):
    """The limit on its CPU time would otherwise end it in the middle of an honest item."""
    monkeypatch.setattr(scorer_module, "WORKER_BUSY_SECONDS_MAX", 0.0)
    first = pid_of(process)
    assert await process.score([hostile("half")]) == [Score(0.5)]
    assert pid_of(process) != first


async def test_a_worker_that_cannot_start_is_no_responses_fault(tmp_path, autojump_clock):
    """ScorerUnavailable, after a bounded number of attempts: nothing is scored 0 for it."""
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos._exit(3)\n")
    with pytest.raises(ScorerUnavailable, match="attempts"):
        async with open_scorer(TaskSpec("file", {"path": str(broken)})):
            pass


TASK = """
def prompts():
    return [{{"prompt": f"{{n}}+1=", "n": n}} for n in range(40)]

def score(example, response):
    {inside}
    return 1.0

{outside}
"""


@pytest.fixture
def own(tmp_path):
    def own(inside: str = "pass", outside: str = "") -> TaskSpec:
        path = tmp_path / "own.py"
        path.write_text(TASK.format(inside=inside, outside=outside))
        return TaskSpec("file", {"path": str(path)})

    return own


async def opening_fails(spec: TaskSpec, **options) -> tuple[str, float]:
    """What is said, and after how many seconds."""
    started = trio.current_time()
    with pytest.raises(TaskUnusable) as raised:
        async with open_scorer(spec, **options):
            pass
    return str(raised.value), trio.current_time() - started


@pytest.fixture
def short_stages(monkeypatch):
    for name, (words, _seconds) in STAGES.items():
        monkeypatch.setitem(STAGES, name, (words, 3.0))


@pytest.mark.parametrize(
    ("inside", "outside", "message"),
    [
        ("pass", "while True: pass", r"the task 'file' \(own.py\): loading took longer than 3 s"),
        ("while True: pass", "", r"the task 'file' \(own.py\): score\(\) did not return within 3 s"),
        ("__import__('signal').raise_signal(19)", "", r"score\(\) did not return within 3 s"),
        ("__import__('os')._exit(0)", "", r"score\(\), called once to try it, ended its process"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", "", r"score\(\), called once to try it, ended its"),
        ("__import__('os').closerange(0, 20)", "", r"score\(\), called once to try it, ended its process"),
    ],
)
@pytest.mark.parametrize("wrap", [None, False])
async def test_a_task_that_hangs_or_dies_before_its_first_item_is_named_once(
    own, short_stages, inside, outside, message, wrap
):
    """Which function it was, after one attempt: another would end the same way."""
    said, seconds = await opening_fails(own(inside, outside), wrap=wrap)
    assert re.search(message, said), said
    assert seconds < 15


async def test_a_task_that_hangs_when_it_is_loaded_later_scores_nothing(own, short_stages):
    """No response is to blame."""
    async with open_scorer("arithmetic") as process:
        with pytest.raises(ScorerUnavailable, match="loading took longer"):
            await process.score([ScoreItem(own(outside="while True: pass"), "train", 0, "1")])
        assert await process.score([ScoreItem("arithmetic", "train", 0, "no")]) == [Score(0.0)]


FORKS = """
import os, time
number = os.fork()
if number == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)
"""


def descendants(pid: int) -> set[int]:
    try:
        children = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except FileNotFoundError:
        return set()
    return children.union(*(descendants(child) for child in children))


async def family_of(pid: int, members: int) -> set[int]:
    """The process and its descendants, once they are so many: the child forks when it comes to it."""
    with trio.fail_after(10):
        while len(found := {pid, *descendants(pid)}) < members:
            await trio.lowlevel.checkpoint()
    return found


@pytest.mark.parametrize("end", ["close", "by itself"])
@pytest.mark.parametrize("wrap", [None, False])
async def test_what_a_file_forks_while_it_loads_ends_with_its_worker(own, wrap, end):
    """In a session of its own, too; when the worker is closed, and when it dies by itself."""
    if sys.platform != "linux":
        pytest.skip("looks in /proc")
    spec = own("response == 'die' and __import__('os')._exit(1)", FORKS)
    async with open_scorer(spec, wrap=wrap, item_seconds=SHORT_SECONDS) as process:
        left = await family_of(pid_of(process), 3)
        if end == "by itself":
            [score] = await process.score([ScoreItem(spec, "train", 0, "die")])
            assert score.reward == 0.0
            await all_end(left)
    await all_end(left)


async def all_end(pids: set[int]) -> None:
    """A killed process is gone soon, not at once."""
    with trio.fail_after(5):
        while any(map(is_running, pids)):
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("where", ["inside", "outside"])
async def test_no_word_of_a_task_reaches_a_terminal_as_a_command(own, where):
    """Escape bytes, line feeds and signs that turn the writing around are told as escapes."""
    words = r"raise ValueError('\x1b[2J\x1b]0;pwn\x07 bad\r\n\x9b\u202e')"
    told = r"\x1b[2J\x1b]0;pwn\x07 bad\r\n\x9b\u202e"
    if where == "outside":
        said, _ = await opening_fails(own(outside=words))
        assert told in said
    else:
        async with open_scorer(spec := own(words)) as process:
            [score] = await process.score([ScoreItem(spec, "train", 0, "1")])
        assert told in score.reason


@pytest.mark.slow
async def test_two_thousand_sums_take_well_under_a_second(process):
    """A step's rollouts are scored without the learner noticing."""
    items = sums(600) * 4
    await process.score(items[:1])
    started = trio.current_time()
    await process.score(items)
    assert len(items) / (trio.current_time() - started) >= 2000
