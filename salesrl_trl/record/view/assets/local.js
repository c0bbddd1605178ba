// Answers of a page that stands alone, from the data inside it. The same questions as those of the server.

const PART = 50;
const EQUAL = ["branch", "outcome", "reason", "provider", "mode", "row", "recovered"];
const BETWEEN = ["reward", "advantage", "step"];
const size = (value) => (value === null ? null : Math.abs(value));
const ORDERS = {
  newest: ["step", -1],
  oldest: ["step", 1],
  disagreement: ["disagreement", -1],
  advantage: ["advantage", -1, size],
  slowest: ["call_s", -1],
};

// What has no number comes last.
function sorted(items, order) {
  const [name, way, seen = (value) => value] = ORDERS[order] ?? [
    order.replace(/_(high|low)$/, ""),
    order.endsWith("_low") ? 1 : -1,
  ];
  const key = (item) => seen(item[name]) ?? way * Infinity;
  return items.toSorted((a, b) => (key(a) === key(b) ? 0 : way * (key(a) < key(b) ? -1 : 1)));
}

export async function localAnswer(data, question, params) {
  const key = `${Number(params.run ?? 0)}/${params.mode || "train"}`;
  const latest = () => data.overview[key].steps.at(-1)?.step ?? 0;
  const known = {
    state: () => data.state,
    list: () => listed(data, params),
    overview: () => data.overview[key],
    completion: () => data.completions[params.id],
    row: () => data.row[params.row],
    histogram: () => data.histogram[`${key}/${params.step ?? latest()}`] ?? { step: params.step, edges: [], counts: {} },
    report: () => data.report[params.run ?? 0],
    compare: () =>
      data.compare[`${params.one}/${params.other}/${params.mode || "train"}/${params.order || "largest"}`],
  };
  const answer = known[question]();
  if (answer === undefined) throw new Error("not_there");
  return question === "compare" ? { ...answer, next: null } : answer;
}

// The items that fit the filters, in their order.
export function chosen(data, params) {
  const word = (params.text ?? "").trim().toLowerCase();
  const fits = (item) =>
    (!params.run || item.run === Number(params.run)) &&
    EQUAL.every((name) => !params[name] || item[name] === params[name]) &&
    BETWEEN.every((name) => inside(item[name], params[`${name}_min`], params[`${name}_max`])) &&
    (!params.flag || (params.flag === "any" ? item.flag || item.note : item.flag === params.flag)) &&
    (!word || said(data.completions[item.id]).includes(word));
  return sorted(data.items.filter(fits), params.order || "newest");
}

function listed(data, params) {
  const found = chosen(data, params);
  const first = Number(params.after ?? 0);
  const next = first + PART < found.length ? String(first + PART) : null;
  return { total: found.length, items: found.slice(first, first + PART), next };
}

function inside(value, min, max) {
  if (!min && !max) return true;
  return value !== null && (!min || value >= Number(min)) && (!max || value <= Number(max));
}

function said(completion) {
  const texts = [
    completion.text,
    ...completion.messages.map((each) => each.content),
    ...completion.verdicts.map((each) => each.reason),
  ];
  return texts.join("\n").toLowerCase();
}

// Lines as the server's export has them, of the completions in this page.
export function exported(data, params, kind) {
  const conversation = ({ turns, text }) => (turns.length ? turns : [{ role: "assistant", content: text }]);
  const all = chosen(data, params).map((item) => ({ ...data.completions[item.id] }));
  if (kind === "dataset")
    return all.map((each) => ({
      prompt: each.messages,
      completion: conversation(each),
      ...Object.fromEntries(
        ["run", "row", "branch", "step", "mode", "outcome", "reason", "reward", "advantage", "flag", "note"].map(
          (name) => [name, name === "run" ? data.state.runs[each.run].name : each[name]],
        ),
      ),
    }));
  const groups = Map.groupBy(
    all.filter((each) => each.reward !== null),
    (each) => each.row + JSON.stringify(each.messages),
  );
  return [...groups.values()]
    .map((some) => some.toSorted((a, b) => b.reward - a.reward))
    .filter((some) => some[0].reward > some.at(-1).reward)
    .map(([best, ...others]) => ({
      prompt: best.messages,
      chosen: conversation(best),
      rejected: conversation(others.at(-1)),
      row: best.row,
      branch: best.branch,
      chosen_reward: best.reward,
      rejected_reward: others.at(-1).reward,
    }));
}
