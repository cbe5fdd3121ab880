"""`echo2 watch`: what is asked, what is shown at 80 columns, and when it ends."""

import io
import json
import socket
import threading
from contextlib import closing

import httpx
import pytest
from rich.console import Console

from echo2.coordinator.rest_client import Look, NoAnswer, RestClient, read_token
from echo2.coordinator.views import EvaluationView, NodeView, PoolView, RolloutCounts, RunView, StepView
from echo2.coordinator.watch import watch
from echo2.coordinator.watch_screen import plain_line, render, sparkline, staleness_counts
from echo2.p2p.errors import ConfigurationError

PEER = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
REASON = "no node has version 4 any more, version 6 is published; 150 of 300 answered"


def step(number, **changes):
    return StepView(
        **{
            "step": number, "reward_mean": number / 100, "staleness": 2, "staleness_mean": 1.5, "kl": 0.01,
            "ratio_mean": 1.0, "clip_share": 0.01, "entropy": 0.5, "loss": 0.1, "response_tokens_mean": 3.0,
            "rollouts": 128, "groups_without_spread": 2, "train_seconds": 3.0, "idle_seconds": 0.2,
            "staleness_counts": (0, 64, 64),
        } | changes
    )  # fmt: skip


def run(**changes):
    return RunView(
        **{
            "run": "sums", "task": "arithmetic", "model": "tiny", "state": "running", "state_reason": "",
            "learner": PEER, "learner_connected": True, "learner_status": "training", "epoch": 0, "version": 60,
            "learner_version": 60, "steps": 100, "staleness_max": 3, "publish_period": 2, "rollouts_per_step": 128,
            "group_size": 8, "waiting": "pacing: 7936 of 7936 under version 60", "reserved": 7936,
            "reserved_max": 7936, "outstanding": 31, "evaluated": 900,
            "rollouts": RolloutCounts(submitted=7900, consumed=7680, admitted=200, stale=12, rejected=8),
            "evaluations": (
                EvaluationView(version=0, purpose="baseline", size=300, count=300, mean=0.31, complete=True),
                EvaluationView(
                    version=4, purpose="interim", size=300, count=150, mean=0.4, complete=False, reason=REASON
                ),
                EvaluationView(version=60, purpose="interim", size=300, count=7, mean=0.9, complete=False, samples=2),
            ),
            "series": tuple(step(number) for number in range(60)), "reward_mean": 0.59, "staleness": 2, "kl": 0.01,
            "bubble": 0.118, "t_train_seconds": 3.0, "t_bcast_seconds": 0.8, "staleness_estimate": 5,
        } | changes
    )  # fmt: skip


def pool(**changes):
    return PoolView(
        **{
            "coordinator": PEER, "addresses": (), "nodes_healthy": 2, "nodes_late": 0, "nodes_dead": 1,
            "nodes_suspended": 0, "mu_pool": 34.1, "mu_min": 72.8, "t_bcast_seconds": 0.8, "t_train_seconds": 3.0,
            "refused": {"stale: too old": 12, "rejected: token range": 8}, "protocol_errors": 0, "trouble": "",
        } | changes
    )  # fmt: skip


def node(number, **changes):
    return NodeView(
        **{
            "peer": PEER, "name": f"node-{number}", "software": "s", "addresses": (), "state": "active",
            "state_reason": "", "health": "healthy", "last_seen_seconds": 1.0, "node_says": "working", "epoch": 0,
            "version": 60, "version_lag": 0, "mu": 20.0 - number, "tokens_per_second": 9.0, "leases_held": 1,
            "samples_held": 4, "accepted": 3900, "rejected": 0, "evaluated": 10, "rollouts": RolloutCounts(),
            "protocol_errors": 0, "reason": "",
        } | changes
    )  # fmt: skip


def look(nodes=3, **changes):
    return Look(run(**changes), pool(), tuple(node(number) for number in range(nodes)))


def shown(what, width=80, **kwargs):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(what, width=width, **kwargs))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_screen_has_everything_within_its_width(width):
    """Reward, held-out, staleness, bubble, pool, rollouts with their reasons, nodes, and what is waited for."""
    text = shown(look(), width=width)
    assert max(map(len, text.splitlines())) <= width
    for part in (
        "step 60 of 100", "pacing: 7936 of 7936", "0 to 0.59, now 0.590", "version 0 (baseline): 0.310 avg@1",
        "version 4 (interim): 0.400 avg@1, ended early: 150 of 300", "version 60 (interim): 0.900 avg@2, 7 of 300",
        "S = 3, Delta = 5", "50 %", "11.8 %", "34.1/s", "72.8/s", "80.1/s", "0.8 s", "2 healthy, 1 dead",
        "submitted 7900", "12 stale: too old", "8 rejected: token range", "node-0", "3900",
    ):  # fmt: skip
        assert part in text, part
    assert "…" not in text


def test_a_run_that_has_not_begun_has_a_screen_too():
    """Nothing measured, no node, and the learner away."""
    empty = Look(
        run(
            state="ready", version=None, learner_version=0, series=(), evaluations=(),
            waiting="no snapshot published yet",
            reward_mean=None, bubble=None, t_train_seconds=None, t_bcast_seconds=None, staleness_estimate=None,
            reserved_max=None, rollouts=RolloutCounts(), learner_connected=False, learner_status="",
        ),
        pool(mu_min=None, mu_pool=0.0, refused={}, nodes_healthy=0, nodes_dead=0),
        (),
    )  # fmt: skip
    text = shown(empty)
    for part in (
        "ready",
        "no snapshot published yet",
        "the learner is away",
        "no step yet",
        "not measured yet",
        "none yet",
    ):
        assert part in text, part
    assert plain_line(empty).startswith("ready  step 0/100")


def test_nodes_that_have_no_room_are_counted():
    """On a terminal of 40 lines; the fastest are shown."""
    text = shown(look(nodes=64), height=40)
    assert len(text.splitlines()) <= 40
    assert "node-0 " in text
    assert "more" in text


def test_a_sparkline_goes_from_the_lowest_to_the_highest():
    """Means where there are more values than columns, the middle where all are one."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([-5, -5, 5, 5], 2) == "▁█"
    assert sparkline([3, 3], 5) == "▄▄"
    assert sparkline([], 5) == ""


def test_the_histogram_is_of_the_last_steps():
    """Old ones are forgotten."""
    old = tuple(step(number, staleness_counts=(100,)) for number in range(10))
    counts = staleness_counts(run(series=(*old, *(step(number) for number in range(32)))))
    assert counts == {1: 32 * 64, 2: 32 * 64, 0: 0}


# asking


class Coordinator:
    """Answers as one would; `script` says what state the run is in at each look, or that there is no answer."""

    def __init__(self, *script):
        self.script = list(script)
        self.asked = []

    def __call__(self, request):
        self.asked.append(request)
        if request.url.path == "/v1/runs":
            return httpx.Response(200, json=[run().model_dump(mode="json")])
        if request.url.path == "/v1/pool":
            return httpx.Response(200, json=pool().model_dump(mode="json"))
        if request.url.path == "/v1/nodes":
            return httpx.Response(200, json=[node(0).model_dump(mode="json")])
        state = self.script.pop(0)
        if state == "gone":
            raise httpx.ConnectError("refused")
        waiting = "pacing" if state == "running" else ""
        return httpx.Response(200, json=run(state=state, waiting=waiting).model_dump(mode="json"))


def watched(*script, **kwargs):
    coordinator, out, slept = Coordinator(*script), io.StringIO(), []
    client = RestClient("http://127.0.0.1:1", transport=httpx.MockTransport(coordinator))
    options = {"once": False, "as_lines": False, "seconds": 2.0} | kwargs
    code = watch(client, "", **options, sleep=slept.append, out=out)
    return code, out.getvalue().splitlines(), slept


def test_watching_ends_with_the_run():
    """Without a terminal a line for each change; a coordinator that is away is waited for, and said."""
    code, lines, slept = watched("running", "gone", "running", "finished")
    assert (code, len(slept)) == (0, 3)
    assert [line.split()[0] for line in lines] == ["running", "http://127.0.0.1:1", "running", "finished"]
    assert "does not answer: refused" in lines[1]
    assert watched("stopped")[0] == 1


def test_one_look_as_json_is_one_object():
    """The three views as REST has them."""
    code, (line,), slept = watched("running", once=True, as_lines=True)
    assert (code, slept) == (0, [])
    assert json.loads(line)["run"]["state"] == "running"
    assert set(json.loads(line)) == {"run", "pool", "nodes"}
    assert [json.loads(line)["run"]["state"] for line in watched("running", "finished", as_lines=True)[1]] == [
        "running",
        "finished",
    ]


def test_a_terminal_has_the_screen(monkeypatch):
    """Drawn anew each look, and left standing at the end."""
    monkeypatch.setenv("TERM", "xterm")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    client = RestClient("http://127.0.0.1:1", transport=httpx.MockTransport(Coordinator("running", "gone", "finished")))
    assert watch(client, "sums", once=False, as_lines=False, seconds=1.0, sleep=lambda _: None, out=out) == 0
    drawn = out.getvalue()
    assert "running" in drawn
    assert "does not answer" in drawn
    assert drawn.rindex("finished") > drawn.rindex("running")


def test_a_run_that_is_not_there_is_said_with_those_that_are():
    """By name."""
    client = RestClient("http://127.0.0.1:1", transport=httpx.MockTransport(Coordinator()))
    with pytest.raises(ConfigurationError, match="has no run 'other'; it serves sums"):
        client.run_name("other")


@pytest.mark.parametrize(
    "url", ["ftp://x", "nonsense", "http://", "http://[::1", "http://127.0.0.1:x/", "http://127.0.0.1:1/\n", ""]
)
def test_what_is_no_url_is_said(url):
    """One line."""
    with pytest.raises(ConfigurationError, match="is not a URL like"):
        RestClient(url)


def test_the_token_goes_with_each_request_and_never_in_the_clear():
    """Loopback or TLS."""
    coordinator = Coordinator("running")
    client = RestClient("http://localhost:1", "secret", transport=httpx.MockTransport(coordinator))
    client.look("sums")
    assert {request.headers["Authorization"] for request in coordinator.asked} == {"Bearer secret"}
    RestClient("https://pool.example.org", "secret").close()
    with pytest.raises(ConfigurationError, match=r"not sent to pool\.example\.org in the clear"):
        RestClient("http://pool.example.org", "secret")


def test_a_token_file_must_be_its_owners_alone(tmp_path):
    """Mode 0600, one word."""
    path = tmp_path / "token"
    path.write_text("abc-DEF_1\n")
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="can be read by others"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == "abc-DEF_1"
    for bad in ("", "two words", "bad\nlines"):
        path.write_text(bad)
        with pytest.raises(ConfigurationError, match="does not hold a token"):
            read_token(path)


@pytest.mark.parametrize(("status", "kind"), [(401, ConfigurationError), (403, ConfigurationError), (503, NoAnswer)])
def test_a_refusal_is_told_in_the_coordinators_words(status, kind):
    """What a person can mend ends the watching, what passes does not."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json={"detail": "this needs the token"}))
    with pytest.raises(kind, match="this needs the token"):
        RestClient("http://127.0.0.1:1", transport=transport).pool()
    broken = httpx.MockTransport(lambda _: httpx.Response(500, text="<html>"))
    with pytest.raises(NoAnswer, match="HTTP 500"):
        RestClient("http://127.0.0.1:1", transport=broken).pool()


def test_another_release_is_said():
    """A view with other fields."""
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"colour": "blue"}))
    with pytest.raises(ConfigurationError, match="another release"):
        RestClient("http://127.0.0.1:1", transport=transport).look("sums")


@pytest.mark.parametrize("body", ["<html>", "", "[", "3", "null", '{"a": NaN}', "[" * 100_000])
@pytest.mark.parametrize("status", [200, 302])
def test_what_answers_and_is_no_coordinator_is_said(status, body):
    """Another server at that port, or a page to log in at: one line for each kind of question, never a traceback."""
    client = RestClient(
        "http://127.0.0.1:1", transport=httpx.MockTransport(lambda _: httpx.Response(status, text=body))
    )
    ask = [
        client.pool,
        lambda: client.run_name("sums"),
        lambda: client.look("sums"),
        lambda: list(client.rows("/v1/n")),
    ]
    for question in ask:
        with pytest.raises(ConfigurationError, match="is something else, or of another release"):
            question()
    if body not in {"3", "null", '{"a": NaN}'}:  # those are an answer of some kind
        for question in (
            lambda: client.get("/x"),
            lambda: client.change("/x", {}),
            lambda: client.send_text("/x", "", ""),
        ):
            with pytest.raises(ConfigurationError, match="is something else"):
                question()
    odd = httpx.MockTransport(lambda _: httpx.Response(200, text="id: x\n\n"))
    with pytest.raises(ConfigurationError, match="is something else"):
        next(RestClient("http://127.0.0.1:1", transport=odd).follow("/v1/events/stream", 0))


def test_a_reason_in_another_encoding_is_said():
    """As Python has an argument whose bytes are no UTF-8."""
    client = RestClient("http://127.0.0.1:1", transport=httpx.MockTransport(lambda _: httpx.Response(200, text="{}")))
    with pytest.raises(ConfigurationError, match="bytes that are not UTF-8"):
        client.change("/v1/nodes/x/ban", {"reason": "caf\udce9"})


def test_https_against_plain_http_is_said():
    """As it is: a server that answers a TLS greeting with an error page."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        server = threading.Thread(target=answer)
        server.start()
        with (
            closing(RestClient(f"https://127.0.0.1:{port}")) as client,
            pytest.raises(
                ConfigurationError, match=rf"it speaks http://, try --coordinator http://127\.0\.0\.1:{port}$"
            ),
        ):
            client.pool()
        server.join()
