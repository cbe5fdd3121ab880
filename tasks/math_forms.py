"""The forms in which an answer may be asked for, each with a reader that says what an answer in that form means.

`\\frac{8}{6} - \\frac{4}{7}` means what `\\frac{16}{21}` means, but it is the question. A problem with a form takes
only answers in that form, in any usual way of writing it; what is read is exact, so two answers are the same if they
are read alike.

| form          | taken                                                                                             |
|---------------|---------------------------------------------------------------------------------------------------|
| number        | a whole number, a decimal, a fraction of whole numbers, a mixed number, with percent or a unit     |
| fraction      | a fraction in lowest terms, or a whole number                                                      |
| root          | as `fraction` in any terms, or with one root of a whole number, never below the line               |
| simplest root | as `root`, where what is under the root has no square in it                                        |
| polynomial    | a sum of terms like `-2x^2`, each power once                                                       |
| set           | numbers in any order, in braces or, if there are several, without                                  |
| pair          | two numbers in brackets, or `x = 1, y = 2`                                                         |
| interval      | an interval, or several joined by \\cup                                                            |

Before each may stand what it is: `x = `, `A \\cup B = `. Of a chain of equals signs only the end counts.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import gcd, inf, isqrt, sqrt
from typing import TYPE_CHECKING

from .math_answers import label_of, lists, sides, without_unit, written

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

ANSWER_CHARACTERS_MAX = 512
DIGITS_MAX = 18
"""Of any whole number in an answer; also keeps the search for squares under a root short."""

RADICAND_MAX = 10**9

_WHOLE = rf"\d{{1,{DIGITS_MAX}}}"
_FRACTION = re.compile(rf"\\frac\{{([+-]?{_WHOLE})\}}\{{([+-]?{_WHOLE})\}}|\(?([+-]?{_WHOLE})\)?/\(?([+-]?{_WHOLE})\)?")
_MIXED = re.compile(rf"({_WHOLE})(?:\\frac\{{({_WHOLE})\}}\{{({_WHOLE})\}}| ({_WHOLE})/({_WHOLE}))")
_DECIMAL = re.compile(rf"{_WHOLE}\.\d{{0,{DIGITS_MAX}}}|\.\d{{1,{DIGITS_MAX}}}|{_WHOLE}")
_THOUSANDS = re.compile(r"(?<!\d)\d{1,3}(?:,\d{3})+(?![\d,])")
_ROOT = r"\\sqrt\{(\d{1,10})\}"
_ROOTS = (
    re.compile(rf"(.*?)\*?{_ROOT}(?:/({_WHOLE}))?"),
    re.compile(rf"\\frac\{{([+-]?(?:{_WHOLE})?)\*?{_ROOT}\}}\{{({_WHOLE})\}}"),
)
_TERM = re.compile(rf"([+-]*)({_WHOLE}(?:\.\d+)?|\\frac\{{{_WHOLE}\}}\{{{_WHOLE}\}}|)\*?(?:([a-z])(?:\^(\d{{1,3}}))?)?")
_PAIRS = (
    re.compile(r"x=([^,;=]*?)\s*(?:[,;]|[,;]?\band\b)\s*y=([^,;=]*)"),
    re.compile(r"(?:.*=)?\(([^,;()]*)[,;]([^,;()]*)\)"),
)
_MEMBER_LABEL = re.compile(r"[A-Za-z](?:_?\d)?=")
_JOINT = re.compile(r",|;|\\lor(?![A-Za-z])|\\text\{or\}|\b(?:or|and)\b")
_INTERVAL = re.compile(r"([(\[\]])([^,()\[\]]*),([^,()\[\]]*)([)\]\[])")


def read(form: str, text: str) -> Hashable | None:
    """What `text` means as an answer in the form, comparable with another of that form; None when it is not in it."""
    if len(text) > ANSWER_CHARACTERS_MAX:
        return None
    try:
        return FORMS[form](written(text))
    except ZeroDivisionError:
        return None


def size(value: Hashable | None) -> float | None:
    """A number or root as a float; None for what is neither."""
    match value:
        case Fraction():
            return float(value)
        case (Fraction() as factor, int() as radicand):
            return float(factor) * sqrt(radicand)
    return None


def same(form: str, answer: str, gold: str) -> bool:
    """Whether an answer is in the form and is the right one. `y = 3` is not right where `x = 3` is."""
    wanted, found = label_of(written(gold)), label_of(written(answer))
    if wanted and found and wanted != found and len(found) == 1:
        return False
    if form not in _OF_SEVERAL and any(map(lists, sides(answer)[:-1])):
        return False
    value = read(form, answer)
    return value is not None and value == read(form, gold) and not contradicts(answer)


def contradicts(answer: str) -> bool:
    """Whether an answer says of one number that it is another: `77 = 12`, `x = 77 x = 12`."""
    return len({read("number", re.sub(r"(?<=[\d)}])\s+[A-Za-z]$", "", side)) for side in sides(answer)} - {None}) > 1


def _last_side(text: str) -> str:
    return sides(text)[-1]


def _sign(text: str) -> tuple[int, str]:
    """The sign of a number and the rest, without brackets around either."""
    sign = 1
    for _ in range(8):
        if text[:1] in ("+", "-"):
            sign, text = -sign if text[0] == "-" else sign, text[1:]
        elif text[:1] + text[-1:] in ("()", "{}") and not {text[0], text[-1]} & set(text[1:-1]):
            text = text[1:-1]
        else:
            break
    return sign, text


def _rational(text: str) -> Fraction | None:
    """A number as it is written out: nothing in it is left to be worked out but one division."""
    sign, text = _sign(text)
    if match := _FRACTION.fullmatch(text):
        top, bottom = (int(part) for part in match.groups() if part is not None)
        return Fraction(sign * top, bottom)
    if match := _MIXED.fullmatch(text):
        whole, top, bottom = (int(part) for part in match.groups() if part is not None)
        return sign * (whole + Fraction(top, bottom)) if top < bottom else None
    return sign * Fraction(text) if _DECIMAL.fullmatch(text) else None


def _number(text: str) -> Fraction | None:
    text = without_unit(_last_side(text)).rstrip(".")
    text = re.sub(r" ?percent$", "%", text)
    share = text.endswith("%")
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text.rstrip("%").rstrip("\\").strip())
    value = _rational(text)
    return value if value is None or not share else value / 100


def _lowest(text: str) -> Fraction | None:
    sign, text = _sign(_last_side(text))
    if match := _FRACTION.fullmatch(text):
        top, bottom = (int(part) for part in match.groups() if part is not None)
        return Fraction(sign * top, bottom) if gcd(top, bottom) == 1 else None
    return sign * Fraction(text) if re.fullmatch(_WHOLE, text) else None


def _root(text: str) -> tuple[Fraction, int] | None:
    """(q, m) of q sqrt(m), m free of squares; m is 1 for a fraction."""
    found = _read_root(without_unit(_last_side(text)))
    if found is None:
        return None
    factor, radicand = found
    square = _square_in(radicand)
    return factor * square, radicand // square**2


def _simplest_root(text: str) -> tuple[Fraction, int] | None:
    found = _read_root(_last_side(text))
    return found if found is not None and _square_in(found[1]) == 1 else None


def _read_root(text: str) -> tuple[Fraction, int] | None:
    sign, text = _sign(text)
    if r"\sqrt" not in text:
        value = _rational(text)
        return None if value is None else (sign * value, 1)
    match = next((match for shape in _ROOTS if (match := shape.fullmatch(text))), None)
    if match is None:
        return None
    factor, radicand, bottom = match.groups()
    sign, factor = (-sign, "") if factor == "-" else (sign, factor)
    value = _rational(factor) if factor else Fraction(1)
    m = int(radicand)
    if value is None or not 1 < m <= RADICAND_MAX or isqrt(m) ** 2 == m:
        return None
    return sign * value / int(bottom or 1), m


def _square_in(number: int) -> int:
    """The largest k whose square divides `number`."""
    square, k = 1, 2
    while k * k <= number:
        while number % (k * k) == 0:
            number //= k * k
            square *= k
        k += 1
    return square


def _polynomial(text: str) -> frozenset[tuple[str, int, Fraction]] | None:
    text = _last_side(text).replace(" ", "")
    terms: dict[tuple[str, int], Fraction] = {}
    names = set()
    while text:
        match = _TERM.match(text)
        if match is None or not (match[2] or match[3]) or len(match[1]) > 1 or (terms and not match[1]):
            return None
        sign, size, name, power = match.groups()
        value = (_rational(size) if size else Fraction(1)) or Fraction(0)
        place = (name or "", int(power or 1) if name else 0)
        if place in terms:
            return None
        terms[place] = -value if sign == "-" else value
        names.add(name or "")
        text = text[match.end() :]
    if len(names - {""}) > 1:
        return None
    return frozenset((name, power, value) for (name, power), value in terms.items() if value) if terms else None


def _set(text: str) -> frozenset[Fraction] | None:
    start, end = text.find(r"\{"), text.rfind(r"\}")
    braced = start >= 0 or text[:1] + text[-1:] == "{}"
    if start >= 0:
        if end + 2 != len(text) or not re.fullmatch(r"|.*(?:=|\\in)", text[:start]):
            return None
        text = text[start + 2 : end]
    elif braced:
        text = text[1:-1]
    members: set[Fraction] = set()
    for member in _JOINT.split(text):
        shown = _MEMBER_LABEL.sub("", member.strip(), count=1).removeprefix(r"x\in")
        both = shown.startswith(r"\pm")
        value = _rational(shown.removeprefix(r"\pm").strip())
        if value is None:
            return None
        members |= {value, -value} if both else {value}
    # One number alone is no set, and may be any of the prompt's.
    return frozenset(members) if braced or len(members) > 1 else None


def _pair(text: str) -> tuple[Fraction, Fraction] | None:
    match = next((match for shape in _PAIRS if (match := shape.fullmatch(text))), None)
    if match is None:
        return None
    first, second = (_rational(part.strip()) for part in match.groups())
    return None if first is None or second is None else (first, second)


def _interval(text: str) -> tuple[tuple[float | Fraction, float | Fraction, bool, bool], ...] | None:
    text = re.sub(r"^.*?(?:=|\\in)(?![A-Za-z])", "", text)
    pieces = []
    for piece in re.split(r"\\cup(?![A-Za-z])|(?<=[)\]\[])U(?=[(\[\]])", text):
        match = _INTERVAL.fullmatch(piece.strip())
        if match is None:
            return None
        low, high = _end(match[2]), _end(match[3])
        if low is None or high is None or low >= high:
            return None
        closed = (match[1] == "[", match[4] == "]")
        if (low == -inf and closed[0]) or (high == inf and closed[1]):
            return None
        pieces.append((low, high, *closed))
    return tuple(sorted(pieces))


def _end(text: str) -> float | Fraction | None:
    sign, rest = _sign(text.strip())
    return sign * inf if rest.strip() == r"\infty" else _rational(text.strip())


_OF_SEVERAL = ("set", "pair", "interval")

FORMS: Mapping[str, Callable[[str], Hashable | None]] = {
    "number": _number,
    "fraction": _lowest,
    "root": _root,
    "simplest root": _simplest_root,
    "polynomial": _polynomial,
    "set": _set,
    "pair": _pair,
    "interval": _interval,
}
