// Small parts of several views.
import { h } from "./vendor/preact.mjs";
import { named, t, tongue, whole } from "./words.js";
import { change, page } from "./core.js";

// A table. `columns`: [name, class]; `rows`: lists of cells, or { cells, ...attributes of the row }.
export function Table({ caption, columns, rows, id }) {
  return h(
    "div",
    { class: "scroll", role: "region", tabIndex: 0, "aria-label": caption },
    h(
      "table",
      { id },
      h("caption", { class: "unseen" }, caption),
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)),
        ),
      ),
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

// Text as it was written, in its language.
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

// Runs of the same name are told apart by their numbers.
export function runName(at) {
  const runs = page.state.runs;
  const name = runs[at]?.name ?? String(at);
  return runs.filter((run) => run.name === name).length > 1 ? `${name} (${at + 1})` : name;
}

// Branches, reasons and judges have names of their own: no word of the page is put in their place.
export const facetOptions = (name) =>
  Object.entries(page.state.facets[name] ?? {}).map(([code, many]) => [
    code,
    `${name === "outcome" || name === "mode" ? named(code) : code} (${whole(many)})`,
  ]);
export const modeOptions = () => ["train", "eval"].map((code) => [code, t(code)]);

export const Outcome = ({ outcome, reason }) =>
  h("span", { class: `outcome ${outcome}` }, named(outcome), reason && h("span", { class: "reason" }, ` ${reason}`));
