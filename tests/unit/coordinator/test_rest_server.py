"""The socket under REST: what its clients may hold."""

from __future__ import annotations

import trio

from echo2.coordinator.rest_server import CappedListener, open_listener, serve_rest

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def test_connections_beyond_the_cap_wait_until_one_is_given_back():
    """Two places: the third is accepted once one of the two is released; a cancelled wait costs no place."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    with trio.fail_after(30):
        async with CappedListener(listener, 2) as capped:
            clients = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
            held = [await capped.accept() for _ in range(2)]
            async with trio.open_nursery() as nursery:

                async def third():
                    held.append(await capped.accept())

                nursery.start_soon(third)
                await trio.testing.wait_all_tasks_blocked()
                assert len(held) == 2
                nursery.cancel_scope.cancel()
            capped.release()
            held.append(await capped.accept())
            for one in (*held, *clients):
                await one.aclose()


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
