"""What a node is doing, as a table. Pure.

A node's state is not a chain of steps but follows from a few facts, which events change one at a time. So it cannot be
lost in a corner: whatever happened before, the same facts are the same state. The first row that holds decides:

| state      | holds when                                          | asks for leases | generates            |
|------------|-----------------------------------------------------|-----------------|----------------------|
| stopped    | `finish` is done, or the coordinator's no is final  | no              | no                   |
| starting   | the process has not come up yet                     | no              | no                   |
| finishing  | the owner said `finish`                             | no              | what it holds        |
| paused     | the owner said `pause`                              | no              | what it holds        |
| blocked    | something must change first; the reason is shown    | no              | no, or tries again   |
| joining    | no welcome from the coordinator on this connection  | no              | what it holds        |
| installing | no snapshot is in use yet                           | no              | no                   |
| working    | otherwise                                           | yes             | yes                  |

The owner's command outlives the process (`commands`): a paused node is still paused after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

Command = Literal["run", "pause", "finish"]
"""`resume` is the command `run`."""


class State(StrEnum):
    """See the table above; the value goes into heartbeats and status."""

    STARTING = "starting"
    JOINING = "joining"
    INSTALLING = "installing"
    WORKING = "working"
    PAUSED = "paused"
    FINISHING = "finishing"
    BLOCKED = "blocked"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the state follows from. `blocks`: what is in the way, by source, with the reason to show."""

    started: bool = False
    stopped: bool = False
    joined: bool = False
    installed: bool = False
    command: Command = "run"
    blocks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Started:
    """The services are up."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The coordinator welcomed this node."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The coordinator cannot be reached, or does not know this node any more."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A snapshot is loaded and in use."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The coordinator's welcome names another run than the one before: what is in use is not of it."""


@dataclass(frozen=True, slots=True)
class Commanded:
    """The owner's word."""

    command: Command


@dataclass(frozen=True, slots=True)
class Blocked:
    """`source` (engine, disk, coordinator, snapshot) stands in the way."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """`source` no longer stands in the way."""

    source: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing more will be done by this process."""


Event = Started | Joined | Lost | Installed | Moved | Commanded | Blocked | Cleared | Stopped


def step(facts: Facts, event: Event) -> Facts:
    """The facts after `event`. Events may come in any order and may repeat."""
    match event:
        case Started():
            return replace(facts, started=True)
        case Joined():
            return replace(facts, joined=True)
        case Lost():
            return replace(facts, joined=False)
        case Installed():
            return replace(facts, installed=True)
        case Moved():
            return replace(facts, installed=False)
        case Commanded(command):
            return replace(facts, command=command)
        case Blocked(source, reason):
            return replace(facts, blocks=facts.blocks | {source: reason})
        case Cleared(source):
            return replace(facts, blocks={s: r for s, r in facts.blocks.items() if s != source})
        case Stopped():
            return replace(facts, stopped=True)


def state_of(facts: Facts) -> State:
    """The first row of the table that holds."""
    rows = (
        (facts.stopped, State.STOPPED),
        (not facts.started, State.STARTING),
        (facts.command == "finish", State.FINISHING),
        (facts.command == "pause", State.PAUSED),
        (bool(facts.blocks), State.BLOCKED),
        (not facts.joined, State.JOINING),
        (not facts.installed, State.INSTALLING),
    )
    return next((state for holds, state in rows if holds), State.WORKING)


def may_install(facts: Facts) -> bool:
    """Whether a newer snapshot may be fetched: not while the owner wants the machine and the line for himself."""
    return facts.joined and facts.command == "run" and not facts.stopped
