// One completion with its whole way.
import { h, Fragment } from "./vendor/preact.mjs";
import { mean, named, number, seconds, signed, t, tongue, when } from "./words.js";
import { address, ask, page, views } from "./core.js";
import { Note, Outcome, runName, Said, Section, Table, Title } from "./parts.js";

const Facts = ({ facts }) =>
  h(
    "dl",
    { class: "facts" },
    facts
      .filter(([, value]) => value !== null && value !== undefined)
      .map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))),
  );

const numbersOf = (object) =>
  Object.entries(object ?? {}).map(([name, value]) => [
    name,
    typeof value === "number" ? number(value) : String(value),
  ]);

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

export const Conversation = ({ messages }) =>
  h(
    "ol",
    { class: "messages" },
    messages.map((each) =>
      h("li", { class: each.role }, h("strong", null, named(each.role)), h(Said, { text: each.content })),
    ),
  );

function Call({ call }) {
  const head = `${call.service} ${call.path} · ${seconds(call.seconds)} · `;
  const body = (name) =>
    call[name] !== null && h(Fragment, null, h("h4", null, t(name)), h("pre", { tabIndex: 0 }, pretty(call[name])));
  return h(
    "li",
    null,
    h(
      "details",
      null,
      h("summary", null, head, h("span", { class: call.failure ? "bad" : "good" }, call.failure || t("answered"))),
      h(Note, null, when(call.time)),
      body("request"),
      body("answer"),
    ),
  );
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // no JSON: as it was sent
  }
}

function Stages({ stages }) {
  const entries = Object.entries(stages ?? {}),
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
          ["s", "n"],
          ["", "wide"],
        ],
        rows: entries.map(([name, value]) => [
          name,
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

function Completion(data) {
  const { reward, reference_reward: reference } = data;
  return h(
    Fragment,
    null,
    h(Neighbours, { id: data.id }),
    h(Title, null, t("completion"), ` ${data.id} · `, data.branch, ` · ${t("step")} ${data.step}`),
    h("p", null, h("a", { href: address("row", { row: data.row }) }, t("over_time"), `: ${data.row}`)),
    h(
      Section,
      { title: t("earned") },
      h(Facts, {
        facts: [
          [t("outcome"), h(Outcome, data)],
          [t("reward"), h("strong", null, number(reward))],
          [t("reference_reward"), number(reference)],
          [t("advantage"), data.advantage === null ? "–" : signed(data.advantage)],
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
      numbersOf(data.parts).length > 0 &&
        h(Fragment, null, h("h3", null, t("parts")), h(Facts, { facts: numbersOf(data.parts) })),
      numbersOf(data.functions).length > 0 &&
        h(Fragment, null, h("h3", null, t("functions")), h(Facts, { facts: numbersOf(data.functions) })),
    ),
    h(Section, { title: t("conversation") }, h(Conversation, { messages: data.messages })),
    h(
      Section,
      { title: t("wrote") },
      h("pre", { class: "text", lang: tongue(data.text), dir: "auto", tabIndex: 0 }, data.text),
      data.action
        ? h(Table, {
            caption: t("action"),
            columns: [
              [t("action"), ""],
              ["", "wide"],
            ],
            rows: Object.entries(data.action).map(([name, value]) => [
              name,
              h("span", { lang: tongue(String(value)) }, String(value)),
            ]),
          })
        : data.outcome === "invalid_action" && h("p", { class: "bad" }, t("no_action", data.reason)),
    ),
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
    h(
      Section,
      { title: t("verdicts") },
      data.verdicts.length
        ? h(Table, {
            caption: t("verdicts"),
            columns: [
              [t("rubric"), ""],
              [t("candidate_score"), "n"],
              [t("reference_score"), "n"],
              [t("judge_words"), "wide"],
              [t("provider"), ""],
            ],
            rows: data.verdicts.map((each) => [
              each.rubric,
              number(each.candidate, 2),
              number(each.reference, 2),
              h("span", { lang: tongue(each.reason) }, each.reason),
              each.provider,
            ]),
          })
        : h(Note, null, t("no_verdict")),
    ),
    h(
      Section,
      { title: t("group") },
      h(Note, null, t("group_told", number(mean(data.group.map((each) => each.reward))))),
      h(Table, {
        caption: t("group"),
        columns: [
          [t("completion"), "extra"],
          [t("text"), "wide"],
          [t("outcome"), ""],
          [t("reward"), "n"],
          [t("advantage"), "n"],
        ],
        rows: data.group.map((each) => ({
          class: each.id === data.id ? "current" : "",
          "aria-current": each.id === data.id ? "true" : undefined,
          cells: [
            each.id === data.id ? `${each.id} (${t("this_one")})` : each.id,
            h("a", { href: address("completion", { id: each.id }), lang: tongue(each.text) }, each.text || "–"),
            h(Outcome, each),
            number(each.reward),
            each.advantage === null ? "–" : signed(each.advantage),
          ],
        })),
      }),
    ),
    h(Stages, { stages: data.seconds }),
    h(
      Section,
      { title: t("calls") },
      data.calls.length
        ? h(
            "ol",
            { class: "calls" },
            data.calls.map((call) => h(Call, { call, key: call.time + call.service })),
          )
        : h(Note, null, t("no_calls")),
    ),
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
