// Two runs side by side.
import { h, Fragment } from "./vendor/preact.mjs";
import { number, signed, t, whole } from "./words.js";
import { ask, page, views } from "./core.js";
import { Chart } from "./chart.js";
import { ofRow } from "./list.js";
import { branchesOf, lineOf } from "./overview.js";
import { colorOf, manyBranches, modeOf, modeOptions, Note, runName, runOptions, Section, Select, Table, Title } from "./parts.js";

const chosenRuns = (params) => ({ one: params.one ?? "0", other: params.other ?? "1", mode: modeOf(params) });

function Compared(data, params) {
  const { one, other, mode } = chosenRuns(params);
  if (!data) return h(Fragment, null, h(Title, null, t("compare_title")), h(Note, null, t("one_run")));
  const sides = [
    [one, data.steps[0]],
    [other, data.steps[1]],
  ];
  const branches = branchesOf([...data.steps[0], ...data.steps[1]]);
  const series = sides.flatMap(([run, steps], side) =>
    branches.map((branch) => ({
      name: t("pair", runName(Number(run)), branch),
      color: colorOf(branch),
      dash: side,
      points: lineOf(steps, branch, (each) => each.reward),
    })),
  );
  const meanOf = (steps, branch) => {
    const some = steps.filter((each) => each.branch === branch && each.scored);
    const many = some.reduce((sum, each) => sum + each.scored, 0);
    return many ? some.reduce((sum, each) => sum + each.reward * each.scored, 0) / many : null;
  };
  const difference = (a, b) => (a === null || b === null ? "–" : signed(b - a));
  const names = [runName(Number(one)), runName(Number(other))];
  return h(
    Fragment,
    null,
    h(Title, null, t("compare_title")),
    h(
      "form",
      { class: "filters row", onSubmit: (event) => event.preventDefault() },
      h(Select, { name: "one", label: t("one"), options: runOptions(), empty: false, value: one }),
      h(Select, { name: "other", label: t("other"), options: runOptions(), empty: false, value: other }),
      h(Select, { name: "mode", label: t("mode"), options: modeOptions(), empty: false, value: mode }),
    ),
    h(Chart, { title: t("mean_reward"), series }),
    h(
      Section,
      { title: t("by_branch") },
      h(Table, {
        caption: t("by_branch"),
        columns: [[t("branch"), ""], ...names.map((name) => [name, "n"]), [t("change"), "n"]],
        rows: branches.map((branch) => {
          const [a, b] = sides.map(([, steps]) => meanOf(steps, branch));
          return [branch, number(a), number(b), difference(a, b)];
        }),
      }),
    ),
    h(
      Section,
      { title: t("rows_both") },
      h("p", null, data.total ? t("compare_told", whole(data.total), signed(data.change), whole(data.better), whole(data.worse)) : t("no_rows")),
      data.total > 0 && h(Table, {
        caption: t("rows_both"),
        columns: [[t("row"), ""], [manyBranches() ? t("branch") : "", "extra"], ...names.map((name) => [name, "n"]), [t("change"), "n"]],
        rows: data.rows.map((each) => [
          h("a", { href: ofRow(each.row) }, each.row),
          manyBranches() ? each.branch : "",
          h(Fragment, null, number(each.one), h("small", null, ` ${t("last_step", each.one_step)}`)),
          h(Fragment, null, number(each.other), h("small", null, ` ${t("last_step", each.other_step)}`)),
          signed(each.change),
        ]),
      }),
    ),
  );
}

views.compare = {
  async ask(params) {
    if (page.state.runs.length < 2) return null;
    const { one, other, mode } = chosenRuns(params);
    const [found, ...steps] = await Promise.all([
      ask("compare", { one, other, mode }),
      ask("overview", { run: one, mode }),
      ask("overview", { run: other, mode }),
    ]);
    return { ...found, steps: steps.map((each) => each.steps) };
  },
  View: Compared,
  title: () => t("compare_title"),
};
