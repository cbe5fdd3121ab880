"""REST on a real socket against clients that mean harm: places, resets, framing, odd heads."""

from __future__ import annotations

import json
import logging
import socket
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio
from rest_stage import AUTH, Stage
from rest_thread import make_certificate

from echo2.coordinator import rest_http1, rest_places, rest_server
from echo2.coordinator.rest_gate import Door
from echo2.coordinator.rest_http1 import PIECES_MAX
from echo2.coordinator.rest_server import open_listener, serve_rest
from echo2.coordinator.rest_tls import client_context, server_context

TOKEN = AUTH["Authorization"].encode()
RESET = b"\1\0\0\0\0\0\0\0"
OUTSIDE = Door(open_reads=False)


def request(path=b"/healthz", *headers, method=b"GET", body=b"", host=b"localhost"):
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: " + host, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


WITH_TOKEN = request(b"/healthz", b"Authorization: " + TOKEN)


@asynccontextmanager
async def served(folder, *, door=OUTSIDE, most=64, tls=None):
    """The port of the whole of REST, on a stage."""
    stage = Stage(folder, door=door, stream_seconds=60.0)
    listener = open_listener("127.0.0.1", 0)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stage.rooms.feed.run)
            nursery.start_soon(partial(serve_rest, stage.app, listener, most=most, tls=tls))
            yield listener.getsockname()[1]
            nursery.cancel_scope.cancel()
    stage.close()


async def one_answer(stream, said):
    """The status of the answer to a request, once its body was read; 0: the connection ended without."""
    got = b""
    try:
        await stream.send_all(said)
        while b"\r\n\r\n" not in got or len(got.partition(b"\r\n\r\n")[2]) < length_in(got):
            part = await stream.receive_some()
            if not part:
                break
            got += part
    except trio.BrokenResourceError:
        pass
    return int(got[9:12]) if got else 0


def length_in(got):
    head = got.partition(b"\r\n\r\n")[0].lower()
    return int(head.partition(b"content-length: ")[2].partition(b"\r")[0] or 0)


async def ended(stream):
    """Waits until the server ends the connection; returns what still came."""
    rest = b""
    try:
        while part := await stream.receive_some():
            rest += part
    except trio.BrokenResourceError:
        pass
    return rest


# Places.


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (request(), 401),
        (request(b"/healthz", b"Authorization: Bearer no"), 401),
        (request(b"/v1/tokens", b"Content-Length: 99999", method=b"POST"), 413),
        (request(b"/v1/tokens", b"Content-Length: 999", method=b"POST"), 401),
        (request(b"/v1/tokens", b"Transfer-Encoding: chunked", method=b"POST"), 401),
        (request(b"/v1/pool", b"X-Forwarded-For: 192.0.2.1"), 403),
        (request(b"/v1/pool", host=b"a b"), 400),
    ],
)
async def test_whoever_is_turned_away_loses_the_connection(tmp_path, said, status):
    """At once, not after the time for the next request; and the answer says so."""
    async with served(tmp_path) as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(said)
        with trio.fail_after(rest_server.IDLE_SECONDS - 1):
            got = await ended(stream)
    assert int(got[9:12]) == status
    assert b"\r\nconnection: close\r\n" in got.lower()


async def test_a_connection_is_kept_for_those_who_may_ask(tmp_path):
    """Request after request on one connection, a mistake among them."""
    async with served(tmp_path) as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        for path, status in ((b"/healthz", 200), (b"/v1/runs/none", 404), (b"/v1/nodes?limit=0", 422), (b"/", 200)):
            assert await one_answer(stream, request(path, b"Authorization: " + TOKEN)) == status


@pytest.mark.parametrize("said", [b"", request()[:30], request(b"/v1/session", b"Content-Length: 9", method=b"POST")])
async def test_strangers_that_hold_every_place_give_one_up_for_each_who_comes(tmp_path, said):
    """Silent ones, halves of a head, of a body: an operator is answered at once, and again, and so is the next."""
    async with served(tmp_path, most=4) as port:
        strangers = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(4)]
        for one in strangers:
            await one.send_all(said)
        with trio.fail_after(rest_server.IDLE_SECONDS - 1):
            async with await trio.open_tcp_stream("127.0.0.1", port) as operator:
                assert await one_answer(operator, WITH_TOKEN) == 200
                for _ in range(8):
                    strangers.append(await trio.open_tcp_stream("127.0.0.1", port))
                    await strangers[-1].send_all(said)
                assert await one_answer(operator, WITH_TOKEN) == 200
        for one in strangers:
            await one.aclose()


async def test_strangers_that_hold_greetings_give_up_their_places(tmp_path):
    """Half a TLS greeting on every place: an operator's whole one gets through."""
    certificate = make_certificate(tmp_path)
    tls = server_context(*certificate)
    async with served(tmp_path, door=Door(open_reads=False, tls=True), most=4, tls=tls) as port:
        strangers = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(4)]
        for one in strangers:
            await one.send_all(b"\x16\x03\x01\x02\x00\x01")
        with trio.fail_after(rest_server.IDLE_SECONDS - 1):
            raw = await trio.open_tcp_stream("127.0.0.1", port)
            stream = trio.SSLStream(raw, client_context(certificate[0]), https_compatible=True)
            assert await one_answer(stream, WITH_TOKEN) == 200
            await stream.aclose()
        for one in strangers:
            await one.aclose()


async def test_one_address_has_a_part_of_the_places(tmp_path, monkeypatch):
    """A crowd from one address ends its own oldest, although there are places left; another's are not touched."""
    monkeypatch.setattr(rest_places, "group_of", lambda host: (host, "a network"))
    monkeypatch.setattr(rest_places, "ADDRESS_PLACES_MAX", 3)
    async with served(tmp_path) as port:
        other = await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.0.2")
        crowd = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(5)]
        with trio.fail_after(rest_server.IDLE_SECONDS - 1):
            for one in crowd[:2]:
                assert await ended(one) == b""
            assert await one_answer(crowd[4], WITH_TOKEN) == 200
            assert await one_answer(other, WITH_TOKEN) == 200
        for one in (other, *crowd):
            await one.aclose()


# Resets.


def reset(stream):
    raw = stream.socket
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    raw.close()


@pytest.mark.parametrize("door", [OUTSIDE, Door()], ids=["outside", "loopback"])
async def test_clients_that_reset_leave_no_traceback(tmp_path, caplog, door):
    """In the midst of an answer, of many, of a head, of a body, of a stream: nothing above debug is logged."""
    heads = [
        WITH_TOKEN,
        WITH_TOKEN * 50,
        request() * 50,
        request(b"/web/app.js") * 20,
        WITH_TOKEN[:40],
        request(b"/v1/session", b"Content-Length: 9", method=b"POST", body=b"half"),
        request(b"/v1/events/stream?after=0", b"Authorization: " + TOKEN),
        request(b"/v1/session", b"Transfer-Encoding: chunked", method=b"POST", body=b"3\r\nabc\r\n"),
    ]
    async with served(tmp_path, door=door) as port:
        for turn in range(3 * len(heads)):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(heads[turn % len(heads)])
            for _ in range(turn * 5 % 17):
                await trio.lowlevel.checkpoint()
            reset(stream)
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            assert await one_answer(stream, WITH_TOKEN) == 200
    assert [line for line in caplog.records if line.levelno >= logging.WARNING] == []


async def test_clients_that_reset_within_tls_leave_no_traceback(tmp_path, caplog):
    """Before, in and behind the greeting, in the midst of an answer, and with what is no TLS."""
    certificate = make_certificate(tmp_path)
    context = client_context(certificate[0])
    async with served(tmp_path, door=Door(open_reads=False, tls=True), tls=server_context(*certificate)) as port:
        for turn in range(12):
            raw = await trio.open_tcp_stream("127.0.0.1", port)
            if turn % 4 == 1:
                await raw.send_all(b"\x16\x03\x01\x02\x00\x01")
            if turn % 4 >= 2:
                stream = trio.SSLStream(raw, context, https_compatible=True)
                await stream.send_all(WITH_TOKEN * (1 + 30 * (turn % 2)))
                if turn % 4 == 3:
                    await stream.receive_some(1)
            if turn == 8:
                await raw.send_all(b"GET / HTTP/1.1\r\n\r\n")
            reset(raw)
        raw = await trio.open_tcp_stream("127.0.0.1", port)
        stream = trio.SSLStream(raw, context, https_compatible=True)
        assert await one_answer(stream, WITH_TOKEN) == 200
        await stream.aclose()
    assert [line for line in caplog.records if line.levelno >= logging.WARNING] == []


async def test_a_client_that_resets_a_large_answer_leaves_no_traceback(caplog):
    """Of which the first part was written, and the rest was not."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": bytes(1 << 17), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    listener = open_listener("127.0.0.1", 0)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_rest, app, listener, most=2))
            for turn in range(9):
                stream = await trio.open_tcp_stream("127.0.0.1", listener.getsockname()[1])
                await stream.send_all(request() * (1 + turn % 2))
                await stream.receive_some(1 if turn % 3 else 1 << 18)
                reset(stream)
            async with await trio.open_tcp_stream("127.0.0.1", listener.getsockname()[1]) as stream:
                await stream.send_all(request(b"/", b"Connection: close"))
                assert len(await ended(stream)) > 64 << 17
            nursery.cancel_scope.cancel()
    assert [line for line in caplog.records if line.levelno >= logging.WARNING] == []


async def test_defects_are_logged_at_a_limited_rate(caplog):
    """Whoever finds one asks for it a hundred times: one traceback, not a hundred."""

    async def app(scope, receive, send):
        raise RuntimeError("a defect")

    listener = open_listener("127.0.0.1", 0)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_rest, app, listener, most=2))
            for _ in range(9):
                async with await trio.open_tcp_stream("127.0.0.1", listener.getsockname()[1]) as stream:
                    assert await one_answer(stream, request()) == 500
            nursery.cancel_scope.cancel()
    told = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "a defect" in str(told[0].exc_info[1])


# Framing.


@pytest.mark.parametrize("head", [b"/healthz", b"/v1/session"])
async def test_a_body_in_crumbs_is_refused(tmp_path, monkeypatch, head):
    """20,000 chunks of one byte: no more of them are looked at than are allowed, and the answer says what to do."""
    looked_at = 0
    plain = rest_http1.h11.Connection.next_event

    def counted(self):
        nonlocal looked_at
        looked_at += 1
        return plain(self)

    monkeypatch.setattr(rest_http1.h11.Connection, "next_event", counted)
    crumbs = request(head, b"Transfer-Encoding: chunked", method=b"POST", body=b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n")
    async with (
        served(tmp_path, door=Door()) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
        trio.open_nursery() as nursery,
    ):

        async def send():
            with suppress(trio.BrokenResourceError):
                await stream.send_all(crumbs)

        nursery.start_soon(send)
        got = await ended(stream)
        nursery.cancel_scope.cancel()
    assert looked_at < PIECES_MAX + 20
    assert got.startswith(b"HTTP/1.1 413")
    assert "pieces" in json.loads(got.partition(b"\r\n\r\n")[2])["detail"]


async def test_a_body_in_honest_chunks_is_taken(tmp_path):
    """As many as are allowed, with the token in them."""
    login = json.dumps({"token": TOKEN.partition(b" ")[2].decode()}).encode().ljust(PIECES_MAX)
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in login) + b"0\r\n\r\n"
    said = request(
        b"/v1/session", b"Transfer-Encoding: chunked", b"Content-Type: application/json", method=b"POST", body=body
    )
    async with served(tmp_path) as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        assert await one_answer(stream, said) == 201
        assert await one_answer(stream, WITH_TOKEN) == 200


CHUNKED = b"Transfer-Encoding: chunked"


ODD = [
    (request(b"http://localhost/healthz"), 400),
    (request(b"http://evil.example/healthz"), 400),
    (request(b"evil.example:443", method=b"CONNECT"), 400),
    (request(b"*", method=b"OPTIONS"), 400),
    (request(b"healthz"), 400),
    (request(method=b"TRACE"), 405),
    (request(b"/healthz", b"Connection: close", method=b"HEAD"), 405),
    (request(b"*", method=b"HEAD"), 400),
    (request(b"/v1/session", CHUNKED, b"Content-Length: 5", method=b"POST", body=b"0\r\n\r\n"), 400),
    (request(b"/healthz", b"Content-Length: 5", b"Content-Length: 6", body=b"abcde"), 400),
    (request(b"/healthz", b"Content-Length: -5"), 400),
    (request(b"/healthz", b"Content-Length: +5", body=b"abcde"), 400),
    (request(b"/healthz", b"Transfer-Encoding: gzip, chunked"), 501),
    (request(b"/healthz", b"Host: localhost"), 400),
    (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
    (b"GET /healthz HTTP/1.0\r\n\r\n", 403),
    (b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n", 200),
    (request(b"/healthz", b"Authorization: " + TOKEN, b"Authorization: Bearer no"), 400),
    (request(b"/v1/session", b"Origin: http://localhost", b"Origin: http://evil", method=b"POST"), 400),
    (request(b"/healthz", b"X: a\r\n b"), 200),
    (request(b"/healthz", b"X : a"), 400),
    (request(b"/healthz", b"X: \x00"), 400),
    (request(b"/v1/nodes/%zz%00%ff"), 422),
    (request(b"/v1/runs/..%2f..%2fetc"), 404),
    (request(b"/%2e%2e/%2e%2e/etc/passwd"), 404),
    (request(b"/web/..%2frest_gate.py"), 404),
    (request(b"//evil.example/v1/nodes?limit=1"), 404),
    (request(b"/v1/nodes/" + b"1" * 9000), 422),
    (request(b"/v1/runs/" + b"a" * 9000), 422),
    (request(b"/v1/events?limit=" + b"9" * 5000), 422),
    (request(b"/v1/events?" + b"limit=1&" * 1000), 200),
    (request(b"/healthz", *[b"a: b"] * 2000), 200),
    (request(b"/healthz", b"Cookie: " + b'echo2-session="\\400' + b"x;" * 4000), 200),
    (request(b"/v1/events/stream", b"Last-Event-ID: -1"), 422),
]


async def test_odd_requests_are_answered_in_words(tmp_path, caplog):
    """Each with its status and, where there is one, a problem; none is a defect, and the next client is served."""
    async with served(tmp_path, door=Door()) as port:
        for said, status in ODD:
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                assert await one_answer(stream, said) == status, said[:80]
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                assert await one_answer(stream, WITH_TOKEN) == 200
    assert [line for line in caplog.records if line.levelno >= logging.WARNING] == []


NO_HOSTS = [
    b"localhost:80@evil", b"localhost@evil", b"[::1", b"[::1]evil", b"[::1]:x", b"localhost:", b"localhost:80:80",
    b"localhost/evil", b"localhost evil", b"\xff\xfe", b"localhost:123456", b"[localhost]:1@evil", b"localhost#",
]  # fmt: skip


@pytest.mark.parametrize("door", [OUTSIDE, Door()], ids=["outside", "loopback"])
async def test_a_host_that_is_none_is_refused(tmp_path, door):
    """Whatever it begins with, with a token or without."""
    async with served(tmp_path, door=door) as port:
        for host in NO_HOSTS:
            for headers in ([], [b"Authorization: " + TOKEN]):
                async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                    assert await one_answer(stream, request(b"/v1/nodes?limit=1", *headers, host=host)) == 400, host
