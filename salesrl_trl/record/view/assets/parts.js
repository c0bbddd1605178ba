// Components shared by several views.
import { h } from "./vendor/preact.mjs";
import { named, t, tongue, whole } from "./words.js";
import { change, page } from "./core.js";

// Judges, references and actions are only mentioned if the record contains them.
export const has = (name) => (page.state.facets.has?.[name] ?? 0) > 0;
const of = (name) => Object.keys(page.state.facets[name] ?? {});
// In one run, or in any run.
export const isJudged = (run) =>
  page.state.runs.some((each, at) => each.judged > 0 && (run === undefined || at === Number(run)));
export const manyBranches = () => of("branch").length > 1;
// Defaults to training, or to evaluations if nothing else was recorded.
export const modeOf = (params) => params.mode || (of("mode").includes("train") || !of("mode").length ? "train" : "eval");
export const outcomeName = (code, run) => {
  const plain = `plain_${code}`;
  return !isJudged(run) && t(plain) !== plain ? t(plain) : named(code);
};
// A branch keeps its colour across runs.
export const colorOf = (branch) => Math.max(of("branch").sort().indexOf(branch), 0);

// `columns`: [name, class]; `rows`: lists of cells, or { cells, ...attributes of the row }.
export function Table({ caption, columns, rows }) {
  return h(
    "div",
    { class: "scroll", role: "region", tabIndex: 0, "aria-label": caption },
    h(
      "table",
      null,
      h("caption", { class: "unseen" }, caption),
      columns.some(([name]) => name) &&
        h("thead", null, h("tr", null, columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
      h(
        "tbody",
        null,
        rows.map((row) => {
          const { cells, ...rest } = Array.isArray(row) ? { cells: row } : row;
          return h(
            "tr",
            rest,
            cells.map((cell, at) =>
              at ? h("td", { class: columns[at][1] }, cell) : h("th", { scope: "row", class: columns[0][1] }, cell),
            ),
          );
        }),
      ),
    ),
  );
}

export const Note = ({ children }) => h("p", { class: "muted" }, children);
export const Title = ({ children }) => h("h1", { tabIndex: -1 }, children);
export const Section = ({ title, children, kind }) =>
  h("section", { class: kind, "aria-label": title }, h("h2", null, title), children);

// Verbatim text, with its language.
export const Said = ({ text, kind = "" }) => h("p", { class: `said ${kind}`, lang: tongue(text), dir: "auto" }, text);

export function Select({ name, label, options, empty = true, value }) {
  const shown = value ?? page.params[name] ?? "";
  return h(
    "label",
    null,
    h("span", null, label),
    h(
      "select",
      { name, value: shown, onChange: (event) => change({ [name]: event.target.value }) },
      empty && h("option", { value: "", selected: shown === "" }, t("any")),
      options.map(([code, told]) => h("option", { value: code, selected: String(code) === shown }, told)),
    ),
  );
}

export const runOptions = () => page.state.runs.map((run, at) => [String(at), runName(at)]);

// Runs with equal names are numbered.
export function runName(at) {
  const runs = page.state.runs;
  const name = runs[at]?.name ?? String(at);
  return runs.filter((run) => run.name === name).length > 1 ? `${name} (${at + 1})` : name;
}

// Names of branches, reasons and judges are not translated.
export const facetOptions = (name) =>
  Object.entries(page.state.facets[name] ?? {}).map(([code, many]) => [
    code,
    `${name === "outcome" ? outcomeName(code) : code} (${whole(many)})`,
  ]);
// A choice among several runs.
export const RunChoice = ({ run }) =>
  runOptions().length > 1 && h(Select, { name: "run", label: t("run"), options: runOptions(), empty: false, value: run });
export const modeOptions = () => ["train", "eval"].map((code) => [code, t(code)]);

export const Outcome = ({ outcome, reason, run }) =>
  h("span", { class: `outcome ${outcome}` }, outcomeName(outcome, run), reason && " ", reason && h("span", { class: "reason" }, reason.split(/(?<=_)/).map((part) => [part, h("wbr")])));
