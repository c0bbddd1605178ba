// The list of completions with filters and sorting.
import { h, Fragment } from "./vendor/preact.mjs";
import { number, t, tongue, whole } from "./words.js";
import { address, ask, draw, load, note, page, views } from "./core.js";
import {
  facetOptions,
  has,
  isJudged,
  manyBranches,
  modeOf,
  modeOptions,
  Note,
  Outcome,
  runName,
  runOptions,
  Select,
  Title,
} from "./parts.js";

const ORDERED = ["step", "reward", "reference_reward", "advantage", "judge_s", "tokens"]; // columns that sort the list
const WAIT_MS = 250;
let waiting = 0;

const wantedMode = (params) => (params.mode === "any" ? "" : modeOf(params));

function typed(event) {
  const { name, value } = event.target;
  clearTimeout(waiting);
  note({ [name]: value });
  waiting = setTimeout(load, WAIT_MS);
}

function Field({ name, label, kind = "number", hint }) {
  return h(
    "label",
    { class: kind },
    h("span", null, label),
    h("input", { name, type: kind, step: "any", value: page.params[name] ?? "", placeholder: hint, onInput: typed }),
  );
}

const Between = ({ name }) =>
  h(
    "fieldset",
    null,
    h("legend", null, t(name)),
    h(Field, { name: `${name}_min`, label: t("from") }),
    h(Field, { name: `${name}_max`, label: t("to") }),
  );

function Filters({ params }) {
  return h(
    "details",
    { class: "filtering", open: innerWidth > 768 },
    h("summary", null, t("filters")),
    h(
      "form",
      { class: "filters", role: "search", "aria-label": t("filters"), onSubmit: (event) => event.preventDefault() },
      h(Field, { name: "text", label: t("text"), kind: "search", hint: t(isJudged() ? "text_hint" : "plain_text_hint") }),
      runOptions().length > 1 && h(Select, { name: "run", label: t("run"), options: runOptions() }),
      h(Select, {
        name: "mode",
        label: t("mode"),
        options: [...modeOptions(), ["any", t("any")]],
        empty: false,
        value: modeOf(params),
      }),
      ["branch", "outcome", "reason", "provider"]
        .filter((name) => facetOptions(name).length > (name === "branch" || name === "outcome" ? 1 : 0))
        .map((name) => h(Select, { name, label: t(name), options: facetOptions(name) })),
      h(Field, { name: "row", label: t("row"), kind: "text" }),
      ["reward", has("advantage") && "advantage", "step"].filter(Boolean).map((name) => h(Between, { name })),
      h("a", { class: "button", href: "#list" }, t("clear")),
    ),
  );
}

// Column headers sort the whole list, not only the rows shown.
function Head({ name, kind, params }) {
  const told = t(name),
    at = [`${name}_high`, `${name}_low`].indexOf(params.order || "step_high");
  return h(
    "th",
    { scope: "col", class: kind, "aria-sort": ["descending", "ascending"][at] },
    ORDERED.includes(name)
      ? h("a", { href: address("list", { ...params, order: `${name}_${at === 0 ? "low" : "high"}` }), title: t("sorted_by", told) }, told)
      : told,
  );
}

// All completions of a dataset row over training.
export const ofRow = (row) => address("list", { row, mode: "any", order: "step_low" });

function Items({ items, current, runs, params }) {
  const link = (item) => address("completion", { id: item.id });
  const columns = [
    ["step", "n", (item) => item.step],
    runs && ["run", "extra", (item) => runName(item.run)],
    manyBranches() && ["branch", "extra", (item) => item.branch],
    ["row", "extra row_id", (item) => h("a", { href: ofRow(item.row), tabIndex: -1, dir: "ltr", title: item.row }, item.row)],
    ["text", "wide", (item) => h("a", { class: "open", href: link(item), lang: tongue(item.text), "data-id": item.id }, item.text || "–")],
    ["outcome", "", (item) => h(Outcome, item)],
    ["reward", "n", (item) => number(item.reward)],
    has("reference_reward") && ["reference_reward", "n extra", (item) => number(item.reference_reward)],
    has("advantage") && ["advantage", "n thin", (item) => number(item.advantage, 2)],
    has("judge_s") && ["judge_s", "n extra", (item) => number(item.judge_s, 2)],
    has("tokens") && ["tokens", "n extra", (item) => item.tokens ?? "–"],
  ].filter(Boolean);
  return h(
    "table",
    { class: "items" },
    h("caption", { class: "unseen" }, t("list")),
    h("thead", null, h("tr", null, columns.map(([name, kind]) => h(Head, { name, kind, params })))),
    h(
      "tbody",
      null,
      items.map((item) =>
        h(
          "tr",
          { key: item.id, class: item.id === current ? "current" : "" },
          columns.map(([, kind, cell]) => h("td", { class: kind }, cell(item))),
        ),
      ),
    ),
  );
}

function List(data, params) {
  return h(
    Fragment,
    null,
    h(Title, null, t("list")),
    h(Filters, { params }),
    h(
      "p",
      { class: "count" },
      h("strong", null, t("found", whole(data.total))),
      " ",
      h("span", { class: "muted keys" }, t("keys")),
    ),
    data.items.length
      ? h(Items, { items: data.items, current: page.list.at, runs: page.state.runs.length > 1, params })
      : h(Note, null, t("none")),
    data.next && h("p", null, h("button", { type: "button", onClick: () => more(data, params) }, t("more"))),
  );
}

async function more(data, params) {
  const next = await ask("list", { ...params, mode: wantedMode(params), after: data.next });
  if (page.shown?.data !== data) return;
  const first = next.items[0]?.id;
  const items = [...data.items, ...next.items];
  page.shown = { ...page.shown, data: { ...next, total: data.total, items } };
  page.list.ids = items.map((item) => item.id);
  draw();
  document.querySelector(`[data-id="${first}"]`)?.focus();
}

views.list = {
  async ask(params) {
    const hash = address("list", params),
      wanted = page.list.hash === hash ? page.list.ids.length : 0; // restore the number of rows shown
    const asked = { ...params, mode: wantedMode(params) };
    const found = await ask("list", asked);
    while (found.next && found.items.length < wanted) {
      const more = await ask("list", { ...asked, after: found.next });
      found.items.push(...more.items);
      found.next = more.next;
    }
    page.list = { hash, ids: found.items.map((item) => item.id), at: page.list.at };
    return found;
  },
  View: List,
  title: () => t("list"),
  told: (data) => t("found", whole(data.total)),
  focus: () => page.list.at && document.querySelector(`[data-id="${page.list.at}"]`),
};
