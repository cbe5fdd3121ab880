"""The socket under REST: what its clients may hold."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from echo2.coordinator import rest_server
from echo2.coordinator.rest_server import open_listener, serve_rest

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def test_every_connection_gives_its_place_back():
    """With one place, one client after the other is served; and one that says nothing and leaves holds nobody up."""
    listener = open_listener("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def serve():
                await serve_rest(app, listener, most=1)

            nursery.start_soon(serve)
            for _ in range(3):
                silent = await trio.open_tcp_stream("127.0.0.1", port)
                await silent.aclose()
                async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                    await stream.send_all(REQUEST)
                    assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
            nursery.cancel_scope.cancel()


LARGE = b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"
KEPT = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
BOUND_SECONDS = 0.3
"""Instead of the real bounds: these tests run on sockets, in real time."""


async def sized_app(scope, receive, send):
    """A megabyte at /large; at /body the body's length, at /fault an exception; `ok` elsewhere."""
    body = b"ok"
    if scope["path"] == "/large":
        body = bytes(1 << 20)
    if scope["path"] == "/fault":
        raise RuntimeError("a defect of the application")
    if scope["path"] == "/body":
        more, size = True, 0
        while more:
            event = await receive()
            more = event.get("more_body", False)
            size += len(event.get("body", b""))
        body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def served(app=sized_app, most=2):
    """The port of a server with `most` places."""
    listener = open_listener("127.0.0.1", 0)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def serve():
                await serve_rest(app, listener, most=most)

            nursery.start_soon(serve)
            yield listener.getsockname()[1]
            nursery.cancel_scope.cancel()


async def answer(stream):
    """All that comes until the server ends the connection."""
    parts = []
    try:
        async for part in stream:
            parts.append(part)
    except trio.BrokenResourceError:
        parts.append(b"reset")
    return b"".join(parts)


async def asked(port, request=REQUEST):
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request)
        return await answer(stream)


async def deaf_clients(port, count):
    """They ask for a megabyte fifty times in one go and read nothing."""
    clients = []
    for _ in range(count):
        clients.append(await trio.open_tcp_stream("127.0.0.1", port))
        await clients[-1].send_all(LARGE * 50)
    return clients


async def test_clients_that_do_not_read_lose_their_places(monkeypatch):
    """They still hold on, more of them than places, and an honest request is answered after the bound on a write."""
    monkeypatch.setattr(rest_server, "WRITE_SECONDS", BOUND_SECONDS)
    async with served() as port:
        clients = await deaf_clients(port, 5)
        assert (await asked(port)).startswith(b"HTTP/1.1 200")
        for one in clients:
            await one.aclose()


async def test_clients_that_went_away_unread_hold_nothing():
    """Their places are free at once, long before any bound, though they had asked for more."""
    async with served() as port:
        for _ in range(3):
            for one in await deaf_clients(port, 2):
                await one.receive_some(1)  # it is being answered
                await one.aclose()
            with trio.fail_after(rest_server.WRITE_SECONDS / 2):
                assert (await asked(port)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ("IDLE_SECONDS", b""),
        ("IDLE_SECONDS", KEPT[:20]),
        ("IDLE_SECONDS", KEPT),
        ("READ_SECONDS", b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf"),
        ("CONNECTION_SECONDS", KEPT[:20]),
        ("ANSWER_SECONDS", LARGE * 9),
    ],
)
async def test_a_connection_ends_when_its_client_takes_too_long(monkeypatch, bound, said):
    """Silent, in the middle of a head, after an answer, in the middle of a body, in all, and reading in sips."""
    monkeypatch.setattr(rest_server, bound, BOUND_SECONDS)
    async with served(most=1) as port, await trio.open_tcp_stream("127.0.0.1", port) as slow:
        await slow.send_all(said)
        with trio.fail_after(4.0):
            assert (await asked(port)).startswith(b"HTTP/1.1 200")


async def test_requests_in_one_go_are_answered_in_turn_up_to_a_cap(monkeypatch):
    """None of the answers is lost when the connection is then closed, though more was asked."""
    monkeypatch.setattr(rest_server, "REQUESTS_MAX", 5)
    monkeypatch.setattr(rest_server, "LINGER_SECONDS", 30.0)  # a busy machine
    async with served() as port:
        said = await asked(port, KEPT * 2000)
    assert said.count(b"HTTP/1.1 200") == 5
    assert b"reset" not in said
    assert b"connection: close" in said.lower()


async def test_whoever_ends_its_side_after_asking_is_answered():
    """As `nc` does with a request from a pipe; in the middle of a request there is nothing to answer."""
    async with served() as port:
        for said, begin in ((KEPT, b"HTTP/1.1 200"), (LARGE, b"HTTP/1.1 200"), (KEPT[:20], b""), (b"", b"")):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(said)
                await stream.send_eof()
                got = await answer(stream)
                assert got[:12] == begin
                assert len(got) > 1 << 20 or said != LARGE


async def test_only_http_1_is_spoken():
    """HTTP/2 by its preface is declined; an offer to change to it, or to a websocket, is passed over."""
    offer = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, %b\r\nUpgrade: %b\r\n%b\r\n"
    socket = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    async with served() as port:
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
        assert (await asked(port, preface)).startswith(b"HTTP/1.1 505")
        for said in (
            offer % (b"HTTP2-Settings, close", b"h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n"),
            offer % (b"close", b"websocket", socket),
        ):
            assert (await asked(port, said)).startswith(b"HTTP/1.1 200")


async def test_a_fault_of_the_application_costs_one_answer():
    """The next request is answered; so is what follows a client's nonsense."""
    async with served(most=1) as port:
        fault = REQUEST.replace(b"GET /", b"GET /fault")
        assert (await asked(port, fault)).startswith(b"HTTP/1.1 500")
        assert (await asked(port, b"\x16\x03\x01 nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert (await asked(port)).startswith(b"HTTP/1.1 200")


async def test_the_head_of_a_request_is_bounded():
    """Long enough for any honest one; beyond, 431 and the end of the connection."""
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: %b\r\n\r\n"
    async with served() as port:
        assert (await asked(port, head % (b"x" * 8_000))).startswith(b"HTTP/1.1 200")
        assert (await asked(port, head % (b"x" * 40_000))).startswith(b"HTTP/1.1 431")
        assert (await asked(port)).startswith(b"HTTP/1.1 200")
