// One completion in detail.
import { h, Fragment } from "./vendor/preact.mjs";
import { mean, named, number, seconds, signed, t, tongue, when, whole } from "./words.js";
import { address, ask, page, views } from "./core.js";
import { ofRow } from "./list.js";
import { isJudged, manyBranches, Note, Outcome, runName, Said, Section, Table, Title } from "./parts.js";

const Facts = ({ facts }) =>
  h(
    "dl",
    { class: "facts" },
    facts
      .filter(([, value]) => value !== null && value !== undefined)
      .map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))),
  );

function Neighbours({ id }) {
  const at = page.list.ids.indexOf(id);
  const link = (other, told, rel) =>
    other && h("a", { class: "button", rel, href: address("completion", { id: other }) }, told);
  return h(
    "nav",
    { class: "row", "aria-label": t("list") },
    h("a", { class: "button", href: page.list.hash }, t("back")),
    at >= 0 && link(page.list.ids[at - 1], t("previous"), "prev"),
    at >= 0 && link(page.list.ids[at + 1], t("next"), "next"),
  );
}

function Answered({ title, answer }) {
  if (!answer) return h("section", { "aria-label": title }, h("h3", null, title), h(Note, null, t("no_answer")));
  const passages = answer.passages ?? [];
  return h(
    "section",
    { "aria-label": title },
    h("h3", null, title),
    h(Said, { text: answer.text ?? JSON.stringify(answer) }),
    h(Note, null, answer.took_ms !== undefined && t("took", `${Math.round(answer.took_ms)} ms`)),
    passages.length > 0 &&
      h(Table, {
        caption: `${t("passages")}: ${title}`,
        columns: [
          [t("passage"), ""],
          [t("text"), "wide"],
          [t("score"), "n"],
        ],
        rows: passages.map((each) => [
          each.id,
          h("span", { lang: tongue(each.text) }, each.text),
          number(each.score, 2),
        ]),
      }),
  );
}

// Splits a message with one line per speaker into turns.
const SPEAKERS = { customer: "customer", 客户: "customer", seller: "seller", 销售: "seller" };
const TURN = /^(customer|seller|客户|销售)\s*[:：]\s*/;
function turnsOf(message) {
  const lines = message.content.split("\n");
  if (lines.length < 2 || !TURN.test(lines[0])) return [message];
  const turns = [];
  for (const line of lines) {
    const speaker = line.match(TURN);
    if (speaker) turns.push({ role: SPEAKERS[speaker[1]], content: line.slice(speaker[0].length) });
    else turns.at(-1).content += `\n${line}`;
  }
  return turns;
}

const Folded = ({ title, text }) =>
  h("details", { class: "folded" }, h("summary", null, title), h("pre", { tabIndex: 0, lang: tongue(text) }, pretty(text)));

// Folds tool calls and results, in messages and in texts with the marks of Qwen's template.
const MARKS = /<(tool_call|tool_response|think)>([\s\S]*?)<\/\1>/;
const toolName = (text) => text.match(/"name"\s*:\s*"([^"]*)"/)?.[1] ?? "";
function Written({ text, shown }) {
  const parts = text.split(MARKS); // text, mark, inside, text, ...
  return parts.map((part, at) => {
    if (at % 3 === 1) return null;
    if (at % 3 === 0) return (part.trim() || parts.length === 1) && shown(part);
    const title = { tool_call: t("tool_call", toolName(part)), tool_response: t("tool_answer"), think: t("thought") };
    return h(Folded, { title: title[parts[at - 1]], text: part.trim() });
  });
}

const outcomeOf = ([name, value]) => `${name} ${typeof value === "number" ? number(value, 2) : value}`;

function Turn({ message }) {
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls.map((each) => each.function ?? each) : [];
  return h(
    "li",
    { class: message.role },
    h("strong", null, named(message.role), message.name && ` ${message.name}`),
    message.role === "user" && message.call && ` · ${seconds(message.call.seconds)}`,
    message.role === "tool"
      ? h(Folded, { title: [t("tool_answer"), message.call && ` · ${seconds(message.call.seconds)}`, message.call?.failure && ` · ${message.call.failure}`], text: message.content })
      : h(Written, { text: message.content, shown: (text) => h(Said, { text }) }),
    calls.map((each) => h(Folded, { title: t("tool_call", each.name ?? ""), text: JSON.stringify(each.arguments ?? each) })),
    message.outcome && h(Note, null, Object.entries(message.outcome).map(outcomeOf).join(" · ")),
  );
}

// The messages of a conversation; tool results and a partner's replies are matched to their calls, in order per name.
function withCalls({ turns, calls }) {
  const left = calls.filter((call) => call.path.startsWith("turn "));
  return turns.map((message) => {
    const service = message.role === "tool" ? `tool_${message.name}` : message.role === "user" ? message.name : null;
    const at = service ? left.findIndex((call) => call.service === service) : -1;
    return at < 0 ? message : { ...message, call: left.splice(at, 1)[0] };
  });
}

const Conversation = ({ messages }) =>
  h("ol", { class: "messages" }, messages.flatMap(turnsOf).map((message) => h(Turn, { message })));

// Numbers each request's attempts. A repeat while an earlier one is pending is a hedge.
function attemptsOf(calls) {
  const before = new Map();
  return calls.map((call) => {
    const key = [call.service, call.path, call.request].join("\n"),
      known = before.get(key) ?? [],
      again = call.request ? !call.path.startsWith("turn ") : known.at(-1)?.failure,
      earlier = again ? known : []; // tools are called once; without a request, an answer ends the attempts
    before.set(key, [...earlier, call]);
    const beside = earlier.some((each) => each.time + each.seconds > call.time);
    return { call, number: earlier.length + 1, kind: beside ? "hedge" : earlier.length ? "retry" : "attempt" };
  });
}

// Bytes sent and received, if the client recorded them.
const sizeOf = (text) => whole(new TextEncoder().encode(text ?? "").length);
const bytesOf = ({ request, answer }) => (request || answer ? ` · ${t("bytes", sizeOf(request), sizeOf(answer))}` : "");

const SHORTEST = 0.0005; // shortest wait shown, in seconds

// Requests as bars on a common timeline; each line opens its request and answer.
function Timeline({ calls, queue }) {
  const waited = queue >= SHORTEST ? queue : 0;
  const began = Math.min(...calls.map((call) => call.time)) - waited;
  const end = Math.max(...calls.map((call) => call.time + call.seconds));
  const scale = (time) => (1000 * (time - began)) / Math.max(end - began, 1e-6);
  const many = new Map();
  for (const { service } of calls) many.set(service, (many.get(service) ?? 0) + 1);
  const Bar = ({ from, to, kind }) =>
    h(
      "svg",
      { class: "track", viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      [250, 500, 750].map((x) => h("path", { d: `M${x} 0V10`, class: "tick" })),
      h("rect", { class: kind, x: scale(from), width: Math.max(scale(to) - scale(from), 3), y: 1, height: 8, rx: 2 }),
    );
  return h(
    Fragment,
    null,
    h(Note, null, t("timeline_told", seconds(end - began))),
    h(
      "ol",
      { class: "calls" },
      waited > 0 &&
        h(
          "li",
          { class: "bar_line" },
          h("span", null, t("waited")),
          h(Bar, { from: began, to: began + waited, kind: "waited" }),
          h("span", { class: "n" }, seconds(waited)),
        ),
      attemptsOf(calls).map(({ call, number: at, kind }) => {
        const dropped = ["cancelled", "given_up"].includes(call.failure);
        const failed = dropped ? "cancelled" : call.failure ? "failed" : "answered";
        const [kindOfPath, turn] = call.path.split(" ");
        const path = ["group", "batch"].includes(call.path) ? t(`for_${call.path}`) : kindOfPath === "turn" ? t("in_turn", turn) : call.path;
        const body = (name) =>
          call[name] && h(Fragment, null, h("h4", null, t(name)), h("pre", { tabIndex: 0 }, pretty(call[name])));
        return h(
          "li",
          { key: `${call.time}${call.service}${at}` },
          h(
            "details",
            null,
            h(
              "summary",
              { class: "bar_line" },
              h("span", null, call.service, " ", h("small", null, turn || (kind === "attempt" && many.get(call.service) < 2) ? path : t(kind, at))),
              h(Bar, { from: call.time, to: call.time + call.seconds, kind: `${failed} ${kind}` }),
              h(
                "span",
                { class: "n" },
                seconds(call.seconds),
                " ",
                h("small", { class: failed === "failed" ? "bad" : failed === "answered" ? "good" : "" }, dropped ? t(call.failure) : call.failure || t("answered")),
              ),
            ),
            h(Note, null, `${call.service} ${path} · ${when(call.time)}${bytesOf(call)}`),
            body("request"),
            body("answer"),
          ),
        );
      }),
    ),
  );
}

// Indented JSON with the line breaks of its texts.
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2).replace(/(?<!\\)((?:\\\\)*)\\n/g, "$1\n");
  } catch {
    return text; // not JSON: unchanged
  }
}

function Stages({ stages }) {
  const entries = Object.entries(stages ?? {}).filter(([name, value]) => name !== "queue" || value >= SHORTEST),
    most = Math.max(...entries.map(([, value]) => value), 1e-9);
  return (
    entries.length > 0 &&
    h(
      Section,
      { title: t("seconds") },
      h(Table, {
        caption: t("seconds"),
        columns: [
          [t("stage"), ""],
          [t("second"), "n"],
          ["", "wide"],
        ],
        rows: entries.map(([name, value]) => [
          name === "queue" ? t("waited") : name,
          number(value),
          h(
            "svg",
            { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
            h("rect", { width: (100 * value) / most, height: 6 }),
          ),
        ]),
      }),
    )
  );
}

// All scores, a line each: judges, reward functions and components.
function Scores({ data }) {
  const functions = data.functions ?? {},
    said = new Map(data.verdicts.map((each) => [each.rubric, each]));
  const kindOf = ({ rubric, provider }) => t(provider || rubric === "judge" || rubric.startsWith("judge_") ? "verdict" : "logged");
  const verdicts = data.verdicts
    .filter((each) => !(each.rubric in functions))
    .map((each) => [each.rubric, kindOf(each), each.candidate, null, each.reference, each.reason, each.provider]);
  const ofFunctions = Object.entries(functions).map(([name, value]) => [
    name, t("function"), value, data.weights?.[name] ?? null, null, said.get(name)?.reason ?? "", "",
  ]);
  const parts = Object.entries(data.parts ?? {}).map(([name, value]) => [name, t("part"), value, null, null, "", ""]);
  const all = [...ofFunctions, ...verdicts, ...parts];
  const weighed = ofFunctions.some((each) => each[3] !== null);
  const provided = data.verdicts.some((each) => each.provider);
  const referred = data.verdicts.some((each) => each.reference !== null),
    worded = data.verdicts.some((each) => each.reason);
  if (!all.length) return isJudged(data.run) && h(Section, { title: t("scores") }, h(Note, null, t("no_verdict")));
  const columns = [
    [t("score_of"), ""],
    ["", "muted extra"],
    [t(referred ? "candidate_score" : "number"), "n"],
    weighed && [t("weight"), "n"],
    referred && [t("reference_score"), "n"],
    worded && [t("words"), "wide"],
    provided && [t("provider"), "extra"],
  ];
  const rows = all.map(([name, kind, value, weight, reference, words, by]) =>
    [name, kind, typeof value === "string" ? value : number(value), weight === null ? "" : `× ${weight}`, number(reference), h("span", { lang: tongue(words) }, words), by].filter(
      (_, at) => columns[at],
    ),
  );
  return h(Section, { title: t("scores") }, h(Table, { caption: t("scores"), columns: columns.filter(Boolean), rows }));
}

function Group({ data }) {
  return h(
    Section,
    { title: t("group") },
    h(Note, null, t("group_told", number(mean(data.group.map((each) => each.reward))))),
    h(Table, {
      caption: t("group"),
      columns: [[t("completion"), "extra"], [t("text"), "wide"], [t("outcome"), ""], [t("reward"), "n"], [t("advantage"), "n thin"]],
      rows: data.group.map((each) => ({
        class: each.id === data.id ? "current" : "",
        "aria-current": each.id === data.id ? "true" : undefined,
        cells: [
          each.id === data.id ? t("marked", each.id, t("this_one")) : each.id,
          h("a", { href: address("completion", { id: each.id }), lang: tongue(each.text) }, each.text || "–"),
          h(Outcome, { ...each, run: data.run }),
          number(each.reward),
          each.advantage === null ? "–" : signed(each.advantage),
        ],
      })),
    }),
  );
}

function Completion(data) {
  const hasAnswers = data.answer !== null || data.reference !== null || data.action !== null;
  return h(
    Fragment,
    null,
    h(Neighbours, { id: data.id }),
    h(Title, null, t("completion"), ` ${data.id} · `, manyBranches() && `${data.branch} · `, t("at_step", data.step)),
    h(
      "p",
      { class: "row" },
      h("a", { href: ofRow(data.row) }, t("chart_of", t("over_time"), data.row)),
    ),
    h(
      "div",
      { class: "way" },
      h(
        "div",
        null,
        h(Section, { title: t("conversation") }, h(Conversation, { messages: data.messages })),
        h(
          Section,
          { title: t("wrote") },
          data.turns.length
            ? h(Conversation, { messages: withCalls(data) })
            : h(Written, {
                text: data.text,
                shown: (text) => h("pre", { class: "text", lang: tongue(text), dir: "auto", tabIndex: 0 }, text),
              }),
          data.action
            ? h(Table, {
                caption: t("action"),
                columns: [
                  ["", ""],
                  ["", "wide"],
                ],
                rows: Object.entries(data.action).map(([name, value]) => [
                  name,
                  h("span", { lang: tongue(String(value)) }, String(value)),
                ]),
              })
            : data.outcome === "invalid_action" && isJudged(data.run) && h("p", { class: "bad" }, t("no_action", data.reason)),
        ),
      ),
      h(
        "div",
        { class: "beside" },
        h(
          Section,
          { title: t("earned") },
          h(Facts, {
            facts: [
              [t("reward"), h("strong", { class: "large" }, number(data.reward))],
              [t("advantage"), data.advantage === null ? null : h("span", { class: "large" }, signed(data.advantage))],
              [t("reference_reward"), data.reference_reward === null ? null : h("span", { class: "large" }, number(data.reference_reward))],
              [t("outcome"), h(Outcome, data)],
            ],
          }),
          h(Facts, {
            facts: [
              [t("run"), runName(data.run)],
              [t("mode"), named(data.mode)],
              [t("provider"), data.provider],
              [t("judge_s"), data.judge_s === null ? null : number(data.judge_s, 2)],
              [t("tokens"), data.tokens],
              [t("staleness"), data.staleness],
              [t("rank"), data.rank],
              [t("time"), when(data.time)],
            ],
          }),
        ),
        h(Scores, { data }),
        h(Stages, { stages: data.seconds }),
      ),
    ),
    hasAnswers &&
      h(
        Section,
        { title: t("answers") },
        h(
          "div",
          { class: "sides" },
          h(Answered, { title: t("candidate"), answer: data.answer }),
          h(Answered, { title: t("reference"), answer: data.reference }),
        ),
      ),
    (data.calls.length > 0 || isJudged(data.run)) &&
      h(
        Section,
        { title: t("calls") },
        data.calls.length ? h(Timeline, { calls: data.calls, queue: data.seconds?.queue ?? 0 }) : h(Note, null, t("no_calls")),
      ),
    h(Group, { data }),
  );
}

views.completion = {
  async ask(params) {
    const found = await ask("completion", { id: params.id });
    page.list.at = found.id;
    return found;
  },
  View: (data) => h("div", { key: data.id }, Completion(data)),
  title: (data) => `${t("completion")} ${data.id}`,
};
