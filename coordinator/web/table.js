// A table that sorts, filters and keeps its rows: what did not change is not touched. Cards where it is narrow.

import { h, say } from "./dom.js";

const ROWS_MAX = 500;

/**
 * columns: [{name, about, num, long, whole, cell: row => {text | none, href, tone, title},
 *   sort: row => number | string | null}].
 * options: {key: row => string, label, order: [column name, descending], cards: false for one that is narrow, empty}.
 */
export function dataTable(columns, options) {
  const body = h("tbody", { role: "rowgroup" });
  const buttons = new Map();
  const note = h("p", { class: "quiet count", role: "status" });
  let order = options.order ?? [columns[0].name, false];
  let rows = [];
  let narrow = () => true;
  const known = new Map();

  const head = h("tr", { role: "row" });
  for (const column of columns) {
    const th = h("th", { scope: "col", role: "columnheader", class: column.num ? "num" : null });
    if (column.sort) {
      const button = h("button", {
        type: "button", class: "sort", title: column.about ?? `sort by ${column.name}`,
        onclick: () => {
          order = [column.name, order[0] === column.name ? !order[1] : Boolean(column.num)];
          draw();
        },
      }, column.name);
      buttons.set(column.name, [th, button]);
      th.append(button);
    } else th.append(column.name);
    head.append(th);
  }
  const table = h("table",
    { class: options.cards === false ? "data" : "data cards", role: "table", "aria-label": options.label },
    h("thead", { role: "rowgroup" }, head), body);
  const element = h("div", { class: "data-box" }, h("div", { class: "scroll" }, table), note);

  function made(key) {
    const cells = columns.map((column) =>
      h("td", { role: "cell", "data-label": column.name, class: kind(column) }));
    const entry = { tr: h("tr", { role: "row", "data-row": key }, ...cells), cells,
      shown: columns.map(() => undefined) };
    known.set(key, entry);
    return entry;
  }

  function fill(entry, row) {
    columns.forEach((column, place) => {
      const value = column.cell(row);
      const now = JSON.stringify(value);
      if (entry.shown[place] === now) return;
      entry.shown[place] = now;
      const cell = entry.cells[place];
      const old = cell.firstElementChild;
      if (old?.tagName === "A" && value.href === old.getAttribute("href")) {
        say(old, value.text);
        return;
      }
      cell.replaceChildren(content(value));
    });
  }

  function draw() {
    const column = columns.find((candidate) => candidate.name === order[0]) ?? columns[0];
    const sign = order[1] ? -1 : 1;
    const found = rows.filter((row) => narrow(row));
    const keyed = found.map((row) => [column.sort(row), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || a === undefined) return b === null || b === undefined ? 0
        : 1; // what has no value is last either way
      if (b === null || b === undefined) return -1;
      return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
    });
    for (const [name, [th, button]] of buttons) {
      const way = name === order[0] ? (order[1] ? "descending" : "ascending") : null;
      if (way) th.setAttribute("aria-sort", way);
      else th.removeAttribute("aria-sort");
      button.dataset.way = way ?? "";
    }
    const wanted = keyed.slice(0, ROWS_MAX).map(([, row]) => {
      const key = options.key(row);
      const entry = known.get(key) ?? made(key);
      fill(entry, row);
      return entry.tr;
    });
    const kept = new Set(wanted);
    for (const [key, entry] of known) {
      if (!kept.has(entry.tr)) {
        entry.tr.remove();
        known.delete(key);
      }
    }
    let before = body.firstElementChild;
    for (const tr of wanted) {
      if (tr === before) before = before.nextElementSibling;
      else body.insertBefore(tr, before);
    }
    table.hidden = !wanted.length;
    const left = found.length - wanted.length;
    let words = "";
    if (!rows.length) words = options.empty ?? "none";
    else if (!found.length) words = `none of ${rows.length} fits the filter`;
    else if (left) words = `${left} more are not shown: filter or sort to see them`;
    else if (found.length < rows.length) words = `${found.length} of ${rows.length}`;
    say(note, words);
    note.hidden = !words;
  }

  return {
    element,
    update(values) {
      rows = values;
      draw();
    },
    filter(keep) {
      narrow = keep;
      draw();
    },
  };
}

const kind = ({ num, long, whole }) => (num && "num") || (long && "long") || (whole && "whole") || null;

function content(value) {
  if (value.none !== undefined) {
    return h("span", { class: "none", title: value.none }, "-", h("span", { class: "unseen" }, ` (${value.none})`));
  }
  const attributes = { title: value.title, class: value.tone ? `chip ${value.tone}` : null };
  return value.href ? h("a", { href: value.href, title: value.title }, value.text) : h("span", attributes, value.text);
}

/** A search field, reached with "/", and a choice beside it. `changed({text, choice})`. */
export function filterBar({ label, choices, changed }) {
  const input = h("input",
    { type: "search", id: "filter", placeholder: "filter", autocomplete: "off", spellcheck: "false" });
  const select = choices
    ? h("select", { id: "choice" }, ...choices.map(([value, name]) => h("option", { value }, name))) : null;
  const tell = () => changed({ text: input.value.trim().toLowerCase(), choice: select?.value ?? "" });
  input.addEventListener("input", tell);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && input.value) {
      input.value = "";
      tell();
      event.preventDefault();
    }
  });
  select?.addEventListener("change", tell);
  return h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    h("label", { for: "filter", class: "unseen" }, label), input,
    select ? h("label", { for: "choice", class: "unseen" }, "show") : null, select);
}
