// Answers of a page that stands alone, from the data inside it. The same questions as those of the server.

const PART = 50;
const EQUAL = ["branch", "outcome", "reason", "provider", "mode", "row"];
const BETWEEN = ["reward", "advantage", "step"];
const low = (value) => value ?? -Infinity;
const size = (value) => (value === null ? -Infinity : Math.abs(value));
const ORDERS = {
  newest: (a, b) => b.step - a.step,
  oldest: (a, b) => a.step - b.step,
  reward_high: (a, b) => low(b.reward) - low(a.reward),
  reward_low: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  disagreement: (a, b) => low(b.disagreement) - low(a.disagreement),
  advantage: (a, b) => size(b.advantage) - size(a.advantage),
  slowest: (a, b) => low(b.judge_s) - low(a.judge_s),
};

export async function localAnswer(data, question, params) {
  const known = {
    state: () => data.state,
    list: () => listed(data, params),
    overview: () => data.overview[`${Number(params.run ?? 0)}/${params.mode || "train"}`],
    completion: () => data.completions[params.id],
    row: () => data.row[params.row],
    compare: () =>
      data.compare[`${params.one}/${params.other}/${params.mode || "train"}/${params.order || "largest"}`],
  };
  const answer = known[question]();
  if (answer === undefined) throw new Error("not_there");
  return question === "compare" ? { ...answer, next: null } : answer;
}

function listed(data, params) {
  const word = (params.text ?? "").trim().toLowerCase();
  const fits = (item) =>
    (!params.run || item.run === Number(params.run)) &&
    EQUAL.every((name) => !params[name] || item[name] === params[name]) &&
    BETWEEN.every((name) => inside(item[name], params[`${name}_min`], params[`${name}_max`])) &&
    (!word || said(data.completions[item.id]).includes(word));
  const order = ORDERS[params.order || "newest"];
  const found = data.items.filter(fits).sort((a, b) => order(a, b) || 0);
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
