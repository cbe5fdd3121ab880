"""Asks a coordinator's REST interface as pages and monitors do: `python rest_poller.py PORT SECONDS_EACH`.

Every path once in that time, each on its own connection, until a line of input comes. The answer is one line of JSON:
the latencies by path, what went wrong, and when which node was judged late or dead (system's monotonic clock).
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections import Counter

PATHS = ("/v1/pool", "/v1/nodes", "/v1/runs", "/metrics", "/v1/events")


class Poller:
    def __init__(self, port: int, every: float) -> None:
        self.port, self.every = port, every
        self.latencies: dict[str, list[tuple[float, float]]] = {path: [] for path in PATHS}
        self.errors: Counter[str] = Counter()
        self.judged: list[tuple[float, str, str]] = []
        self.ended = threading.Event()

    def poll(self, path: str, offset: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30.0)
        due = time.monotonic() + offset
        while not self.ended.wait(max(0.0, due - time.monotonic())):
            began = time.monotonic()
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200:
                    raise http.client.HTTPException(answer.status)
                self.latencies[path].append((began, time.monotonic() - began))
                if path == "/v1/nodes":
                    self.judge(began, body)
            except (OSError, http.client.HTTPException) as error:
                self.errors[f"{path}: {type(error).__name__} {error}"] += 1
                connection.close()
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30.0)
            due = max(due + self.every, time.monotonic())

    def judge(self, now: float, body: bytes) -> None:
        for node in json.loads(body):
            if node["health"] != "healthy":
                self.judged.append((now, node["peer"], node["health"]))


def main() -> None:
    poller = Poller(int(sys.argv[1]), float(sys.argv[2]))
    threads = [
        threading.Thread(target=poller.poll, args=(path, poller.every * number / len(PATHS)), daemon=True)
        for number, path in enumerate(PATHS)
    ]
    for thread in threads:
        thread.start()
    sys.stdin.readline()
    poller.ended.set()
    for thread in threads:
        thread.join(35.0)
    print(json.dumps({"latencies": poller.latencies, "errors": poller.errors, "judged": poller.judged}), flush=True)


if __name__ == "__main__":
    main()
