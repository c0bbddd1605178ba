// One run's steps by branch.
import { h, Fragment } from "./vendor/preact.mjs";
import { number, percent, t, whole } from "./words.js";
import { address, ask, change, views } from "./core.js";
import { Chart } from "./chart.js";
import {
  colorOf,
  manyBranches,
  modeOf,
  modeOptions,
  Note,
  outcomeName,
  RunChoice,
  runName,
  Section,
  Select,
  Table,
  Title,
} from "./parts.js";

const LATEST = 60;

export const branchesOf = (steps) => [...new Set(steps.map((each) => each.branch))].sort();
export const lineOf = (steps, branch, value) =>
  steps.filter((each) => each.branch === branch).map((each) => [each.step, value(each)]);

// The name of an only branch is omitted.
const branchName = (name) => (manyBranches() ? name : t("list"));

function Overview({ steps }, params) {
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
        h(RunChoice, { run: String(run) }),
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
            h(Chart, { title: t("mean_reward"), series: series((each) => each.reward), columns: 2 }),
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
  ask: (params) => ask("overview", { run: params.run ?? 0, mode: modeOf(params) }),
  View: Overview,
  title: (_, params) => `${t("overview")} · ${runName(Number(params.run ?? 0))}`,
};
