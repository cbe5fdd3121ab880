// Appeals that wait for an answer, for those who may answer.

import { h } from "./dom.js";
import { askReason } from "./dialog.js";
import { clock, short } from "./format.js";
import { section, textTable } from "./parts.js";
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

function cells(appeal, done) {
  const when = clock(appeal.created_seconds);
  const button = (verb, act, tone) => h("button", { type: "button", class: tone, "data-key": `${verb}-${appeal.id}`,
    onclick: () => act(appeal, done), "aria-label": `${verb} appeal ${appeal.id} ...` }, `${verb} ...`);
  return [
    h("a", { href: `/nodes/${appeal.peer}`, "data-key": `of-${appeal.id}`, title: appeal.peer },
      appeal.name || short(appeal.peer)),
    `${when.day} ${when.time}`,
    h("span", { title: appeal.subject },
      appeal.subject === "suspension" ? "its suspension" : `lease ${appeal.subject.slice(0, 12)}`),
    appeal.text,
    h("div", { class: "tools" }, button("Uphold", uphold, null), button("Refuse", refuse, "danger")),
  ];
}

/** A part of a page that is there for whoever may answer. Returns [element, refresh()]. */
export function appealsPart(done) {
  const [list, show] = textTable(["node", "when", "about", "what its owner says", "answer"], {
    label: "appeals that wait for an answer", long: "what its owner says", empty: "none waits for an answer",
    row: (appeal) => cells(appeal, done) });
  const element = section("Appeals", list);
  element.hidden = true;
  return [element, async () => {
    element.hidden = !may(ANSWER);
    if (!element.hidden) show((await get("/v1/appeals")).filter((appeal) => appeal.state === "open"));
  }];
}
