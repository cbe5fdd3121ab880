"""Chat templates as prefixes and suffixes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from contract.small_models import CHATML_TEMPLATE, LLAMA3_TEMPLATE

from echo2.learner import chat_template
from echo2.learner.chat_template import chat_format, read_chat_template
from echo2.p2p.errors import ConfigurationError

CHATML_ENDS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]

QWEN3_LIKE = """\
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' + (message.content.split('</think>')[-1].lstrip('\\n')) + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

THINKS_FIRST = CHATML_TEMPLATE.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")


def test_chatml_with_a_system_line():
    """The template's own system line belongs to the prefix; a turn begins after the marker that the policy wrote."""
    chat = chat_format(CHATML_TEMPLATE, {}, CHATML_ENDS)
    assert chat.prompt_prefix == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert chat.prompt_suffix == "<|im_end|>\n<|im_start|>assistant\n"
    assert chat.end == "<|im_end|>"
    assert chat.turn_prefix == "\n<|im_start|>user\n"
    assert chat.turn_suffix == "<|im_end|>\n<|im_start|>assistant\n"


def test_llama_3_with_a_date():
    """<bos> comes from the settings, and the date is always the same: a folder made tomorrow is the same model."""
    chat = chat_format(LLAMA3_TEMPLATE, {"bos_token": "<|begin_of_text|>"}, ["<|eot_id|>", "<|end_of_text|>"])
    assert chat.prompt_prefix == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n"
    )
    assert chat.prompt_suffix == "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert (chat.end, chat.turn_prefix) == ("<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\n")


def test_qwen_3_keeps_turns_without_thoughts():
    """What it strips from earlier turns is not there, so turns fit."""
    chat = chat_format(QWEN3_LIKE, {}, CHATML_ENDS)
    assert chat.prompt_prefix == "<|im_start|>user\n"
    assert chat.turn_prefix == "\n<|im_start|>user\n"


def test_a_template_that_rewrites_history_has_no_turns():
    """The policy was shown <think>, the history shows none: token for token that is another conversation."""
    chat = chat_format(THINKS_FIRST, {}, CHATML_ENDS)
    assert chat.prompt_suffix.endswith("assistant\n<think>\n")
    assert (chat.turn_prefix, chat.turn_suffix, chat.end) == ("", "", "")


def test_a_template_for_one_turn_only():
    """A complaint about the second turn costs the turns, not the template."""
    once = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}Q: {{ messages[0].content }}\nA:"
    chat = chat_format(once, {}, CHATML_ENDS)
    assert (chat.prompt_prefix, chat.prompt_suffix, chat.turn_prefix, chat.end) == ("Q: ", "\nA:", "", "")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no users here') }}", "cannot be rendered: no users here"),
        ("{% for %}", "cannot be rendered"),
        ("{{ messages[3].content }}", "cannot be rendered"),
        ("{{ 1 // 0 }}", "cannot be rendered"),
        ("nothing", "0 times"),
        ("{{ messages[0].content }} {{ messages[0].content }}", "2 times"),
        ("{{ messages[0].content | length }}{{ messages[0].content }}", "different texts around different prompts"),
    ],
)
def test_a_template_that_is_no_prefix_and_suffix_is_refused(template: str, says: str):
    """With the reason, and without a traceback."""
    with pytest.raises(ConfigurationError, match=says):
        chat_format(template, {}, CHATML_ENDS)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 'a' * (10 ** 11) }}", "more than 256 MiB of memory"),
        ("{% set x = lipsum(n=1000000) %}{{ messages[0].content }}", "takes too long|MiB of memory"),
        ("{{ messages[0].content }}{{ 'a' * 2000000 }}", "2000012 characters around a prompt, at most 1048576"),
        (
            "{% if messages|length > 1 %}{{ 'a' * (10 ** 11) }}{% endif %}{{ messages[0].content }}",
            "more than 256 MiB of memory",
        ),
        ("{%- macro f() -%}{{ f() }}{%- endmacro -%}{{ f() }}", "cannot be rendered"),
    ],
)
def test_a_template_that_would_take_all_memory_is_refused(template: str, says: str):
    """In a process of its own: it is a program of somebody else's, and the sandbox bounds neither time nor memory."""
    with pytest.raises(ConfigurationError, match=says):
        chat_format(template, {}, CHATML_ENDS)


def test_a_template_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch):
    """After a bounded time on the clock, however the process spends it."""

    def run(*_arguments: object, timeout: float, **_named: object) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(chat_template.subprocess, "run", run)
    with pytest.raises(ConfigurationError, match="it takes too long"):
        chat_format("{{ messages[0].content }}.", {}, CHATML_ENDS)


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals there")
@pytest.mark.parametrize(("code", "says"), [(-24, "takes too long"), (-9, "takes too long"), (-11, "ended with -11")])
def test_a_process_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch, code: int, says: str):
    """Out of its seconds of CPU, or of the stack."""
    died = subprocess.CompletedProcess([], code, stdout=b"", stderr=b"")
    monkeypatch.setattr(chat_template.subprocess, "run", lambda *_, **__: died)
    with pytest.raises(ConfigurationError, match=says):
        chat_format("{{ messages[0].content }}!", {}, CHATML_ENDS)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("chat_template.jinja", b"\xff\xfe", "is not a chat template: it is not UTF-8"),
        ("chat_template.jinja", b"x" * (1 << 20) + b"x", "too large to be a chat template"),
        ("chat_template.json", b"", "is not JSON"),
        ("chat_template.json", b"[]", "is not a table"),
        ("chat_template.json", b"[" * 100_000, "nested too deep"),
        ("chat_template.json", b'{"chat_template": 3}', "chat_template is not a text"),
        ("chat_template.json", b'{"chat_template": [{"a": 1}]}', "not a name and a template"),
        ("chat_template.json", b'{"chat_template": [{"name": [], "template": "x"}]}', "not a name and a template"),
    ],
)
def test_a_damaged_file_of_a_template_is_named(tmp_path: Path, name: str, content: bytes, says: str):
    """A bare text without the file would send its reader to the wrong one of four."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=says) as caught:
        read_chat_template(tmp_path, {})
    assert str(tmp_path / name) in str(caught.value)


def test_where_a_template_is_looked_for(tmp_path: Path):
    """Its own file before the settings; of several by name the default one; none is no mistake."""
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert read_chat_template(tmp_path, {}) == ""
    assert read_chat_template(tmp_path, {"chat_template": "S"}) == "S"
    assert read_chat_template(tmp_path, {"chat_template": named}) == "D"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert read_chat_template(tmp_path, {}) == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert read_chat_template(tmp_path, {"chat_template": "S"}) == "F"
