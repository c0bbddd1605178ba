// The report of a run, as `python -m salesrl_trl.record.report` writes it, in the look of this page.
import { h, Fragment } from "./vendor/preact.mjs";
import { spoken, t } from "./words.js";
import { ask, views } from "./core.js";
import { Note, runName, runOptions, Section, Select, Table, Title } from "./parts.js";

const INKS = { "#1f2933": "var(--fg)", "#616e7c": "var(--soft)", "#b6bec8": "var(--line)", "#cfe8d5": "var(--band)" };
const ink = (colour) => INKS[colour] ?? colour;

function Drawn({ part, frame }) {
  // Its shapes take any width; its words keep their size.
  const text = (x, y, words, anchor, dx) => h("text", { x: `${(100 * x) / frame.width}%`, y, dx, "text-anchor": anchor }, words);
  return h(
    "figure",
    null,
    part.keys.length > 0 &&
      h(
        "figcaption",
        null,
        h(
          "ul",
          { class: "legend" },
          part.keys.map(([name, colour, isDashed]) =>
            h(
              "li",
              null,
              h(
                "svg",
                { viewBox: "0 0 16 8", width: 16, height: 8, "aria-hidden": "true" },
                h("path", {
                  d: "M0 4H16",
                  style: { stroke: ink(colour) },
                  "stroke-width": isDashed ? 1.6 : 5,
                  "stroke-dasharray": isDashed ? "4 2" : undefined,
                }),
              ),
              name,
            ),
          ),
        ),
      ),
    h(
      "svg",
      { height: frame.height, role: "img", "aria-label": part.description },
      h(
        "svg",
        { viewBox: `0 0 ${frame.width} ${frame.height}`, preserveAspectRatio: "none", height: frame.height },
        h("g", { class: "axis" }, part.y_ticks.map(([y]) => h("path", { d: `M${frame.left} ${y}H${frame.right}` }))),
        part.paths.map((path) =>
          h("path", {
            d: path.d,
            style: { stroke: ink(path.stroke), fill: ink(path.fill) },
            "stroke-width": path.width,
            opacity: path.opacity,
            "stroke-dasharray": path.dash,
            "stroke-linecap": "round",
            "stroke-linejoin": "round",
          }),
        ),
      ),
      part.y_ticks.map(([y, words]) => text(frame.left, y + 4, words, "end", -6)),
      h("g", { class: "x" }, part.x_ticks.map(([x, words]) => text(x, frame.floor + 15, words, "middle"))),
      part.notes.map(([x, words]) => text(x, 23, words, "middle")),
      text(frame.left, 11, part.y_label),
      text((frame.left + frame.right) / 2, frame.height - 4, t("optimizer_step"), "middle"),
    ),
  );
}

const PARTS = {
  Chart: Drawn,
  Table: ({ part, title }) =>
    h(Table, {
      caption: title,
      columns: (part.head.length ? part.head : ["", ""]).map((name, at) => [name, at && part.head.length ? "n" : ""]),
      rows: part.rows,
    }),
  Numbered: ({ part }) => h("ol", { class: "sentences" }, part.sentences.map((each) => h("li", null, each))),
  Paragraph: ({ part }) => h(part.form === "heading" ? "h3" : "p", { class: part.form === "remark" ? "muted" : undefined }, part.text),
};

function Report({ sections, frame, error }, params) {
  const run = params.run ?? "0";
  return h(
    Fragment,
    null,
    h(
      "div",
      { class: "head" },
      h(Title, null, t("report"), " · ", runName(Number(run))),
      runOptions().length > 1 &&
        h(
          "form",
          { class: "choices", onSubmit: (event) => event.preventDefault() },
          h(Select, { name: "run", label: t("run"), options: runOptions(), empty: false, value: run }),
        ),
    ),
    error && h(Note, null, t("no_report"), " ", error),
    h(
      "div",
      { class: "report" },
      (sections[spoken()] ?? []).map(({ title, parts }) =>
        h(Section, { title }, parts.map((part) => h(PARTS[part.kind], { part, frame, title }))),
      ),
    ),
  );
}

views.report = {
  async ask(params) {
    try {
      return await ask("report", { run: params.run ?? 0 });
    } catch (error) {
      return { sections: {}, error: error.message };
    }
  },
  View: Report,
  title: (_, params) => `${t("report")} · ${runName(Number(params.run ?? 0))}`,
};
