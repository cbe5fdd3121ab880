"""What a researcher writes for a multi-turn task: an environment that answers each thing the policy says.

A sandbox plays one episode. It is deterministic: the same seed and the same actions give the same observations and the
same rewards in every process and on every machine. That is what lets the coordinator replay, from the lease's seed
alone, what a stranger's machine says happened (DESIGN section 9).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

SEED_BYTES = 32

TURNS_MAX = 64
"""Turns of one episode, whatever a task asks for: bounds a rollout's spans on the wire and a replay's length."""

OBSERVATION_CHARACTERS_MAX = 8192
"""One observation's text: several times a poker table's history; a longer one would leave no room for the answers."""

EPISODES_MAX = 10_000_000
"""Of one split: the scorer's bound on the size of any task (`scorer_wire.SIZE_MAX`)."""

DETAILS_MAX = 32
"""Measures one episode may return: each is a column of a table a person reads."""

_NO_DETAILS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy is told after a reset or an action.

    `text` never holds the model's own words, only canonical forms of them: a policy that could write its own
    observations could write template markers into them. `reward` is this step's; an episode's is their sum. `details`
    (the paper's Omega: chips by opponent, unreadable actions) come with the last observation only.
    """

    text: str
    done: bool = False
    reward: float = 0.0
    details: Mapping[str, float] = field(default_factory=lambda: _NO_DETAILS)


class Sandbox(Protocol):
    """One episode: `reset` once, then `step` until an observation is done, or `truncate`."""

    def reset(self, seed: bytes) -> Observation:
        """The opening, never done; all chance of the episode comes from the 32 bytes of `seed`. May be called again."""

    def step(self, action: str) -> Observation:
        """The answer to any text whatever: what cannot be read is an action too. Raises ValueError once done."""

    def truncate(self) -> Observation:
        """The end of an episode whose policy ran out of tokens or turns: a done observation, a forfeit where it lost.

        Raises ValueError once done.
        """


class SandboxTask(Protocol):
    """A multi-turn task adapter: an index names no stored prompt; the environment's seed makes the opening."""

    @property
    def name(self) -> str:
        """The catalogue's key."""

    @property
    def train_size(self) -> int:
        """Number of training episodes counted as one pass."""

    @property
    def heldout_size(self) -> int:
        """Number of held-out episodes, played under seeds no training lease has."""

    @property
    def turns_max(self) -> int:
        """Actions after which an episode is truncated, at most `TURNS_MAX`."""

    @property
    def prefill(self) -> str:
        """How every turn is begun for the policy: part of what it is told, neither drawn nor trained on, no action."""

    def sandbox(self) -> Sandbox:
        """A fresh environment, its state shared with no other."""


def environment_seed(lease_seed: bytes) -> bytes:
    """The seed of a group's environment: BLAKE2b-256 of "env" keyed with the lease's seed. One for all its samples."""
    return blake2b(b"env", key=lease_seed, digest_size=SEED_BYTES).digest()
