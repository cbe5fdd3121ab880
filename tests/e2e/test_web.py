"""The coordinator's web page in a real Chromium: in light and dark, at 400 pixels, by keyboard, under attack."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial

import pytest

from echo2.p2p.identity import Identity

sync_api = pytest.importorskip("playwright.sync_api", reason="no driver for a browser here: pip install playwright")
from e2e.web_stage import HOSTILE, RUN, STEPS, TOKEN, Stage  # noqa: E402 - after the driver is known to be there

expect = sync_api.expect
expect.set_options(timeout=15_000)  # for what the page does at its next look, on a machine that is busy

pytestmark = pytest.mark.e2e

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_MS = 15_000

CONTRAST = """() => {
  const parse = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    return [parts[0], parts[1], parts[2], parts[3] ?? 1];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const linear = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => sum + w * linear(colour[i] / 255), 0);
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      layers.push(parse(getComputedStyle(at).backgroundColor));
      if (layers.at(-1)[3] === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const found = [];
  let looked = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    const text = node.textContent.trim();
    if (!text || !element.checkVisibility() || element.closest(".unseen, .skip, noscript, option")) continue;
    looked += 1;
    const style = getComputedStyle(element);
    const under = ground(element);
    const colour = over(parse(element instanceof SVGElement ? style.fill : style.color), under);
    const [a, b] = [light(colour), light(under)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < least) found.push(`${ratio.toFixed(2)}: ${text.slice(0, 40)}`);
  }
  return { looked, found };
}"""
"""WCAG's contrast of every text that is seen, against the ground it stands on."""


FOCUSED = """(() => {
  const element = document.activeElement, style = getComputedStyle(element);
  const name = element.id || element.textContent;
  return [name, parseFloat(style.outlineWidth), style.outlineStyle, element.matches(":focus-visible")];
})()"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with Stage(tmp_path_factory.mktemp("web")).running() as stage:
        yield stage


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


class Tab:
    """A page of its own profile that keeps what went wrong in it."""

    def __init__(self, browser, stage, **options):
        self.stage = stage
        self.faults = []
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.page.on("console", lambda said: said.type == "error" and self.faults.append(f"console: {said.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
        self.page.on("request", self.only_ours)
        self.page.add_init_script(
            "document.addEventListener('securitypolicyviolation', (e) => console.error('CSP', e.violatedDirective))"
        )

    def only_ours(self, request):
        if not request.url.startswith((f"{self.stage.url}/", f"{self.stage.guarded_url}/")):
            self.faults.append(f"asked elsewhere: {request.url}")

    def forgive(self, status):
        """Chromium writes every refused request into its console: these were to be refused."""
        self.faults = [fault for fault in self.faults if f"status of {status}" not in fault]

    def go(self, path):
        self.page.goto(self.stage.url + path)
        self.page.wait_for_selector(".page")
        return self.page


@pytest.fixture
def tab(browser, stage):
    """A fresh browser profile; the test fails when anything went wrong in it."""
    tab = Tab(browser, stage, viewport={"width": 1280, "height": 900})
    yield tab
    tab.page.unroute_all(behavior="wait")
    tab.context.close()
    assert tab.faults == []


def paths(stage):
    return {
        "pool": "/",
        "run": f"/runs/{RUN}",
        "node": f"/nodes/{stage.nodes[3].peer_id}",
        "broadcast": "/broadcast",
        "events": "/events",
        "public": f"/public/{RUN}",
    }


def sign_in(page, token=TOKEN, said="ada (operator)"):
    page.get_by_role("button", name="Sign in").click()
    page.get_by_label("Token", exact=True).fill(token)
    page.keyboard.press("Enter")
    expect(page.get_by_text(said)).to_be_visible(timeout=WAIT_MS)


def do(page, verb, reason, **fields):
    """Press a button, say why and the rest, and press it again."""
    page.get_by_role("button", name=f"{verb} ...").click()
    page.get_by_role("textbox", name="Reason").fill(reason)
    for label, value in fields.items():
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name=verb, exact=True).click()


def answer(page, number, verb, reason, dollars=None):
    page.get_by_role("button", name=f"{verb} appeal {number} ...").click()
    page.get_by_role("textbox", name="Reason").fill(reason)
    if dollars is not None:
        page.get_by_label("Adjustment").fill(dollars)
    page.get_by_role("button", name=verb, exact=True).click()


def actions(page):
    return [name.removesuffix(" ...") for name in page.locator(".tools button").all_inner_texts()]


@pytest.mark.parametrize("name", ["pool", "run", "node", "broadcast", "events", "public"])
def test_every_page_is_legible_in_both_schemes_and_fits_400_pixels(tab, stage, name):
    """No error, nothing asked elsewhere, WCAG AA contrast in light and dark, and no sideways scroll of the page."""
    page = tab.go(paths(stage)[name])
    assert page.locator("h1").count() == 1
    assert page.title().endswith(" - ECHO-2")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # else a colour is seen on its way
        contrast = page.evaluate(CONTRAST)
        assert contrast["looked"] > 20
        assert contrast["found"] == []
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate(CONTRAST)["found"] == []
    controls = "[...document.querySelectorAll('input, select, textarea')]"
    assert page.evaluate(f"{controls}.filter((one) => !one.labels.length).map((one) => one.id)") == []


def test_the_pool_says_how_it_is_in_words_and_numbers(tab, stage):
    """Speed against what is needed, states, lag, rho of who is paid; and why a figure is missing."""
    page = tab.go("/")
    expect(page.get_by_text("Too slow: the pool makes")).to_be_visible()
    expect(page.locator(".matters .warn")).to_contain_text("the pool is too slow for r1")
    row = page.locator(f'tr[data-row="{stage.nodes[7].peer_id}"]')
    expect(row).to_contain_text("$0.35/h")
    expect(row.locator("td").nth(7)).to_have_text(re.compile(r"^\$0\.\d+ / 1000$"))
    states = [page.locator(f'tr[data-row="{node.peer_id}"] .chip').inner_text() for node in stage.nodes[:7]]
    later = [page.locator(f'tr[data-row="{node.peer_id}"] .chip') for node in (stage.newcomer, stage.applicant)]
    assert [chip.inner_text() for chip in later] == ["probation", "applied"]
    for state, number in {"applied": 1, "probation": 1, "suspended": 1, "banned": 0, "dead": 1}.items():
        figure = page.locator(".figure", has=page.get_by_text(state, exact=True))
        expect(figure.locator("dd")).to_have_text(str(number))
    assert states == ["healthy", "healthy", "healthy", "suspended", "late", "dead", "healthy"]
    missing = page.locator(f'tr[data-row="{stage.nodes[0].peer_id}"] td').nth(7)
    expect(missing).to_have_text("- (a volunteer: it has no price)")
    expect(page.get_by_text("stale: too stale")).to_be_visible()


def test_what_is_not_measured_is_no_zero(tab):
    """A run before its first step: every figure and chart says why it is empty."""

    def bare(route):
        run = route.fetch().json()
        run |= {"series": [], "evaluations": [], "reward_mean": None, "kl": None, "bubble": None, "staleness": None}
        run |= {"t_train_seconds": None, "t_bcast_seconds": None, "version": None, "epoch": None, "reserved_max": None}
        route.fulfill(json=run)

    tab.page.route(f"**/v1/runs/{RUN}", bare)
    page = tab.go(f"/runs/{RUN}")
    figure = page.locator(".figure", has_text="reward, last step")
    expect(figure.locator(".none")).to_have_text("- (no step was reported yet)")
    expect(figure.locator("small")).to_have_text("no step was reported yet")
    assert page.locator(".chart .empty:visible").all_inner_texts() == ["- (no step was reported yet)"] * 6
    assert page.locator(".chart svg.plot:visible").count() == 0


def test_a_chart_can_be_read_with_keys_and_as_a_table(tab):
    """Arrow keys move from step to step and say the values; the same numbers are in a table."""
    page = tab.go(f"/runs/{RUN}")
    chart = page.locator(".chart", has=page.get_by_text("Reward", exact=True))
    assert "held out: 4 values" in chart.locator("svg.plot").get_attribute("aria-label")
    chart.locator("svg.plot").focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(chart.locator(".tip strong")).to_have_text("step 2")
    said = chart.locator(".tip div").inner_text()
    expect(chart.locator("[aria-live]")).to_contain_text(said)
    page.keyboard.press("Escape")
    expect(chart.locator(".tip")).to_be_hidden()
    chart.locator("summary").click()
    expect(chart.locator("tbody tr")).to_have_count(STEPS)
    row = chart.locator("tbody tr", has=page.get_by_role("rowheader", name="2", exact=True))
    assert row.locator("td").first.inner_text() == said.removeprefix("training: ")
    box = chart.locator("svg.plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 15, box["y"] + 60)
    expect(chart.locator(".tip strong")).to_have_text(f"step {STEPS - 1}")


def test_the_broadcast_shows_who_has_what(tab, stage):
    """A strip of cells for each node, where it is, from whom it gets it, and who is late."""
    page = tab.go("/broadcast")
    expect(page.locator(".matters .wait")).to_contain_text("more nodes to use it")
    expect(page.locator(".matters .warn")).to_contain_text("carl-gaming")
    row = page.locator(f'tr[data-row="{stage.nodes[2].peer_id}"]')
    expect(row).to_contain_text("fetching")
    expect(row).to_contain_text("anna-3090, the learner")
    strip = page.locator(".matrix tr", has_text="carl-gaming")
    expect(strip).to_contain_text("54 of 90")
    assert strip.locator("path").get_attribute("d").count("M") == 2  # the first 53 cells, a gap, and the last one
    expect(page.locator(f'tr[data-row="{stage.nodes[8].peer_id}"]')).to_contain_text("loading")


def test_the_keyboard_reaches_everything(tab):
    """Skip link first, visible focus at each stop, `/` to the filter, `?` for help, focus kept in it and given back."""
    page = tab.go("/")
    page.keyboard.press("Tab")
    skip = page.locator(".skip")
    expect(skip).to_be_focused()
    assert skip.bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.goto(f"{tab.stage.url}/")
    page.wait_for_selector(".page")
    stops = []
    page.keyboard.press("Tab")
    while page.evaluate("document.activeElement !== document.body"):
        name, width, style, seen = page.evaluate(FOCUSED)
        assert (width >= 2, style, seen) == (True, "solid", True), name
        stops.append(name)
        page.keyboard.press("Tab")
    assert stops[:7] == ["Skip to the content", "ECHO-2", "Pool", "Run", "Broadcast", "Events", "Sign in"]
    places = [
        stops.index(name) for name in ("?", "filter", "choice", "node", "reason", HOSTILE, "anna-3090", "rented-h100")
    ]
    assert places == sorted(places)
    page.keyboard.press("/")
    expect(page.locator("#filter")).to_be_focused()
    page.keyboard.type("rented")
    expect(page.locator("tbody tr[data-row]")).to_have_count(2)
    page.keyboard.press("Escape")
    expect(page.locator("tbody tr[data-row]")).to_have_count(11)
    page.locator("#filter").press("?")
    expect(page.locator("#filter")).to_have_value("?")  # where one types it is a letter
    page.keyboard.press("Escape")
    page.get_by_role("button", name="rho").focus()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys and words")
    expect(dialog).to_be_visible()
    for _ in range(5):
        page.keyboard.press("Tab")
        assert dialog.evaluate("(one) => one.contains(document.activeElement)")
    page.keyboard.press("Shift+Tab")
    assert dialog.evaluate("(one) => one.contains(document.activeElement)")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="rho")).to_be_focused()


def test_a_table_sorts_and_filters(tab):
    """By any column, either way, which is said; what has no value comes last; by words and by state."""
    page = tab.go("/")
    names = page.locator("tbody tr[data-row] td:first-child")
    page.get_by_role("button", name="rho", exact=True).click()
    assert names.all_inner_texts()[:2] == ["rented-h100", "rented-a10"]
    expect(page.get_by_role("columnheader", name="rho")).to_have_attribute("aria-sort", "descending")
    page.get_by_role("button", name="rho", exact=True).press("Enter")
    assert names.all_inner_texts()[:2] == ["rented-a10", "rented-h100"]
    page.locator("#choice").select_option("suspended")
    assert names.all_inner_texts() == ["dora"]
    page.locator("#choice").select_option("")
    page.locator("#filter").fill("no such node")
    expect(page.locator(".data-box .count")).to_have_text("none of 11 fits the filter")


@pytest.mark.parametrize("name", ["pool", "node", "broadcast", "events", "public"])
def test_hostile_names_and_reasons_are_text(tab, stage, name):
    """Markup in a node's name or in a reason is shown letter by letter, and makes no element."""
    page = tab.go(paths(stage)[name])
    if name == "node":
        page = tab.go(f"/nodes/{stage.nodes[6].peer_id}")
    expect(page.get_by_text(HOSTILE).first).to_be_visible()
    assert page.locator("img, main script").count() == 0
    assert "owned" not in page.title()
    if name in {"pool", "events"}:
        expect(page.get_by_text("<script>document.title").first).to_be_visible()


def test_a_change_needs_a_sign_in_a_reason_and_the_word_against_forgery(tab, stage):
    """No buttons without a role; a wrong token is told; the change is made, on record, and shown; then undone."""
    page = tab.go(f"/runs/{RUN}")
    assert page.get_by_role("button", name="Pause ...").count() == 0
    page.get_by_role("button", name="Sign in").click()
    page.get_by_label("Token", exact=True).fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("this token is not known here")
    tab.forgive(401)
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.get_by_text("ada (operator)")).to_be_visible()
    page.get_by_role("button", name="Pause ...").click()
    reason = page.get_by_role("textbox", name="Reason")
    expect(reason).to_be_focused()
    reason.fill("   ")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("say why")
    reason.fill(f"the disk is full {HOSTILE}")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator("h1 .chip")).to_have_text("paused")
    assert stage.do(stage.run).state == "paused"
    newest = stage.do(stage.newest_event)
    assert (newest.actor, newest.action, newest.reason) == ("ada", "run paused", f"the disk is full {HOSTILE}")
    do(page, "Resume", "mended")
    expect(page.locator("h1 .chip")).to_have_text("running")
    forged = page.evaluate(f"fetch('/v1/runs/{RUN}/pause', {{method: 'POST'}}).then((reply) => reply.status)")
    assert (forged, stage.do(stage.run).state) == (403, "running")
    tab.forgive(403)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    expect(page.get_by_role("button", name="Pause ...")).to_have_count(0)


def test_an_operator_changes_a_node_as_its_state_allows(tab, stage):
    """Each state offers what its table has; a ban for a time says until when; each step to it is told."""
    page = tab.go(f"/nodes/{stage.nodes[1].peer_id}")
    assert actions(page) == []
    sign_in(page)
    chip = page.locator("h1 .chip")
    history = page.locator("section", has=page.get_by_role("heading", name="How it came to its state"))
    expect(page.get_by_role("button", name="Drain ...")).to_be_visible()
    assert actions(page) == ["Drain", "Suspend", "Ban"]
    do(page, "Drain", "its disk is changed")
    expect(chip).to_have_text("draining")
    assert actions(page) == ["Suspend", "Ban", "Restore"]
    do(page, "Ban", f"asks too much {HOSTILE}", Hours="48")
    expect(chip).to_have_text("banned")
    assert actions(page) == ["Ban", "Unban"]
    expect(page.locator(".matters .bad").first).to_contain_text(re.compile(r"banned, by ada, until 20\d\d-"))
    row = history.locator("tbody tr").first
    expect(row).to_contain_text(f"asks too much {HOSTILE}")
    expect(row.locator("td").nth(4)).to_have_text(re.compile(r"^20\d\d-"))
    do(page, "Unban", "a mistake")
    expect(chip).to_have_text("probation")
    expect(page.locator(".figure", has_text="warm-up")).to_contain_text("0 of 2 leases")
    do(page, "Suspend", "so that it can be restored")
    expect(chip).to_have_text("suspended")
    do(page, "Restore", "all is well")
    expect(chip).to_have_text("healthy")
    events = [row.inner_text() for row in history.locator("tbody tr td:nth-child(3)").all()]
    assert [event.partition(":")[0] for event in events] == [
        "restored", "suspended", "unbanned", "banned", "drained", "passed", "joined",
    ]  # fmt: skip


def test_what_is_offered_depends_on_the_role(tab, stage):
    """A researcher pauses runs and does nothing to nodes; a viewer only looks; neither sees appeals."""
    for role, runs in (("researcher", ["Pause", "Stop"]), ("viewer", [])):
        token = stage.do(stage.make_access, f"a-{role}", role)
        page = tab.go(f"/runs/{RUN}")
        sign_in(page, token, f"a-{role} ({role})")
        for name in runs:
            expect(page.get_by_role("button", name=f"{name} ...")).to_be_visible()
        assert actions(page) == runs
        tab.go(f"/nodes/{stage.nodes[0].peer_id}")
        expect(page.get_by_text(f"a-{role} ({role})")).to_be_visible()
        assert actions(page) == []
        tab.go("/")
        expect(page.get_by_role("heading", name="Appeals")).to_be_hidden()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("button", name="Sign in")).to_be_visible()


def test_who_has_applied_is_admitted_and_appeals_are_answered(tab, stage):
    """From the applicant's page; an appeal is answered with a reason and an adjustment, and is then no longer open."""
    page = tab.go(f"/nodes/{stage.newcomer.peer_id}")
    expect(page.locator(".figure", has_text="warm-up")).to_contain_text("1 of 2 leases")
    expect(page.locator(".figure", has_text="benchmark")).to_contain_text("tokens/s")
    page = tab.go(f"/nodes/{stage.applicant.peer_id}")
    expect(page.locator(".matters .wait")).to_contain_text("it waits for an operator to admit it")
    sign_in(page)
    expect(page.get_by_role("button", name="Admit ...")).to_be_visible()
    assert actions(page) == ["Admit", "Ban"]
    do(page, "Admit", "I know them")
    expect(page.locator("h1 .chip")).to_have_text("probation")
    page = tab.go("/")
    appeals = page.locator("section", has=page.get_by_role("heading", name="Appeals"))
    expect(appeals.locator("tbody tr")).to_have_count(2)
    expect(appeals.get_by_text(f"they are right {HOSTILE}")).to_be_visible()
    answer(page, 1, "Refuse", "they are not")
    expect(appeals.locator("tbody tr")).to_have_count(1)
    answer(page, 2, "Uphold", "so it did", "1.5")
    expect(appeals.get_by_text("none waits for an answer")).to_be_visible()
    refused, upheld = sorted(stage.do(stage.appeals), key=lambda one: one.id)
    assert (refused.state, refused.answer, refused.posting) == ("refused", "they are not", None)
    assert (upheld.state, upheld.answer) == ("upheld", "so it did")
    page = tab.go(f"/nodes/{stage.nodes[0].peer_id}")
    expect(page.locator(".figure", has_text="balance, dollars").locator("dd")).to_have_text("$1.50")


def test_volunteers_are_let_in(tab):
    """A join string is made, and shown once."""
    page = tab.go("/")
    sign_in(page)
    page.get_by_role("button", name="Let volunteers in ...").click()
    page.get_by_label("Nodes it lets in").fill("3")
    page.get_by_role("button", name="Make a join string").click()
    expect(page.get_by_role("textbox", name="join string")).to_have_value(re.compile(r"^echo2://"))


def test_a_run_says_what_it_costs(tab, stage):
    """Spent, committed, budget, per hour and per step, and credits; without a budget it says so."""
    page = tab.go(f"/runs/{RUN}")
    money = page.locator("section", has=page.get_by_role("heading", name="Money")).locator(".figure")
    shown = {one.locator("dt").inner_text(): one.locator("dd > span").inner_text() for one in money.all()}
    run = stage.do(stage.run)
    assert shown["cost per hour"] == "$1.15"
    assert "no budget is set" in shown["budget"]
    assert float(shown["spent"].removeprefix("$")) == pytest.approx(run.spent_dollars, rel=0.01)
    assert float(shown["cost per step"].removeprefix("$")) == pytest.approx(run.spent_dollars / STEPS, rel=0.01)
    assert float(shown["credits"]) == pytest.approx(run.credits, rel=0.01)


def test_events_come_by_themselves(tab, stage):
    """At the stream's word a new event is there at once and said aloud; while the list is held it stays out."""
    page = tab.go("/events")
    rows = page.locator("tbody tr[data-row]")
    before = rows.count()

    async def happen(number):
        stage.world.token(uses=number)

    stage.do(happen, 7)
    expect(page.get_by_text("7 uses")).to_be_visible()
    expect(rows).to_have_count(before + 1)
    expect(page.locator("#spoken")).to_have_text("1 new event")
    expect(rows.first).to_contain_text("7 uses")
    page.get_by_label("hold").check()
    stage.do(happen, 8)
    page.wait_for_event("response", lambda reply: "/v1/runs" in reply.url)
    expect(page.get_by_text("8 uses")).to_have_count(0)
    page.get_by_label("hold").uncheck()
    expect(page.get_by_text("8 uses")).to_be_visible()


def test_older_events_are_fetched_when_asked_for(tab, stage):
    """The page that the answer's header names, until there are no more."""
    tab.page.route(
        re.compile(r"/v1/events\?limit=200"),
        lambda route: route.continue_(url=route.request.url.replace("limit=200", "limit=9")),
    )
    page = tab.go("/events")
    rows, older = page.locator("tbody tr[data-row]"), page.get_by_role("button", name="Older")
    expect(rows).to_have_count(9)
    older.click()
    expect(rows).to_have_count(18)
    for _ in range(20):
        if older.is_disabled():
            break
        before = rows.count()
        older.click()
        expect(rows).not_to_have_count(before)
    expect(older).to_be_disabled()
    assert rows.count() == stage.do(stage.count_events)


def test_without_a_stream_and_with_lists_in_pages_it_is_the_same(tab):
    """While no stream can be had the page asks again and again; of a list in pages it asks for all of them."""
    tab.page.route("**/v1/events/stream", lambda route: route.fulfill(status=503, json={"detail": "no place"}))
    tab.page.route(
        re.compile(r"/v1/nodes\?limit=1000"),
        lambda route: route.continue_(url=route.request.url.replace("limit=1000", "limit=4")),
    )
    page = tab.go("/")
    expect(page.locator("tbody tr[data-row]")).to_have_count(11)
    page.wait_for_event("response", lambda reply: reply.url.endswith("/v1/pool"))
    page.wait_for_event("response", lambda reply: reply.url.endswith("/v1/pool"))
    tab.forgive(503)


def test_who_may_not_read_is_asked_to_sign_in(tab):
    """Off loopback nothing is shown before; the page says so and opens the form."""
    tab.page.goto(f"{tab.stage.guarded_url}/")
    dialog = tab.page.get_by_role("dialog", name="Sign in")
    expect(dialog).to_be_visible()
    expect(tab.page.locator("#notice")).to_contain_text("Sign in to see this.")
    assert tab.page.locator(".page").count() == 0
    tab.page.get_by_label("Token", exact=True).fill(TOKEN)
    tab.page.keyboard.press("Enter")
    expect(tab.page.locator("tbody tr[data-row]")).to_have_count(11)
    expect(tab.page.locator("#notice")).to_be_hidden()
    (cookie,) = tab.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    tab.forgive(401)


def test_an_answer_of_another_release_is_said(tab):
    """What the page cannot show ends in words, not in a page that loads for ever."""
    tab.page.route("**/v1/pool", lambda route: route.fulfill(json={"something": "else"}))
    tab.page.goto(f"{tab.stage.url}/")
    expect(tab.page.locator("#notice")).to_contain_text("This page cannot show what the coordinator answered")
    assert tab.faults
    tab.faults = []


def test_the_public_page_needs_nobody_and_tells_no_secrets(tab, stage):
    """Curve, progress and contributions by name; in what is sent there is no peer id and no price."""
    page = tab.go(f"/public/{RUN}")
    expect(page.locator(".progress")).to_contain_text(f"step {STEPS} of 60")
    expect(page.locator("tbody tr", has_text="anna-3090").locator("td").nth(2)).not_to_have_text("0")
    sent = page.evaluate(f"fetch('/v1/public/runs/{RUN}').then((reply) => reply.text())")
    assert len(json.loads(sent)["reward"]) == STEPS
    for private in [node.peer_id for node in stage.nodes] + ["12D3", "price", "rewards that cannot be"]:
        assert private not in sent
    assert not tab.context.cookies()


def test_the_page_outlives_a_restart_of_the_coordinator(tab, stage):
    """It says since when nothing answers, keeps what it showed, and goes on by itself."""
    page = tab.go("/")
    stage.stop()
    expect(page.locator("#notice")).to_contain_text("The coordinator does not answer since")
    expect(page.locator("tbody tr[data-row]")).to_have_count(11)
    stage.start()
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#spoken")).to_have_text("the coordinator answers again")
    expect(page.locator(f'tr[data-row="{stage.nodes[0].peer_id}"]')).to_contain_text("healthy")
    tab.faults = [fault for fault in tab.faults if "net::ERR" not in fault]


def test_with_several_runs_one_is_chosen(tab, stage):
    """The pool shows each with its share of the nodes; a choice beside the pages leads to another run, and its own
    broadcast. Last of all: the run stays."""
    service, (run,) = stage.world.service, stage.world.config().all_runs
    other = run.model_copy(update={"name": "r2", "learner": Identity(b"\x77" * 32).peer_id, "weight": 3.0})
    stage.do(partial(service.create_run, other, actor="test", reason="test"))
    page = tab.go("/")
    lines = page.locator(".run-line")
    expect(lines).to_have_count(2)
    expect(lines.nth(1)).to_contain_text("0 nodes for weight 3")
    page = tab.go(f"/runs/{RUN}")
    choice = page.get_by_label("run", exact=True)
    expect(choice).to_have_value(RUN)
    choice.select_option("r2")
    expect(page.locator("h1")).to_contain_text("r2")
    expect(page.locator("main")).to_contain_text("r2 waits for: no snapshot published yet")
    page = tab.go("/broadcast?run=r2")
    expect(page.locator("main")).to_contain_text("no snapshot is published yet")
    page.get_by_label("run", exact=True).select_option(RUN)
    expect(page.locator("main")).not_to_contain_text("no snapshot is published yet")
