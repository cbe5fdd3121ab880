"""The system-call filter, as a program."""

from __future__ import annotations

import struct

import pytest

from echo2.tasks.confinement import _FORBIDDEN, _filter

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050001


def run(program: bytes, architecture: int, number: int) -> int:
    """Interprets the four instructions the filter uses, as the kernel does."""
    steps = list(struct.iter_unpack("=HBBI", program))
    accumulator, at = 0, 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x20:
            accumulator = {0: number, 4: architecture}[value]
        elif code == 0x15:
            at += yes if accumulator == value else no
        elif code == 0x35:
            at += yes if accumulator >= value else no
        else:
            return value


@pytest.mark.parametrize(("machine", "architecture", "column"), [("x86_64", X86_64, 0), ("aarch64", AARCH64, 1)])
def test_exactly_the_forbidden_calls_are_refused(machine, architecture, column):
    """Each named call gets EPERM, its neighbours pass."""
    program = _filter(machine)
    forbidden = {row[column] for row in _FORBIDDEN.values()} - {None}
    for number in range(600):
        assert run(program, architecture, number) == (REFUSE if number in forbidden else ALLOW)


def test_other_ways_to_number_calls_are_closed():
    """32-bit calls kill the process and x32 calls are refused: both would number the forbidden calls differently."""
    program = _filter("x86_64")
    assert run(program, 0x40000003, 1) == KILL
    assert run(program, X86_64, 0x40000000 | 1) == REFUSE


def test_an_unknown_machine_has_no_filter():
    """Then status shows that this layer is missing."""
    assert _filter("riscv64") == b""
