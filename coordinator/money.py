"""Amounts of money: whole micro-dollars inside, dollars for people. Pure."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation

MICRO = 1_000_000

DOLLARS_MAX = 1_000_000_000
"""An amount beyond this is a slip of the finger; it also keeps every sum within 63 bits of a database's integer."""


def micro_dollars(text: str | int | float | Decimal) -> int:
    """An amount as a person writes it, in dollars. Raises ValueError unless it is a number from 0 in micro-dollars."""
    try:
        amount = Decimal(str(text))
    except InvalidOperation as error:
        raise ValueError(f"{str(text)[:32]!r} is no amount in dollars, for example 0.35") from error
    if not amount.is_finite() or not 0 <= amount <= DOLLARS_MAX:
        raise ValueError(f"{str(text)[:32]} dollars: must be from 0 to {DOLLARS_MAX}")
    return int((amount * MICRO).to_integral_value(ROUND_HALF_EVEN))


def dollars(micro: int) -> str:
    """Micro-dollars as a person reads them."""
    return f"${micro / MICRO:.4g}"
