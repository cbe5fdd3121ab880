"""REST over TLS, with a certificate made here, on a real socket."""

from __future__ import annotations

import socket
import ssl
from contextlib import closing

import httpx
import pytest
import trio
from rest_stage import AUTH, TOKEN, Stage, is_problem
from rest_thread import make_certificate, served

from echo2.coordinator import rest_server
from echo2.coordinator.event_feed import WATCHERS_OF_CLIENT_MAX
from echo2.coordinator.rest_client import NoAnswer, RestClient
from echo2.coordinator.rest_gate import Door
from echo2.coordinator.rest_server import open_listener, serve_rest
from echo2.coordinator.rest_tls import client_context, server_context
from echo2.p2p.errors import ConfigurationError


@pytest.fixture
def certificate(tmp_path):
    return make_certificate(tmp_path)


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path, door=Door(open_reads=False, tls=True))
    yield made
    made.close()


def test_the_whole_of_rest_over_tls(stage, certificate):
    """Reads, changes, a session with a cookie that is Secure, a megabyte of answer; HSTS on each."""
    stage.desk.nodes = 1000
    with served(stage, server_context(*certificate)) as url:
        with httpx.Client(base_url=url, verify=client_context(certificate[0])) as client:
            is_problem(client.get("/v1/pool"), 401)
            answer = client.get("/v1/nodes?limit=1000", headers=AUTH)
            assert len(answer.json()) == 1000
            assert len(answer.content) > 1 << 19
            assert answer.headers["strict-transport-security"]
            login = client.post("/v1/session", json={"token": TOKEN})
            csrf = {"X-CSRF-Token": login.json()["csrf"], "Origin": url}
            assert client.post("/v1/runs/sums/pause", json={}, headers=csrf).status_code == 200
            assert client.delete("/v1/session", headers=csrf).status_code == 204
        with closing(RestClient(url, TOKEN, tls=client_context(certificate[0]))) as client:
            assert client.look("sums").run.run == "sums"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_the_certificate_is_checked(stage, certificate, tmp_path):
    """By name and root, as the system has them; on its own machine, that it is this very one."""
    other, _ = make_certificate(tmp_path, "other.example.org")
    with served(stage, server_context(*certificate)) as url:
        for context in (None, client_context(other)):
            with closing(RestClient(url, TOKEN, tls=context)) as client, pytest.raises(NoAnswer, match="CERTIFICATE"):
                client.pool()
        port = int(url.rpartition(":")[2])
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        with socket.create_connection(("127.0.0.1", port), timeout=30) as raw, pytest.raises((ssl.SSLError, OSError)):
            old.wrap_socket(raw)
        with (
            closing(RestClient(url.replace("https", "http"))) as client,
            pytest.raises(NoAnswer, match="--coordinator https"),
        ):
            client.pool()


async def test_a_greeting_that_does_not_come_holds_no_place(monkeypatch, stage, certificate):
    """Silence, nonsense, half a greeting: with one place, the next client is served after the bound."""
    monkeypatch.setattr(rest_server, "IDLE_SECONDS", 0.3)
    listener = open_listener("127.0.0.1", 0)
    port = listener.getsockname()[1]
    context = client_context(certificate[0])
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def serve():
                await serve_rest(stage.app, listener, most=1, tls=server_context(*certificate))

            nursery.start_soon(serve)
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"):
                slow = await trio.open_tcp_stream("127.0.0.1", port)
                if said:
                    await slow.send_all(said)
                raw = await trio.open_tcp_stream("127.0.0.1", port)
                stream = trio.SSLStream(raw, context, https_compatible=True)
                await stream.send_all(b"GET /v1/pool HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 401")
                await stream.aclose()
                await slow.aclose()
            nursery.cancel_scope.cancel()


def test_files_that_are_no_certificate_are_said(tmp_path, certificate):
    """Missing, of something else, of another pair, with a passphrase nobody can type."""
    path, key = certificate
    _, other = make_certificate(tmp_path, "other.example.org")
    (tmp_path / "text").write_text("hello")
    locked = tmp_path / "locked"
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n")
    for pair, says in (
        ((tmp_path / "none", key), r"rest\.certificate: cannot read .*No such file"),
        ((path, tmp_path / "none"), r"rest\.key: cannot read"),
        ((tmp_path / "text", key), "are no PEM certificate with its key"),
        ((path, other), "are no PEM certificate with its key"),
        ((path, locked), "are no PEM certificate with its key"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            server_context(*pair)


def test_watchers_that_went_away_give_their_places_back(tmp_path):
    """Before the first line and after it, many more of them than places."""
    stage = Stage(tmp_path, stream_seconds=60.0)
    with served(stage) as url:
        port = int(url.rpartition(":")[2])
        for number in range(3 * WATCHERS_OF_CLIENT_MAX):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
                raw.sendall(b"GET /v1/events/stream?after=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if number % 2:
                    assert raw.recv(15) == b"HTTP/1.1 200 \r\n"
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        with closing(RestClient(url, TOKEN)) as client:
            assert next(client.follow("/v1/events/stream", 0))[1]["reason"] == "r"
    stage.close()


def test_a_stream_over_a_real_socket_goes_on_where_it_broke_off(tmp_path):
    """As the command follows it: line after line as they come, then again behind the last one."""
    stage = Stage(tmp_path, stream_seconds=60.0)
    with served(stage) as url, closing(RestClient(url, TOKEN)) as client:
        stage.desk.add_event("second")
        stream = client.follow("/v1/events/stream", 0)
        assert [next(stream)[1]["reason"] for _ in range(2)] == ["r", "second"]
        stage.desk.add_event("third")
        last, event = next(stream)
        assert event["reason"] == "third"
        stream.close()
        stage.desk.add_event("fourth")
        stream = client.follow("/v1/events/stream", last)
        assert next(stream)[1]["reason"] == "fourth"
        stream.close()
    stage.close()
