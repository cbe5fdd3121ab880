"""The web page's files, and what strangers may see."""

from __future__ import annotations

import re

import httpx
import pytest
from rest_stage import Stage

from echo2.coordinator.api import make_api
from echo2.coordinator.rest_gate import Door
from echo2.coordinator.views import EvaluationView, NodeView, RolloutCounts, RunView
from echo2.coordinator.web_pages import ADDRESS_BURST, ADDRESSES_MAX, FOLDER, PUBLIC_BURST, PUBLIC_SECONDS, WebPages
from echo2.p2p.identity import Identity

PEER = Identity(b"\x02" * 32).peer_id
TOKEN = "operators-own-token"
LOOPBACK = ("127.0.0.1", 1)
STRANGER = ("203.0.113.7", 1)


def node(name="n0", peer=PEER, consumed=10, **fields):
    known = {
        "peer": peer, "name": name, "software": "echo2 0.1", "addresses": ("/ip4/203.0.113.9/tcp/4001",),
        "state": "active", "state_reason": "", "health": "healthy", "last_seen_seconds": 1.0, "node_says": "working",
        "epoch": 0, "version": 2, "version_lag": 0, "price_hour": 0.35, "mu": 1.5, "tokens_per_second": 9.0,
        "leases_held": 1, "samples_held": 2, "accepted": consumed + 1, "rejected": 1, "evaluated": 0,
        "rollouts": RolloutCounts(submitted=11, consumed=consumed, rejected=1), "protocol_errors": 0,
        "reason": "its secret reason",
    }  # fmt: skip
    return NodeView(**known | fields)


def evaluation(version, mean, *, complete=True):
    return EvaluationView(version=version, purpose="interim", size=4, count=4, mean=mean, complete=complete)


class FakeDesk:
    """One run, some nodes; counts how often it is asked."""

    def __init__(self, nodes=None):
        self.nodes = [node()] if nodes is None else nodes
        self.asked = 0

    def nodes_of(self, run):
        self.asked += 1
        return self.nodes

    def run_view(self, run):
        if run != "sums":
            raise KeyError(run)
        return RunView(
            run="sums", task="sums", model="tiny", state="running", state_reason="why it is so", learner=PEER,
            learner_connected=True, learner_status="training", epoch=0, version=2, learner_version=3, steps=100,
            staleness_max=3, publish_period=2, rollouts_per_step=256, group_size=8, waiting="", reserved=5,
            reserved_max=9, outstanding=1, rollouts=RolloutCounts(submitted=11, consumed=10, rejected=1), evaluated=4,
            evaluations=(evaluation(0, 0.25), evaluation(2, 0.5, complete=False)), series=(), reward_mean=0.5,
            staleness=1, kl=0.001, bubble=0.1, t_train_seconds=None, t_bcast_seconds=0.5, staleness_estimate=2,
        )  # fmt: skip


async def behind(scope, receive, send):
    """The application that is asked for everything else."""
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b"behind"})


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def client_of(app, client=LOOPBACK):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=client), base_url="http://127.0.0.1:8080")


def pages(desk=None, *, public=True, clock=None, door=Door()):  # noqa: B008 - frozen
    return WebPages(behind, desk or FakeDesk(), door=door, public=public, clock=clock or Clock())


PAGES = ["/", "/runs/sums", f"/nodes/{PEER}", "/broadcast", "/events"]


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_comes_with_its_type_and_forbids_all_from_elsewhere(path):
    """HTML that names its script, under a policy that runs nothing in line and loads nothing from elsewhere."""
    async with client_of(pages()) as client:
        answer = await client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "@page@" not in answer.text
    for source in re.findall(r'(?:src|href)="(/web/[^"]+)"', answer.text):
        async with client_of(pages()) as client:
            assert (await client.get(source)).status_code == 200


@pytest.mark.parametrize("path", sorted(path.name for path in FOLDER.iterdir()))
async def test_every_file_is_served_but_the_pages_own(path):
    """With the right type, and nothing in it is fetched from elsewhere or written as markup."""
    text = (FOLDER / path).read_text(encoding="utf-8")
    assert not re.findall(r"(?<!xmlns=\")https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|style=", text)
    async with client_of(pages()) as client:
        answer = await client.get(f"/web/{path}")
    if path.endswith(".html"):
        assert answer.status_code == 418
        return
    kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}[path.rpartition(".")[2]]
    assert answer.headers["content-type"].split(";")[0] == kind
    assert answer.content == (FOLDER / path).read_bytes()


async def test_what_is_known_is_not_sent_again():
    """The tag that came before gets 304 and no body, also as one of several or weakened by a proxy; HEAD has none."""
    async with client_of(pages()) as client:
        first = await client.get("/web/style.css")
        tag = first.headers["etag"]
        for known in (tag, f'"x", {tag}', f"W/{tag}"):
            again = await client.get("/web/style.css", headers={"If-None-Match": known})
            assert (again.status_code, again.content) == (304, b"")
        assert (await client.get("/web/style.css", headers={"If-None-Match": '"x"'})).status_code == 200
        head = await client.head("/web/style.css")
    assert (head.content, head.headers["content-length"]) == (b"", str(len(first.content)))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/pool"), ("GET", "/web/../api.py"), ("GET", "/web/shell.html"), ("GET", "/nothing"),
        ("POST", "/"), ("GET", "/runs/<script>"), ("GET", "/nodes/short"), ("GET", "/v1/public/runs/"),
    ],
)  # fmt: skip
async def test_all_else_goes_to_the_application(method, path):
    """Data, changes, and paths that are no pages."""
    async with client_of(pages()) as client:
        assert (await client.request(method, path)).status_code == 418


async def test_the_public_page_is_off_unless_asked_for():
    """Neither page nor data: the application behind decides, which knows no such path."""
    async with client_of(pages(public=False)) as client:
        for path in ("/public/sums", "/v1/public/runs/sums"):
            assert (await client.get(path)).status_code == 418


async def test_the_public_sees_contributions_and_nothing_private():
    """Names, counts and curves; no peer id, address, price, software or reason."""
    two = [node("ada", consumed=4), node("bob", consumed=9), node("ada", consumed=7, health="dead")]
    async with client_of(pages(FakeDesk(two)), STRANGER) as client:
        answer = await client.get("/v1/public/runs/sums")
        assert (await client.get("/public/sums")).status_code == 200
        assert (await client.get("/v1/public/runs/none")).status_code == 404
    view = answer.json()
    assert [(one["name"], one["nodes"], one["trained_on"], one["accepted"]) for one in view["contributors"]] == [
        ("ada", 2, 11, 13),
        ("bob", 1, 9, 10),
    ]
    assert (view["nodes_now"], view["nodes_ever"], view["heldout"]) == (2, 3, [{"at": 0, "reward": 0.25}])
    for private in (PEER, "203.0.113", "4001", "price", "0.35", "secret reason", "why it is so", "echo2 0.1"):
        assert private not in answer.text


async def test_no_more_contributors_are_listed_than_a_page_holds():
    """Those with the most come first, the rest are counted."""
    many = [node(f"n{number}", consumed=number) for number in range(250)]
    async with client_of(pages(FakeDesk(many))) as client:
        view = (await client.get("/v1/public/runs/sums")).json()
    assert (view["contributors"][0]["name"], len(view["contributors"]), view["contributors_left_out"]) == (
        "n249",
        200,
        50,
    )


async def test_the_publics_data_are_made_once_however_many_ask():
    """For some seconds the same bytes go to all, with a tag; then they are made anew."""
    desk, clock = FakeDesk(), Clock()
    async with client_of(pages(desk, clock=clock)) as client:
        answers = [await client.get("/v1/public/runs/sums") for _ in range(50)]
        assert desk.asked == 1
        assert answers[0].headers["cache-control"] == f"public, max-age={PUBLIC_SECONDS:.0f}"
        known = {"If-None-Match": answers[0].headers["etag"]}
        clock.now = PUBLIC_SECONDS
        assert (await client.get("/v1/public/runs/sums", headers=known)).status_code == 304
        desk.nodes = []
        clock.now = 2 * PUBLIC_SECONDS
        assert (await client.get("/v1/public/runs/sums", headers=known)).json()["nodes_ever"] == 0
    assert desk.asked == 3


async def test_an_address_that_asks_too_often_is_told_to_wait():
    """After its burst, and alone: others are answered. A second later it may ask again. Loopback is not counted."""
    clock = Clock()
    app = pages(clock=clock)
    async with client_of(app, STRANGER) as stranger, client_of(app, ("203.0.113.8", 1)) as other, client_of(app) as own:
        answers = [(await stranger.get("/web/icon.svg")).status_code for _ in range(int(ADDRESS_BURST) + 5)]
        assert (answers.count(200), answers.count(429)) == (ADDRESS_BURST, 5)
        assert (await stranger.get("/")).headers["retry-after"] == "1"
        assert (await other.get("/")).status_code == 200
        assert {(await own.get("/")).status_code for _ in range(int(ADDRESS_BURST) + 5)} == {200}
        clock.now = 1.0
        assert (await stranger.get("/")).status_code == 200


async def test_everybody_together_may_ask_for_so_much():
    """Behind a proxy all strangers are one address: the public's paths have a bound of their own, the pages none."""
    async with client_of(pages()) as proxy:
        answers = [(await proxy.get("/v1/public/runs/sums")).status_code for _ in range(int(PUBLIC_BURST) + 5)]
        assert (answers.count(200), answers.count(429)) == (PUBLIC_BURST, 5)
        assert (await proxy.get("/")).status_code == 200


async def test_no_more_addresses_are_remembered_than_are_kept():
    """Addresses cost a stranger little; those of one IPv6 site nothing, and they are one."""
    app = pages()
    for number in range(ADDRESSES_MAX + 10):
        async with client_of(app, (f"2001:db8:{number:x}::1", 1)) as client:
            await client.get("/web/icon.svg")
    assert len(app._addresses) == ADDRESSES_MAX
    site = pages()
    answers = []
    for number in range(int(ADDRESS_BURST) + 5):
        async with client_of(site, (f"2001:db8::{number:x}", 1)) as client:
            answers.append((await client.get("/web/icon.svg")).status_code)
    assert (answers.count(200), answers.count(429)) == (ADDRESS_BURST, 5)


async def test_behind_a_proxy_each_client_has_a_rate_of_its_own():
    """As the proxy tells them apart, on this machine or another: a stranger costs an operator no page."""
    for proxy in ("127.0.0.1", "192.0.2.80"):
        app = pages(door=Door(open_reads=False, tls=True, proxy=proxy))
        async with client_of(app, (proxy, 1)) as client:
            answers = [
                (await client.get("/", headers={"X-Forwarded-For": "198.51.100.1"})).status_code
                for _ in range(int(ADDRESS_BURST) + 5)
            ]
            assert (answers.count(200), answers.count(429)) == (ADDRESS_BURST, 5)
            assert (await client.get("/", headers={"X-Forwarded-For": "203.0.113.1"})).status_code == 200


async def test_off_loopback_the_pages_are_open_and_the_data_are_not(tmp_path):
    """Whoever signs in needs the page to do so; it holds nothing of the pool."""
    stage = Stage(tmp_path, door=Door(open_reads=False))
    app = make_api(stage.rooms, door=Door(open_reads=False), version="0.1.0", public_page=True)
    async with client_of(app, STRANGER) as client:
        for path in (*PAGES, "/public/sums", "/v1/public/runs/sums", "/web/rest.js"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/pool", "/v1/nodes", "/v1/broadcast", "/v1/events", "/v1/runs/sums"):
            assert (await client.get(path)).status_code == 401
    stage.close()
