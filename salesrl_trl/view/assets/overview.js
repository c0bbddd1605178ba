// Steps by branch of one run.
import { h, Fragment } from "./vendor/preact.mjs";
import { named, number, percent, t, whole } from "./words.js";
import { address, ask, change, page, views } from "./core.js";
import { Chart } from "./chart.js";
import { modeOptions, Note, runName, runOptions, Section, Select, Table, Title } from "./parts.js";

export const LATEST = 60;

export const branchesOf = (steps) => [...new Set(steps.map((each) => each.branch))].sort();
export const lineOf = (steps, branch, value) =>
  steps.filter((each) => each.branch === branch).map((each) => [each.step, value(each)]);

function Overview({ steps }, params) {
  const run = Number(params.run ?? 0),
    mode = params.mode || "train",
    branches = branchesOf(steps);
  const series = (value) =>
    branches.map((name, at) => ({ name, color: at, dash: at, points: lineOf(steps, name, value) }));
  const outcomes = [...new Set(steps.flatMap((each) => Object.keys(each.outcomes)))].sort();
  const numbers = [...new Set(steps.map((each) => each.step))];
  const first = params.all ? -Infinity : (numbers.at(-Math.min(LATEST, numbers.length)) ?? 0);
  const shown = steps.filter((each) => each.step >= first).sort((a, b) => b.step - a.step);
  return h(
    Fragment,
    null,
    h(Title, null, t("overview"), " · ", runName(run)),
    h(
      "form",
      { class: "filters row", onSubmit: (event) => event.preventDefault() },
      runOptions().length > 1 &&
        h(Select, { name: "run", label: t("run"), options: runOptions(), empty: false, value: String(run) }),
      h(Select, { name: "mode", label: t("mode"), options: modeOptions(), empty: false, value: mode }),
    ),
    steps.length
      ? h(
          Fragment,
          null,
          h(
            "div",
            { class: "charts" },
            h(Chart, { title: t("mean_reward"), series: series((each) => each.reward) }),
            h(Chart, { title: t("scored_share"), series: series((each) => each.scored / each.many), domain: [0, 1] }),
          ),
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
              columns: [
                [t("step"), "n"],
                [t("branch"), ""],
                [t("reward"), "n"],
                [t("reference_reward"), "n extra"],
                [t("scored"), "n"],
                ...outcomes.map((code) => [named(code), "n extra title"]),
              ],
              rows: shown.map((each) => [
                h(
                  "a",
                  {
                    href: address("list", {
                      run,
                      mode,
                      step_min: each.step,
                      step_max: each.step,
                      branch: each.branch,
                    }),
                  },
                  each.step,
                ),
                each.branch,
                number(each.reward),
                number(each.reference),
                `${percent(each.scored / each.many)} (${each.scored}/${each.many})`,
                ...outcomes.map((code) => each.outcomes[code] ?? 0),
              ]),
            }),
          ),
        )
      : h(Note, null, t("no_steps")),
  );
}

views.overview = {
  ask: (params) => ask("overview", { run: params.run ?? 0, mode: params.mode || "train" }),
  View: Overview,
  title: (_, params) => `${t("overview")} · ${runName(Number(params.run ?? 0))}`,
};
