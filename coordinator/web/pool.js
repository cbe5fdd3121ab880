// The pool: how it is, what it makes, who is in it.

import { h, region } from "./dom.js";
import { askReason, invite } from "./dialog.js";
import { appealsPart } from "./appeals.js";
import { ago, count, digits, dollars, duration, number, rho } from "./format.js";
import { chip, figures, gauge, matters, reasons, rolloutStates, runMatters } from "./parts.js";
import { MEANS, section, standing, whyNoMinimum } from "./parts.js";
import { get, may } from "./rest.js";
import { allNodes, knownRuns, start, title } from "./shell.js";
import { dataTable, filterBar } from "./table.js";

const COLUMNS = [
  { name: "node", cell: (node) => ({ text: node.name, href: `/nodes/${node.peer}`, title: node.peer }),
    sort: (node) => node.name },
  { name: "state", cell: (node) => chip(standing(node), node.state_reason || node.node_says),
    sort: (node) => standing(node) },
  { name: "does", cell: (node) => (node.node_says ? { text: node.node_says } : { none: "not heard of yet" }),
    sort: (node) => node.node_says },
  { name: "seen", num: true, cell: (node) => ago(node.last_seen_seconds, "not since the coordinator started"),
    sort: (node) => node.last_seen_seconds },
  { name: "version lag", num: true, about: "training steps behind the newest snapshot", cell: (node) => lag(node),
    sort: (node) => node.version_lag },
  { name: "mu", num: true, about: "accepted rollouts a second while it holds work",
    cell: (node) => (node.mu === null ? { none: "it has not held work yet" } : { text: `${digits(node.mu)} /s` }),
    sort: (node) => node.mu },
  { name: "price", num: true,
    cell: (node) => (node.price_hour ? { text: `${dollars(node.price_hour).text}/h` }
    : { none: "a volunteer: it has no price" }), sort: (node) => node.price_hour || null },
  { name: "rho", num: true, about: "dollars for 1,000 rollouts", cell: rho,
    sort: (node) => node.rho_dollars },
  { name: "leases", num: true, about: "leases held now, and the samples in them",
    cell: (node) => ({ text: node.leases_held ? `${node.leases_held} (${node.samples_held} samples)` : "0" }),
    sort: (node) => node.leases_held },
  { name: "accepted", num: true, about: "training rollouts that passed the checks",
    cell: (node) => count(node.accepted), sort: (node) => node.accepted },
  { name: "rejected", num: true, cell: (node) => count(node.rejected), sort: (node) => node.rejected },
  { name: "reason", long: true, cell: (node) => (node.reason ? { text: node.reason } : { none: "all is well" }),
    sort: (node) => node.reason || null },
];

/** Beside the health of those that are active. */
const STATES = ["applied", "probation", "standby", "draining", "suspended", "banned", "left"];

export function lag(node) {
  if (node.version === null) return { none: "it has no snapshot yet" };
  if (node.version_lag === null) return { none: "nothing is published" };
  return { text: node.version_lag === 1 ? "1 step" : `${node.version_lag} steps` };
}

start((page, look) => {
  const [matter, showMatter] = matters();
  const [appeals, refreshAppeals] = appealsPart(look);
  const [speed, showSpeed] = gauge();
  const [tiles, showTiles] = figures("the pool in figures");
  const [states, showStates] = rolloutStates();
  const [refused, showRefused] = reasons("none was lost so far");
  const runs = h("div", { class: "run-lines" });
  const tools = h("div", { class: "tools" });
  const table = dataTable(COLUMNS,
    { key: (node) => node.peer, label: "nodes", order: ["node", false],
    empty: "no node was ever admitted here: make a join string" });
  const bar = filterBar({
    label: "filter the nodes",
    choices: [["", "every state"], ["healthy", "healthy"], ["late", "late"], ["dead", "dead"],
      ...STATES.map((state) => [state, state]), ["behind", "behind"], ["trouble", "with a reason"]],
    changed: ({ text, choice }) => table.filter((node) => fits(node, text, choice)),
  });
  const showRuns = region(runs, (found) => found.map((run) => runLine(run, look)));
  const showTools = region(tools,
    (allowed) => allowed
    ? h("button", { type: "button", "data-key": "invite", onclick: invite }, "Let volunteers in ...") : null);
  page.append(h("h1", {}, "Pool"), matter, runs, appeals,
    section("Speed", speed), section("Figures", tiles),
    section("Nodes", h("div", { class: "bar" }, bar, tools), table.element),
    h("div", { class: "two" }, section("Rollouts by state", states), section("Lost, by reason", refused)));
  return async () => {
    const [pool, nodes] = await Promise.all([get("/v1/pool"), allNodes(), refreshAppeals()]);
    const found = knownRuns();
    showMatter(found.length ? found.flatMap((run, place) => runMatters(run, place ? null : pool))
      : [{ tone: "wait", text: "this coordinator has no run" }]);
    const several = found.length > 1;
    showRuns(found.map(({ run, task, model, state, version, learner_version, steps, reward_mean, bubble, weight,
      nodes: placed }) =>
      ({ run, task, model, state, version, learner_version, steps, reward_mean, bubble,
        share: several ? `${count(placed).text} nodes for weight ${digits(weight)}` : null,
        mayPause: may("POST /v1/runs/{run}/pause"), mayResume: may("POST /v1/runs/{run}/resume") })));
    showTools(may("POST /v1/tokens"));
    showSpeed({ mu_pool: pool.mu_pool, mu_min: pool.mu_min, mu_target: pool.mu_target,
      why: several ? "a run was not timed yet, or no rate is enough for it" : whyNoMinimum(pool) });
    showTiles([
      { label: "healthy nodes", value: count(pool.nodes_healthy) },
      { label: "late", value: count(pool.nodes_late), about: "missed a heartbeat" },
      { label: "dead", value: count(pool.nodes_dead), about: "missed three heartbeats" },
      ...STATES.map((state) => ({ label: state, value: count(pool[`nodes_${state}`]), about: MEANS[state] })),
      { label: "T_train",
        value: duration(pool.t_train_seconds, several ? "each run has its own" : "no step was timed yet"),
        about: "median of recent training steps" },
      { label: "T_bcast",
        value: duration(pool.t_bcast_seconds, several ? "each run has its own" : "no broadcast was timed yet"),
        about: "median of recent broadcasts" },
      { label: "protocol errors", value: count(pool.protocol_errors), about: "since the coordinator started" },
      { label: "scorer confined by",
        value: pool.scorer_confinement.length ? { text: pool.scorer_confinement.join(", ") }
        : { none: "nothing confines it" } },
    ]);
    table.update(nodes);
    if (found[0]) showStates(found.map((run) => run.rollouts).reduce((sum, one) =>
      Object.fromEntries(Object.entries(sum).map(([state, number]) => [state, number + one[state]]))));
    showRefused(pool.refused);
    const live = pool.nodes_healthy + pool.nodes_late;
    title(pool.trouble ? "Trouble - Pool" : `${live} ${live === 1 ? "node" : "nodes"} - Pool`);
  };
});

function fits(node, text, choice) {
  const parts = [node.name, node.peer, node.node_says, node.software, node.reason, standing(node)];
  const words = parts.join(" ").toLowerCase();
  if (!words.includes(text)) return false;
  if (choice === "behind") return node.version_lag === null ? node.version === null : node.version_lag > 0;
  if (choice === "trouble") return Boolean(node.reason);
  return !choice || standing(node) === choice;
}

function runLine(run, look) {
  const path = `/v1/runs/${encodeURIComponent(run.run)}`;
  const facts = [
    run.task, run.model, run.version === null ? "nothing published" : `version ${run.version}`,
    `step ${run.learner_version} of ${run.steps}`,
    `reward ${number(run.reward_mean).text ?? "-"}`,
      `bubble ${run.bubble === null ? "-" : `${digits(100 * run.bubble)} %`}`,
    ...(run.share ? [run.share] : []),
  ];
  const act = (verb, about) => h("button", {
    type: "button", "data-key": `${verb}-${run.run}`,
    onclick: () => askReason({ title: `${verb} ${run.run}`, about, verb, path: `${path}/${verb.toLowerCase()}`,
      done: look }),
  }, `${verb} ...`);
  return h("div", { class: "run-line" },
    h("a", { href: `/runs/${encodeURIComponent(run.run)}`, "data-key": `run-${run.run}` }, run.run),
    h("span", { class: `chip ${chip(run.state).tone}` }, run.state),
    h("span", { class: "quiet" }, facts.join(" \u00b7 ")),
    run.mayPause && run.state === "running" ? act("Pause", "No new leases until it is resumed. What is out comes back.")
      : null,
    run.mayResume && run.state === "paused" ? act("Resume", "Leases flow again.") : null);
}
