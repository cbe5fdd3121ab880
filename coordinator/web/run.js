// A run: what it learns, how stale, how long it waits, what it costs.

import { h, region } from "./dom.js";
import { chart } from "./chart.js";
import { askReason } from "./dialog.js";
import { count, digits, dollars, duration, nats, number, percent } from "./format.js";
import { chip, figures, gauge, matters, progress, rolloutStates, runMatters, section, whyNoMinimum } from "./parts.js";
import { Problem, get, may } from "./rest.js";
import { start, title } from "./shell.js";

const HISTOGRAM_STEPS = 50;

const name = decodeURIComponent(location.pathname.split("/")[2]);
const path = `/v1/runs/${encodeURIComponent(name)}`;
const STEP = { label: "step" };

start((page, look) => {
  const heading = h("h1", {}, name);
  const showHeading = region(heading, (state) => [name, " ", h("span", { class: `chip ${chip(state).tone}` }, state)]);
  const act = (verb, about, danger) => h("button", {
    type: "button", class: danger ? "danger" : null, "data-key": verb,
    onclick: () => askReason({ title: `${verb} ${name}`, verb, about, danger, path: `${path}/${verb.toLowerCase()}`,
      done: look }),
  }, `${verb} ...`);
  const tools = h("div", { class: "tools" });
  const showTools = region(tools, ({ state, pause, resume, stop }) => [
    pause && state === "running" ? act("Pause", "No new leases until it is resumed. What is out comes back.") : null,
    resume && state === "paused" ? act("Resume", "Leases flow again.") : null,
    stop && !["finished", "stopped"].includes(state)
      ? act("Stop", "This ends the run for good: no new leases, the learner ends its step. It cannot be undone.", true)
      : null,
  ]);
  const [matter, showMatter] = matters();
  const [bar, showBar] = progress("training steps");
  const [tiles, showTiles] = figures("the run in figures");
  const [money, showMoney] = figures("what the run costs");
  const [speed, showSpeed] = gauge();
  const [states, showStates] = rolloutStates();
  const reward = chart({ title: "Reward", about: "mean of each step's batch, and of the held-out prompts", x: STEP,
    y: { label: "mean reward" } });
  const stale = chart({ title: "Staleness", about: `rollouts of the last ${HISTOGRAM_STEPS} steps by age`, kind: "bars",
    x: { label: "staleness (steps)", name: String }, y: { label: "rollouts", from: 0 } });
  const bubble = chart({ title: "Bubble", about: "share of a step in which the learner waited", x: STEP,
    y: { label: "waiting", unit: "%", from: 0, to: 100 } });
  const times = chart({ title: "Time of a step", about: "training, and waiting for rollouts", x: STEP,
    y: { label: "time", unit: "s", from: 0 } });
  const kl = chart({ title: "KL",
    about: "learner against sampler, and against the base model where there is a reference", x: STEP,
    y: { label: "KL", unit: "nats" } });
  const lengths = chart({ title: "Response length", about: "mean of each step", x: STEP,
    y: { label: "length", unit: "tokens", from: 0 } });
  const held = h("div", { class: "scroll" });
  const showHeld = region(held, evaluationTable);
  page.append(h("div", { class: "bar" }, heading, tools), matter, bar, section("Figures", tiles),
    section("Speed", speed),
    section("Money", money),
    section("Curves", h("div", { class: "charts" },
      ...[reward, stale, bubble, times, kl, lengths].map((one) => one.element))),
    section("Held-out evaluations", held), section("Rollouts by state", states));
  return async () => {
    let run;
    try {
      run = await get(path);
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 404) throw error;
      showMatter([{ tone: "bad", text: error.message }]);
      title("No such run");
      return;
    }
    const pool = await get("/v1/pool");
    showHeading(run.state);
    showTools({ state: run.state, pause: may("POST /v1/runs/{run}/pause"),
      resume: may("POST /v1/runs/{run}/resume"), stop: may("POST /v1/runs/{run}/stop") });
    showMatter(runMatters(run, pool));
    showBar({ done: run.learner_version, all: run.steps });
    const noStep = "no step was reported yet";
    showTiles([
      { label: "task", value: { text: run.task } },
      { label: "model", value: { text: run.model } },
      { label: "reward, last step", value: number(run.reward_mean, noStep) },
      { label: "held-out reward", value: number(newest(run.evaluations), "no evaluation is complete yet") },
      { label: "bubble", value: percent(run.bubble, noStep),
        about: "share of its time in which the learner waited, since the first step" },
      { label: "staleness, last step",
        value: run.staleness === null ? { none: noStep }
        : { text: `${run.staleness} of at most ${run.staleness_max} steps` } },
      { label: "KL, last step", value: nats(run.kl, noStep), about: "learner against sampler" },
      { label: "T_train", value: duration(run.t_train_seconds, "no step was timed yet") },
      { label: "T_bcast", value: duration(run.t_bcast_seconds, "no broadcast was timed yet") },
      { label: "version", value: run.version === null ? { none: "nothing published yet" }
        : { text: `${run.version} (epoch ${run.epoch})` } },
      { label: "out on lease", value: { text: `${count(run.outstanding).text} rollouts` } },
      { label: "pacing", value: run.reserved_max === null ? { none: "nothing published yet" }
        : { text: `${count(run.reserved).text} of ${count(run.reserved_max).text} rollouts` },
        about: "consumed, queued and out, of what may be under this version" },
      { label: "S, kappa", value: { text: `${run.staleness_max}, ${run.publish_period} steps` },
        about: "the staleness budget, and the steps between two snapshots" },
      { label: "R, n", value: { text: `${run.rollouts_per_step}, ${run.group_size} rollouts` },
        about: "of a training step, and of one prompt" },
      { label: "learner", value: run.learner_status ? { text: run.learner_status }
        : { none: "it has not reported yet" } },
    ]);
    showSpeed({ mu_pool: run.mu_pool, mu_min: run.mu_min, mu_target: run.mu_target, why: whyNoMinimum(run) });
    showMoney([
      { label: "spent", value: dollars(run.spent_dollars), about: "pay of its nodes so far; the learner is not in it" },
      { label: "committed", value: dollars(run.committed_dollars), about: "what may still become due of what is out" },
      { label: "budget", value: dollars(run.budget_dollars, "no budget is set"),
        about: "spent and committed together never pass it" },
      { label: "cost per hour", value: dollars(run.cost_hour_dollars),
        about: "what the nodes that are activated ask together" },
      { label: "cost per step", value: dollars(run.learner_version ? run.spent_dollars / run.learner_version : null,
        "no step is finished yet"), about: "spent, over the steps that are finished" },
      { label: "credits", value: number(run.credits), about: "that its nodes earned" },
    ]);
    curves(run);
    showHeld(run.evaluations);
    showStates(run.rollouts);
    title(`${run.state}, step ${run.learner_version} of ${run.steps} - ${name}`);
  };

  function curves(run) {
    const of = (value) =>
      run.series.map((step) => [step.step, value(step)]).filter(([, y]) => y !== null && y !== undefined);
    const none = "no step was reported yet";
    reward.update([
      { name: "training", points: of((step) => step.reward_mean), tone: 1 },
      { name: "held out", style: "points",
        points: run.evaluations.filter((one) => one.complete
        && one.mean !== null).map((one) => [one.version, one.mean]), tone: 2 },
    ], none);
    stale.update([{ name: "rollouts", points: histogram(run.series.slice(-HISTOGRAM_STEPS)), tone: 1 }],
      run.series.length ? "the learner does not report it" : none);
    bubble.update([{ name: "waiting", points: of((step) => share(step)), tone: 2 }], none);
    times.update([
      { name: "training", points: of((step) => step.train_seconds), tone: 1 },
      { name: "waiting", style: "dashed", points: of((step) => step.idle_seconds), tone: 2 },
    ], none);
    kl.update([
      { name: "learner to sampler", points: of((step) => step.kl), tone: 1 },
      { name: "to the base model", style: "dashed", points: of((step) => step.kl_reference), tone: 3 },
    ], none);
    lengths.update([{ name: "response", points: of((step) => step.response_tokens_mean), tone: 1 }], none);
  }
});

const newest = (evaluations) => evaluations.filter((one) => one.complete && one.mean !== null).at(-1)?.mean ?? null;

function share(step) {
  const whole = step.idle_seconds + step.train_seconds;
  return whole > 0 ? (100 * step.idle_seconds) / whole : null;
}

function histogram(series) {
  const sums = [];
  for (const step of series) step.staleness_counts.forEach((value, age) => (sums[age] = (sums[age] ?? 0) + value));
  return Array.from(sums, (value, age) => [age, value ?? 0]);
}

function evaluationTable(evaluations) {
  if (!evaluations.length) return h("p", { class: "quiet" }, "none yet");
  return h("table", { class: "plain" },
    h("thead", {}, h("tr", {},
      ...["version", "purpose", "mean reward", "answers", "of each prompt",
      "remark"].map((label) => h("th", { scope: "col" }, label)))),
    h("tbody", {}, ...[...evaluations].reverse().map((one) => h("tr", {},
      h("th", { scope: "row" }, String(one.version)), h("td", {}, one.purpose),
      h("td", { class: "num" }, one.mean === null ? "-" : digits(one.mean)),
      h("td", { class: "num" }, `${one.count} of ${one.size}`), h("td", { class: "num" }, String(one.samples)),
      h("td", { class: "remark" }, one.complete ? "complete" : one.reason || "under way")))));
}
