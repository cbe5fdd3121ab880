// Appeals that wait for an answer, for those who may answer.

import { h, region } from "./dom.js";
import { askReason } from "./dialog.js";
import { clock, short } from "./format.js";
import { section } from "./parts.js";
import { get, may } from "./rest.js";

const ANSWER = "POST /v1/appeals/{id}/resolve";
const MICRO = 1e6;

function uphold(appeal, done) {
  askReason({
    title: `Uphold appeal ${appeal.id} of ${appeal.name || short(appeal.peer)}`, verb: "Uphold", done,
    about: "Its owner sees the reason. It is for good; a suspension is lifted on the node's page.",
    path: `/v1/appeals/${appeal.id}/resolve`,
    fields: [
      h("label", { for: "amount" }, "Adjustment, if there is one"),
      h("input", { id: "amount", name: "amount", type: "number", step: "any" }),
      h("label", { for: "unit" }, "in"),
      h("select", { id: "unit", name: "unit" }, h("option", { value: "usd" }, "dollars"),
        h("option", { value: "credit" }, "credits")),
    ],
    body: ({ amount, unit }) => ({ upheld: true, amount_micros: Math.round(MICRO * Number(amount)), unit }),
  });
}

function refuse(appeal, done) {
  askReason({
    title: `Refuse appeal ${appeal.id} of ${appeal.name || short(appeal.peer)}`, verb: "Refuse", done, danger: true,
    about: "Its owner sees the reason. It is for good.", path: `/v1/appeals/${appeal.id}/resolve`,
    body: () => ({ upheld: false }),
  });
}

function row(appeal, done) {
  const when = clock(appeal.created_seconds);
  return h("tr", {},
    h("th", { scope: "row" }, h("a", { href: `/nodes/${appeal.peer}`, "data-key": `of-${appeal.id}`,
      title: appeal.peer }, appeal.name || short(appeal.peer))),
    h("td", { class: "whole" }, h("time", { datetime: when.iso }, `${when.day} ${when.time}`)),
    h("td", { title: appeal.subject }, appeal.subject === "suspension" ? "its suspension"
      : `lease ${appeal.subject.slice(0, 12)}`),
    h("td", { class: "remark" }, appeal.text),
    h("td", {}, h("div", { class: "tools" },
      h("button", { type: "button", "data-key": `uphold-${appeal.id}`, onclick: () => uphold(appeal, done),
        "aria-label": `Uphold appeal ${appeal.id} ...` }, "Uphold ..."),
      h("button", { type: "button", class: "danger", "data-key": `refuse-${appeal.id}`,
        onclick: () => refuse(appeal, done), "aria-label": `Refuse appeal ${appeal.id} ...` }, "Refuse ..."))));
}

/** A part of a page that is there for whoever may answer. Returns [element, refresh()]. */
export function appealsPart(done) {
  const list = h("div", { class: "scroll" });
  const element = section("Appeals", list);
  element.hidden = true;
  const show = region(list, (open) => open.length
    ? h("table", { class: "plain" },
        h("thead", {}, h("tr", {},
          ...["node", "when", "about", "what its owner says", "answer"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, ...open.map((appeal) => row(appeal, done))))
    : h("p", { class: "quiet" }, "none waits for an answer"));
  return [element, async () => {
    element.hidden = !may(ANSWER);
    if (!element.hidden) show((await get("/v1/appeals")).filter((appeal) => appeal.state === "open"));
  }];
}
