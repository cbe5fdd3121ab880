"""Which answer a response gives, how it is written, and whether it only repeats the question.

Texts only, and time that grows with their length at most quadratically: a response is a stranger's. What an answer is
worth, `math_forms` and `math_problems` say.

One answer counts: what stands in the last box; without a box, the mathematics after the last word "answer", or else the
last in the text. Several joined by "or", a comma or the like are one answer that holds several, which is right only
where several are asked for.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_OPEN, _CLOSE = r"[-(\s]{0,8}", r"[)\s]{0,8}"  # bounded, or a run of brackets is looked through from each of them
_SUM = rf"-?\({{0,8}}(?:{_NUMBER})(?:{_CLOSE}(?:\*\*|[-+*/^\u00d7\u00f7\u2212]){_OPEN}(?:{_NUMBER}))*"
_MATHEMATICS = re.compile(
    r"\$\$[^$]+\$\$|\\\[(?:(?!\\[\[\]]).)+\\\]|\\\((?:(?!\\[()]).)+\\\)|(?<!\\)\$[^$\n]+\$(?!\d)"
    r"|-?\\[dt]?frac\s*\{-?\d+\}\s*\{-?\d+\}"
    rf"|(?<![\w.\\]){_SUM}\){{0,8}}(?:\s*(?:\\?%|percent\b))?",
    re.DOTALL,
)
_JOINED = re.compile(
    r"\s*(?:,|;|/|\||=|\u2248|~|\\approx|,?\s*(?:or|and|also|alternatively)|)\s*(?:[A-Za-z]\s*=\s*)?", re.IGNORECASE
)
_GOES_ON = re.compile(
    # what makes the mathematics after a box a second answer, and not the next sentence
    r"(?:or\b|and\b|finally\b|\\text\s*\{\s*(?:or|and)\s*\}|\\approx|\\vee|\\lor|[ \t,;/|~=\u2248])*"
    r"(?:\$\$?\s*\S|\\\(|\\\[|\\[dt]?frac|\\sqrt|[-+]?\.?\d)",
    re.IGNORECASE,
)
_PERCENT = re.compile(r"\s{0,4}\$?\s{0,4}(?:\\?%|percent\b)")
_ANSWER_WORD = re.compile(r"\banswer\b", re.IGNORECASE)
ANSWER_REACH = 100
"""Characters between the word "answer" and the answer, at most."""


def last_answer(response: str) -> str:
    """The answer that counts, as it is written; nothing when there is none, or two stand side by side."""
    box = None
    for box in _BOX.finditer(response):  # noqa: B007  # the last
        pass
    return _unboxed(response) if box is None else _boxed(response, box.start(), box.end())


def _boxed(response: str, start: int, inside: int) -> str:
    end = _closing(response, inside)
    if end < 0:
        return ""
    content, rest = response[inside:end], response[end + 1 :]
    if percent := _PERCENT.match(rest):
        content, rest = content + r"\%", rest[percent.end() :]
    dollars = len(re.findall(r"(?<!\\)\$", response[:start]))
    if dollars % 2:
        rest = re.sub(r"\$\$?", " ", rest, count=1)  # the end of the formula that the box stands in
    nested = any(_closing(response, box.end(), start) < 0 for box in _BOX.finditer(response[:start]))
    return "" if _GOES_ON.match(rest) or (nested and rest.strip()[:1] not in ("", "}")) else content.strip()


def _closing(text: str, start: int, end: int | None = None) -> int:
    """Where the brace closes that opened just before `start`; -1 when it does not before `end`."""
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start, len(text) if end is None else end):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return -1


def _unboxed(response: str) -> str:
    found = list(_MATHEMATICS.finditer(response))
    words = list(_ANSWER_WORD.finditer(response))
    first = len(found) - 1
    if words:
        after = [place for place, match in enumerate(found) if match.start() >= words[-1].end()]
        if after and found[after[0]].start() - words[-1].end() <= ANSWER_REACH:
            first = after[0]
    if first < 0:
        return ""
    last = first
    while last + 1 < len(found) and _JOINED.fullmatch(response, found[last].end(), found[last + 1].start()):
        last += 1
    while first > 0 and _JOINED.fullmatch(response, found[first - 1].end(), found[first].start()):
        first -= 1
    parts = [response[match.start() : match.end()] for match in found[first : last + 1]]
    between = [response[a.end() : b.start()] for a, b in pairwise(found[first : last + 1])]
    joined = _bare(parts[0])
    for joint, part in zip(between, parts[1:], strict=True):
        joined += f" {joint.strip() or ';'} {_bare(part)}"
    return joined


def _bare(part: str) -> str:
    for start, end in (("$$", "$$"), (r"\[", r"\]"), (r"\(", r"\)"), ("$", "$")):
        if part.startswith(start) and part.endswith(end) and len(part) > len(start):
            return part[len(start) : -len(end)].strip()
    return part.strip()


_SIGNS = {
    "\u2212": "-",
    "\u2013": "-",
    "\u00d7": "*",
    "\u00b7": "*",
    "\u22c5": "*",
    "\u00f7": "/",
    "\u221a": r"\sqrt ",
    "\u221e": r"\infty ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2248": r"\approx ",
    "\u2228": r"\lor ",
    "\u2208": r"\in ",
    "\u00b1": r"\pm ",
    "\u00b2": "^2",
    "\u00b3": "^3",
    "\u00a0": " ",
    "~": " ",
    "\u20ac": "",
    "\u00a3": "",
}
_UNWRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|boldsymbol|operatorname|mbox|hbox)\s*\{([^{}]*)\}"
)
_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|hline)(?![A-Za-z])\.?", ""),
        (r"\\(?:[,;:! ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"\*\*", "^"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\not\s*=", r"\\ne "),
        (r"\\(?:lbrace|lbrack)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace|rbrack)(?![A-Za-z])", r"\\}"),
        (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge"),
        (r"\\(?:[lr]?vert|mid)(?![A-Za-z])", "|"),
        (r"\\vee(?![A-Za-z])", r"\\lor"),
        (r"\\\$|\$", ""),
        (r"(?<![\\A-Za-z])sqrt\s*\(", r"\\sqrt("),
        (r"(?<![\\A-Za-z])infinity|(?<![\\A-Za-z])inf(?:ty)?(?![A-Za-z])", r"\\infty "),
        (r"\\sqrt\s*\(\s*(\w+)\s*\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\d+)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*([A-Za-z])", r"\\sqrt{\1}"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
        (r"\\frac\s*\{", r"\\frac{"),
        (r"\^\s*\{\s*(\d+)\s*\}", r"^\1"),
        (r"_\s*\{\s*(\w)\s*\}", r"_\1"),
    )
)


@lru_cache(maxsize=4096)
def written(text: str) -> str:
    """`text` in one way of writing: `\\dfrac12` and `\\frac{1}{2}`, `\\cdot` and `*`, `\\left(` and `(` come out alike.

    Blanks stay only between two letters or digits, so that `1 2` is not 12.
    """
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    text = _UNWRAPPED.sub(r" \1 ", without_gaps(text))
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?<![A-Za-z0-9.]) | (?![A-Za-z0-9.])", "", text)
    return text.rstrip(".,;:")


_GAPS = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\})(?=\d{3}(?!\d))")


def without_gaps(text: str) -> str:
    """`1,000` for `1\\,000`."""
    return _GAPS.sub(",", text)


_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\.\d+|[^\s]")
_FRACTION_PARTS = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}")
_LABEL = re.compile(r"(?:[A-Za-z]+[\w' ]*(?:_\w)?'?(?:\([A-Za-z]\))?|\\[A-Za-z]+(?:_\w)?)")
_EQUALS = re.compile(r"(?<![\\<>!:=])=(?!=)")


def sides(text: str) -> list[str]:
    """What stands between the equals signs of a text, in order."""
    return [side.strip() for side in _EQUALS.split(text)]


def label_of(text: str) -> str:
    """`x` of `x = 3`, if what stands before the first equals sign is a name; else nothing."""
    first, *others = sides(text)
    return first if others and _LABEL.fullmatch(first) else ""


def repeats(answer: str, prompt: str, gold: str) -> bool:
    """Whether an answer is an expression of the prompt as it stands there, and not the right answer as it is written.

    That two are the same does not hang on blanks, braces, outer brackets, the size of delimiters, signs of
    multiplication, or the case of letters.
    """
    given = {_key(without_unit(text)) for text in (written(answer), sides(written(answer))[-1])} - {()}
    if given & {_key(gold), _key(sides(written(gold))[-1])}:
        return False
    whole = _key(prompt)
    return any(
        whole[start] == copied[0] and whole[start : start + len(copied)] == copied
        for copied in given
        for start in range(len(whole) - len(copied) + 1)
    )


_PLAIN = re.compile(rf"\s*{_SUM}{_CLOSE}%?\s*")


def is_plain(answer: str) -> bool:
    """Whether an answer is numbers and signs of arithmetic only, and no LaTeX."""
    return _PLAIN.fullmatch(answer) is not None


_UNIT = re.compile(
    r"(?<=[\d)}%]) ?(?!(?:or|and|not)\b)(?:[A-Za-z]{2,}|h)(?:[ /.]+(?!(?:or|and|not)\b)[A-Za-z]+)*(?:\^-?\d)?$"
)


def without_unit(text: str) -> str:
    """A text as `written` gives it, without the words after its number: `270 dollars`, `48 km/h`."""
    return _UNIT.sub("", text)


def rounded(answer: str) -> tuple[str, float | None]:
    """An answer, and the decimal that it is said to be about: `\\frac{1}{3} \\approx 0.33`; without one, None."""
    exact, *about = re.split(r"\\approx(?![A-Za-z])|\u2248", answer)
    if len(about) != 1 or not re.fullmatch(r"\s*-?\d{1,18}(?:\.\d{1,18})?\s*", about[0]):
        return answer, None
    return exact.strip(), float(about[0])


@lru_cache(maxsize=4096)
def _key(text: str) -> tuple[str, ...]:
    text = written(text)
    for _ in range(8):
        text, count = _FRACTION_PARTS.subn(_divided, text)
        if not count:
            break
    tokens = [
        _number(token.lower()) for token in _TOKEN.findall(text) if token not in ("{", "}", "*", r"\(", r"\)", r"\[")
    ]
    while tokens and tokens[0] == "(" and _closes(tokens) == len(tokens) - 1 and "," not in tokens:
        tokens = tokens[1:-1]
    return tuple(tokens)


def _divided(match: re.Match[str]) -> str:
    top, bottom = (part if re.fullmatch(r"\w+|\\sqrt\{?\w+\}?", part) else f"({part})" for part in match.groups())
    return f"{top}/{bottom}"


def _number(token: str) -> str:
    return (token.rstrip("0").rstrip(".") or "0") if re.fullmatch(r"\d*\.\d+", token) else token


def _closes(tokens: list[str]) -> int:
    depth = 0
    for place, token in enumerate(tokens):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if depth == 0:
            return place
    return -1


_ALWAYS_SEVERAL = (
    *(
        r"\\approx",
        r"\\lor",
        r"\\vee",
        r"\\Rightarrow",
        r"\\Longrightarrow",
        r"\\implies",
        r"\\iff",
        r"\\to",
        r"\\rightarrow",
    ),
    *(r"\\ne", r"\\neq", r"\\sim", r"\\equiv", r"\\\\", ";", r"\\quad", r"\\qquad", r"\\newline", r"\\begin"),
    *(r"==", r"\\not", r"\\tag", r"\\[hv]space", r"\\l?dots", r"\\cdots", r"\d\s*_", r"\n", r"(?<!^)(?<!\\)\$(?!$)"),
)
_JOINTS = re.compile("|".join(rf"{joint}(?![A-Za-z])" for joint in _ALWAYS_SEVERAL) + r"|\b(?:or|and|also|vs)\b")
_WORDS = r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf)|operatorname|[mh]box)\s*\{"
_WORDS_INSIDE = re.compile(
    rf"{_WORDS}[^{{}}]*\}}(?=\s*(?:[\w({{]|\\(?:[dt]?frac|sqrt|pi)))|(?<=[\w)}}])\s*{_WORDS}[^}}]*\d"
)
_CHOICES = re.compile(
    r"\\(?:min|max|gcd|lcm|inf|sup|lfloor|lceil|sum|prod|int|lim|det)(?![A-Za-z])|\b(?:min|max|gcd|lcm|sum)\s*\("
)
"""What makes one value of several, left to be worked out."""


def holds_several(answer: str, gold: str) -> bool:
    """Whether an answer is several where the right one is one: `12 or 77`, `12|77`, `12, 77`, `12 \\approx 77`."""
    if "|" in written(answer) and "|" not in written(gold):
        return True
    if _CHOICES.search(answer) and not _CHOICES.search(gold):
        return True
    if (
        _commas(written(gold))
        or r"\cup" in written(gold)
        or gold.lstrip("$ ").startswith((r"\{", "{"))
        or _JOINTS.search(gold)
    ):
        return False  # several are asked for, so that all of them must be right
    return _WORDS_INSIDE.search(answer) is not None or lists(answer)


def lists(text: str) -> bool:
    """Whether a text joins several by a word, a comma or a sign."""
    plain = written(text)
    return bool(_JOINTS.search(text) or _JOINTS.search(plain) or _commas(plain))


def _commas(text: str) -> bool:
    """Whether a comma stands outside all brackets, other than one between thousands."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        thousands = re.fullmatch(r"\d,\d{3}(?!\d).?", text[max(0, place - 1) : place + 5], re.DOTALL)
        if letter == "," and depth <= 0 and not thousands:
            return True
    return False
