// A run's charts: a tab of the page, and the whole page written by `salesrl report`.
import { h, Fragment } from "./vendor/preact.mjs";
import { number, percent, seconds, spoken, t, whole } from "./words.js";
import { ask, page, views } from "./core.js";
import { Chart, short } from "./chart.js";
import { Note, runName, RunChoice, Section, Table, Title } from "./parts.js";

const CHART_WIDTH = 1024; // a chart's width in style.css

const Lines = (given) => h(Chart, { ...given, widest: CHART_WIDTH });

function Kl({ branch, kl, band, beta }) {
  const [low, high, share] = band ?? [];
  return h(
    Fragment,
    null,
    h(Lines, { title: t("pair", "KL", branch), series: kl, band: band && { name: t("band", short(low), short(high)), low, high } }),
    band && h(Note, null, t("in_band", percent(share))),
    h(Lines, { title: t("pair", "beta", branch), series: beta }),
  );
}

// Parts of a whole: lines over steps, and a table row each.
const Parts = ({ title, lines, rows, heads, size }) =>
  h(
    Fragment,
    null,
    h(Lines, { title, series: lines, domain: [0, Math.max(...lines.flatMap(({ points }) => points.map(([, value]) => value)))] }),
    h(Table, {
      caption: title,
      columns: [...heads, t("share")].map((head, at) => [head, at ? "n" : ""]),
      rows: rows.map(([name, value, share]) => [name, size(value), percent(share)]),
    }),
  );

function HeldOut({ kinds, rows }) {
  return h(Table, {
    caption: t("held_out"),
    columns: [[t("step"), "n"], ...kinds.map((kind) => [kind.replaceAll("_", " "), "n"])],
    rows: rows.map(([step, ...values]) => [step, ...values.map((value) => number(value))]),
  });
}

function Spending({ spent, limits }) {
  const usd = (value) => number(value, 4);
  return h(
    Fragment,
    null,
    h(Table, {
      caption: t("spending"),
      columns: [[t("service"), ""], [t("calls"), "n"], [t("prompt_tokens"), "n"], [t("completion_tokens"), "n"], ["USD", "n"]],
      rows: spent.map((each) => [each.service, whole(each.calls), whole(each.prompt_tokens), whole(each.completion_tokens), usd(each.usd)]),
    }),
    limits.map(([name, taken, most]) => h(Note, null, t("of_limit", name, taken.toLocaleString(spoken()), most.toLocaleString(spoken())))),
  );
}

function Figures({ figures }) {
  const rewards = figures.reward.map((line) => ({
    ...line,
    name: line.dash ? t("pair", line.name || t("all_branches"), t("reference_reward")) : line.name || t("all_branches"),
  }));
  const failed = figures.failures.rows.length;
  const sections = [
    [t("reward"), rewards.length, h(Lines, { title: t("mean_reward"), series: rewards })],
    ["KL", figures.kl.length, figures.kl.map((each) => h(Kl, each))],
    [t("step_time"), figures.phases.rows.length, h(Parts, { title: t("seconds_a_step"), heads: [t("phase"), t("phase_time")], size: seconds, ...figures.phases })],
    [t("failures"), rewards.length, failed ? h(Parts, { title: t("failures"), heads: [t("reason"), t("count")], size: whole, ...figures.failures }) : h(Note, null, t("no_failures"))],
    [t("held_out"), figures.held_out.rows.length, h(HeldOut, figures.held_out)],
    [t("spending"), figures.spent.length, h(Spending, figures)],
  ];
  return sections.map(([title, isThere, shown]) => h(Section, { title }, isThere ? shown : h(Note, null, t("not_logged"))));
}

function Report({ figures, error }, params) {
  const run = params.run ?? "0";
  return h(
    Fragment,
    null,
    h("div", { class: "head" }, h(Title, null, t("report"), " · ", runName(Number(run))), h("form", { class: "choices" }, h(RunChoice, { run }))),
    h(Note, null, page.state.runs[run]?.path),
    error ? h(Note, null, t("no_report"), " ", error) : h("div", { class: "report" }, h(Figures, { figures })),
  );
}

views.report = {
  ask: (params) => ask("report", { run: params.run ?? 0 }),
  View: Report,
  title: (_, params) => `${t("report")} · ${runName(Number(params.run ?? 0))}`,
};
