// Two completions of a row, word by word: what one has and the other has not.
import { h, Fragment } from "./vendor/preact.mjs";
import { number, seconds, t, tongue } from "./words.js";
import { address, ask, page, views } from "./core.js";
import { Conversation } from "./completion.js";
import { Note, Outcome, runName, Section, Select, Title } from "./parts.js";

// A Chinese character is a word.
const WORD = /\p{Script=Han}|(?:(?!\p{Script=Han})[\p{L}\p{N}_])+|\s+|./gu;
const MOST_CELLS = 6e6; // of the table that is looked through: a second's work. What is longer is told apart by lines.

// Pieces [kind, text] of two lists of words, in their order: "" in both, "del" in the first, "ins" in the second alone.
export function pieces(one, other, split = (text) => text.match(WORD) ?? []) {
  const a = split(one),
    b = split(other);
  let from = 0,
    end = 0;
  while (from < Math.min(a.length, b.length) && a[from] === b[from]) from++;
  while (end < Math.min(a.length, b.length) - from && a.at(-1 - end) === b.at(-1 - end)) end++;
  const left = a.slice(from, a.length - end),
    right = b.slice(from, b.length - end);
  const lines = (text) => text.split(/(?<=\n)/);
  const isLong = left.length * right.length > MOST_CELLS;
  if (isLong && lines(one).length * lines(other).length < left.length * right.length)
    return pieces(one, other, lines);
  const middle = isLong ? [...left.map((word) => ["del", word]), ...right.map((word) => ["ins", word])] : longest(left, right);
  const all = [...a.slice(0, from).map(same), ...middle, ...a.slice(a.length - end).map(same)];
  const joined = [];
  for (const [kind, word] of all) {
    if (joined.at(-1)?.[0] === kind) joined.at(-1)[1] += word;
    else joined.push([kind, word]);
  }
  return joined;
}
const same = (word) => ["", word];

// The longest common subsequence, by the table of its lengths.
function longest(a, b) {
  const wide = b.length + 1,
    lengths = new Uint16Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      lengths[i * wide + j] =
        a[i] === b[j] ? lengths[(i + 1) * wide + j + 1] + 1 : Math.max(lengths[(i + 1) * wide + j], lengths[i * wide + j + 1]);
  const found = [];
  let i = 0,
    j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) found.push(same(a[i++], j++));
    else if (j === b.length || (i < a.length && lengths[(i + 1) * wide + j] >= lengths[i * wide + j + 1]))
      found.push(["del", a[i++]]);
    else found.push(["ins", b[j++]]);
  }
  return found;
}

const Marked = ({ found, kind }) =>
  h(
    "pre",
    { class: "text", lang: tongue(found.map(([, text]) => text).join("")), dir: "auto", tabIndex: 0 },
    found.filter(([of]) => of === "" || of === kind).map(([of, text]) => (of ? h(of, null, text) : text)),
  );

const sideName = (item) =>
  `${page.state.runs.length > 1 ? `${runName(item.run)}, ` : ""}${t("step")} ${item.step}${item.mode === "eval" ? ` ${t("eval")}` : ""}: ${number(item.reward)} (${item.id})`;

function Side({ name, items, whole, found, kind }) {
  return h(
    "section",
    { "aria-label": t(name) },
    h(Select, { name, label: t(name), options: items.map((item) => [item.id, sideName(item)]), empty: false, value: whole.id }),
    h(
      "p",
      null,
      h("a", { href: address("completion", { id: whole.id }) }, t("completion"), ` ${whole.id}`),
      " · ",
      h(Outcome, whole),
      " · ",
      t("reward"),
      " ",
      h("strong", null, number(whole.reward)),
    ),
    h(Marked, { found, kind }),
    whole.verdicts
      .filter((each) => each.reason)
      .map((each) => h("p", { class: "muted" }, `${each.rubric} ${number(each.candidate, 2)}: `, h("span", { lang: tongue(each.reason) }, each.reason))),
    whole.judge_s !== null && h(Note, null, t("provider"), ` ${seconds(whole.judge_s)}`),
  );
}

function Diff({ row, items, first, second }) {
  if (!first || !second) return h(Fragment, null, h(Title, null, t("diff")), h(Note, null, t("diff_alone")));
  const found = pieces(first.text, second.text);
  return h(
    Fragment,
    null,
    h("nav", { class: "row", "aria-label": t("list") }, h("a", { class: "button", href: address("row", { row }) }, t("over_time")),
      h("a", { class: "button", href: page.list.hash }, t("back"))),
    h(Title, null, t("diff_title", row)),
    h(Note, null, found.some(([kind]) => kind) ? t("diff_told") : t("diff_same")),
    h(
      "div",
      { class: "sides" },
      h(Side, { name: "a", items, whole: first, found, kind: "del" }),
      h(Side, { name: "b", items, whole: second, found, kind: "ins" }),
    ),
    JSON.stringify(first.messages) === JSON.stringify(second.messages)
      ? h("details", null, h("summary", null, t("conversation")), h(Conversation, { messages: first.messages }))
      : h(Section, { title: t("conversation") }, h(Note, null, t("other_prompt"))),
  );
}

views.diff = {
  async ask(params) {
    const { items } = await ask("row", { row: params.row });
    // Without a choice: the last of each run, or the first and the last of one.
    const runs = [...new Set(items.map((item) => item.run))];
    const lastOf = (run) => items.filter((item) => item.run === run).at(-1)?.id;
    const a = params.a ?? (runs.length > 1 ? lastOf(runs[0]) : items[0]?.id);
    const b = params.b ?? items.findLast((item) => item.id !== a)?.id;
    const [first, second] = await Promise.all([a, b].map((id) => id && ask("completion", { id })));
    return { row: params.row, items, first, second };
  },
  View: Diff,
  title: (data) => t("diff_title", data.row),
};
