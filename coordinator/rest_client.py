"""What the commands ask of a coordinator over REST."""

from __future__ import annotations

import json
import os
import ssl
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import httpx
from pydantic import TypeAdapter

from echo2.p2p.errors import ConfigurationError, Echo2Error
from echo2.p2p.settings import read_text

from .config import LOOPBACK_HOSTS
from .views import NodeView, PoolView, RunView

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

COORDINATOR_URL = "http://127.0.0.1:8080"
"""Where a coordinator with default settings is, seen from its own machine."""

REQUEST_SECONDS = 10.0
"""For one answer of the coordinator, on a machine that is busy training."""

STREAM_SECONDS = 30.0
"""Without a sign of life, which comes every five, a stream of events is dead."""

PAGE = 1000
"""Rows asked for at once: as many as the coordinator gives."""

TOKEN_BYTES_MAX = 4096

NO_TLS_REASONS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"})
"""OpenSSL's words for an answer that is no TLS."""

_RUNS = TypeAdapter(list[RunView])
_NODES = TypeAdapter(list[NodeView])
_A_LIST = TypeAdapter(list[Any])


class NoAnswer(Echo2Error):
    """The coordinator cannot be asked just now; it may be again."""


class Declined(Echo2Error):
    """The coordinator understood; the state of things forbids it."""


@dataclass(frozen=True, slots=True)
class Look:
    """One round of questions."""

    run: RunView
    pool: PoolView
    nodes: tuple[NodeView, ...]


def read_token(path: Path) -> str:
    """The operator's token from a file that its owner alone can read. Raises ConfigurationError."""
    token = read_text(path, "token file", bytes_max=TOKEN_BYTES_MAX).strip()
    mode = stat.S_IMODE(path.expanduser().stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        raise ConfigurationError(f"{path} can be read by others (mode {mode:o}): chmod 600 {path}")
    if not token or any(not symbol.isprintable() or symbol.isspace() for symbol in token) or not token.isascii():
        raise ConfigurationError(f"{path} does not hold a token: one line, as `echo2-coordinator init` printed it")
    return token


class RestClient:
    """Asks one coordinator. Off loopback the token goes only over TLS: whoever has it may stop the run."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        try:
            parts, base = urlsplit(url), httpx.URL(url)
        except (ValueError, httpx.InvalidURL) as error:
            raise _no_url(url) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _no_url(url)
        if token is not None and parts.scheme == "http" and parts.hostname not in LOOPBACK_HOSTS:
            raise ConfigurationError(
                f"the token is not sent to {parts.hostname} in the clear: use https, or a tunnel to its loopback port"
            )
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        self._client = httpx.Client(
            base_url=base, headers=headers, timeout=REQUEST_SECONDS, transport=transport, verify=tls or True
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def pool(self) -> PoolView:
        """The pool as a whole. Raises NoAnswer and ConfigurationError, as the others do."""
        with self._understood():
            return PoolView.model_validate_json(self._get("/v1/pool"))

    def run_name(self, run: str) -> str:
        """`run`, or the name of the only one there is."""
        with self._understood():
            runs = _RUNS.validate_json(self._get("/v1/runs"))
        names = [view.run for view in runs]
        if run in names:
            return run
        if not run and len(names) == 1:
            return names[0]
        known = f"it serves {', '.join(names)}" if names else "it serves none"
        raise ConfigurationError(f"the coordinator has no run {run!r}; {known}" if run else f"which run? {known}")

    def look(self, run: str) -> Look:
        """The run, the pool and every node."""
        with self._understood():
            return Look(
                RunView.model_validate_json(self._get(f"/v1/runs/{quote(run, safe='')}")),
                self.pool(),
                tuple(_NODES.validate_python(list(self.rows("/v1/nodes")), strict=False)),
            )

    def get(self, path: str, **parameters: Any) -> Any:
        """What a path answers. Raises NoAnswer and ConfigurationError; Declined for what is not possible now."""
        reply = self._get(path, parameters)
        with self._understood():
            return json.loads(reply)

    def change(self, path: str, body: Mapping[str, Any]) -> Any:
        """What came of a change. Raises as `get` does."""
        reply = self._ask("POST", path, json=body)
        with self._understood():
            return json.loads(reply.content)

    def send_text(self, path: str, text: str, media_type: str) -> Any:
        """What is answered to a text. Raises as `get` does."""
        headers = {"Content-Type": media_type}
        reply = self._ask("POST", path, content=text.encode(), headers=headers, timeout=60.0)
        with self._understood():
            return json.loads(reply.content)

    def rows(self, path: str, most: int | None = None, **parameters: Any) -> Iterator[Any]:
        """The rows of a list, page after page: all, or `most`. Raises as `get` does."""
        left = most
        where: str | None = path
        asked: dict[str, Any] | None = {"limit": PAGE if most is None else min(most, PAGE)} | parameters
        while where is not None and left != 0:
            reply = self._ask("GET", where, params=asked)
            with self._understood():
                page = _A_LIST.validate_json(reply.content)
            yield from page if left is None else page[:left]
            left = None if left is None else max(0, left - len(page))
            where, asked = reply.links.get("next", {}).get("url"), None

    def follow(self, path: str, after: int | None) -> Iterator[tuple[int, Any]]:
        """Events as they come, each with its id, until the coordinator ends the stream. Raises as `get` does."""
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        timeout = httpx.Timeout(REQUEST_SECONDS, read=STREAM_SECONDS)
        try:
            with self._client.stream("GET", path, headers=headers, timeout=timeout) as reply:
                if reply.is_error:
                    reply.read()
                    self._raise(reply)
                number = 0
                for line in reply.iter_lines():
                    name, _, value = line.partition(": ")
                    with self._understood():
                        if name == "id":
                            number = int(value)
                        event = json.loads(value) if name == "data" else None
                    if event is not None:
                        yield number, event
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error

    def _get(self, path: str, parameters: Mapping[str, Any] | None = None) -> bytes:
        given = {name: value for name, value in (parameters or {}).items() if value is not None}
        return self._ask("GET", path, params=given).content

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            reply = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error
        except UnicodeEncodeError as error:  # bytes of a command line that are no text in its encoding
            raise ConfigurationError("what was given holds bytes that are not UTF-8; type it anew") from error
        self._raise(reply)
        return reply

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Around what takes an answer apart. Raises ConfigurationError when it is not one of ours."""
        try:
            yield
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{self._client.base_url} answers, but not as a coordinator does: it is something else, or of another "
                "release (--coordinator)"
            ) from error

    def _no_answer(self, error: httpx.HTTPError) -> Echo2Error:
        url = self._client.base_url
        why = str(error) or type(error).__name__
        if _is_plain_http(error):
            plain = url.copy_with(scheme="http")
            return ConfigurationError(f"{url} does not speak TLS ({why}): it speaks http://, try --coordinator {plain}")
        if isinstance(error, httpx.RemoteProtocolError) and url.scheme == "http":
            why += f"; if it speaks TLS, try --coordinator {url.copy_with(scheme='https')}"
        return NoAnswer(f"{url} does not answer: {why}")

    def _raise(self, reply: httpx.Response) -> None:
        if not reply.is_error:
            return
        said = f"{self._client.base_url}: {_detail(reply)}"
        if reply.status_code in (401, 403):
            raise ConfigurationError(f"{said} (--token-file)")
        if reply.status_code in (404, 422):
            raise ConfigurationError(said)
        if reply.status_code == 409:
            raise Declined(said)
        raise NoAnswer(said)


def _no_url(url: str) -> ConfigurationError:
    return ConfigurationError(f"--coordinator {url[:128]!r} is not a URL like {COORDINATOR_URL}")


def _detail(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["detail"])[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"HTTP {reply.status_code}"


def _is_plain_http(error: BaseException | None) -> bool:
    """What answers a TLS greeting with something else, as a plain server does with an error page."""
    while error is not None:
        if isinstance(error, ssl.SSLError) and error.reason in NO_TLS_REASONS:
            return True
        error = error.__cause__ or error.__context__
    return False
