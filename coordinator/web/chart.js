// Charts in SVG: lines, points and bars with axes, units, a tooltip that keys can move, and the numbers as a table.

import { h, s, say } from "./dom.js";
import { digits } from "./format.js";

const HEIGHT = 190;
const MARGIN = { top: 10, right: 14, bottom: 40, left: 58 };
const TABLE_ROWS_MAX = 500;

/** Round steps that cover [low, high] with about `count` of them. */
function ticks(low, high, count, whole = false) {
  const raw = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((size) => size >= raw - 1e-12);
  if (whole) step = Math.max(1, Math.ceil(step));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

/**
 * A figure. spec: {title, about, x: {label}, y: {label, unit, from, to}, kind: "line" | "bars"}.
 * `update(series, reason)`: series [{name, style: "line" | "points" | "dashed", tone, points: [[x, y], ...]}];
 * without any point the reason is shown.
 */
export function chart(spec) {
  const svg = s("svg", { class: "plot", role: "img", tabindex: "0" });
  const tip = h("div", { class: "tip", hidden: true });
  const empty = h("p", { class: "empty" });
  const legend = h("ul", { class: "legend" });
  const numbers = h("details", { class: "numbers" });
  const box = h("div", { class: "plot-box" }, svg, tip);
  const figure = h(
    "figure", { class: "chart" },
    h("figcaption", {}, h("strong", {}, spec.title), spec.about ? h("span", { class: "quiet" }, spec.about) : null),
    legend, empty, box, numbers,
  );
  const state = { series: [], xs: [], cursor: null, shown: "" };

  function place() {
    const width = Math.max(240, box.clientWidth || 480);
    const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    const xs = state.series.flatMap((one) => one.points.map((point) => point[0]));
    const ys = state.series.flatMap((one) => one.points.map((point) => point[1]));
    let [left, right] = [Math.min(...xs), Math.max(...xs)];
    if (spec.kind === "bars") [left, right] = [left - 0.5, right + 0.5];
    else if (left === right) [left, right] = [left - 1, right + 1];
    let low = spec.y.from ?? Math.min(...ys);
    let high = spec.y.to ?? Math.max(...ys);
    if (spec.y.from === undefined && spec.y.to === undefined) {
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      [low, high] = [low - room, high + room];
    } else if (spec.y.to === undefined) high = Math.max(high * 1.05, low + 1e-9);
    if (high <= low) high = low + 1;
    return {
      width, inner, left, right, low, high,
      x: (value) => MARGIN.left + (inner.width * (value - left)) / (right - left),
      y: (value) => MARGIN.top + inner.height * (1 - (value - low) / (high - low)),
    };
  }

  function axes(at) {
    const parts = [];
    const bottom = MARGIN.top + at.inner.height;
    for (const value of ticks(at.low, at.high, 4)) {
      parts.push(s("line",
        { class: "grid", x1: MARGIN.left, x2: at.width - MARGIN.right, y1: at.y(value), y2: at.y(value) }));
      parts.push(s("text", { class: "tick end", x: MARGIN.left - 6, y: at.y(value) + 4 },
        digits(Number(value.toPrecision(6)))));
    }
    const marks = spec.kind === "bars" ? thin(state.xs, at.inner.width / 34)
      : ticks(at.left, at.right, at.inner.width / 60, true);
    for (const value of marks) {
      parts.push(s("text", { class: "tick middle", x: at.x(value), y: bottom + 16 },
        spec.x.name?.(value) ?? digits(value)));
    }
    parts.push(s("line", { class: "axis", x1: MARGIN.left, x2: at.width - MARGIN.right, y1: bottom, y2: bottom }));
    parts.push(s("text", { class: "label middle", x: MARGIN.left + at.inner.width / 2, y: HEIGHT - 5 }, spec.x.label));
    const turned = `translate(13 ${MARGIN.top + at.inner.height / 2}) rotate(-90)`;
    const unit = spec.y.unit ? `${spec.y.label} (${spec.y.unit})` : spec.y.label;
    parts.push(s("text", { class: "label middle", transform: turned }, unit));
    return parts;
  }

  function drawn(one, at) {
    const tone = `tone-${one.tone ?? 1}`;
    if (spec.kind === "bars") {
      const wide = Math.max(1, Math.min(46, (0.8 * at.inner.width) / (at.right - at.left)));
      return one.points.map(([x, y]) =>
        s("rect", { class: `bar ${tone}`, x: at.x(x) - wide / 2, y: at.y(y), width: wide,
          height: Math.max(0, at.y(at.low) - at.y(y)) }));
    }
    if (one.style === "points") {
      return one.points.map(([x, y]) => s("circle", { class: `point ${tone}`, cx: at.x(x), cy: at.y(y), r: 4 }));
    }
    if (one.points.length === 1) {
      return [s("circle", { class: `point ${tone}`, cx: at.x(one.points[0][0]), cy: at.y(one.points[0][1]), r: 3 })];
    }
    const path = one.points.map(([x, y], place) => `${place ? "L" : "M"}${at.x(x).toFixed(1)} ${at.y(y).toFixed(1)}`);
    return [s("path", { class: `line ${tone}${one.style === "dashed" ? " dashed" : ""}`, d: path.join("") })];
  }

  function draw() {
    if (!state.xs.length) return;
    const at = place();
    svg.setAttribute("viewBox", `0 0 ${at.width} ${HEIGHT}`);
    svg.setAttribute("height", HEIGHT);
    const cursor = s("g", { class: "cursor" });
    svg.replaceChildren(...axes(at), ...state.series.flatMap((one) => drawn(one, at)), cursor);
    state.at = at;
    state.mark = cursor;
    if (state.cursor !== null) point(state.cursor);
  }

  function point(index) {
    const x = state.xs[index];
    if (x === undefined) return;
    state.cursor = index;
    const { at } = state;
    const found = state.series
      .map((one) => [one, one.points.find((candidate) => candidate[0] === x)])
      .filter(([, candidate]) => candidate);
    state.mark.replaceChildren(
      s("line", { class: "cursor-line", x1: at.x(x), x2: at.x(x), y1: MARGIN.top, y2: MARGIN.top + at.inner.height }),
      ...found.map(([one, [, y]]) =>
        s("circle", { class: `point tone-${one.tone ?? 1}`, cx: at.x(x), cy: at.y(y), r: 4.5 })),
    );
    tip.replaceChildren(
      h("strong", {}, `${spec.x.label} ${spec.x.name?.(x) ?? digits(x)}`),
      ...found.map(([one, [, y]]) => h("div", {}, `${one.name}: ${written(y)}`)),
    );
    tip.hidden = false;
    const [right, wide] = [at.x(x) + 10, tip.offsetWidth];
    tip.style.left = `${right + wide > at.width ? Math.max(0, right - wide - 20) : right}px`;
    say(live, tip.textContent);
  }

  const live = h("span", { class: "unseen", role: "status", "aria-live": "polite" });
  figure.append(live);
  const written = (value) => `${digits(value)}${spec.y.unit ? ` ${spec.y.unit}` : ""}`;
  const leave = () => {
    state.cursor = null;
    tip.hidden = true;
    state.mark?.replaceChildren();
  };
  svg.addEventListener("pointermove", (event) => {
    if (!state.at) return;
    const bounds = svg.getBoundingClientRect();
    const x = ((event.clientX - bounds.left) * state.at.width) / bounds.width;
    let best = 0;
    state.xs.forEach((value, index) => {
      if (Math.abs(state.at.x(value) - x) < Math.abs(state.at.x(state.xs[best]) - x)) best = index;
    });
    point(best);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const last = state.xs.length - 1;
    const from = state.cursor ?? last + 1;
    const to = { ArrowLeft: from - 1, ArrowRight: (state.cursor ?? -1) + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") leave();
    if (to === undefined || last < 0) return;
    event.preventDefault();
    point(Math.min(Math.max(to, 0), last));
  });

  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth !== width) {
      width = box.clientWidth;
      draw();
    }
  }).observe(box);

  numbers.append(h("summary", {}, "as a table"));
  const table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${spec.title}, as a table` });
  numbers.append(table);
  const fill = () => {
    if (numbers.open) table.replaceChildren(tableOf(spec, state, written));
  };
  numbers.addEventListener("toggle", fill);

  function update(series, reason = "nothing measured yet") {
    const now = JSON.stringify([series, reason]);
    if (now === state.shown) return;
    state.shown = now;
    state.series = series.filter((one) => one.points.length);
    state.xs = [...new Set(state.series.flatMap((one) => one.points.map((candidate) => candidate[0])))].sort((a, b) =>
      a - b);
    if (state.cursor !== null) state.cursor = Math.min(state.cursor, state.xs.length - 1);
    const none = !state.xs.length;
    say(empty, none ? `- (${reason})` : "");
    [empty.hidden, box.hidden, numbers.hidden] = [!none, none, none];
    legend.hidden = none || state.series.length < 2;
    legend.replaceChildren(...state.series.map((one) =>
      h("li", {}, s("svg", { class: "key", width: 18, height: 10, "aria-hidden": "true" },
        one.style === "points"
          ? s("circle", { class: `point tone-${one.tone ?? 1}`, cx: 9, cy: 5, r: 4 })
          : s("path", { class: `line tone-${one.tone ?? 1}${one.style === "dashed" ? " dashed" : ""}`, d: "M0 5H18" })),
            one.name)));
    svg.setAttribute("aria-label",
      none ? spec.title : `${spec.title}. ${summary(state.series, spec, written)} Arrow keys read the points.`);
    draw();
    fill();
  }
  return { element: figure, update };
}

function summary(series, spec, written) {
  return series
    .map((one) => {
      const last = one.points[one.points.length - 1];
      const ys = one.points.map((candidate) => candidate[1]);
      const [least, most] = [written(Math.min(...ys)), written(Math.max(...ys))];
      const newest = `at ${spec.x.label} ${digits(last[0])}: ${written(last[1])}`;
      return `${one.name}: ${one.points.length} values from ${least} to ${most}, ${newest}.`;
    })
    .join(" ");
}

function thin(values, most) {
  const every = Math.max(1, Math.ceil(values.length / Math.max(most, 1)));
  return values.filter((_, index) => index % every === 0);
}

function tableOf(spec, state, written) {
  const rows = state.xs.slice(-TABLE_ROWS_MAX).reverse();
  const lookup = state.series.map((one) => new Map(one.points));
  return h(
    "table", { class: "plain" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, spec.x.label),
      ...state.series.map((one) => h("th", { scope: "col" }, one.name)))),
    h("tbody", {}, ...rows.map((x) =>
      h("tr", {}, h("th", { scope: "row" }, spec.x.name?.(x) ?? digits(x)),
        ...lookup.map((points) => h("td", { class: "num" }, points.has(x) ? written(points.get(x)) : "-"))))),
  );
}
