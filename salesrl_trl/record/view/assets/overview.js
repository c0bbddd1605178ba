// Steps by branch of one run.
import { h, Fragment } from "./vendor/preact.mjs";
import { number, percent, t, whole } from "./words.js";
import { address, ask, change, views } from "./core.js";
import { Bars, Chart } from "./chart.js";
import {
  colorOf,
  manyBranches,
  modeOf,
  modeOptions,
  Note,
  outcomeName,
  runName,
  runOptions,
  Section,
  Select,
  Table,
  Title,
} from "./parts.js";

export const LATEST = 60;

export const branchesOf = (steps) => [...new Set(steps.map((each) => each.branch))].sort();
export const lineOf = (steps, branch, value) =>
  steps.filter((each) => each.branch === branch).map((each) => [each.step, value(each)]);

// A branch's name is of no use where there is no other.
const branchName = (name) => (manyBranches() ? name : t("list"));

// The rewards of one step, and what chooses the step.
function Histogram({ found, numbers }) {
  const at = numbers.indexOf(found.step);
  return h(
    "div",
    null,
    found.edges.length > 0
      ? h(Bars, {
          title: t("rewards_of", found.step),
          edges: found.edges,
          parts: Object.entries(found.counts).map(([name, bins]) => ({ name: branchName(name), bins, color: colorOf(name) })),
          columns: 2,
        })
      : h(Note, null, t("no_rewards", found.step)),
    numbers.length > 1 &&
      h(
        "label",
        { class: "slider" },
        h("span", null, t("step"), ` ${found.step}`),
        h("input", {
          type: "range",
          name: "at",
          min: 0,
          max: numbers.length - 1,
          value: at,
          "aria-valuetext": String(found.step),
          onInput: (event) => change({ at: numbers[event.target.value] }),
        }),
      ),
  );
}

function Overview({ steps, found }, params) {
  const run = Number(params.run ?? 0),
    mode = modeOf(params),
    branches = branchesOf(steps);
  const series = (value) =>
    branches.map((name, at) => ({ name: branchName(name), color: colorOf(name), dash: at, points: lineOf(steps, name, value) }));
  const outcomes = [...new Set(steps.flatMap((each) => Object.keys(each.outcomes)))].sort();
  const numbers = [...new Set(steps.map((each) => each.step))];
  const first = params.all ? -Infinity : (numbers.at(-Math.min(LATEST, numbers.length)) ?? 0);
  const shown = steps.filter((each) => each.step >= first).sort((a, b) => b.step - a.step);
  const isWhole = steps.every((each) => each.scored === each.many);
  const columns = [
    [t("step"), "n", (each) => stepLink(each, run, mode)],
    manyBranches() && [t("branch"), "", (each) => each.branch],
    [t("reward"), "n", (each) => number(each.reward)],
    steps.some((each) => each.reference !== null) && [t("reference_reward"), "n extra", (each) => number(each.reference)],
    [t("scored"), "n", (each) => `${percent(each.scored / each.many)} (${each.scored}/${each.many})`],
    ...(outcomes.length > 1
      ? outcomes.map((code) => [outcomeName(code, run), "n extra title", (each) => each.outcomes[code] ?? 0])
      : []),
  ].filter(Boolean);
  return h(
    Fragment,
    null,
    h(
      "div",
      { class: "head" },
      h(Title, null, t("overview"), " · ", runName(run)),
      h(
        "form",
        { class: "choices", onSubmit: (event) => event.preventDefault() },
        runOptions().length > 1 &&
          h(Select, { name: "run", label: t("run"), options: runOptions(), empty: false, value: String(run) }),
        h(Select, { name: "mode", label: t("mode"), options: modeOptions(), empty: false, value: mode }),
      ),
    ),
    steps.length
      ? h(
          Fragment,
          null,
          h(
            "div",
            { class: "charts" },
            h(Chart, {
              title: t("mean_reward"),
              series: series((each) => each.reward),
              columns: 2,
              picked: found.step,
              onPick: (step) => change({ at: step }),
            }),
            h(Histogram, { found, numbers }),
            !isWhole &&
              h(Chart, {
                title: t("scored_share"),
                series: series((each) => each.scored / each.many),
                domain: [0, 1],
                columns: 2,
              }),
          ),
          isWhole && h(Note, null, t("all_scored")),
          h(
            Section,
            { title: t("steps_table") },
            numbers.length > LATEST &&
              !params.all &&
              h(
                Note,
                null,
                t("latest", LATEST, whole(numbers.length)),
                " ",
                h("button", { type: "button", onClick: () => change({ all: 1 }) }, t("show_all")),
              ),
            h(Table, {
              caption: t("steps_table"),
              columns,
              rows: shown.map((each) => columns.map(([, , cell]) => cell(each))),
            }),
          ),
        )
      : h(Note, null, t("no_steps")),
  );
}

const stepLink = ({ step, branch }, run, mode) =>
  h("a", { href: address("list", { run, mode, step_min: step, step_max: step, branch }) }, step);

views.overview = {
  async ask(params) {
    const which = { run: params.run ?? 0, mode: modeOf(params) };
    const [{ steps }, found] = await Promise.all([
      ask("overview", which),
      ask("histogram", { ...which, step: params.at }),
    ]);
    return { steps, found };
  },
  View: Overview,
  title: (_, params) => `${t("overview")} · ${runName(Number(params.run ?? 0))}`,
};
