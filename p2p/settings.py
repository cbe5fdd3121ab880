"""Strict settings: a TOML file into a frozen pydantic model, with errors written for the person who wrote the file.

An unknown key is an error with a suggestion, a bad value names its key, what was given and what is allowed. Used by all
three daemons, so a mistake reads the same everywhere.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, ValidationInfo

from .errors import ConfigurationError

S = TypeVar("S", bound="Settings")

SETTINGS_BYTES_MAX = 1 << 20
"""Far above any settings file; keeps a wrong path (a model, a disk image) from being read whole."""

ERRORS_SHOWN_MAX = 3
"""Mistakes named in the one error line; the rest are counted."""

NESTING_MAX = 16
"""Tables within tables, or parts of a dotted key; settings have three. The parser's time grows with the square of it,
and what reads and writes the values calls itself once for each."""

_INTEGER_MAX = 10**4300
"""What Python writes in decimal. A longer one can be read from hexadecimal, and then neither shown nor passed on."""

_KEY_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_DEEP_KEY = re.compile(rf"(?<![A-Za-z0-9_-])(?:{_KEY_PART}){{{NESTING_MAX}}}")
"""A dotted key of more parts. Each is tried once, so a long line costs no more than its length."""


class Settings(BaseModel):
    """Base of every settings table. Frozen, no coercion ("5" is not 5), no unknown keys, no NaN."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True)


def home_path(path: Path) -> Path:
    """A path as a person writes it, with `~` resolved. Raises ConfigurationError when no file can have that name."""
    if "\0" in str(path):
        raise ConfigurationError(f"{str(path)[:64]!r} cannot be the name of a file")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{str(path)[:64]}: there is no such user on this machine") from error


def refuse_used(out: Path, otherwise: str) -> None:
    """Raises ConfigurationError when `out`, a folder to be made, is in use; `otherwise` says what to do then."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigurationError(f"{out} exists and is not an empty folder; {otherwise}")
    except (OSError, ValueError) as error:
        name = str(out) if len(str(out)) <= 300 else f"{str(out)[:297]}..."
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigurationError(f"the folder {name} cannot be written: {why}") from error


def _from_file(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("must be a path")
    try:
        path = home_path(Path(value))
    except ConfigurationError as error:
        raise ValueError(str(error)) from error
    folder = (info.context or {}).get("folder")
    return path if folder is None or path.is_absolute() else folder / path


SettingsPath = Annotated[Path, PlainValidator(_from_file)]
"""A path; a relative one starts at the settings file's own folder, so a daemon may be started from anywhere."""

Port = Annotated[int, Field(ge=0, le=65535, description="a TCP port; 0 = any free one")]
MULTIADDR_CHARACTERS_MAX = 256
"""As a PeerAddress may carry."""

_MULTIADDR = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/\s]+)/tcp/([0-9]{1,5})")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def check_multiaddr(text: str) -> str:
    """An address that a socket can have. Raises ValueError, its message fit to show a person."""
    match = _MULTIADDR.fullmatch(text)
    if match is None or len(text) > MULTIADDR_CHARACTERS_MAX:
        raise ValueError("must be an address like /ip4/0.0.0.0/tcp/4001")
    kind, host, port = match.groups()
    if int(port) > 65535:
        raise ValueError(f"{port} is not a port from 0 to 65535")
    if kind in ("ip4", "ip6"):
        try:
            (ipaddress.IPv4Address if kind == "ip4" else ipaddress.IPv6Address)(host)
        except ValueError as error:
            raise ValueError(f"{host} is not an {kind.replace('ip', 'IPv')} address") from error
    elif not _HOST.fullmatch(host):
        raise ValueError(f"{host} is not the name of a host")
    return text


Multiaddr = Annotated[
    str, AfterValidator(check_multiaddr), Field(description="an address like /ip4/0.0.0.0/tcp/4001"),
]  # fmt: skip


def read_text(path: Path, what: str, *, bytes_max: int = SETTINGS_BYTES_MAX) -> str:
    """A small file that a person named: never a device or a pipe, which may not end; a byte order mark is left out.

    Raises ConfigurationError, which calls the file `what`.
    """
    try:
        found = home_path(path)
        if not stat.S_ISREG(found.stat().st_mode) and not found.is_dir():
            raise ConfigurationError(f"{path} is not a {what}: it is a device or a pipe, not a file")
        with found.open("rb") as file:
            content = file.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise ConfigurationError(f"{path} is too large to be a {what}")
        return content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no {what} {path}") from error
    except OSError as error:
        raise ConfigurationError(f"cannot read the {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not a {what}: it is not UTF-8 text") from error


def load_settings(path: Path, kind: type[S], *, overrides: Mapping[str, Any] | None = None) -> S:
    """Read `path` as TOML and validate it as `kind`. `overrides` (from the command line) replace top-level keys.

    Raises ConfigurationError, one line, for anything a person must put right.
    """
    return make_settings(read_toml(path) | dict(overrides or {}), kind, source=str(path), folder=path.parent)


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a settings file. Raises ConfigurationError."""
    return parse_toml(read_text(path, "settings file"), path)


def parse_toml(text: str, path: Path, what: str = "settings file") -> dict[str, Any]:
    """The values of such a text, from `path` or only called so. Raises ConfigurationError, which calls it `what`."""
    if deep := _DEEP_KEY.search(text):
        line = text.count("\n", 0, deep.start()) + 1
        raise ConfigurationError(f"{path} is not a {what}: line {line} has a key of more than {NESTING_MAX} parts")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of nested brackets
        raise ConfigurationError(f"{path} is not a {what}: {str(error).partition(';')[0]}") from error


def make_settings(values: Mapping[str, Any], kind: type[S], *, source: str, folder: Path | None = None) -> S:
    """Validate `values` as `kind`; `source` is what the error message calls them.

    Relative paths are taken from `folder`, or from the working directory when it is None.
    """
    _check_plain(values, source)
    try:
        # Through JSON: strict mode then takes a list for a tuple and a string for a path, and nothing else.
        return kind.model_validate_json(json.dumps(values, default=str), context={"folder": folder})
    except ValidationError as error:
        found = _leaves([dict(item) for item in error.errors(include_url=False)])
        shown = [_explain(kind, item) for item in found[:ERRORS_SHOWN_MAX]]
        if len(found) > ERRORS_SHOWN_MAX:
            shown.append(f"and {len(found) - ERRORS_SHOWN_MAX} more")
        raise ConfigurationError(f"{source}: {'; '.join(shown)}") from error


def _check_plain(values: Mapping[str, Any], source: str) -> None:
    """Refuse what JSON cannot carry: nested too deep, a number too long to be written. Does not call itself."""
    open_values: list[tuple[tuple[int | str, ...], Any]] = [((), values)]
    while open_values:
        location, value = open_values.pop()
        if isinstance(value, int) and abs(value) >= _INTEGER_MAX:
            raise ConfigurationError(f"{source}: {_shown(location)} is a number of thousands of digits; no setting is")
        if not isinstance(value, Mapping | list | tuple):
            continue
        if len(location) > NESTING_MAX:
            raise ConfigurationError(
                f"{source}: {_shown(location)} is nested more than {NESTING_MAX} deep; no setting is"
            )
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        open_values += (((*location, key), item) for key, item in items)


def _shown(location: tuple[int | str, ...]) -> str:
    text = _dotted(location)
    return text if len(text) <= 60 else text[:57] + "..."


def _leaves(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that only follow from another one: a list "too short" because its one item was refused."""
    above = {error["loc"][:length] for error in errors for length in range(len(error["loc"]))}
    return [error for error in errors if error["loc"] not in above]


def _explain(kind: type[Settings], error: dict[str, Any]) -> str:
    location: tuple[int | str, ...] = error["loc"]
    key = _dotted(location)
    table, field = _resolve(kind, location)
    if error["type"] == "extra_forbidden":
        known = sorted(table.model_fields) if table else []
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        same_letters = [name for name in known if name.lower() == str(location[-1]).lower()]
        hint = (same_letters or near)[:1]
        tables = {name: _table(field.annotation) for name, field in kind.model_fields.items()}
        home = [f"[{name}]" for name, inner in tables.items() if inner and location[-1] in inner.model_fields]
        ending = f"did you mean {hint[0]!r}?" if hint else f"known here: {', '.join(known)}"
        ending = f"it belongs to {home[0]}" if home else ending
        return f"unknown key {key!r}; {ending}"
    wanted = f" ({field})" if field else ""
    if error["type"] == "missing":
        return f"{key!r} is missing{wanted}"
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if error["type"] == "value_error" and isinstance(error["input"], dict):
        return message  # one of our own rules: its text names the keys and what is allowed
    if error["type"].startswith("string_") and field:
        message, wanted = f"must be {field}", ""
    if not location:
        return "this is not a table of settings"  # a command line's bytes that are no text
    if field and field in message:
        wanted = ""
    given = json.dumps(error["input"], default=str, ensure_ascii=False)
    return f"{key} = {given if len(given) <= 60 else given[:57] + '...'}: {message}{wanted}"


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _resolve(kind: type[Settings], location: tuple[int | str, ...]) -> tuple[type[Settings] | None, str | None]:
    """The table that holds the last key of `location`, and that key's description."""
    table: type[Settings] | None = kind
    description: str | None = None
    for position, part in enumerate(location):
        if isinstance(part, int):
            continue
        field = table.model_fields.get(part) if table else None
        if field is None:
            return table, None
        description = field.description or _described(field.annotation)
        if position < len(location) - 1:
            inner = _table(field.annotation)
            if inner is None:
                return table, description
            table = inner
    return table, description


def _table(annotation: Any) -> type[Settings] | None:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    return next((found for found in map(_table, get_args(annotation)) if found), None)


def _described(annotation: Any) -> str | None:
    """The description inside tuple[Annotated[str, Field(description=...)], ...]."""
    for part in (*getattr(annotation, "__metadata__", ()), *get_args(annotation)):
        text = getattr(part, "description", None) or _described(part)
        if isinstance(text, str):
            return text
    return None
