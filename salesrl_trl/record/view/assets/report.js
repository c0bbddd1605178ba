// The figures of a run: a tab of the page, and all of a page that `salesrl report` writes.
import { h, Fragment } from "./vendor/preact.mjs";
import { spoken, t } from "./words.js";
import { ask, page, views } from "./core.js";
import { Bars, Chart } from "./chart.js";
import { Note, runName, runOptions, Section, Select, Table, Title } from "./parts.js";

const CHART_WIDTH = 1024; // of a chart, as the style has it

const PARTS = {
  lines: ({ part }) =>
    h(Chart, {
      title: part.label,
      widest: CHART_WIDTH,
      band: part.band,
      marks: part.starts,
      isLog: part.is_log,
      fromZero: part.from_zero,
      series: part.lines.map((line) => ({ ...line, color: line.colour, dash: line.is_dashed ? 1 : 0 })),
    }),
  bars: ({ part }) =>
    h(Bars, {
      title: part.label,
      widest: CHART_WIDTH,
      edges: part.edges,
      top: part.top,
      notes: part.notes,
      hasSteps: true,
      isWhole: part.are_counts,
      parts: part.layers.map((layer) => ({ name: layer.name, color: layer.colour, bins: layer.heights })),
    }),
  table: ({ part, title }) =>
    h(Table, {
      caption: title,
      columns: (part.head.length ? part.head : ["", ""]).map((name, at) => [name, at && part.head.length ? "n" : ""]),
      rows: part.rows,
    }),
  list: ({ part }) => h("ol", { class: "sentences" }, part.sentences.map((each) => h("li", null, each))),
  heading: ({ part }) => h("h3", null, part.text),
  remark: ({ part }) => h(Note, null, part.text),
  text: ({ part }) => h("p", null, part.text),
};

function Report({ sections, error }, params) {
  const run = params.run ?? "0";
  return h(
    Fragment,
    null,
    h(
      "div",
      { class: "head" },
      h(Title, null, t("report"), " · ", runName(Number(run))),
      runOptions().length > 1 &&
        h(
          "form",
          { class: "choices", onSubmit: (event) => event.preventDefault() },
          h(Select, { name: "run", label: t("run"), options: runOptions(), empty: false, value: run }),
        ),
    ),
    h(Note, null, page.state.runs[run].path),
    error && h(Note, null, t("no_report"), " ", error),
    h(
      "div",
      { class: "report" },
      (sections[spoken()] ?? []).map(({ title, parts }) =>
        h(Section, { title }, parts.map((part) => h(PARTS[part.kind], { part, title }))),
      ),
    ),
  );
}

views.report = {
  ask: (params) => ask("report", { run: params.run ?? 0 }),
  View: Report,
  title: (_, params) => `${t("report")} · ${runName(Number(params.run ?? 0))}`,
};
