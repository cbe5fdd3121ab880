"""Hostile responses to every task that scores with somebody else's library, through the real worker."""

from __future__ import annotations

import pytest
import trio

from echo2.tasks.catalog import CLASSES
from echo2.tasks.scorer import PlayItem, ScoreItem, open_scorer
from echo2.tasks.task import Score, TaskSpec

EVALUATING = {
    # data set of reasoning_gym: an answer that runs COMMAND if it is evaluated
    "binary_matrix": "[[__import__('os').system(COMMAND)]]",
    "countdown": "__import__('os').system(COMMAND)",
    "n_queens": "[[__import__('os').system(COMMAND)]]",
    "polynomial_multiplication": "__import__('os').system(COMMAND)",
    "puzzle24": "__import__('os').system(COMMAND) + 24",
    "simple_integration": "exec(\"__import__('os').system(COMMAND)\") or x",
    "spiral_matrix": "[__import__('os').system(COMMAND)]",
    "string_insertion": "[str(__import__('os').system(COMMAND))]",
}
EVERY = sorted(set(CLASSES) - {"file", "reasoning_gym"})


def gym(dataset: str, **options) -> TaskSpec:
    return TaskSpec("reasoning_gym", {"dataset": dataset, "train_size": 8, "heldout_size": 4, **options})


@pytest.fixture(scope="module")
def gyms():
    return [gym(dataset) for dataset in EVALUATING]


async def test_no_response_runs_a_command(gyms, tmp_path):
    """In the eight data sets whose scorer evaluates it, nothing happens and nothing is earned."""
    written = tmp_path / "written"
    async with open_scorer(*gyms, wrap=False) as scorer:
        first = scorer._worker.pid
        for spec, attack in zip(gyms, EVALUATING.values(), strict=True):
            answer = attack.replace("COMMAND", f"chr({'+chr('.join(f'{ord(c)})' for c in f'id>{written}')}")
            [score] = await scorer.score([ScoreItem(spec, "train", 0, answer)])
            assert score.reward <= 0.05, spec
            [(right, reward)] = await scorer.samples(spec, "train", 0) or [("", 0.0)]
            if right:
                assert await scorer.score([ScoreItem(spec, "train", 0, right)]) == [Score(reward)]
        assert scorer._worker.pid == first
    assert not written.exists()


async def test_a_list_still_earns_what_the_library_gives_for_it():
    """Literals are read, code is not."""
    spec = gym("string_insertion")
    async with open_scorer(spec, wrap=False) as scorer:
        [(answer, _)] = await scorer.samples(spec, "train", 0)
        scores = await scorer.score(
            [
                ScoreItem(spec, "train", 0, str(list(answer))),
                ScoreItem(spec, "train", 0, f"list({answer!r})"),
            ]
        )
    assert [score.reward for score in scores] == [0.1, 0.0]


async def test_responses_that_burn_time_or_memory_cost_their_own_item():
    """math-verify and sympy on powers of powers: 0, and the neighbours are scored."""
    spec, tower = TaskSpec("math"), gym("puzzle24")
    async with open_scorer(spec, tower, wrap=False) as scorer:
        [(right, _), _] = await scorer.samples(spec, "train", 0)
        for bomb in ("9**9**9**9", r"$\boxed{9^{9^{9^{9}}}}$", r"\boxed{" * 5000, r"$\frac{" * 1000, "\0", "\ud800"):
            scores = await scorer.score([ScoreItem(spec, "train", 0, text) for text in (right, bomb, right)])
            assert [score.reward for score in scores] == [1.0, 0.0, 1.0], bomb
        [bad, good] = await scorer.score(
            [ScoreItem(tower, "train", 0, "9**9**9**9"), ScoreItem(spec, "train", 0, right)]
        )
    assert (bad.reward <= 0.01, good.reward) == (True, 1.0)


@pytest.mark.parametrize("name", EVERY)
async def test_bad_text_never_earns_and_never_ends_the_worker(name):
    """Each task of the catalogue, scored or played: empty, long, NUL, half a surrogate pair, brackets without end."""
    texts = ["", "\0", "\ud800", "9" * 100_000, "(" * 5000, "[" * 5000, "{" * 5000, "__import__('os').abort()"]
    async with open_scorer(name, wrap=False) as scorer:
        first = scorer._worker.pid
        sizes = await scorer.sizes(TaskSpec(name))
        if not sizes.turns_max:
            scores = await scorer.score([ScoreItem(name, "heldout", 0, text) for text in texts])
            assert [score.reward for score in scores] == [0.0] * len(texts)
        else:
            opened = await scorer.play([PlayItem(name, bytes(32), (text,)) for text in texts])
            cut = await scorer.play(
                [
                    PlayItem(name, bytes(32), (text,), truncated=not play.done)
                    for text, play in zip(texts, opened, strict=True)
                ]
            )
            assert [play.reason for play in cut] == [""] * len(texts)
            assert all(play.done and play.reward <= 0 for play in cut)
        assert scorer._worker.pid == first


async def test_a_restarted_worker_scores_the_same():
    """Prompts are made again from their seed, those too that draw from the interpreter's own generator."""
    spec = gym("list_functions")
    async with open_scorer(spec, wrap=False) as scorer:
        prompts = await scorer.prompts(spec, "train", 0, 8)
        [(right, _)] = await scorer.samples(spec, "train", 5)
        await scorer.close()
        assert await scorer.score([ScoreItem(spec, "train", 5, right)]) == [Score(1.0)]
        assert await scorer.prompts(spec, "train", 0, 8) == prompts
        with trio.move_on_after(0):
            await scorer.score([ScoreItem(spec, "train", 5, right)])
        assert await scorer.score([ScoreItem(spec, "train", 5, right)]) == [Score(1.0)]
