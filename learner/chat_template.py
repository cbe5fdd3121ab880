"""A chat template as four pieces of text: what stands before and after a prompt, and before and after a later turn.

Found by rendering: the template is given texts that occur nowhere else, and what it puts around them is cut out. So no
template is ever run again, neither by the coordinator nor by a node.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from echo2.p2p.errors import ConfigurationError

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

TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template may raise: its own complaint, a mistake in it, or what Python says to what it asks for."""


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
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    older = folder / "chat_template.json"
    if template is None and older.is_file():
        template = json.loads(older.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else ""


def chat_format(template: str, markers: Mapping[str, str], end_markers: Sequence[str]) -> ChatFormat:
    """What `template` puts around a prompt and around a later turn.

    `markers` are what a template calls bos_token, eos_token and so on; `end_markers` the texts of tokens that may end a
    response. Raises ConfigurationError when the template fails, or does not keep a prompt as it is.
    """
    first, second = (_prompt(template, markers, texts[0]) for texts in TEXTS)
    if first != second:
        raise ConfigurationError(
            "the chat template puts different texts around different prompts, so it cannot be a prefix and a suffix"
        )
    prefix, suffix = first
    turns = [_turn(template, markers, texts, prefix, suffix) for texts in TEXTS]
    if turns[0] is None or turns[0] != turns[1]:
        return ChatFormat(prefix, suffix)
    between, turn_suffix = turns[0]
    end = max((marker for marker in end_markers if marker and between.startswith(marker)), key=len, default="")
    if not end:
        return ChatFormat(prefix, suffix)
    return ChatFormat(prefix, suffix, between[len(end) :], turn_suffix, end)


def _prompt(template: str, markers: Mapping[str, str], text: str) -> tuple[str, str]:
    try:
        rendered = _render(template, markers, [("user", text)])
    except TEMPLATE_ERRORS as error:
        raise ConfigurationError(f"the chat template cannot be rendered: {error}") from error
    parts = rendered.split(text)
    if len(parts) != 2:
        raise ConfigurationError(f"the chat template writes a prompt {len(parts) - 1} times instead of once")
    return parts[0], parts[1]


def _turn(
    template: str, markers: Mapping[str, str], texts: Sequence[str], prefix: str, suffix: str
) -> tuple[str, str] | None:
    """What stands between the policy's turn and what is observed, and after that; None when it does not fit."""
    ask, reply, observed = texts
    try:
        rendered = _render(template, markers, [("user", ask), ("assistant", reply), ("user", observed)])
    except TEMPLATE_ERRORS:
        return None
    start = f"{prefix}{ask}{suffix}{reply}"  # the history must be, token for token, what the policy saw and wrote
    parts = rendered.removeprefix(start).split(observed)
    if not rendered.startswith(start) or len(parts) != 2:
        return None
    return parts[0], parts[1]


def _render(template: str, markers: Mapping[str, str], messages: Sequence[tuple[str, str]]) -> str:
    """In the sandbox that transformers renders templates in."""
    conversation = [{"role": role, "content": content} for role, content in messages]
    rendered: Any = render_jinja_template(
        conversations=[conversation],
        chat_template=_FIXED_DATE + template,
        add_generation_prompt=True,
        **markers,
    )
    return str(rendered[0][0])
