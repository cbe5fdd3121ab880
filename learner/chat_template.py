"""A chat template as four pieces of text: what stands before and after a prompt, and before and after a later turn.

Found by rendering: the template is given texts that occur nowhere else, and what it puts around them is cut out. So no
template is ever run again, neither by the coordinator nor by a node. It is run in a process of its own
(`template_process`), whose time and memory are bounded.
"""

from __future__ import annotations

import datetime
import functools
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import read_text

from .reading import read_table
from .vocabulary import CHAT_TEMPLATE_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TEXTS = (("Sentinel7Ask", "Sentinel7Reply", "Sentinel7Observe"), ("other9Ask", "other9Reply", "other9Observe"))
"""Two sets: what is around them must be the same for both. Without spaces at their ends, which templates may strip."""

DATE = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)
"""What a template that writes today's date is told: a folder prepared tomorrow is to be the same model."""


_FIXED_DATE = (
    "{%- macro strftime_now(form) -%}{{- form"
    + "".join(f" | replace('%{code}', '{DATE.strftime('%' + code)}')" for code in "aAbBdHIjmMpSyY")
    + " -}}{%- endmacro -%}"
)
"""Hides the function of that name, which would tell the time; transformers takes no other function than its own."""

TEMPLATE_BYTES_MAX = 1 << 20
"""Real ones are of some kilobytes."""

RENDER_SECONDS_MAX = 60.0
"""For all of it; nearly all of that is for loading a library on a machine that is busy training."""

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_NOT_RENDERED = "the chat template cannot be rendered: "
_KILLED_FOR_TIME = () if sys.platform == "win32" else (signal.SIGXCPU, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """As in `tasks.model_card.ModelCard`; `end` is the marker that closes the policy's turn, empty when unknown.

    The turn's texts are empty when the template takes no second turn.
    """

    prompt_prefix: str
    prompt_suffix: str
    turn_prefix: str = ""
    turn_suffix: str = ""
    end: str = ""


def read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    """The template of a Hugging Face folder, "" when it has none. `settings` is its tokenizer_config.json."""
    file = folder / CHAT_TEMPLATE_FILE
    if file.is_file():
        return read_text(file, "chat template", bytes_max=TEMPLATE_BYTES_MAX)
    where, template = folder / TOKENIZER_CONFIG_FILE, settings.get("chat_template")
    older = folder / "chat_template.json"
    if template is None and older.is_file():
        where, template = older, read_table(older).get("chat_template")
    if isinstance(template, list):  # several by name
        template = dict(_named(entry, where) for entry in template)
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str | None):
        raise ConfigurationError(f"{where}: chat_template is not a text")
    return template or ""


def _named(entry: object, where: Path) -> tuple[str, str]:
    match entry:
        case {"name": str() as name, "template": str() as text}:
            return name, text
    raise ConfigurationError(f"{where}: chat_template has an entry that is not a name and a template")


def chat_format(template: str, markers: Mapping[str, str], end_markers: Sequence[str]) -> ChatFormat:
    """What `template` puts around a prompt and around a later turn.

    `markers` are what a template calls bos_token, eos_token and so on; `end_markers` the texts of tokens that may end a
    response. Raises ConfigurationError when the template fails, or does not keep a prompt as it is.
    """
    asked = [[("user", ask)] for ask, _, _ in TEXTS]
    taken_on = [[("user", ask), ("assistant", reply), ("user", observed)] for ask, reply, observed in TEXTS]
    rendered = _render(template, markers, [*asked, *taken_on])
    first, second = (_prompt(text, texts[0]) for text, texts in zip(rendered, TEXTS, strict=False))
    if first != second:
        raise ConfigurationError(
            "the chat template puts different texts around different prompts, so it cannot be a prefix and a suffix"
        )
    prefix, suffix = first
    turns = [_turn(text, texts, prefix, suffix) for text, texts in zip(rendered[len(TEXTS) :], TEXTS, strict=True)]
    if turns[0] is None or turns[0] != turns[1]:
        return ChatFormat(prefix, suffix)
    between, turn_suffix = turns[0]
    end = max((marker for marker in end_markers if marker and between.startswith(marker)), key=len, default="")
    if not end:
        return ChatFormat(prefix, suffix)
    return ChatFormat(prefix, suffix, between[len(end) :], turn_suffix, end)


def _prompt(rendered: Mapping[str, str], text: str) -> tuple[str, str]:
    if "error" in rendered:
        raise ConfigurationError(_NOT_RENDERED + rendered["error"])
    parts = rendered["text"].split(text)
    if len(parts) != 2:
        raise ConfigurationError(f"the chat template writes a prompt {len(parts) - 1} times instead of once")
    return parts[0], parts[1]


def _turn(rendered: Mapping[str, str], texts: Sequence[str], prefix: str, suffix: str) -> tuple[str, str] | None:
    """What stands between the policy's turn and what is observed, and after that; None when it does not fit."""
    if "error" in rendered:
        return None
    ask, reply, observed = texts
    start = f"{prefix}{ask}{suffix}{reply}"  # the history must be, token for token, what the policy saw and wrote
    parts = rendered["text"].removeprefix(start).split(observed)
    if not rendered["text"].startswith(start) or len(parts) != 2:
        return None
    return parts[0], parts[1]


def _render(
    template: str, markers: Mapping[str, str], conversations: Sequence[Sequence[tuple[str, str]]]
) -> list[dict[str, str]]:
    """Of each conversation, {"text": what is written} or {"error": why nothing is}."""
    request = {
        "template": _FIXED_DATE + template,
        "markers": dict(markers),
        "conversations": [[{"role": role, "content": text} for role, text in each] for each in conversations],
    }
    rendered: list[dict[str, str]] = json.loads(_rendered_apart(json.dumps(request)))
    return rendered


@functools.lru_cache(maxsize=16)  # a process that prepares several folders meets the same few templates
def _rendered_apart(request: str) -> str:
    """What the other process answers, when that is no refusal."""
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", f"{__package__}.template_process"],
            input=request.encode(),
            capture_output=True,
            timeout=RENDER_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(_NOT_RENDERED + "it takes too long") from error
    except OSError as error:
        raise ConfigurationError(f"no process to render the chat template in: {error.strerror or error}") from error
    if -done.returncode in _KILLED_FOR_TIME:
        raise ConfigurationError(_NOT_RENDERED + "it takes too long")
    if done.returncode:
        raise ConfigurationError(_NOT_RENDERED + f"the process that tried ended with {done.returncode}")
    answer = done.stdout.decode()
    if answer.startswith("{"):
        raise ConfigurationError(_NOT_RENDERED + json.loads(answer)["refused"])
    return answer
