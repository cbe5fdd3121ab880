"""One fuzz case: what hostile peers send to a process, step by step; kept as JSON in `corpus/`."""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CORPUS = Path(__file__).parent / "corpus"

PLAIN_BYTES_MAX = 1024

After = Literal["read", "reset", "silent", "usual"]
"""What the sender does next: read the answer to its end, reset the stream, or say and read nothing for ever.

`usual`: this time the peer answers as it should, or (of one that asks) lets the moment pass; `data` is empty."""


@dataclass(frozen=True)
class Step:
    """`role` sends `data` on a stream of `protocol`: as a request, or in place of the reply it owes."""

    role: str
    protocol: str
    data: bytes
    after: After = "read"


@dataclass(frozen=True)
class Case:
    """All steps of one case against one kind of process (`stage`). `failure` is the harm it once did, if any."""

    stage: str
    steps: tuple[Step, ...]
    failure: str = ""
    scheduler: int = 0
    """Seed of the order in which tasks run."""

    def to_json(self) -> str:
        lines = [
            {"role": step.role, "protocol": step.protocol, "after": step.after} | _packed(step.data)
            for step in self.steps
        ]
        return (
            json.dumps(
                {"stage": self.stage, "failure": self.failure, "scheduler": self.scheduler, "steps": lines}, indent=1
            )
            + "\n"
        )

    @staticmethod
    def from_json(text: str) -> Case:
        raw = json.loads(text)
        steps = tuple(Step(s["role"], s["protocol"], _unpacked(s), s["after"]) for s in raw["steps"])
        return Case(raw["stage"], steps, raw.get("failure", ""), raw.get("scheduler", 0))

    def keep(self, why: str, folder: Path = CORPUS) -> Path:
        """Into the corpus, under a name that says why and tells cases apart."""
        text = self.to_json()
        path = folder / f"{self.stage}-{why}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
        path.write_text(text)
        return path


def _packed(data: bytes) -> dict[str, str]:
    """As hex; what is long is mostly repetition, and deflated."""
    if len(data) <= PLAIN_BYTES_MAX:
        return {"data": data.hex()}
    return {"deflated": zlib.compress(data, 9).hex()}


def _unpacked(step: dict[str, str]) -> bytes:
    return bytes.fromhex(step["data"]) if "data" in step else zlib.decompress(bytes.fromhex(step["deflated"]))


def kept(stage: str) -> list[Path]:
    """The corpus of one stage."""
    return sorted(CORPUS.glob(f"{stage}-*.json"))
