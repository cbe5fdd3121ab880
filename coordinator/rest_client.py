"""What `echo2` asks of a coordinator over REST."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import httpx
from pydantic import TypeAdapter, ValidationError

from echo2.p2p.errors import ConfigurationError, Echo2Error
from echo2.p2p.settings import read_text

from .config import LOOPBACK_HOSTS
from .views import NodeView, PoolView, RunView

if TYPE_CHECKING:
    from pathlib import Path

COORDINATOR_URL = "http://127.0.0.1:8080"
"""Where a coordinator with default settings is, seen from its own machine."""

REQUEST_SECONDS = 10.0
"""For one answer of the coordinator, on a machine that is busy training."""

TOKEN_BYTES_MAX = 4096

NO_TLS_REASONS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"})
"""OpenSSL's words for an answer that is no TLS."""

_RUNS = TypeAdapter(list[RunView])
_NODES = TypeAdapter(list[NodeView])


class NoAnswer(Echo2Error):
    """The coordinator cannot be asked just now; it may be again."""


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

    def __init__(self, url: str, token: str | None = None, *, transport: httpx.BaseTransport | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"--coordinator {url[:128]!r} is not a URL like {COORDINATOR_URL}")
        if token is not None and parts.scheme == "http" and parts.hostname not in LOOPBACK_HOSTS:
            raise ConfigurationError(
                f"the token is not sent to {parts.hostname} in the clear: use https, or a tunnel to its loopback port"
            )
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=REQUEST_SECONDS, transport=transport)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def pool(self) -> PoolView:
        """The pool as a whole. Raises NoAnswer and ConfigurationError, as the others do."""
        return PoolView.model_validate_json(self._get("/v1/pool"))

    def run_name(self, run: str) -> str:
        """`run`, or the name of the only one there is."""
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
        try:
            return Look(
                RunView.model_validate_json(self._get(f"/v1/runs/{quote(run, safe='')}")),
                self.pool(),
                tuple(_NODES.validate_json(self._get("/v1/nodes"))),
            )
        except ValidationError as error:
            raise ConfigurationError("the coordinator is of another release than this command") from error

    def _get(self, path: str) -> bytes:
        try:
            reply = self._client.get(path)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            if _is_plain_http(error):
                plain = self._client.base_url.copy_with(scheme="http")
                raise ConfigurationError(
                    f"{self._client.base_url} does not speak TLS ({why}): it speaks http://, try --coordinator {plain}"
                ) from error
            raise NoAnswer(f"{self._client.base_url} does not answer: {why}") from error
        if reply.status_code in (401, 403):
            raise ConfigurationError(f"{self._client.base_url}: {_detail(reply)} (--token-file)")
        if reply.status_code == 404:
            raise ConfigurationError(f"{self._client.base_url}: {_detail(reply)}")
        if reply.is_error:
            raise NoAnswer(f"{self._client.base_url}: {_detail(reply)}")
        return reply.content


def _detail(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["detail"])[:300]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {reply.status_code}"


def _is_plain_http(error: BaseException | None) -> bool:
    """What answers a TLS greeting with something else, as a plain server does with an error page."""
    while error is not None:
        if isinstance(error, ssl.SSLError) and error.reason in NO_TLS_REASONS:
            return True
        error = error.__cause__ or error.__context__
    return False
