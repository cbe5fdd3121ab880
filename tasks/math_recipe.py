"""The recipe of the small set of mathematical problems that comes with the task `math`.

`python -m echo2.tasks.math_recipe` writes them out, one JSON object a line; a test compares that with the file
`tasks/data/math.jsonl` and has a symbolic algebra system work out each answer again. Answers are worked out here in
whole numbers and fractions, by another way than the `check` beside them.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PER_KIND = 16
SEED = 20_251


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, its answer in LaTeX and the answer's form, and a sympy expression of the problem's numbers for it."""

    kind: str
    problem: str
    answer: str
    check: str
    form: str

    @property
    def line(self) -> str:
        """As it stands in the file."""
        return json.dumps({"problem": self.problem, "answer": self.answer, "form": self.form}, ensure_ascii=False)


def problems() -> Iterator[Problem]:
    """All of them, in the order of the file; no two have the same text."""
    for kind, (form, make) in KINDS.items():
        rng = Random(f"{SEED}/{kind}")
        seen: set[str] = set()
        while len(seen) < PER_KIND:
            problem, answer, check = make(rng)
            if problem not in seen:
                seen.add(problem)
                yield Problem(kind, problem, answer, check, form)


Made = tuple[str, str, str]


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _signed(value: int, name: str = "") -> str:
    """` + 3x`, ` - x`, or nothing for 0."""
    if value == 0:
        return ""
    size = "" if abs(value) == 1 and name else str(abs(value))
    return f" {'-' if value < 0 else '+'} {size}{name}"


def _quadratic(a: int, b: int, c: int) -> str:
    return f"{'' if a == 1 else a}x^2{_signed(b, 'x')}{_signed(c)}"


def _root(value: int) -> tuple[int, int]:
    """(k, m) with sqrt(value) = k sqrt(m) and m free of squares."""
    k = max(k for k in range(1, math.isqrt(value) + 1) if value % (k * k) == 0)
    return k, value // (k * k)


def _radical(k: Fraction, m: int) -> str:
    if m == 1:
        return _latex(k)
    top = rf"\sqrt{{{m}}}" if abs(k.numerator) == 1 else rf"{abs(k.numerator)}\sqrt{{{m}}}"
    sign = "-" if k < 0 else ""
    return sign + (top if k.denominator == 1 else rf"\frac{{{top}}}{{{k.denominator}}}")


def _fraction_sum(rng: Random) -> Made:
    a, c = rng.randint(1, 9), rng.randint(1, 9)
    b, d = rng.sample(range(2, 13), 2)
    sign = rng.choice("+-")
    value = Fraction(a, b) + (Fraction(c, d) if sign == "+" else -Fraction(c, d))
    return (
        rf"Compute $\frac{{{a}}}{{{b}}} {sign} \frac{{{c}}}{{{d}}}$ as a fraction in lowest terms.",
        _latex(value),
        f"Rational({a}, {b}) {sign} Rational({c}, {d})",
    )


def _fraction_quotient(rng: Random) -> Made:
    a, b, c, d = (rng.randint(2, 15) for _ in range(4))
    value = Fraction(a, b) / Fraction(c, d)
    return (
        rf"Divide $\frac{{{a}}}{{{b}}}$ by $\frac{{{c}}}{{{d}}}$.",
        _latex(value),
        f"Rational({a}, {b}) / Rational({c}, {d})",
    )


def _simplify_root(rng: Random) -> Made:
    k, m = rng.randint(2, 9), rng.choice((2, 3, 5, 6, 7, 10, 11, 13))
    j = rng.randint(2, 4)
    value = k * k * m
    return (
        rf"Simplify ${j}\sqrt{{{value}}}$ so that the number under the root is as small as possible.",
        _radical(Fraction(j * k), m),
        f"{j} * sqrt({value})",
    )


def _rationalise(rng: Random) -> Made:
    a, m = rng.randint(1, 12), rng.choice((2, 3, 5, 6, 7, 10, 11))
    return (
        rf"Write $\frac{{{a}}}{{\sqrt{{{m}}}}}$ without a root in the denominator.",
        _radical(Fraction(a, m), m),
        f"{a} / sqrt({m})",
    )


def _distance(rng: Random) -> Made:
    x, y, u, v = (rng.randint(-9, 9) for _ in range(4))
    u += 1 if (x, y) == (u, v) else 0
    k, m = _root((x - u) ** 2 + (y - v) ** 2)
    return (
        f"What is the distance between the points $({x}, {y})$ and $({u}, {v})$ of the plane?",
        _radical(Fraction(k), m),
        f"Point({x}, {y}).distance(Point({u}, {v}))",
    )


def _linear(rng: Random) -> Made:
    a, c = rng.sample(range(2, 12), 2)
    b, d = rng.randint(-20, 20), rng.randint(-20, 20)
    return (
        f"Solve ${a}x{_signed(b)} = {c}x{_signed(d)}$ for $x$.",
        f"x = {_latex(Fraction(d - b, a - c))}",
        f"Eq(x, solve(Eq({a}*x + {b}, {c}*x + {d}), x)[0])",
    )


def _roots(rng: Random) -> Made:
    p, q = sorted(rng.sample(range(-9, 10), 2))
    return (
        f"Find the set of all real solutions of ${_quadratic(1, -p - q, p * q)} = 0$.",
        rf"\{{{p}, {q}\}}",
        f"FiniteSet(*solve(x**2 + ({-p - q})*x + {p * q}, x))",
    )


def _inequality(rng: Random) -> Made:
    p, q = sorted(rng.sample(range(-9, 10), 2))
    sign, symbol = rng.choice((("<", "<"), ("<=", r"\le"), (">", ">"), (">=", r"\ge")))
    ends = "[]" if "=" in sign else "()"
    outside = rf"(-\infty, {p}{ends[1]} \cup {ends[0]}{q}, \infty)"
    return (
        f"For which real $x$ is ${_quadratic(1, -p - q, p * q)} {symbol} 0$? Give an interval or a union of intervals.",
        f"{ends[0]}{p}, {q}{ends[1]}" if sign[0] == "<" else outside,
        f"solve_univariate_inequality(x**2 + ({-p - q})*x + {p * q} {sign} 0, x, relational=False)",
    )


def _absolute(rng: Random) -> Made:
    a, b = rng.randint(-12, 12) or 1, rng.randint(1, 15)
    closed = rng.random() < 0.5
    symbol, sign, ends = (r"\le", "<=", "[]") if closed else ("<", "<", "()")
    return (
        rf"Solve $|x{_signed(-a)}| {symbol} {b}$ over the real numbers and give the solution as an interval.",
        f"{ends[0]}{a - b}, {a + b}{ends[1]}",
        f"solve_univariate_inequality(Abs(x - ({a})) {sign} {b}, x, relational=False)",
    )


def _sets(rng: Random) -> Made:
    first = sorted(rng.sample(range(1, 20), rng.randint(4, 6)))
    second = sorted({*rng.sample(range(1, 20), 3), *rng.sample(first, 2)})
    symbol, name = rng.choice(((r"\cup", "Union"), (r"\cap", "Intersection"), (r"\setminus", "Complement")))
    a, b = set(first), set(second)
    members = sorted({r"\cup": a | b, r"\cap": a & b, r"\setminus": a - b}[symbol])
    if not members:
        return _sets(rng)
    shown = [", ".join(map(str, values)) for values in (first, second, members)]
    return (
        rf"Let $A = \{{{shown[0]}\}}$ and $B = \{{{shown[1]}\}}$. What is $A {symbol} B$?",
        rf"\{{{shown[2]}\}}",
        f"{name}(FiniteSet({shown[0]}), FiniteSet({shown[1]}))",
    )


def _system(rng: Random) -> Made:
    x, y = rng.randint(-9, 9), rng.randint(-9, 9)
    a, b, c, d = (rng.randint(1, 7) for _ in range(4))
    if a * d == b * c:
        d += 1
        if a * d == b * c:
            return _system(rng)
    e, f = a * x + b * y, c * x - d * y
    if a * -d == b * c:
        return _system(rng)
    return (
        (
            f"Solve ${_term(a, 'x')}{_signed(b, 'y')} = {e}$ and ${_term(c, 'x')}{_signed(-d, 'y')} = {f}$. "
            "Give the pair $(x, y)$."
        ),
        f"({x}, {y})",
        f"Tuple(*list(linsolve([{a}*x + {b}*y - ({e}), {c}*x - {d}*y - ({f})], (x, y)))[0])",
    )


def _term(value: int, name: str) -> str:
    return name if value == 1 else f"{value}{name}"


def _expand(rng: Random) -> Made:
    a, c = rng.randint(1, 5), rng.randint(1, 5)
    b, d = (rng.choice([n for n in range(-9, 10) if n]) for _ in range(2))
    return (
        f"Expand $({_term(a, 'x')}{_signed(b)})({_term(c, 'x')}{_signed(d)})$.",
        _quadratic(a * c, a * d + b * c, b * d),
        f"expand(({a}*x + ({b}))*({c}*x + ({d})))",
    )


def _derivative(rng: Random) -> Made:
    a, b, c = rng.randint(1, 6), rng.randint(-9, 9), rng.randint(-9, 9)
    return (
        f"Find the derivative of ${_term(a, 'x^3')}{_signed(b, 'x^2')}{_signed(c, 'x')} + 7$ with respect to $x$.",
        _quadratic(3 * a, 2 * b, c),
        f"diff({a}*x**3 + ({b})*x**2 + ({c})*x + 7, x)",
    )


def _line(rng: Random) -> Made:
    x, y, u = rng.randint(-6, 6), rng.randint(-9, 9), rng.randint(1, 6)
    slope = rng.choice((-4, -3, -2, 2, 3, 4))
    return (
        f"Give the line through $({x}, {y})$ and $({x + u}, {y + slope * u})$ in the form $y = mx + b$.",
        f"y = {slope}x{_signed(y - slope * x)}",
        f"Eq(y, interpolate([({x}, {y}), ({x + u}, {y + slope * u})], x))",
    )


def _logarithm(rng: Random) -> Made:
    base, top, bottom = rng.choice((2, 3, 5)), rng.randint(1, 6), rng.randint(2, 5)
    return (
        rf"Compute $\log_{{{base**bottom}}} {base**top}$.",
        _latex(Fraction(top, bottom)),
        f"expand_log(log({base**top}), force=True) / expand_log(log({base**bottom}), force=True)",
    )


def _choose(rng: Random) -> Made:
    n, k = rng.randint(5, 12), rng.randint(2, 4)
    what = rng.choice(("books", "players", "colours", "cards"))
    value = math.factorial(n) // math.factorial(k) // math.factorial(n - k)
    return (f"In how many ways can {k} of {n} different {what} be chosen?", str(value), f"binomial({n}, {k})")


def _series(rng: Random) -> Made:
    first, step, count = rng.randint(1, 20), rng.randint(2, 9), rng.randint(8, 30)
    value = count * (2 * first + (count - 1) * step) // 2
    return (
        (
            f"What is the sum of the first {count} terms of the arithmetic sequence {first}, {first + step}, "
            f"{first + 2 * step}, ...?"
        ),
        str(value),
        f"summation({first} + {step}*x, (x, 0, {count - 1}))",
    )


def _work(rng: Random) -> Made:
    a, b = rng.sample(range(2, 13), 2)
    return (
        f"One pump empties a tank in {a} hours, another in {b} hours. How many hours do both need together?",
        _latex(Fraction(a * b, a + b)),
        f"solve(x/{a} + x/{b} - 1, x)[0]",
    )


def _percent(rng: Random) -> Made:
    price, off = rng.randrange(20, 400, 20), rng.choice((5, 10, 15, 20, 25, 30, 40))
    return (
        f"A coat costs {price} dollars. Its price is lowered by {off} percent. What is the new price in dollars?",
        _latex(Fraction(price * (100 - off), 100)),
        f"{price} - {price} * Rational({off}, 100)",
    )


def _journey(rng: Random) -> Made:
    out, back = rng.sample(range(20, 121, 10), 2)
    return (
        (
            f"A van drives to a town at {out} km/h and back on the same road at {back} km/h. "
            "What is its mean speed over the whole journey, in km/h?"
        ),
        _latex(Fraction(2 * out * back, out + back)),
        f"2 / (1/Integer({out}) + 1/Integer({back}))",
    )


KINDS: dict[str, tuple[str, Callable[[Random], Made]]] = {
    # name: the form that its answers are in (`math_forms`), and what makes one
    "fraction sum": ("fraction", _fraction_sum),
    "fraction quotient": ("number", _fraction_quotient),
    "root": ("simplest root", _simplify_root),
    "rationalise": ("root", _rationalise),
    "distance": ("root", _distance),
    "linear equation": ("number", _linear),
    "roots": ("set", _roots),
    "inequality": ("interval", _inequality),
    "absolute value": ("interval", _absolute),
    "sets": ("set", _sets),
    "system": ("pair", _system),
    "expansion": ("polynomial", _expand),
    "derivative": ("polynomial", _derivative),
    "line": ("polynomial", _line),
    "logarithm": ("number", _logarithm),
    "choice": ("number", _choose),
    "series": ("number", _series),
    "work": ("number", _work),
    "percent": ("number", _percent),
    "journey": ("number", _journey),
}


def main() -> None:
    """Write the file's lines to standard output."""
    for problem in problems():
        sys.stdout.write(problem.line + "\n")


if __name__ == "__main__":
    main()
