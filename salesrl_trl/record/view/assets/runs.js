// A row over training time, and two runs side by side.
import { h, Fragment } from "./vendor/preact.mjs";
import { mean, named, number, signed, t, tongue, whole } from "./words.js";
import { address, ask, draw, page, views } from "./core.js";
import { Chart } from "./chart.js";
import { Conversation } from "./completion.js";
import { branchesOf, LATEST, lineOf } from "./overview.js";
import { colorOf, manyBranches, modeOf, modeOptions, Note, Outcome, runName, runOptions, Section, Select, Table, Title } from "./parts.js";

// Mean reward by step of one run's completions of the row.
function meansOf(items) {
  const steps = new Map();
  for (const { step, reward } of items) {
    if (!steps.has(step)) steps.set(step, []);
    steps.get(step).push(reward);
  }
  return [...steps].map(([step, rewards]) => [step, mean(rewards)]);
}

function Row(data) {
  const runs = [...new Set(data.items.map((item) => item.run))];
  const modes = [...new Set(data.items.map((item) => item.mode))];
  const of = (run, mode) => data.items.filter((item) => item.run === run && item.mode === mode);
  const series = runs.flatMap((run) =>
    modes.map((mode) => ({
      name: `${runName(run)}, ${named(mode)}`,
      color: run,
      dash: modes.indexOf(mode),
      points: meansOf(of(run, mode)),
    })),
  );
  return h(
    Fragment,
    null,
    h("nav", { class: "row", "aria-label": t("list") }, h("a", { class: "button", href: page.list.hash }, t("back")),
      data.items.length > 1 && h("a", { class: "button", href: address("diff", { row: data.row }) }, t("diff_row"))),
    h(Title, null, t("row_title", data.row)),
    h(
      Note,
      null,
      data.items.length < data.total
        ? t("row_part", whole(data.items.length), whole(data.total))
        : t("row_told", whole(data.total)),
    ),
    series.some(({ points }) => points.length > 1) && h(Chart, { title: t("reward_rows"), series }),
    data.messages &&
      h("details", null, h("summary", null, t("conversation")), h(Conversation, { messages: data.messages })),
    h(
      "div",
      { class: "sides" },
      runs.map((run) =>
        h(
          Section,
          { title: runName(run) },
          h(Table, {
            caption: runName(run),
            columns: [
              [t("step"), "n"],
              [t("text"), "wide"],
              [t("outcome"), ""],
              [t("reward"), "n"],
              [t("advantage"), "n extra"],
            ],
            rows: data.items
              .filter((item) => item.run === run)
              .map((item) => [
                `${item.step}${item.mode === "eval" ? ` ${t("eval")}` : ""}`,
                h(
                  "a",
                  { class: "open", href: address("completion", { id: item.id }), lang: tongue(item.text) },
                  item.text || "–",
                ),
                h(Outcome, item),
                number(item.reward),
                number(item.advantage, 2),
              ]),
          }),
        ),
      ),
    ),
  );
}

views.row = { ask: (params) => ask("row", { row: params.row }), View: Row, title: (data) => t("row_title", data.row) };

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
      name: `${runName(Number(run))}, ${branch}`,
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
  const at = (steps, step, branch) =>
    steps.find((each) => each.step === step && each.branch === branch)?.reward ?? null;
  const common = [...new Set(data.steps[0].map((each) => each.step))].filter((step) =>
    data.steps[1].some((each) => each.step === step),
  );
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
      h(
        "details",
        null,
        h("summary", null, t("steps_table")),
        common.length > LATEST && h(Note, null, t("latest", LATEST, whole(common.length))),
        h(Table, {
          caption: t("steps_table"),
          columns: [[t("step"), "n"], [t("branch"), ""], ...names.map((name) => [name, "n"]), [t("change"), "n"]],
          rows: common
            .slice(-LATEST)
            .reverse()
            .flatMap((step) =>
              branches.map((branch) => {
                const [a, b] = sides.map(([, steps]) => at(steps, step, branch));
                return [step, branch, number(a), number(b), difference(a, b)];
              }),
            ),
        }),
      ),
    ),
    h(
      Section,
      { title: t("rows_both") },
      h("p", null, data.total ? t("compare_told", whole(data.total), signed(data.change), whole(data.better), whole(data.worse)) : t("no_rows")),
      data.total > 0 && h(
        "form",
        { class: "filters row", onSubmit: (event) => event.preventDefault() },
        h(Select, {
          name: "order",
          label: t("order"),
          options: ["largest", "better", "worse"].map((code) => [code, t(code)]),
          empty: false,
          value: params.order || "largest",
        }),
      ),
      data.total > 0 && h(Table, {
        caption: t("rows_both"),
        columns: [[t("row"), ""], [manyBranches() ? t("branch") : "", "extra"], ...names.map((name) => [name, "n"]), [t("change"), "n"], ["", "n"]],
        rows: data.rows.map((each) => [
          h("a", { href: address("row", { row: each.row }) }, each.row),
          manyBranches() ? each.branch : "",
          h(Fragment, null, number(each.one), h("small", null, ` ${t("last_step", each.one_step)}`)),
          h(Fragment, null, number(each.other), h("small", null, ` ${t("last_step", each.other_step)}`)),
          signed(each.change),
          h("a", { href: address("diff", { row: each.row }), "aria-label": `${t("diff")}: ${each.row}` }, t("diff_with")),
        ]),
      }),
      data.next !== null &&
        h("p", null, h("button", { type: "button", onClick: () => moreRows(data, params) }, t("more"))),
    ),
  );
}

async function moreRows(data, params) {
  const next = await ask("compare", { ...chosenRuns(params), order: params.order, offset: data.next });
  if (page.shown?.data !== data) return;
  page.shown = { ...page.shown, data: { ...data, next: next.next, rows: [...data.rows, ...next.rows] } };
  draw();
}

views.compare = {
  async ask(params) {
    if (page.state.runs.length < 2) return null;
    const { one, other, mode } = chosenRuns(params);
    const [found, ...steps] = await Promise.all([
      ask("compare", { one, other, mode, order: params.order }),
      ask("overview", { run: one, mode }),
      ask("overview", { run: other, mode }),
    ]);
    return { ...found, steps: steps.map((each) => each.steps) };
  },
  View: Compared,
  title: () => t("compare_title"),
};
