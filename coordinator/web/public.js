// A run for everybody: what it learns, how far it is, and what volunteers did for it.

import { h, region } from "./dom.js";
import { chart } from "./chart.js";
import { connection } from "./shell.js";
import { count, number } from "./format.js";
import { live } from "./live.js";
import { chip, figures, progress, section } from "./parts.js";
import { Problem, get } from "./rest.js";
import { dataTable } from "./table.js";

const SECONDS = 10;

const name = decodeURIComponent(location.pathname.split("/")[2]);
const main = document.getElementById("main");
const page = h("div", { class: "page" });
const heading = h("h1", {}, name);
const showHeading = region(heading, (state) => [name, " ", h("span", { class: `chip ${chip(state).tone}` }, state)]);
const about = h("p", { class: "quiet" });
const showAbout = region(about,
  ({ task, model }) =>
  `The model ${model} learns the task ${task}, with rollouts that volunteers' computers generate.`);
const [bar, showBar] = progress("training steps");
const [tiles, showTiles] = figures("the run in figures");
const reward = chart({ title: "Reward", about: "mean of each training step, and of prompts it never trains on",
  x: { label: "step" }, y: { label: "mean reward" } });
const table = dataTable([
  { name: "contributor", cell: (one) => ({ text: one.name }), sort: (one) => one.name },
  { name: "nodes", num: true, cell: (one) => count(one.nodes), sort: (one) => one.nodes },
  { name: "rollouts trained on", num: true, cell: (one) => count(one.trained_on), sort: (one) => one.trained_on },
  { name: "rollouts accepted", num: true, cell: (one) => count(one.accepted), sort: (one) => one.accepted },
], { key: (one) => one.name, label: "contributions", cards: false, order: ["rollouts trained on", true],
  empty: "nobody yet" });
const left = h("p", { class: "quiet" });
const showLeft = region(left, (number) => (number ? `and ${count(number).text} more` : ""));
page.append(heading, about, bar, section("So far", tiles),
  section("What it learns", h("div", { class: "charts one" }, reward.element)),
  section("Who did it", table.element, left,
    h("p", { class: "quiet" }, "A name is what a volunteer chose; nodes of one name are counted together.")));

live(async () => {
  let run;
  try {
    run = await get(`/v1/public/runs/${encodeURIComponent(name)}`);
  } catch (error) {
    if (!(error instanceof Problem) || error.status !== 404) throw error;
    main.replaceChildren(h("h1", {}, "No such run"), h("p", {}, `There is no run ${name} here.`));
    return;
  }
  showHeading(run.state);
  showAbout({ task: run.task, model: run.model });
  showBar({ done: run.steps_done, all: run.steps });
  const newest = run.heldout.at(-1)?.reward ?? null;
  const before = run.heldout[0]?.reward ?? null;
  showTiles([
    { label: "nodes at work now", value: count(run.nodes_now) },
    { label: "nodes ever", value: count(run.nodes_ever) },
    { label: "rollouts trained on", value: count(run.rollouts_trained_on) },
    { label: "reward, last step", value: number(run.reward.at(-1)?.reward ?? null, "no step was trained yet") },
    { label: "held-out reward", value: number(newest, "no evaluation is complete yet"),
      about: "mean reward of prompts it never trains on" },
    { label: "held out, at the start", value: number(before, "no evaluation is complete yet") },
  ]);
  reward.update([
    { name: "training", points: run.reward.map((point) => [point.at, point.reward]), tone: 1 },
    { name: "held out", style: "points", points: run.heldout.map((point) => [point.at, point.reward]), tone: 2 },
  ], "no step was trained yet");
  table.update(run.contributors);
  showLeft(run.contributors_left_out);
  if (!page.isConnected) main.replaceChildren(page);
  const whole = `${name} - ECHO-2`;
  if (document.title !== whole) document.title = whole;
}, connection(null), { seconds: SECONDS, stream: false });
