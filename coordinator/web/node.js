// One node: what the coordinator thinks of it, what it did, and what happened to it.

import { h, region, shown } from "./dom.js";
import { ago, clock, count, digits, dollars, number, rho, tokenRate } from "./format.js";
import { nodeActions } from "./node_actions.js";
import { MEANS, chip, figures, matters, rolloutStates, section, standing, textTable } from "./parts.js";
import { Problem, get, page as onePage } from "./rest.js";
import { start, title } from "./shell.js";

const EVENTS_LOOKED_AT = 500;
const ROWS_MAX = 50;

const peer = location.pathname.split("/")[2];

start((page, look) => {
  const heading = h("h1", {}, "Node");
  const showHeading = region(heading,
    (node) => [node.name, " ", h("span", { class: `chip ${chip(standing(node)).tone}` }, standing(node))]);
  const [tools, showTools] = nodeActions(look);
  const [matter, showMatter] = matters();
  const [tiles, showTiles] = figures("the node in figures");
  const [states, showStates] = rolloutStates();
  const facts = h("dl", { class: "facts" });
  const showFacts = region(facts,
    (pairs) => pairs.map(([name, value]) =>
    h("div", {}, h("dt", {}, name),
    h("dd", {}, shown(value),
    value.none === undefined ? null : h("span", { class: "quiet", "aria-hidden": "true" }, ` ${value.none}`)))));
  const [became, showBecame] = textTable(["when", "who", "what", "reason", "until"],
    { label: "how it came to its state", long: "reason", empty: "from before the coordinator kept it" });
  const [happened, showHappened] = textTable(["when", "who", "what", "reason"],
    { label: "what happened to it", long: "reason",
      empty: `nothing about this node among the last ${EVENTS_LOOKED_AT} events` });
  page.append(h("div", { class: "bar" }, heading, tools), matter, section("Figures", tiles),
    section("How it came to its state", became), section("Rollouts by state", states),
    section("What is known of it", facts), section("What happened to it", happened));
  return async () => {
    let node;
    try {
      node = await get(`/v1/nodes/${peer}`);
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 404) throw error;
      showMatter([{ tone: "bad", text: error.message }]);
      title("No such node");
      return;
    }
    const [transitions, events] = await Promise.all(
      [get(`/v1/nodes/${peer}/transitions`), onePage(`/v1/events?limit=${EVENTS_LOOKED_AT}`)]);
    showHeading({ name: node.name, state: node.state, health: node.health, standby: node.standby });
    showTools(node);
    showMatter(mattersOf(node));
    showTiles([
      ...warmup(node),
      { label: "mu", value: node.mu === null ? { none: "it has not held work yet" }
        : { text: `${digits(node.mu)} rollouts/s` }, about: "accepted rollouts a second while it holds work" },
      { label: "tokens", value: node.tokens_per_second ? tokenRate(node.tokens_per_second)
        : { none: "it has said of none yet" }, about: "by its own word" },
      { label: "price", value: node.price_hour ? { text: `${dollars(node.price_hour).text}/h` }
        : { none: "a volunteer: it has no price" } },
      { label: "rho", value: rho(node), about: "dollars for 1,000 rollouts" },
      { label: "balance, dollars", value: dollars(node.balance_dollars), about: "posted to it, less what was paid out" },
      { label: "balance, credits", value: number(node.balance_credits), about: "posted to it, less what was paid out" },
      { label: "version", value: node.version === null ? { none: "it has no snapshot yet" }
        : { text: `${node.version} (epoch ${node.epoch})` } },
      { label: "version lag",
        value: node.version_lag === null ? { none: "nothing to compare" }
        : { text: `${node.version_lag} ${node.version_lag === 1 ? "step" : "steps"}` } },
      { label: "leases held", value: { text: `${node.leases_held} (${node.samples_held} samples)` } },
      { label: "accepted", value: count(node.accepted) },
      { label: "evaluated", value: count(node.evaluated), about: "answers to held-out prompts" },
      { label: "unanswered leases", value: node.leases_judged
        ? { text: `${node.leases_unanswered} of ${node.leases_judged}` }
        : { none: "none has ended since the coordinator started" }, about: "of its last 200" },
      { label: "last seen", value: ago(node.last_seen_seconds, "not since the coordinator started") },
      { label: "protocol errors", value: count(node.protocol_errors) },
    ]);
    showStates(node.rollouts);
    showFacts([
      ["state", { text: `${node.state}: ${MEANS[node.state]}` }],
      ["since", node.state_since === null ? { none: "from before the coordinator kept it" }
        : { text: `${at(node.state_since)}${node.state_by ? `, by ${whose(node.state_by)}` : ""}` }],
      ["peer id", { text: node.peer }],
      ["software", node.software ? { text: node.software } : { none: "it did not say" }],
      ["addresses", node.addresses.length ? { text: node.addresses.join(", ") }
        : { none: "it cannot be dialled: it receives snapshots and passes none on" }],
      ["it says", node.node_says ? { text: node.node_says } : { none: "not heard of yet" }],
    ]);
    showBecame(transitions.slice(0, ROWS_MAX).map((one) => [at(one.wall_seconds), whose(one.actor),
      `${one.event}: ${one.from_state} to ${one.to_state}`, one.reason,
      one.expires_seconds === null ? "" : at(one.expires_seconds)]));
    showHappened(events.items.filter((event) => event.subject === peer).slice(0, ROWS_MAX)
      .map((event) => [at(event.wall_seconds), whose(event.actor), event.action, event.reason]));
    title(`${node.name} - Node`);
  };
});

function at(wallSeconds) {
  const { day, time } = clock(wallSeconds);
  return `${day} ${time}`;
}

const whose = (actor) => (actor === peer ? "the node itself" : actor);

/** What a node in probation has shown so far, and its benchmark as long as it is known. */
function warmup(node) {
  const measured = node.benchmark_tokens_per_second === null ? { none: "its first leases are not all back" }
    : { text: `${digits(node.benchmark_tokens_per_second)} tokens/s, `
      + `${digits(node.benchmark_rollouts_per_second)} rollouts/s` };
  const benchmark = { label: "benchmark", value: measured, about: "of its first leases, by the coordinator's clock" };
  if (!node.warmup_leases) return measured.text ? [benchmark] : [];
  const failed = node.warmup_failed ? `, ${node.warmup_failed} failed` : "";
  return [{ label: "warm-up", value: { text: `${node.warmup_returned} of ${node.warmup_leases} leases${failed}` },
    about: "of its first leases, those that came back valid in time" }, benchmark];
}

const GRAVE = new Set(["suspended", "banned"]);

function mattersOf(node) {
  const found = [];
  if (node.state !== "active") {
    const until = node.state_expires === null ? "" : `, until ${at(node.state_expires)}`;
    const by = node.state_by && node.state_by !== peer ? `, by ${node.state_by}` : "";
    found.push({ tone: GRAVE.has(node.state) ? "bad" : "wait",
      text: `${node.state}${by}${until}: ${MEANS[node.state]}` });
  }
  if (node.reason) found.push({ tone: GRAVE.has(node.state) ? "bad" : "warn", text: node.reason });
  if (!GRAVE.has(node.state) && node.state !== "left" && node.health !== "healthy") {
    const heard = ago(node.last_seen_seconds).text ?? "before the coordinator started";
    found.push({ tone: "warn", text: `it is ${node.health}: last heard of ${heard}` });
  }
  if (!found.length) found.push({ tone: "ok", text: `it is ${node.node_says || "here"}` });
  return found;
}
