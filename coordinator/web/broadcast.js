// The broadcast of the newest snapshot: who has which part of it, from whom, and who is late.

import { h, region, s } from "./dom.js";
import { ago, bytes, count, duration, short, span } from "./format.js";
import { chip, figures, matters, section } from "./parts.js";
import { get } from "./rest.js";
import { chosenRun, knownRuns, start, title } from "./shell.js";
import { dataTable, filterBar } from "./table.js";

const NODES = 500;
const WIDTH = 256;
const LATE_NAMED = 8;

/** Runs [from, to) of set bits in a hexadecimal bitmap, the lowest bit first. */
function runsOf(hex, cells) {
  const found = [];
  let from = null;
  for (let cell = 0; cell <= cells; cell += 1) {
    const set = cell < cells && (parseInt(hex.substr(2 * (cell >> 3), 2) || "0", 16) >> (cell & 7)) & 1;
    if (set && from === null) from = cell;
    if (!set && from !== null) {
      found.push([from, cell]);
      from = null;
    }
  }
  return found;
}

function strip(node, cells) {
  const wide = WIDTH / Math.max(cells, 1);
  const runs = runsOf(node.cells, cells);
  const path = runs.map(([from, to]) =>
    `M${(from * wide).toFixed(2)} 0H${(to * wide).toFixed(2)}V10H${(from * wide).toFixed(2)}Z`).join("");
  return s("svg", { class: "strip", viewBox: `0 0 ${WIDTH} 10`, preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { class: "track", width: WIDTH, height: 10 }),
      s("path", { class: `fill ${node.place === "in use" ? "ok" : "warn"}`, d: path }));
}

function picture() {
  const body = h("tbody", {});
  const kept = new Map();
  const element = h("div",
    { class: "scroll matrix", tabindex: "0", role: "region", "aria-label": "who has which chunk" },
    h("table", { class: "plain" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "node"),
        h("th", { scope: "col" }, "chunks, the first at the left"), h("th", { scope: "col", class: "num" }, "has"))),
        body));
  return [element, (view, nodes) => {
    const rows = nodes.map((node) => {
      const now = JSON.stringify([node.cells, node.place, node.chunks_held, view.cells, view.version, node.name]);
      const old = kept.get(node.peer);
      if (old?.dataset.now === now) return old;
      const row = h("tr", { "data-now": now },
        h("th", { scope: "row" }, node.name),
        h("td", { class: "strip-cell" }, strip(node, view.cells)),
        h("td", { class: "num" },
          node.chunks_held === null
          ? h("span", { class: "none", title: "it has not said" }, "-",
          h("span", { class: "unseen" }, " (it has not said)")) : `${node.chunks_held} of ${view.chunks}`));
      kept.set(node.peer, row);
      return row;
    });
    for (const peer of kept.keys()) if (!nodes.some((node) => node.peer === peer)) kept.delete(peer);
    if (rows.length !== body.children.length
      || rows.some((row, place) => body.children[place] !== row)) body.replaceChildren(...rows);
  }];
}

function note(node) {
  if (node.holds_others_up) return chip("late", "others waited for it: it relays nothing for a while");
  if (node.behind) return chip("late", "it lacks the snapshot, and the usual T_bcast is over");
  return node.counted ? { text: "counted" } : { none: "the broadcast does not wait for it" };
}

start((page) => {
  let names = new Map();
  const [matter, showMatter] = matters();
  const [tiles, showTiles] = figures("the broadcast in figures");
  const [matrix, showMatrix] = picture();
  const left = h("p", { class: "quiet" });
  const showLeft = region(left, (number) => (number ? `${number} more nodes are not shown` : ""));
  const sources = (node) =>
    (node.sources.length ? { text: node.sources.map((peer) => names.get(peer) ?? short(peer)).join(", ") }
    : { none: node.place === "fetching" ? "nobody sends to it now" : "it is not fetching" });
  const table = dataTable([
    { name: "node", cell: (node) => ({ text: node.name, href: `/nodes/${node.peer}`, title: node.peer }),
      sort: (node) => node.name },
    { name: "where it is", cell: (node) => chip(node.place),
      sort: (node) => ["fetching", "waiting", "loading", "in use", "away"].indexOf(node.place) },
    { name: "has", num: true,
      cell: (node) => (node.chunks_held === null ? { none: "it has not said" }
      : { text: `${node.chunks_held} chunks` }), sort: (node) => node.chunks_held },
    { name: "from", long: true, cell: sources, sort: (node) => node.sources.length || null },
    { name: "in use after", num: true,
      cell: (node) => (node.seconds === null
      ? { none: node.place === "in use" ? "since before the coordinator started" : "not in use yet" }
      : duration(node.seconds)), sort: (node) => node.seconds },
    { name: "remark", cell: note, sort: (node) => (node.holds_others_up || node.behind ? 0 : node.counted ? 1 : 2) },
  ], { key: (node) => node.peer, label: "nodes of the broadcast", order: ["where it is", false],
    empty: "no node was ever admitted here" });
  const bar = filterBar({
    label: "filter the nodes",
    choices: [["", "every node"], ["fetching", "fetching"], ["waiting", "waiting"], ["loading", "loading"],
      ["in use", "in use"], ["away", "away"], ["late", "late"]],
    changed: ({ text, choice }) => table.filter((node) =>
      `${node.name} ${node.peer} ${node.place}`.toLowerCase().includes(text)
        && (!choice || node.place === choice || (choice === "late" && (node.behind || node.holds_others_up)))),
  });
  page.append(h("h1", {}, "Broadcast"), matter, section("Figures", tiles), section("Who has what", matrix, left),
    section("Nodes", h("div", { class: "bar" }, bar), table.element));
  return async () => {
    const run = chosenRun();
    const view = await get(`/v1/broadcast?limit=${NODES}${run ? `&run=${encodeURIComponent(run)}` : ""}`);
    names = new Map(view.nodes.map((node) => [node.peer, node.name]));
    for (const run of knownRuns()) names.set(run.learner, "the learner");
    const late = view.nodes.filter((node) => node.behind || node.holds_others_up);
    const found = [];
    if (view.waiting) found.push({ tone: "wait", text: `the broadcast waits for: ${view.waiting}` });
    else {
      const after = view.broadcast_seconds === null ? "" : `, after ${span(view.broadcast_seconds)}`;
      const nodes = `${view.in_use} of ${view.counted} nodes`;
      found.push({ tone: "ok", text: `version ${view.version} is in use on ${nodes}${after}` });
    }
    if (late.length) {
      const more = late.length > LATE_NAMED ? ` and ${late.length - LATE_NAMED} more` : "";
      const named = late.slice(0, LATE_NAMED).map((node) => node.name);
      found.push({ tone: "warn", text: `late: ${named.join(", ")}${more}` });
    }
    showMatter(found);
    const nothing = "nothing is published yet";
    const planned = view.plan_kind ? { text: view.plan_kind }
      : { none: view.version === null ? nothing : "no node has asked for it yet" };
    showTiles([
      { label: "version", value: view.version === null ? { none: nothing }
        : { text: `${view.version} (epoch ${view.epoch})` } },
      { label: "kind", value: view.kind === null ? { none: nothing } : { text: view.kind } },
      { label: "plan", value: planned, about: "star: the learner sends to all; chain: nodes pass it on" },
      { label: "size", value: bytes(view.length_bytes, nothing) },
      { label: "chunks", value: view.chunks === null ? { none: nothing }
        : { text: `${count(view.chunks).text}, each ${bytes(view.chunk_bytes).text}` },
        about: view.cells < (view.chunks ?? 0)
        ? `one cell of the picture is ${(view.chunks / view.cells).toFixed(1)} chunks`
        : "one cell of the picture is one chunk" },
      { label: "published",
        value: ago(view.published_seconds_ago, view.version === null ? nothing : "before the coordinator started") },
      { label: "in use", value: view.version === null ? { none: nothing }
        : { text: `${view.in_use} of ${view.counted} nodes` }, about: `${view.quorum} of them end the broadcast` },
      { label: "T_bcast of this one",
        value: duration(view.broadcast_seconds, view.version === null ? nothing : "still under way") },
      { label: "T_bcast, usual", value: duration(view.t_bcast_seconds, "no broadcast was timed yet"),
        about: "median of recent ones" },
    ]);
    showMatrix(view, view.nodes);
    showLeft(view.nodes_left_out);
    table.update(view.nodes);
    title(view.version === null ? "Broadcast"
      : `version ${view.version}: ${view.in_use} of ${view.counted} - Broadcast`);
  };
});
