"""`python -m echo2.learner.template_process`: renders a chat template, in a process of its own, within bounds.

A template is a program by whoever made the model. The sandbox keeps it from reaching anything; it does not keep it from
running for ever, nor from filling the memory, which only the system can. stdin: JSON {template, markers,
conversations}; stdout: JSON, a list of {"text": ...} or {"error": ...}, one a conversation, or {"refused": ...}.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

if sys.platform == "win32":
    resource = None
else:
    import resource

CPU_SECONDS_MAX = 2
"""Real templates take milliseconds."""

MEMORY_BYTES_MAX = 256 << 20
"""Beyond what is in use when the libraries are loaded."""

TEXT_CHARACTERS_MAX = 1 << 20
"""Of one rendered conversation; a model card takes 16 KiB of a prefix."""


def main() -> None:
    """Answer the one request there is."""
    from transformers.utils.chat_template_utils import render_jinja_template

    request = json.load(sys.stdin)
    _bound()
    try:
        answer: Any = [_rendered(render_jinja_template, request, each) for each in request["conversations"]]
        text = json.dumps(answer)
    except MemoryError:
        text = json.dumps({"refused": f"it takes more than {MEMORY_BYTES_MAX >> 20} MiB of memory"})
    except OverflowError as error:
        text = json.dumps({"refused": str(error)})
    sys.stdout.write(text)


def _rendered(render: Any, request: Any, conversation: Any) -> dict[str, str]:
    try:
        texts, _ = render(
            conversations=[conversation],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["markers"],
        )
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a template may raise whatever it likes
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}
    if len(texts[0]) > TEXT_CHARACTERS_MAX:
        raise OverflowError(f"it writes {len(texts[0])} characters around a prompt, at most {TEXT_CHARACTERS_MAX} fit")
    return {"text": texts[0]}


def _bound() -> None:
    if resource is None:
        return  # the parent's time-out is then the only bound
    seconds = math.ceil(time.process_time()) + CPU_SECONDS_MAX
    limits = {"RLIMIT_CORE": 0, "RLIMIT_CPU": seconds}
    with contextlib.suppress(OSError):  # Linux alone says how much there is, and alone keeps to the bound
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limits["RLIMIT_AS"] = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    for name, limit in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a lower one is in force already
            resource.setrlimit(getattr(resource, name), (limit, limit))


if __name__ == "__main__":
    main()
