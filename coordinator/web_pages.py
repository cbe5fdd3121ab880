"""The coordinator's web page: static files from `web/`, and what the public may see of a run.

| path                                                   | what                                   | who            |
|--------------------------------------------------------|----------------------------------------|----------------|
| `/`, `/runs/R`, `/nodes/P`, `/broadcast`, `/events`    | pages: they hold no data of the pool   | everybody      |
| `/web/FILE`                                            | their scripts and style                | everybody      |
| `/web/rules.js`                                        | who may what, from our own tables      | everybody      |
| `/public/R`, `/v1/public/runs/R`                       | a run for everybody, and its data      | `public_page`  |
| everything else                                        | the application behind                 | as it decides  |

The pages fetch what they show over REST, with the rights of whoever looks: so they need none themselves. Everything is
read once, at the start, and sent as bytes. The data for the public is made at most once in PUBLIC_SECONDS, however many
ask, and an address that asks too often is told to wait: strangers cannot keep the process from its work.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from echo2.p2p.rates import TokenBucket

from .public_view import public_view
from .rest_gate import address_of, is_loopback
from .rest_limits import client_of
from .web_rules import rules_module

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping, Sequence

    from .rest_gate import Door
    from .views import NodeView, RunView

    Scope = MutableMapping[str, Any]
    Event = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Event]]
    Send = Callable[[Event], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

FOLDER = Path(__file__).with_name("web")

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
)
"""Nothing from elsewhere and nothing in line: a name that became markup by a mistake would still do nothing."""

PUBLIC_SECONDS = 5.0
"""The age up to which the public's data are sent again as they are."""

ADDRESS_RATE, ADDRESS_BURST = 20.0, 120.0
"""Requests a second of one address, and at once: a page is about fifteen, and asks one each few seconds."""

PUBLIC_RATE, PUBLIC_BURST = 100.0, 400.0
"""The same of everybody together, for what the public may see: there are more addresses than one can count."""

ADDRESSES_MAX = 1024
"""Remembered; the longest quiet is forgotten."""

PAGES = (
    (re.compile(r"/"), "pool", "Pool"),
    (re.compile(r"/runs/[A-Za-z0-9][A-Za-z0-9._-]{0,63}"), "run", "Run"),
    (re.compile(r"/nodes/[1-9A-HJ-NP-Za-km-z]{40,64}"), "node", "Node"),
    (re.compile(r"/broadcast"), "broadcast", "Broadcast"),
    (re.compile(r"/events"), "events", "Events"),
)
PUBLIC_PAGE = re.compile(r"/public/[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PUBLIC_DATA = re.compile(r"/v1/public/runs/([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


class PublicDesk(Protocol):
    """The coordinator's service, as far as the public page needs it."""

    def run_view(self, run: str) -> RunView:
        """One run. Raises KeyError for an unknown one."""

    def nodes_of(self, run: str) -> Sequence[NodeView]:
        """Every node ever admitted."""


@dataclass(frozen=True, slots=True)
class Page:
    """What is sent: the same bytes to everybody."""

    body: bytes
    type: str
    etag: bytes
    cache: bytes

    @staticmethod
    def of(body: bytes, kind: str, cache: bytes = b"no-cache") -> Page:
        """`no-cache` means: keep it, and ask each time whether it is still the same."""
        return Page(body, kind, b'"' + hashlib.sha256(body).hexdigest()[:24].encode() + b'"', cache)


def load_pages(folder: Path = FOLDER) -> dict[str, Page]:
    """Every static file by its path, and every page by its name."""
    pages = {
        f"/web/{path.name}": Page.of(path.read_bytes(), TYPES[path.suffix])
        for path in sorted(folder.iterdir())
        if path.suffix in TYPES and path.suffix != ".html"
    }
    pages["/web/rules.js"] = Page.of(rules_module().encode(), TYPES[".js"])
    shell = (folder / "shell.html").read_text(encoding="utf-8")
    for _, name, title in PAGES:
        text = shell.replace("@page@", name).replace("@title@", title)
        pages[name] = Page.of(text.encode(), TYPES[".html"])
    pages["public"] = Page.of((folder / "public.html").read_bytes(), TYPES[".html"])
    return pages


class WebPages:
    """In front of the application: answers for the paths above, hands on all others."""

    def __init__(self, app: App, desk: PublicDesk, *, door: Door, public: bool, clock: Callable[[], float]) -> None:
        self._app = app
        self._door = door
        self._desk = desk
        self._public = public
        self._clock = clock
        self._pages = load_pages()
        self._made: dict[str, tuple[float, Page]] = {}
        self._everybody: TokenBucket | None = None
        self._addresses: OrderedDict[str, TokenBucket] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] not in {"GET", "HEAD"}:
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        found = self._static(path)
        data = PUBLIC_DATA.fullmatch(path) if self._public else None
        if found is None and data is None:
            await self._app(scope, receive, send)
        elif not self._may_ask(scope, public=found is self._pages["public"] or data is not None):
            await _answer(send, HTTPStatus.TOO_MANY_REQUESTS, b"too many requests; wait a second\n", retry=True)
        elif found is not None:
            await _send_page(scope, send, found)
        elif data is not None:
            try:
                await _send_page(scope, send, self._data(data[1]))
            except KeyError:
                await _answer(send, HTTPStatus.NOT_FOUND, b"there is no such run here\n")

    def _static(self, path: str) -> Page | None:
        if path.startswith("/web/"):
            return self._pages.get(path)
        if self._public and PUBLIC_PAGE.fullmatch(path):
            return self._pages["public"]
        return next((self._pages[name] for pattern, name, _ in PAGES if pattern.fullmatch(path)), None)

    def _data(self, run: str) -> Page:
        """Raises KeyError for an unknown run: that is found out without making anything."""
        now = self._clock()
        made_at, page = self._made.get(run, (float("-inf"), None))
        if page is not None and now - made_at < PUBLIC_SECONDS:
            return page
        view = public_view(self._desk.run_view(run), self._desk.nodes_of(run))
        cache = f"public, max-age={PUBLIC_SECONDS:.0f}".encode()
        page = Page.of(view.model_dump_json().encode(), "application/json", cache)
        self._made[run] = now, page  # only runs that exist: as many as the service has
        return page

    def _may_ask(self, scope: Scope, *, public: bool) -> bool:
        now = self._clock()
        if self._everybody is None:
            self._everybody = TokenBucket(PUBLIC_RATE, PUBLIC_BURST, now)
        buckets = [self._everybody] if public else []
        address = address_of(scope, self._door)
        if not is_loopback(address):
            address = client_of(address)
            mine = self._addresses.pop(address, None) or TokenBucket(ADDRESS_RATE, ADDRESS_BURST, now)
            self._addresses[address] = mine
            if len(self._addresses) > ADDRESSES_MAX:
                self._addresses.popitem(last=False)
            buckets.append(mine)
        if any(bucket.tokens(now) < 1 for bucket in buckets):
            return False
        for bucket in buckets:
            bucket.spend(1, now)
        return True


async def _send_page(scope: Scope, send: Send, page: Page) -> None:
    known = b", ".join(value for name, value in scope["headers"] if name == b"if-none-match")
    headers = [
        (b"etag", page.etag),
        (b"cache-control", page.cache),
        (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    ]
    if page.etag in (tag.strip().removeprefix(b"W/") for tag in known.split(b",")):
        await send({"type": "http.response.start", "status": HTTPStatus.NOT_MODIFIED.value, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
        return
    headers += [(b"content-type", page.type.encode()), (b"content-length", str(len(page.body)).encode())]
    await send({"type": "http.response.start", "status": HTTPStatus.OK.value, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else page.body})


async def _answer(send: Send, status: HTTPStatus, body: bytes, *, retry: bool = False) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    headers += [(b"retry-after", b"1")] if retry else []
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})
