// One node: what the coordinator thinks of it, what it did, and what happened to it.

import { h, region, shown } from "./dom.js";
import { askReason } from "./dialog.js";
import { ago, clock, count, digits, dollars, rho, tokenRate } from "./format.js";
import { chip, figures, matters, rolloutStates, section, standing } from "./parts.js";
import { Problem, get, may, page as onePage } from "./rest.js";
import { start, title } from "./shell.js";

const EVENTS_LOOKED_AT = 500;

const SUSPENSION = "It gets no more leases, and what it made and was not trained on is withdrawn. "
  + "Its owner sees the reason.";

const peer = location.pathname.split("/")[2];

start((page, look) => {
  const heading = h("h1", {}, "Node");
  const showHeading = region(heading,
    (node) => [node.name, " ", h("span", { class: `chip ${chip(standing(node)).tone}` }, standing(node))]);
  const tools = h("div", { class: "tools" });
  const showTools = region(tools, ({ name, state, maySuspend, mayRestore }) => [
    state === "active" && maySuspend
      ? h("button", { type: "button", class: "danger", "data-key": "suspend", onclick: () => askReason({
          title: `Suspend ${name}`, verb: "Suspend", danger: true, path: `/v1/nodes/${peer}/suspend`, done: look,
          about: SUSPENSION }) }, "Suspend ...")
      : null,
    state !== "active" && mayRestore
      ? h("button", { type: "button", "data-key": "restore", onclick: () => askReason({
          title: `Restore ${name}`, verb: "Restore", path: `/v1/nodes/${peer}/restore`, done: look,
            about: "It takes part again." }) }, "Restore ...")
      : null,
  ]);
  const [matter, showMatter] = matters();
  const [tiles, showTiles] = figures("the node in figures");
  const [states, showStates] = rolloutStates();
  const facts = h("dl", { class: "facts" });
  const showFacts = region(facts,
    (pairs) => pairs.map(([name, value]) =>
    h("div", {}, h("dt", {}, name),
    h("dd", {}, shown(value),
    value.none === undefined ? null : h("span", { class: "quiet", "aria-hidden": "true" }, ` ${value.none}`)))));
  const happened = h("div", { class: "scroll" });
  const showHappened = region(happened, (events) => events.length
    ? h("table", { class: "plain" },
        h("thead", {}, h("tr", {},
          ...["when", "who", "what", "reason"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, ...events.map((event) => {
          const when = clock(event.wall_seconds);
          return h("tr", {}, h("td", { class: "whole" }, h("time", { datetime: when.iso }, `${when.day} ${when.time}`)),
            h("td", {}, event.actor === peer ? "the node itself" : event.actor),
            h("td", { class: "whole" }, event.action), h("td", { class: "remark" }, event.reason));
        })))
    : h("p", { class: "quiet" }, `nothing about this node among the last ${EVENTS_LOOKED_AT} events`));
  page.append(h("div", { class: "bar" }, heading, tools), matter, section("Figures", tiles),
    section("Rollouts by state", states), section("What is known of it", facts),
      section("What happened to it", happened));
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
    const events = await onePage(`/v1/events?limit=${EVENTS_LOOKED_AT}`);
    showHeading({ name: node.name, state: node.state, health: node.health, standby: node.standby });
    showTools({ name: node.name, state: node.state, maySuspend: may("suspend"), mayRestore: may("restore") });
    showMatter([matterOf(node)]);
    showTiles([
      { label: "mu", value: node.mu === null ? { none: "it has not held work yet" }
        : { text: `${digits(node.mu)} rollouts/s` }, about: "accepted rollouts a second while it holds work" },
      { label: "tokens", value: node.tokens_per_second ? tokenRate(node.tokens_per_second)
        : { none: "it has said of none yet" }, about: "by its own word" },
      { label: "price", value: node.price_hour ? { text: `${dollars(node.price_hour).text}/h` }
        : { none: "a volunteer: it has no price" } },
      { label: "rho", value: rho(node), about: "dollars for 1,000 rollouts" },
      { label: "version", value: node.version === null ? { none: "it has no snapshot yet" }
        : { text: `${node.version} (epoch ${node.epoch})` } },
      { label: "version lag",
        value: node.version_lag === null ? { none: "nothing to compare" }
        : { text: `${node.version_lag} ${node.version_lag === 1 ? "step" : "steps"}` } },
      { label: "leases held", value: { text: `${node.leases_held} (${node.samples_held} samples)` } },
      { label: "accepted", value: count(node.accepted) },
      { label: "evaluated", value: count(node.evaluated), about: "answers to held-out prompts" },
      { label: "last seen", value: ago(node.last_seen_seconds, "not since the coordinator started") },
      { label: "protocol errors", value: count(node.protocol_errors) },
    ]);
    showStates(node.rollouts);
    showFacts([
      ["peer id", { text: node.peer }],
      ["software", node.software ? { text: node.software } : { none: "it did not say" }],
      ["addresses", node.addresses.length ? { text: node.addresses.join(", ") }
        : { none: "it cannot be dialled: it receives snapshots and passes none on" }],
      ["it says", node.node_says ? { text: node.node_says } : { none: "not heard of yet" }],
    ]);
    showHappened(events.items.filter((event) => event.subject === peer).slice(0, 50));
    title(`${node.name} - Node`);
  };
});

function matterOf(node) {
  if (node.reason) return { tone: node.state === "active" ? "warn" : "bad", text: node.reason };
  if (node.health === "healthy") return { tone: "ok", text: `it is ${node.node_says || "here"}` };
  const heard = ago(node.last_seen_seconds).text ?? "before the coordinator started";
  return { tone: "warn", text: `it is ${node.health}: last heard of ${heard}` };
}
