// The list of completions, with its filters and orders.
import { h, Fragment } from "./vendor/preact.mjs";
import { number, t, tongue, whole } from "./words.js";
import { address, ask, draw, load, note, page, views } from "./core.js";
import { facetOptions, Note, Outcome, runName, runOptions, Select, Title } from "./parts.js";

const ORDER_NAMES = ["newest", "oldest", "reward_high", "reward_low", "disagreement", "advantage", "slowest"];
const LEADING = ["disagreement", "advantage", "slowest"];
const WAIT_MS = 250;
let waiting = 0;

const orderName = (code) => t(code === "disagreement" || code === "advantage" ? `order_${code}` : code);

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

function Filters() {
  return h(
    "details",
    { class: "filtering", open: innerWidth > 768 },
    h("summary", null, t("filters")),
    h(
      "form",
      { class: "filters", role: "search", "aria-label": t("filters"), onSubmit: (event) => event.preventDefault() },
      h(Field, { name: "text", label: t("text"), kind: "search", hint: t("text_hint") }),
      runOptions().length > 1 && h(Select, { name: "run", label: t("run"), options: runOptions() }),
      ["branch", "outcome", "reason", "provider", "mode"].map((name) =>
        h(Select, { name, label: t(name), options: facetOptions(name) }),
      ),
      ["reward", "advantage", "step"].map((name) => h(Between, { name })),
      h(Select, {
        name: "order",
        label: t("order"),
        options: ORDER_NAMES.map((code) => [code, orderName(code)]),
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
      LEADING.map((code) => entry(code, t(`most_${code}`))),
    ),
  );
}

export function Items({ items, current, runs }) {
  const link = (item) => address("completion", { id: item.id });
  const columns = [
    ["step", "n"],
    ...(runs ? [["run", "extra"]] : []),
    ["branch", "extra"],
    ["row", "extra row_id"],
    ["text", "wide"],
    ["outcome", ""],
    ["reward", "n"],
    ["reference_reward", "n extra"],
    ["advantage", "n thin"],
    ["disagreement", "n extra"],
    ["judge_s", "n extra"],
  ];
  const cells = {
    step: (item) => item.step,
    run: (item) => runName(item.run),
    branch: (item) => item.branch,
    row: (item) => h("a", { href: address("row", { row: item.row }), tabIndex: -1 }, item.row),
    text: (item) =>
      h("a", { class: "open", href: link(item), lang: tongue(item.text), "data-id": item.id }, item.text || "–"),
    outcome: (item) => h(Outcome, item),
    reward: (item) => number(item.reward),
    reference_reward: (item) => number(item.reference_reward),
    advantage: (item) => number(item.advantage, 2),
    disagreement: (item) => number(item.disagreement),
    judge_s: (item) => number(item.judge_s, 2),
  };
  return h(
    "table",
    { class: "items" },
    h("caption", { class: "unseen" }, t("list")),
    h(
      "thead",
      null,
      h(
        "tr",
        null,
        columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, t(name))),
      ),
    ),
    h(
      "tbody",
      null,
      items.map((item) =>
        h(
          "tr",
          { key: item.id, class: item.id === current ? "current" : "" },
          columns.map(([name, kind]) => h("td", { class: kind }, cells[name](item))),
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
    h(Leading, { params }),
    h(Filters),
    h(
      "p",
      { class: "count" },
      h("strong", null, t("found", whole(data.total))),
      " ",
      h("span", { class: "muted keys" }, t("keys")),
    ),
    data.items.length
      ? h(Items, { items: data.items, current: page.list.at, runs: page.state.runs.length > 1 })
      : h(Note, null, t("none")),
    data.next && h("p", null, h("button", { type: "button", onClick: () => more(data, params) }, t("more"))),
  );
}

async function more(data, params) {
  const next = await ask("list", { ...params, after: data.next });
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
    const found = await ask("list", params);
    while (found.next && found.items.length < wanted) {
      const more = await ask("list", { ...params, after: found.next });
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
