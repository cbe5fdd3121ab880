// What may be done to a node: by the coordinator's own tables of states and of roles.

import { h, region } from "./dom.js";
import { askReason } from "./dialog.js";
import { may } from "./rest.js";
import { NODE_CHANGES } from "./rules.js";

const SECONDS_IN_HOUR = 3600;
const HOURS_MAX = 8784;
const GRAVE = new Set(["suspend", "ban"]);
const LEADS_TO = { suspend: "suspended", ban: "banned" };

const word = (verb) => verb[0].toUpperCase() + verb.slice(1);

function ask(verb, { name, peer, state }, done) {
  const { summary, expires } = NODE_CHANGES[verb];
  askReason({
    title: `${word(verb)} ${name}`, verb: word(verb), danger: GRAVE.has(verb), done,
    about: `${state === LEADS_TO[verb] ? "With another reason or another time. " : ""}${summary} `
      + "Its owner sees the reason.",
    path: `/v1/nodes/${peer}/${verb}`,
    fields: expires ? [
      h("label", { for: "hours" }, "Hours; empty: until it is taken back"),
      h("input", { id: "hours", name: "hours", type: "number", min: 0.01, max: HOURS_MAX, step: "any" }),
    ] : [],
    body: ({ hours }) => (hours ? { expires_seconds: SECONDS_IN_HOUR * Number(hours) } : {}),
  });
}

/** The buttons of a node's page. Returns [element, update(node)]. */
export function nodeActions(done) {
  const element = h("div", { class: "tools" });
  const show = region(element, ({ node, verbs }) => verbs.map((verb) => h("button", {
    type: "button", class: GRAVE.has(verb) ? "danger" : null, "data-key": verb, onclick: () => ask(verb, node, done),
  }, `${word(verb)} ...`)));
  return [element, ({ name, peer, state }) => show({
    node: { name, peer, state },
    verbs: Object.keys(NODE_CHANGES).filter((verb) =>
      NODE_CHANGES[verb].states.includes(state) && may(`POST /v1/nodes/{peer}/${verb}`)),
  })];
}
