// Parts that several pages share: figures with their words, states as chips, the gauge of the pool's speed.

import { h, region, s, shown } from "./dom.js";
import { count, digits, percent, rate } from "./format.js";

/** Tiles of figures: each {label, value: {text | none}, about}. Returns [element, update]. */
export function figures(label) {
  const element = h("dl", { class: "figures", "aria-label": label });
  return [element, region(element, (tiles) => tiles.map((tile) =>
    h("div", { class: "figure", title: tile.about },
      h("dt", {}, tile.label),
      h("dd", {}, shown(tile.value),
        tile.value.none === undefined ? null : h("small", { "aria-hidden": "true" }, tile.value.none)))))];
}

/** What is the matter, in words, the worst first: each {tone: "bad" | "warn" | "ok" | "wait", text}. */
export function matters() {
  const lines = h("ul", { class: "matters" });
  const element = h("div", { role: "status", "aria-live": "polite" }, lines);
  const words = { bad: "trouble", warn: "warning", wait: "waiting", ok: "well" };
  return [element, region(lines, (found) => found.map(({ tone, text }) =>
    h("li", { class: tone }, h("strong", {}, words[tone]), h("span", {}, text))))];
}

/** What a run waits for and what is wrong with it, as `matters` shows it. */
export function runMatters(run, pool) {
  const found = [];
  if (pool?.trouble) found.push({ tone: "bad", text: pool.trouble });
  const over = ["finished", "stopped"].includes(run.state);
  if (run.waiting) found.push({ tone: "wait", text: `${run.run} waits for: ${run.waiting}` });
  if (!run.learner_connected
    && !over) found.push({ tone: "warn", text: `the learner of ${run.run} has not been heard of for a minute` });
  if (run.state === "running" && run.mu_min !== null && run.mu_pool < run.mu_min) {
    const makes = `${digits(run.mu_pool)} of the ${digits(run.mu_min)} rollouts/s it needs`;
    found.push({ tone: "warn", text: `the pool is too slow for ${run.run}: ${makes}` });
  }
  if (run.state === "paused") found.push({ tone: "warn",
    text: `${run.run} is paused${run.state_reason ? `: ${run.state_reason}` : ""}` });
  if (over) found.push({ tone: "ok",
    text: `${run.run} is ${run.state}${run.state_reason ? `: ${run.state_reason}` : ""}` });
  if (!found.length) found.push({ tone: "ok", text: `${run.run} is ${run.state}: leases flow` });
  return found;
}

const TONES = {
  healthy: "ok", active: "ok", running: "ok", "in use": "ok", consumed: "ok",
  late: "warn", standby: "quiet-chip", paused: "warn", fetching: "warn", waiting: "warn", loading: "warn",
  applied: "warn", probation: "warn", draining: "warn",
  dead: "bad", suspended: "bad", banned: "bad", stopped: "bad", rejected: "bad",
};

/** A state as a table's cell. */
export const chip = (state, title) => ({ text: state, tone: TONES[state] ?? "quiet-chip", title });

/** What each state of a node means, for those who read it. */
export const MEANS = {
  applied: "it waits for an operator to admit it: nothing is given to it yet",
  probation: "it shows what it can do: a few leases at a time, and it does not count yet",
  standby: "it has a price and is not needed now: it keeps the newest snapshot and gets no leases",
  active: "it takes part",
  draining: "no new leases, and what it holds it finishes; until an operator restores it",
  suspended: "no leases, and what it delivers is not taken",
  banned: "nothing is served to it: it is told why, then refused",
  left: "it said goodbye; when it comes back it goes on as before",
};

const NOT_EXPECTED = new Set(["suspended", "banned", "left"]);

/** What a node is counted as: its health while it is active, or where it should be here and is dead; else its state. */
export function standing(node) {
  if (NOT_EXPECTED.has(node.state)) return node.state;
  return node.state === "active" || node.health === "dead" ? node.health : node.state;
}

/** Why mu_min is not known. */
export function whyNoMinimum(pool) {
  if (pool.t_train_seconds === null) return "no training step was timed yet";
  if (pool.t_bcast_seconds === null) return "no broadcast was timed yet";
  return "no rate is enough: the broadcast takes longer than the steps between two snapshots";
}

/** mu_pool against mu_min and mu_target: a bar and a sentence. Returns [element, update(pool)]. */
export function gauge() {
  const element = h("div", { class: "gauge" });
  return [element, region(element, ({ mu_pool, mu_min, mu_target, why }) => {
    const top = 1.25 * Math.max(mu_pool, mu_target ?? 0, mu_min ?? 0) || 1;
    const x = (value) => (1000 * value) / top;
    const enough = mu_min === null ? null : mu_pool >= (mu_target ?? mu_min) ? "ok" : mu_pool >= mu_min ? "warn"
      : "bad";
    const mark = (value, name) => value === null ? null
      : s("g", { class: `mark ${name}` }, s("line", { x1: x(value), x2: x(value), y1: 0, y2: 26 }));
    const makes = `the pool makes ${digits(mu_pool)} rollouts/s`;
    const needs = `the learner needs ${digits(mu_min ?? 0)} rollouts/s (mu_min)`;
    const aim = `we aim at ${digits(mu_target ?? mu_min ?? 0)} rollouts/s (mu_target)`;
    const words = {
      null: `The pool makes ${digits(mu_pool)} rollouts/s. What it needs is not known: ${why}.`,
      ok: `Enough: ${makes}; ${needs}, and ${aim}.`,
      warn: `Just enough: ${makes}; ${needs}, but ${aim}.`,
      bad: `Too slow: ${makes}, ${needs}, and ${aim}. It will wait.`,
    }[enough];
    return [
      s("svg", { viewBox: "0 0 1000 26", height: 26, width: "100%", preserveAspectRatio: "none",
        "aria-hidden": "true" },
        s("rect", { class: "track", x: 0, y: 6, width: 1000, height: 14 }),
        s("rect", { class: `fill ${enough ?? ""}`, x: 0, y: 6, width: Math.max(x(mu_pool), 0), height: 14 }),
        mark(mu_min, "minimum"), mark(mu_target, "target")),
      h("p", { class: "gauge-words" }, words),
      h("ul", { class: "legend", "aria-hidden": "true" },
        h("li", {}, s("svg", { class: "key", width: 18, height: 10 },
          s("rect", { class: `fill ${enough ?? ""}`, width: 18, height: 10 })), `mu_pool ${rate(mu_pool).text}`),
        ...[["minimum", "mu_min", mu_min], ["target", "mu_target", mu_target]].map(([name, word, value]) =>
          h("li", {}, s("svg", { class: "key", width: 18, height: 10 },
            s("g", { class: `mark ${name}` }, s("line", { x1: 9, x2: 9, y1: 0, y2: 10 }))),
            `${word} ${rate(value).text ?? "-"}`))),
    ];
  })];
}

const MEANINGS = {
  submitted: "all that came",
  held: "waiting for its reward",
  admitted: "checked and scored: the learner may train on it",
  consumed: "trained on",
  stale: "too old when its turn came",
  withdrawn: "its node was suspended, or its group was no longer wanted",
  rejected: "did not pass a check",
  duplicate: "another node was first",
};

/** Rollouts by state, with their share. Returns [element, update(counts)]. */
export function rolloutStates() {
  const element = h("div", { class: "scroll" });
  return [element, region(element, (counts) => h("table", { class: "plain states" },
    h("thead", {}, h("tr", {},
      ...["state", "rollouts", "share", "meaning"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...Object.entries(counts).map(([state, value]) => h("tr", {},
      h("th", { scope: "row" }, state),
      h("td", { class: "num" }, value.toLocaleString("en")),
      h("td", { class: "num" }, counts.submitted ? `${digits((100 * value) / counts.submitted)} %` : "-"),
      h("td", { class: "quiet" }, MEANINGS[state] ?? ""))))))];
}

/** Counts by reason, the most first. Returns [element, update(object)]. */
export function reasons(empty) {
  const element = h("div", { class: "scroll" });
  return [element, region(element, (counts) => {
    const sorted = Object.entries(counts).sort(([, a], [, b]) => b - a);
    if (!sorted.length) return h("p", { class: "quiet" }, empty);
    return h("table", { class: "plain" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "state and reason"),
        h("th", { scope: "col", class: "num" }, "rollouts"))),
      h("tbody", {}, ...sorted.map(([reason, value]) =>
        h("tr", {}, h("th", { scope: "row" }, reason), h("td", { class: "num" }, value.toLocaleString("en"))))));
  })];
}

/** A small table of texts or elements, cards where it is narrow. Returns [element, update(rows)]. */
export function textTable(names, { label, long, empty, row = (cells) => cells }) {
  const element = h("div", { class: "scroll" });
  const head = () => h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
    ...names.map((name) => h("th", { scope: "col", role: "columnheader" }, name))));
  const made = (cells) => h("tr", { role: "row" }, ...cells.map((cell, place) => h("td", {
    role: "cell", "data-label": names[place], class: names[place] === long ? "remark" : "whole" }, cell)));
  return [element, region(element, (rows) => rows.length
    ? h("table", { class: "plain cards", role: "table", "aria-label": label },
        head(), h("tbody", { role: "rowgroup" }, ...rows.map((one) => made(row(one)))))
    : h("p", { class: "quiet" }, empty))];
}

/** A part of a page with its heading. */
export function section(name, ...content) {
  const id = `part-${name.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { "aria-labelledby": id }, h("h2", { id }, name), ...content);
}

/** A progress bar with its words. Returns [element, update({done, all})]. */
export function progress(label) {
  const element = h("div", { class: "progress" });
  return [element, region(element, ({ done, all }) => [
    h("progress", { max: all, value: Math.min(done, all), "aria-label": label }),
    h("span", {}, `step ${count(done).text} of ${count(all).text} (${percent(done / all).text})`)])];
}
