// The list of completions, with its filters and orders.
import { h, Fragment } from "./vendor/preact.mjs";
import { number, t, tongue, whole } from "./words.js";
import { address, ask, DATA, draw, load, note, page, views } from "./core.js";
import {
  facetOptions,
  Flag,
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
import { exported } from "./local.js";

const ORDER_NAMES = ["newest", "oldest", "reward_high", "reward_low", "disagreement", "advantage", "slowest"];
const LEADING = [
  ["disagreement", "reference_reward"],
  ["advantage", "advantage"],
  ["slowest", "call_s"],
]; // orders, and the number that a record must have for them
const WAIT_MS = 250;
let waiting = 0;

const orderName = (code) => {
  const [, name, end] = code.match(/^(.+)_(high|low)$/) ?? [];
  if (name && name !== "reward") return `${t(name)} ${end === "high" ? "↓" : "↑"}`;
  return t(code === "disagreement" || code === "advantage" ? `order_${code}` : code);
};
const ordersOf = (order) =>
  ORDER_NAMES.filter((code) => !["disagreement", "advantage", "slowest"].includes(code) || LEADING.some(([name, number]) => name === code && has(number))).concat(
    order && !ORDER_NAMES.includes(order) ? [order] : [],
  );
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
      Object.keys(page.state.facets.flag ?? {}).length > 0 &&
        h(Select, { name: "flag", label: t("flag"), options: [["any", t("noted")], ...facetOptions("flag").filter(([code]) => code)] }),
      has("recovered") && h(Select, { name: "recovered", label: t("retries"), options: [["1", t("recovered")]] }),
      ["reward", has("advantage") && "advantage", "step"].filter(Boolean).map((name) => h(Between, { name })),
      h(Select, {
        name: "order",
        label: t("order"),
        options: ordersOf(params.order).map((code) => [code, orderName(code)]),
        empty: false,
        value: page.params.order || "newest",
      }),
      h("a", { class: "button", href: "#list" }, t("clear")),
    ),
  );
}

// The lists of most interest, within the filters that are set.
function Leading({ params }) {
  const { order, ...filters } = params;
  const entry = (code, told) =>
    h(
      "li",
      null,
      h(
        "a",
        {
          href: address("list", { ...filters, order: code }),
          "aria-current": (order ?? "") === code ? "true" : undefined,
        },
        told,
      ),
    );
  return h(
    "nav",
    { class: "leading", "aria-label": t("most") },
    h(
      "ul",
      null,
      entry("", t("all")),
      LEADING.filter(([, name]) => has(name)).map(([code]) => entry(code, t(`most_${code}`))),
    ),
  );
}

const HEADS = { step: ["newest", "oldest"] }; // orders of a column: from the largest, from the smallest
for (const name of ["reward", "reference_reward", "advantage", "disagreement", "call_s", "tokens"])
  HEADS[name] = [`${name}_high`, `${name}_low`];

// A head of the list leads to the list in that order: it is sorted as a whole, and not as far as it is shown.
function Head({ name, kind, params }) {
  const told = t(name),
    orders = HEADS[name],
    order = params.order || "newest";
  const at = orders?.indexOf(order);
  const sort = at >= 0 ? ["descending", "ascending"][at] : undefined;
  return h(
    "th",
    { scope: "col", class: kind, "aria-sort": sort },
    orders
      ? h("a", { href: address("list", { ...params, order: orders[at === 0 ? 1 : 0] }), title: t("sorted_by", told) }, told)
      : told,
  );
}

export function Items({ items, current, runs, params }) {
  const link = (item) => address("completion", { id: item.id });
  const columns = [
    ["step", "n", (item) => item.step],
    runs && ["run", "extra", (item) => runName(item.run)],
    manyBranches() && ["branch", "extra", (item) => item.branch],
    ["row", "extra row_id", (item) => h("a", { href: address("row", { row: item.row }), tabIndex: -1, dir: "ltr", title: item.row }, item.row)],
    [
      "text",
      "wide",
      (item) =>
        h(
          "div",
          { class: "line_of" },
          h(Flag, item),
          h("a", { class: "open", href: link(item), lang: tongue(item.text), "data-id": item.id }, item.text || "–"),
        ),
    ],
    ["outcome", "", (item) => h(Outcome, item)],
    ["reward", "n", (item) => number(item.reward)],
    has("reference_reward") && ["reference_reward", "n extra", (item) => number(item.reference_reward)],
    has("advantage") && ["advantage", "n thin", (item) => number(item.advantage, 2)],
    has("disagreement") && ["disagreement", "n extra", (item) => number(item.disagreement)],
    has("call_s") && ["call_s", "n extra", (item) => number(item.call_s, 2)],
    !has("call_s") && has("tokens") && ["tokens", "n extra", (item) => item.tokens ?? "–"],
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

// What fits the filters, as a file: from the server, or of this page.
function Export({ kind, params }) {
  const wanted = { ...params, mode: wantedMode(params), kind };
  delete wanted.order;
  delete wanted.lang;
  const save = (event) => {
    if (!DATA) return;
    event.preventDefault();
    const lines = exported(DATA, wanted, kind).map((each) => `${JSON.stringify(each)}\n`);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
    link.download = `${kind}.jsonl`;
    link.click();
    URL.revokeObjectURL(link.href);
  };
  const href = DATA ? "#list" : `api/export?${new URLSearchParams(Object.entries(wanted).filter(([, value]) => value))}`;
  return h("a", { class: "button", href, download: `${kind}.jsonl`, onClick: save, title: t("export_told") }, t(`export_${kind}`));
}

function List(data, params) {
  return h(
    Fragment,
    null,
    h(Title, null, t("list")),
    h(Leading, { params }),
    h(Filters, { params }),
    h(
      "p",
      { class: "count" },
      h("strong", null, t("found", whole(data.total))),
      " ",
      data.total > 0 && h("span", { class: "exports" }, h(Export, { kind: "dataset", params }), h(Export, { kind: "preference", params })),
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
      wanted = page.list.hash === hash ? page.list.ids.length : 0; // one comes back to as many as there were
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
