"""Mathematical problems with one answer each. Which part of a response is its answer, `math_answers` says.

A problem whose `form` is known (`math_forms`) takes the right answer in that form, however it is written. Without one
it takes whatever means the same: 1/2, 0.5 and \\frac{2}{4}. But a question means the same as its answer, too: an
expression that stands in the prompt earns nothing, unless it is the very answer.

The judge of meaning is the library math-verify. It reads LaTeX with a symbolic algebra system, which a hostile response
can keep busy for ever (9**9**9**9), so it is imported by `prepare` only, in the scorer's worker, whose parent kills it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import math_forms, options
from .lazy_imports import import_what_sympy_imports_late
from .math_answers import holds_several, is_plain, label_of, last_answer, repeats, rounded, sides, without_gaps, written
from .task import Prompt, Score

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .task import Split

OWN_FILE = Path(__file__).with_name("data") / "math.jsonl"

INSTRUCTION = "\nPut the final answer in \\boxed{}."

RESPONSE_CHARACTERS_MAX = 8192
"""Only this much of the end of a response is read: the answer stands last, and the time to look is bounded."""

PROBLEM_CHARACTERS_MAX = 32_768
ANSWER_CHARACTERS_MAX = 4096
PROBLEMS_MAX = 200_000
FILE_BYTES_MAX = 256 << 20

HELDOUT_SHARE = 0.2

SOFT_SECONDS = 1
"""math-verify's own alarm on each of its two steps; whole seconds. What runs in C code it cannot stop: the worker's
parent can."""

ANSWERS_CACHED = 4096

DELIMITERS = 4
"""Characters around a formula, at most: `\\(` and `\\)`."""

ROUNDED_SHARE_MAX = 0.01
"""How far a decimal may be off that is given beside an exact answer."""


class Problem(NamedTuple):
    """A line of the file; `form` is "" where any way of writing the answer will do."""

    text: str
    answer: str
    form: str


class MathProblems:
    """Reward 1 if the last answer in the response is the problem's answer, in its form if it has one, else 0.

    `path` is a file of one JSON object a line with the texts "problem", "answer" (LaTeX or plain) and perhaps "form";
    without it, the small set of `math_recipe`. About `heldout_share` of the problems are held out: those whose text has
    a small hash, so a problem stays on its side when others are added, and two of the same text are on the same side.
    """

    name = "math"

    def __init__(self, path: str | None = None, heldout_share: float = HELDOUT_SHARE) -> None:
        file = OWN_FILE if path is None else options.path("path", path)
        bound = options.share("heldout_share", heldout_share) * 2**64
        self._problems: dict[Split, list[Problem]] = {"train": [], "heldout": []}
        for problem in _read(file):
            digest = blake2b(problem.text.encode("utf-8", "replace"), digest_size=8).digest()
            self._problems["heldout" if int.from_bytes(digest, "big") < bound else "train"].append(problem)
        for split, members in self._problems.items():
            if not members:
                raise ValueError(
                    f"with heldout_share = {heldout_share}, no problem of {file.name} is in the {split} set"
                )
        self._verify: Any = None
        self._parse: Any = None
        self._gold = lru_cache(maxsize=ANSWERS_CACHED)(self._read_answer)

    @property
    def train_size(self) -> int:
        """Problems that are not held out."""
        return len(self._problems["train"])

    @property
    def heldout_size(self) -> int:
        """Problems that are."""
        return len(self._problems["heldout"])

    def prepare(self) -> None:
        """Import the judge. Raises ValueError when it is not installed."""
        try:
            from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
        except ImportError as error:
            raise ValueError(f"math-verify cannot be imported ({error}): pip install math-verify") from error
        import_what_sympy_imports_late()
        latex, plain = (LatexExtractionConfig(boxed_match_priority=0),), (ExprExtractionConfig(),)

        def read(text: str) -> Any:
            # One after the other: of LaTeX that it cannot read, the second takes the last number that stands in it.
            found = parse(f"${text}$", extraction_config=latex, parsing_timeout=SOFT_SECONDS)
            if is_plain(text) and all(isinstance(part, str) for part in found):
                found = parse(text, extraction_config=plain, parsing_timeout=SOFT_SECONDS)
            return found

        self._parse, self._verify = read, verify
        for answer in (r"\{1, \frac{1}{2}\}", r"(-\infty, 2] \cup [3, 4)", r"x = \sqrt{2}", "(1, 2)", "x^2 + 1"):
            verify(read(answer), read(answer))  # what a first use of each kind imports

    def prompt(self, split: Split, index: int) -> Prompt:
        """Problem `index` of `split`, in the order of the file, and how to answer. Raises IndexError outside it."""
        return Prompt(split, index, self._problem(split, index).text + INSTRUCTION)

    def answer(self, split: Split, index: int) -> str:
        """As the file has it."""
        return self._problem(split, index).answer

    def score(self, prompt: Prompt, response: str) -> Score:
        """R(x, y). Only in the worker: `prepare` comes first. A response without an answer earns 0."""
        problem = self._problem(prompt.split, prompt.index)
        if self._parse is None:
            raise RuntimeError("mathematical problems are scored in the scorer's process only")
        answer, about = rounded(last_answer(response[-RESPONSE_CHARACTERS_MAX:]))
        said = " ".join(response.split())
        if not answer or (len(said) > len(answer) + DELIMITERS and said in " ".join(prompt.text.split())):
            return Score(0.0)  # no answer, or a piece of the prompt, whose last number may be the answer by chance
        if problem.form:
            right = math_forms.same(problem.form, answer, problem.answer) and not (
                {"/", "\\"} & set(written(answer)) and repeats(answer, problem.text, problem.answer)
            )
            exact = math_forms.size(math_forms.read(problem.form, problem.answer)) if about is not None else None
        else:
            gold = self._gold(prompt.split, prompt.index)
            right = self._means(answer, gold, problem)
            exact = _size(gold[0]) if about is not None else None
        if about is not None:
            right = right and exact is not None and abs(about - exact) <= ROUNDED_SHARE_MAX * abs(exact)
        return Score(1.0 if right else 0.0)

    def samples(self, prompt: Prompt) -> list[tuple[str, float]]:
        """The answer in a box, and no answer."""
        answer = self.answer(prompt.split, prompt.index)
        return [(rf"Therefore it is $\boxed{{{answer}}}$.", 1.0), ("I do not know.", 0.0)]

    def _means(self, answer: str, gold: Any, problem: Problem) -> bool:
        several = holds_several(answer, problem.answer) or math_forms.contradicts(answer)
        if several or repeats(answer, problem.text, problem.answer):
            return False
        if "%" in answer and "%" not in problem.answer:  # math-verify takes 12% for 12
            value = math_forms.read("number", answer)
            answer = str(value) if value is not None else ""
        answer = without_gaps(answer)
        found = self._parse(_judged(answer, problem.answer))
        return bool(found) and bool(self._verify(gold, found, timeout_seconds=SOFT_SECONDS))

    def _problem(self, split: Split, index: int) -> Problem:
        if index < 0:
            raise IndexError(f"no problem {index}")
        return self._problems[split][index]

    def _read_answer(self, split: Split, index: int) -> Any:
        answer = self.answer(split, index)
        gold = self._parse(answer)
        if not gold:
            raise ValueError(f"the answer {answer[:64]!r} of {split} problem {index} cannot be read")
        return gold


def _judged(answer: str, gold: str) -> str:
    """What of a chain of equals signs is judged: its end, with its name where the right answer has one."""
    parts = sides(answer)
    name = label_of(written(gold))
    if len(parts) == 1 or ("=" in written(gold) and not name) or holds_several(f"{gold} ", ""):
        return answer
    return f"{parts[0]} = {parts[-1]}" if name and label_of(answer) else parts[-1]


def _size(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, ArithmeticError):
        return None


def _read(file: Path) -> Iterator[Problem]:
    """The problems of a file, in order. Raises ValueError that names the line."""
    try:
        if file.stat().st_size > FILE_BYTES_MAX:
            raise ValueError(f"{file.name} is larger than {FILE_BYTES_MAX} bytes")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the problems cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name} is no text in UTF-8: {error}") from error
    count = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        count += 1
        if count > PROBLEMS_MAX:
            raise ValueError(f"{file.name} has more than {PROBLEMS_MAX} problems")
        yield _problem_of(line, f"line {number} of {file.name}")


def _problem_of(line: str, where: str) -> Problem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(  # noqa: TRY004  # a mistake in the file, like the others
            f'{where} is not an object with "problem" and "answer"'
        )
    for key, characters_max in (("problem", PROBLEM_CHARACTERS_MAX), ("answer", ANSWER_CHARACTERS_MAX)):
        value = record.get(key)
        if not isinstance(value, str) or not 0 < len(value.strip()) <= characters_max:
            raise ValueError(f'{where}: "{key}" must be a text of 1 to {characters_max} characters')
    form = record.get("form", "")
    if form and (not isinstance(form, str) or form not in math_forms.FORMS):
        raise ValueError(f'{where}: "form" must be one of {", ".join(math_forms.FORMS)}')
    if form and math_forms.read(form, record["answer"]) is None:
        raise ValueError(f'{where}: the answer {record["answer"][:64]!r} is not in the form "{form}"')
    return Problem(record["problem"], record["answer"], form or "")
