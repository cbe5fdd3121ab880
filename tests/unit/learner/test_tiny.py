"""The tiny model: what it is made from, what it knows before reinforcement learning, how its folder is made."""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tokenizers import Tokenizer  # noqa: E402

from echo2.learner import tiny  # noqa: E402
from echo2.learner.policy import load_policy, pad_tokens, token_logprobs  # noqa: E402
from echo2.learner.prepare import prepare  # noqa: E402
from echo2.p2p.errors import ConfigurationError  # noqa: E402
from echo2.tasks.arithmetic import Arithmetic  # noqa: E402
from echo2.tasks.model_card import load_model_card  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

torch.set_num_threads(1)

WEIGHTS_BYTES_MAX = 2_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "new" / "tiny"
    prepare("tiny", folder)
    return folder


def test_the_prepared_folder_is_complete(folder: Path) -> None:
    """Card, config, weights and tokeniser, and nothing else; beside it no leftovers."""
    assert sorted(path.name for path in folder.iterdir() if path.name != "generation_config.json") == [
        "config.json",
        "echo2-model.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    card = load_model_card(folder)
    assert (card.name, card.vocabulary_size, card.stop_ids) == ("tiny", 15, (tiny.EOS,))


def test_the_warm_start_leaves_something_to_learn(folder: Path) -> None:
    """Before reinforcement learning a held-out sum is right about every third time, as is a training one."""
    model, _ = load_policy(folder)
    heldout, train = tiny.right_share(model, "heldout"), tiny.right_share(model, "train")
    assert 0.25 < heldout < 0.4
    assert abs(heldout - train) < 0.05


def test_the_warm_start_knows_the_sum(folder: Path) -> None:
    """Its likeliest answer is right on nearly all held-out sums: sampling alone makes it err."""
    model, _ = load_policy(folder)
    task = Arithmetic()
    right = 0
    with torch.no_grad():
        for index in range(0, task.heldout_size, 5):
            answer = task.answer("heldout", index)
            tokens, mask = tiny.encode_pairs([(task.prompt("heldout", index).text, answer)])
            wrong = [str(int(answer) + step) for step in (-10, -1, 1, 10)]
            others = [tiny.encode_pairs([(task.prompt("heldout", index).text, text)]) for text in wrong]
            ours = token_logprobs(model, tokens, mask).sum()
            right += all(ours > token_logprobs(model, *other).sum() for other in others)
    assert right >= 0.9 * len(range(0, task.heldout_size, 5))


def test_the_committed_weights_are_small() -> None:
    """They live in the repository, so they stay under 2 MB, and hold about 0.9 M parameters."""
    assert tiny.WEIGHTS.stat().st_size < WEIGHTS_BYTES_MAX
    assert 800_000 < sum(parameter.numel() for parameter in tiny.tiny_model().parameters()) < 950_000


def test_the_tokenizer_is_one_token_a_character(folder: Path) -> None:
    """15 symbols; a prompt's ids are its characters; a response decodes without <eos>."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(tiny.SYMBOLS) == 15
    assert tokenizer.encode("47+8=", add_special_tokens=False).ids == [7, 10, 13, 11, 14]
    assert tokenizer.decode([8, 8, tiny.EOS], skip_special_tokens=True) == "55"
    assert tokenizer.encode("<bos>1", add_special_tokens=False).ids == [tiny.BOS, 4]


def test_demonstrations_show_training_prompts_only() -> None:
    """No held-out prompt is ever seen; the first demonstrations are right and, of the later ones, 30 %."""
    task = Arithmetic()
    answers = {task.prompt("train", i).text: task.answer("train", i) for i in range(task.train_size)}
    steps = list(tiny.demonstrations(0))
    assert len(steps) == tiny.CLEAN_STEPS + tiny.NOISY_STEPS
    assert {prompt for pairs in steps for prompt, _ in pairs} == set(answers)
    right = [[answers[prompt] == answer for prompt, answer in pairs] for pairs in steps]
    assert all(all(marks) for marks in right[: tiny.CLEAN_STEPS])
    noisy = [mark for marks in right[tiny.CLEAN_STEPS :] for mark in marks]
    assert sum(noisy) / len(noisy) == pytest.approx(1 - tiny.WRONG_SHARE, abs=0.01)


def test_demonstrations_follow_from_the_seed() -> None:
    """The same seed shows the same pairs in the same order, another seed others."""
    first = list(islice(tiny.demonstrations(1), 2))
    assert first == list(islice(tiny.demonstrations(1), 2))
    assert first != list(islice(tiny.demonstrations(2), 2))


@given(answer=st.integers(10, 108), seed=st.integers(0, 1000))
def test_a_wrong_answer_is_wrong_in_one_place(answer: int, seed: int) -> None:
    """Never right, never negative; units or tens are off, not both."""
    wrong = tiny.wrong_answer(answer, random.Random(seed))
    assert wrong >= 0
    assert wrong != answer
    assert wrong // 10 == answer // 10 or wrong % 10 == answer % 10


def test_encoding_masks_answer_and_end() -> None:
    """By hand: the mask covers answer and <eos>, padding is neither."""
    tokens, mask = tiny.encode_pairs([("1+2=", "3"), ("12+9=", "21")])
    assert tokens.tolist() == [[4, 13, 5, 14, 6, 2, 0, 0], [4, 5, 13, 12, 14, 5, 4, 2]]
    assert mask.int().tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]


def test_the_recipe_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed gives the same weights to the last bit, and training lowers the loss."""
    monkeypatch.setattr(tiny, "CLEAN_STEPS", 3)
    monkeypatch.setattr(tiny, "NOISY_STEPS", 2)
    state = torch.random.get_rng_state()
    first, second = tiny.warm_start(4), tiny.warm_start(4)
    assert torch.equal(state, torch.random.get_rng_state())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    tokens = pad_tokens([[7, 10, 13, 11, 14, 8, 8, 2]])
    mask = torch.tensor([[False] * 5 + [True] * 3])
    assert token_logprobs(first, tokens, mask).sum() > token_logprobs(tiny.tiny_model(4), tokens, mask).sum()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """Nothing that lies in a folder is ever touched."""
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        prepare("tiny", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_unknown_model_is_refused_by_name(tmp_path: Path) -> None:
    """The message lists what there is."""
    with pytest.raises(ConfigurationError, match="tiny, smollm2"):
        prepare("huge", tmp_path)  # type: ignore[arg-type]


def test_a_failed_preparation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off half-way, no folder appears under the name asked for."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny, "save_policy", fail)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        prepare("tiny", tmp_path / "model")
    assert not list(tmp_path.iterdir())
