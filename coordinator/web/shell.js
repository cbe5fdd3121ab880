// What every page has: the head, who is signed in, whether the coordinator answers, and the keys.

import { h, region, say, speak } from "./dom.js";
import { SHORTCUTS_OFF, help, signInDialog } from "./dialog.js";
import { clock, span } from "./format.js";
import { live } from "./live.js";
import { currentSession, list, lookUpSession, signOut } from "./rest.js";

const PAGES = [["/", "Pool", "pool"], ["", "Run", "run"], ["/broadcast", "Broadcast", "broadcast"],
  ["/events", "Events", "events"]];

let runs = [];

const NODES_PER_SECOND = 100;
let nodes = [];
let nodesAt = -Infinity;

/** Every node. A large pool is asked for less often than each look: a thousand nodes are most of a megabyte. */
export async function allNodes() {
  if (performance.now() - nodesAt < (1000 * nodes.length) / NODES_PER_SECOND - 1000) return nodes;
  nodes = await list("/v1/nodes");
  nodesAt = performance.now();
  return nodes;
}

/** The runs of this coordinator, as the last look found them. */
export const knownRuns = () => runs;

/** The run that this page's address names, on the run's own page or as ?run=; empty where it names none. */
export const chosenRun = () => (location.pathname.startsWith("/runs/")
  ? decodeURIComponent(location.pathname.split("/")[2]) : new URLSearchParams(location.search).get("run") ?? "");

/** Which of several runs is looked at: another one is another page. */
function runChoice(names) {
  const chosen = chosenRun() || names[0];
  const go = (event) => {
    const run = encodeURIComponent(event.target.value);
    location.href = document.body.dataset.page === "broadcast" ? `/broadcast?run=${run}` : `/runs/${run}`;
  };
  return h("select", { "aria-label": "run", "data-key": "which", onchange: go },
    ...names.map((name) => h("option", { value: name, selected: name === chosen ? "" : null }, name)));
}

function header(again) {
  const here = document.body.dataset.page;
  const nav = h("nav", { "aria-label": "pages" });
  const who = h("div", { class: "who" });
  const state = h("span", { class: "link-state" });
  document.getElementById("top").replaceChildren(
    h("a", { class: "brand", href: "/" }, "ECHO-2"), nav, state, who);
  const showNav = region(nav, (names) => [
    ...PAGES.map(([path, name, page]) => {
      const href = path || (names.length ? `/runs/${encodeURIComponent(chosenRun() || names[0])}` : "");
      return href ? h("a", { href, "aria-current": page === here ? "page" : null, "data-key": page }, name) : null;
    }),
    names.length > 1 && ["run", "broadcast"].includes(here) ? runChoice(names) : null,
  ]);
  const showWho = region(who, (session) => [
    session
      ? h("span", { class: "quiet" }, `${session.name ?? "signed in"} (${session.role})`)
      : null,
    session
      ? h("button", { type: "button", "data-key": "sign",
        onclick: async () => { await signOut(); location.reload(); } }, "Sign out")
      : h("button", { type: "button", "data-key": "sign", onclick: () => signInDialog(again) }, "Sign in"),
    h("button", { type: "button", "data-key": "help", onclick: help, "aria-label": "Help: keys and words" }, "?"),
  ]);
  return { showNav, showWho, state };
}

function keys() {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey
      || localStorage.getItem(SHORTCUTS_OFF) !== null) return;
    if (event.key === "?") {
      event.preventDefault();
      help();
    } else if (event.key === "/" && !document.querySelector("dialog[open]")) {
      const filter = document.getElementById("filter");
      if (!filter) return;
      event.preventDefault();
      filter.focus();
      filter.select();
    }
  });
}

/** Tells of the connection in the notice bar: what is shown may be old, and since when. */
export function connection(state) {
  const notice = document.getElementById("notice");
  let before = "live";
  return ({ state: now, since, error, next }) => {
    if (now === "live") {
      notice.hidden = true;
      say(notice, "");
      if (before !== "live") speak("the coordinator answers again");
      if (state) say(state, `live, ${clock(Date.now() / 1000).time}`);
    } else {
      const when = since && clock(since / 1000).time;
      const words = {
        refused: `${error.message}. Sign in to see this.`,
        broken: `This page cannot show what the coordinator answered (${error.message}). Load it again.`,
        away: `The coordinator does not answer since ${when} (${error.message}). What is shown is from before; `
          + `trying again every ${span(next)}.`,
      }[now];
      notice.hidden = false;
      say(notice, words);
      if (state) say(state, now === "refused" ? "not signed in" : "no answer");
    }
    document.body.dataset.connection = now;
    before = now;
  };
}

/**
 * Starts a page. `build(main)` puts its parts into the page once; it returns `refresh()`, which asks and shows.
 */
export function start(build) {
  let look = () => {};
  const again = () => lookUpSession().then(() => look());
  const { showNav, showWho, state } = header(again);
  showWho(null);
  keys();
  const main = document.getElementById("main");
  const parts = h("div", { class: "page" });
  let refresh = null;
  let asked = false;
  const tell = connection(state);
  look = live(async () => {
    if (!asked) {
      await lookUpSession();
      asked = true;
    }
    showWho(currentSession());
    runs = await list("/v1/runs");
    showNav(runs.map((run) => run.run));
    refresh ??= build(parts, () => look());
    await refresh();
    if (!parts.isConnected) main.replaceChildren(parts);
  }, (told) => {
    if (told.state === "refused") {
      showWho(currentSession());
      if (!document.body.dataset.askedToSignIn) {
        document.body.dataset.askedToSignIn = "1";
        signInDialog(again);
      }
    }
    tell(told);
  });
}

/** The page's title: what matters first. */
export function title(text) {
  const whole = `${text} - ECHO-2`;
  if (document.title !== whole) document.title = whole;
}
