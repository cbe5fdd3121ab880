"""What bounds a coordinator, and what one would write in its place: measured in the same minutes as it is.

The ceiling is the rows of a submission put into tables by bare SQL, one durable commit for each, and nothing else. The
obvious alternative is a POST of the same rollouts as JSON (arrays in base64) to a FastAPI application that checks them
with pydantic and inserts them with one commit each; keep-alive, a few clients at a time.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from pydantic import BaseModel

SUBMISSIONS = 400
CLIENTS = 8
SCHEMA = (
    """CREATE TABLE rollouts (id INTEGER PRIMARY KEY, lease_id BLOB, sample INTEGER, peer TEXT, state TEXT,
    received REAL, UNIQUE (lease_id, sample))""",
    "CREATE TABLE contents (id INTEGER PRIMARY KEY, tokens BLOB, logprobs BLOB)",
    "CREATE TABLE events (id INTEGER PRIMARY KEY, wall REAL, actor TEXT, body BLOB)",
)


def open_bare(path: Path) -> sqlite3.Connection:
    """As durable as the coordinator's ledger."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    for statement in SCHEMA:
        connection.execute(statement)
    return connection


def insert(connection: sqlite3.Connection, first: int, lease_id: bytes, rollouts: list[tuple[bytes, bytes]]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for sample, (tokens, logprobs) in enumerate(rollouts):
        row = (first + sample, lease_id, sample, "peer" * 13, "held", time.time())
        connection.execute("INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?)", row)
        connection.execute("INSERT INTO contents VALUES (?, ?, ?)", (first + sample, tokens, logprobs))
    connection.execute("INSERT INTO events VALUES (NULL, ?, ?, ?)", (time.time(), "peer" * 13, bytes(400)))
    connection.execute("COMMIT")


def bare_rate(folder: Path, database: str, samples: int, tokens: int) -> float:
    """Rollouts a second, submission by submission."""
    folder.mkdir(parents=True)
    rollouts = [(random.randbytes(4 * tokens), random.randbytes(4 * tokens)) for _ in range(samples)]
    if database == "postgresql":
        return _postgresql_rate(rollouts)
    with closing(open_bare(folder / "bare.sqlite3")) as connection:
        began = time.monotonic()
        for number in range(SUBMISSIONS):
            insert(connection, number * samples, os.urandom(16), rollouts)
        return SUBMISSIONS * samples / (time.monotonic() - began)


def _postgresql_rate(rollouts: list[tuple[bytes, bytes]]) -> float:
    import psycopg
    from postgresql import Server, programs

    found = programs()
    assert found is not None
    server = Server(found)
    try:
        server.start()
        with psycopg.connect(host=str(server.folder), user="echo2", dbname="postgres") as connection:
            for statement in SCHEMA:
                connection.execute(
                    statement.replace("BLOB", "BYTEA").replace("INTEGER PRIMARY KEY", "SERIAL PRIMARY KEY")
                )
            connection.commit()
            began = time.monotonic()
            for number in range(SUBMISSIONS):
                lease_id, first = os.urandom(16), number * len(rollouts)
                for sample, (tokens, logprobs) in enumerate(rollouts):
                    row = (first + sample, lease_id, sample, "peer" * 13, "held", time.time())
                    connection.execute("INSERT INTO rollouts VALUES (%s, %s, %s, %s, %s, %s)", row)
                    connection.execute("INSERT INTO contents VALUES (%s, %s, %s)", (first + sample, tokens, logprobs))
                event = (time.time(), "peer" * 13, bytes(400))
                connection.execute("INSERT INTO events (wall, actor, body) VALUES (%s, %s, %s)", event)
                connection.commit()
            return SUBMISSIONS * len(rollouts) / (time.monotonic() - began)
    finally:
        server.stop()


def http_rate(folder: Path, samples: int, tokens: int) -> float:
    """Rollouts a second over HTTP, with `CLIENTS` at a time."""
    folder.mkdir(parents=True)
    server = subprocess.Popen(
        [sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        _wait_for(port)
        left = threading.Semaphore(SUBMISSIONS)
        arrays = [
            {"tokens": base64.b64encode(random.randbytes(4 * tokens)).decode()}
            | {"logprobs": "A" * (6 * tokens // 4 * 4)}
            for _ in range(samples)
        ]

        def client() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            while left.acquire(blocking=False):
                body = json.dumps({"peer": "peer" * 13, "lease_id": os.urandom(16).hex(), "rollouts": arrays})
                connection.request("POST", "/rollouts", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                assert answer.status == 200, answer.read()
                answer.read()

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return SUBMISSIONS * samples / (time.monotonic() - began)
    finally:
        server.kill()
        server.wait()


class Rollout(BaseModel):
    tokens: str
    logprobs: str


class Submission(BaseModel):
    peer: str
    lease_id: str
    rollouts: list[Rollout]


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port} after {START_SECONDS:.0f} s")


START_SECONDS = 30.0
"""For a process that imports a web framework on a busy machine."""


def serve_http(folder: Path) -> None:
    """The alternative's server."""
    import trio
    from fastapi import FastAPI
    from hypercorn.config import Config
    from hypercorn.trio import serve

    api = FastAPI()
    connection = open_bare(folder / "http.sqlite3")
    count = 0

    @api.post("/rollouts")
    async def submit(submission: Submission) -> dict[str, int]:
        nonlocal count
        decoded = [(base64.b64decode(one.tokens), base64.b64decode(one.logprobs)) for one in submission.rollouts]
        insert(connection, count, bytes.fromhex(submission.lease_id), decoded)
        count += len(decoded)
        return {"durable": len(decoded)}

    async def run() -> None:
        config = Config()
        config.bind = ["127.0.0.1:0"]
        sockets = config.create_sockets()
        port = sockets.insecure_sockets[0].getsockname()[1]
        config.create_sockets = lambda: sockets  # type: ignore[method-assign]
        print(port, flush=True)
        await serve(api, config)  # type: ignore[arg-type]

    trio.run(run)


if __name__ == "__main__":
    serve_http(Path(sys.argv[1]))
