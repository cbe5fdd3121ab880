"""msgpack bytes to values, at a cost that their length bounds. Pure.

A value of one byte, an empty map, takes 64 in memory and is an error of its own to report when it is not wanted; an
array of five bytes can announce a million values, each of which takes eight before any has come, and can stand in
another. So three things are bounded that msgpack leaves open: how long an array or map may be, which follows from the
records that are expected, and how many arrays, maps and other values there may be, which follows from the length.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Any, Union, get_args, get_origin

import msgpack
from annotated_types import MaxLen

from .messages import Record

ITEMS_MIN = 64
"""Arrays and maps may always be so long: what another release has added is refused by its schema, with its name."""

FREE_CONTAINERS, BYTES_PER_CONTAINER = 256, 16
FREE_VALUES, BYTES_PER_VALUE = 1024, 8
"""Our records name every field, so that the densest of them, samples of one token, are 32 and 9 bytes apart."""


class TooDense(ValueError):
    """More arrays, maps or values than any record of this length has."""


def unpack(data: bytes, *expected: type[Record]) -> Any:
    """The value in `data`, which should be one of the `expected` records.

    Raises ValueError (and subclasses, TooDense among them) or TypeError.
    """
    containers = FREE_CONTAINERS + len(data) // BYTES_PER_CONTAINER
    values = FREE_VALUES + len(data) // BYTES_PER_VALUE

    def count(container: Any) -> Any:
        nonlocal containers, values
        containers -= 1
        values -= len(container)
        if containers < 0 or values < 0:
            raise TooDense("too many values for its length")
        return container

    items_max = max([ITEMS_MIN, *map(longest, expected)])
    return msgpack.unpackb(
        data,
        raw=False,
        use_list=False,
        strict_map_key=True,
        max_array_len=items_max,
        max_map_len=items_max,
        object_hook=count,
        list_hook=count,
    )


@cache
def longest(kind: type[Record]) -> int:
    """Items of the longest tuple in a record, in the records in it included.

    Raises TypeError for a tuple that may be of any length.
    """
    found = len(kind.model_fields)
    for name, field in kind.model_fields.items():
        if get_origin(field.annotation) is tuple:
            bounds = [bound.max_length for bound in field.metadata if isinstance(bound, MaxLen)]
            if not bounds:
                raise TypeError(f"{kind.__name__}.{name} is a tuple without a bound")
            found = max(found, *bounds)
        found = max([found, *map(longest, _records_in(field.annotation))])
    return found


def _records_in(annotation: Any) -> set[type[Record]]:
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return {annotation}
    if get_origin(annotation) in (tuple, Union, types.UnionType):
        return set().union(*map(_records_in, get_args(annotation)))
    return set()
