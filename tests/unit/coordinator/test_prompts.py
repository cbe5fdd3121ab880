"""What a tokeniser makes of a task's prompts is checked before anything is sampled."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from echo2.coordinator.prompts import PROMPTS_CHECKED, FolderText, check_prompts
from echo2.p2p.errors import ConfigurationError
from echo2.tasks.arithmetic import Arithmetic
from echo2.tasks.model_card import TOKENIZER_FILE, ModelCard, tokenizer_sha256, write_model_card
from echo2.tasks.task import Prompt, Score
from echo2.tasks.word_problems import WordProblems


def folder_text(folder, symbols):
    """A model folder whose tokeniser knows these symbols, and drops every other."""
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / TOKENIZER_FILE))
    card = ModelCard(
        name="few", architecture="llama", tokenizer_sha256=tokenizer_sha256(folder),
        vocabulary_size=len(symbols), context_tokens=64, stop_ids=(0,),
    )  # fmt: skip
    write_model_card(folder, card)
    return FolderText(folder)


class Listed:
    """A task of these prompts."""

    name = "listed"
    heldout_size = 0

    def __init__(self, *texts):
        self.texts = texts
        self.train_size = len(texts)

    def prompt(self, split, index):
        return Prompt(split, index, self.texts[index])

    def score(self, prompt, response):
        return Score(0.0)


def test_a_task_that_the_tokeniser_knows_is_taken(tmp_path):
    """Digits, plus and equals are all that sums need."""
    check_prompts(Arithmetic(), folder_text(tmp_path, "0123456789+="))


def test_what_would_be_lost_is_named(tmp_path):
    """A word problem for the model of sums: the first prompt and the letters that would be dropped."""
    text = folder_text(tmp_path, "0123456789+=")
    with pytest.raises(ConfigurationError) as refused:
        check_prompts(WordProblems(), text)
    said = str(refused.value)
    assert "the model few cannot read the task word-problems: of train prompt 0, " in said
    assert repr(WordProblems().prompt("train", 0).text[:20])[1:-1] in said
    assert "its tokenizer loses" in said


def test_one_bad_prompt_among_good_ones_is_found(tmp_path):
    """The second of three: its minus sign."""
    with pytest.raises(ConfigurationError, match=r"of train prompt 1, '2-2=', its tokenizer loses '-'"):
        check_prompts(Listed("1+1=", "2-2=", "3+3="), folder_text(tmp_path, "0123456789+="))


def test_blanks_are_not_compared(tmp_path):
    """A tokeniser may merge or drop them."""
    check_prompts(Listed("1 + 1 ="), folder_text(tmp_path, "0123456789+="))


def test_the_check_is_bounded(tmp_path):
    """A task of a million prompts starts as fast as a small one."""
    asked = []

    class Counted(Listed):
        train_size = 1_000_000

        def prompt(self, split, index):
            asked.append(index)
            return Prompt(split, index, "1")

    task = Counted()
    task.train_size = 1_000_000
    check_prompts(task, folder_text(tmp_path, "12"))
    assert len(asked) == PROMPTS_CHECKED
