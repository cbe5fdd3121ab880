// The audit log as it grows: what happened, who did it, and why.

import { h, say, speak } from "./dom.js";
import { clock, short } from "./format.js";
import { section } from "./parts.js";
import { page as onePage } from "./rest.js";
import { allNodes, knownRuns, start, title } from "./shell.js";
import { dataTable, filterBar } from "./table.js";

const PAGE_EVENTS = 200;
const KEPT_MAX = 5000;

start((page, look) => {
  const known = new Map();
  let names = new Map();
  let cursor = null;
  let first = true;
  const subject = (event) => (/^[1-9A-HJ-NP-Za-km-z]{40,64}$/.test(event.subject)
    ? { text: names.get(event.subject) ?? short(event.subject), href: `/nodes/${event.subject}`, title: event.subject }
    : { text: event.subject });
  const actor = (event) =>
    (names.has(event.actor) ? { text: names.get(event.actor), title: event.actor }
    : { text: event.actor.length > 40 ? short(event.actor) : event.actor, title: event.actor });
  const when = (event) => {
    const at = clock(event.wall_seconds);
    return { text: `${at.day} ${at.time}`, title: at.iso };
  };
  const table = dataTable([
    { name: "when", whole: true, cell: when, sort: (event) => event.id },
    { name: "who", cell: actor, sort: (event) => event.actor },
    { name: "what", cell: (event) => ({ text: event.action }), sort: (event) => event.action },
    { name: "to", cell: subject, sort: (event) => event.subject },
    { name: "why", long: true, cell: (event) => (event.reason ? { text: event.reason } : { none: "nothing was said" }),
      sort: (event) => event.reason || null },
  ], { key: (event) => String(event.id), label: "events", order: ["when", true], empty: "nothing has happened yet" });
  const bar = filterBar({
    label: "filter the events",
    changed: ({ text }) => table.filter((event) =>
      [event.actor, event.action, event.subject, names.get(event.subject), event.reason]
        .join(" ").toLowerCase().includes(text)),
  });
  const hold = h("input", { type: "checkbox", id: "hold" });
  const state = h("span", { class: "quiet" });
  const older = h("button", { type: "button" }, "Older");
  older.addEventListener("click", async () => {
    older.disabled = true;
    try {
      const found = await onePage(cursor);
      take(found);
      speak(`${found.items.length} older events`);
    } catch (error) {
      speak(error.message);
      say(state, error.message);
    }
    older.disabled = cursor === null || known.size >= KEPT_MAX;
    table.update([...known.values()]);
  });
  hold.addEventListener("change", () => {
    say(state, hold.checked ? "held: new ones are not added" : "");
    look();
  });
  page.append(h("h1", {}, "Events"),
    section("What happened",
      h("div", { class: "bar start" }, bar, h("span", {}, hold, " ", h("label", { for: "hold" }, "hold")), state),
      table.element,
      h("div", { class: "buttons" }, older)));

  function take({ items, next }, newest = false) {
    const fresh = items.filter((event) => !known.has(event.id));
    for (const event of fresh) known.set(event.id, event);
    if (!newest || first) cursor = next;
    return fresh.length;
  }

  return async () => {
    if (hold.checked && !first) return;
    const found = await onePage(`/v1/events?limit=${PAGE_EVENTS}`);
    const fresh = take(found, true);
    if (first || fresh) {
      names = new Map((await allNodes()).map((node) => [node.peer, node.name]));
      for (const run of knownRuns()) names.set(run.learner, "the learner");
    }
    if (!first && fresh) speak(`${fresh} new ${fresh === 1 ? "event" : "events"}`);
    while (known.size > KEPT_MAX) known.delete(Math.min(...known.keys()));
    older.disabled = cursor === null || known.size >= KEPT_MAX;
    first = false;
    table.update([...known.values()]);
    title("Events");
  };
});
