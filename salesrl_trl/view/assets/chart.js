// Lines over steps, as SVG. Its figures stand in a table beside it; to a screen reader it is one picture with words.
import { h } from "./vendor/preact.mjs";
import { number, t } from "./words.js";

const HEIGHT = 220,
  LEFT = 44,
  RIGHT = 8,
  TOP = 10,
  BOTTOM = 26;
// So that its words stay as large on a narrow window.
const width = () => Math.min(640, Math.max(280, innerWidth - 40));
const DASHES = ["", "7 4", "2 3", "10 3 2 3"];
const MOST_POINTS = 360;

// `series`: [{ name, points: [[step, value or null]], color, dash }]; `color` and `dash` are numbers.
export function Chart({ title, series, domain }) {
  const drawn = series
    .map((each) => ({ ...each, points: thinned(each.points.filter(([, y]) => y !== null)) }))
    .filter((each) => each.points.length);
  if (!drawn.length) return null;
  const WIDTH = width();
  const steps = drawn.flatMap((each) => each.points.map(([x]) => x)),
    values = drawn.flatMap((each) => each.points.map(([, y]) => y));
  const [x0, x1] = [Math.min(...steps), Math.max(...steps)];
  const ticks = ticksOf(...(domain ?? [Math.min(...values), Math.max(...values)]));
  const [y0, y1] = [ticks[0], ticks.at(-1)];
  const x = (step) => LEFT + (x1 > x0 ? (step - x0) / (x1 - x0) : 0.5) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const told = drawn.map((each) =>
    t("chart_series", each.name, number(each.points[0][1], 2), number(each.points.at(-1)[1], 2)),
  );
  return h(
    "figure",
    null,
    h(
      "figcaption",
      null,
      h("strong", null, title),
      h(
        "ul",
        { class: "legend" },
        drawn.map((each) =>
          h(
            "li",
            null,
            h(
              "svg",
              { viewBox: "0 0 24 8", width: 24, height: 8, "aria-hidden": "true" },
              h("path", {
                d: "M0 4H24",
                class: `line c${each.color % 6}`,
                "stroke-dasharray": DASHES[each.dash % 4],
              }),
            ),
            each.name,
          ),
        ),
      ),
    ),
    h(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": t("chart_of", title, told.join("; ")) },
      ticks.map((value) =>
        h(
          "g",
          { class: "axis" },
          h("path", { d: `M${LEFT} ${y(value)}H${WIDTH - RIGHT}` }),
          h("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, 2)),
        ),
      ),
      [...new Set([0, 0.25, 0.5, 0.75, 1].map((part) => Math.round(x0 + part * (x1 - x0))))].map((step) =>
        h("text", { class: "axis", x: x(step), y: HEIGHT - 8, "text-anchor": step === x1 ? "end" : "middle" }, step),
      ),
      drawn.map((each) =>
        each.points.length > 1
          ? h("path", {
              class: `line c${each.color % 6}`,
              "stroke-dasharray": DASHES[each.dash % 4],
              d: each.points
                .map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`)
                .join(""),
            })
          : h("circle", { class: `dot c${each.color % 6}`, cx: x(each.points[0][0]), cy: y(each.points[0][1]), r: 3 }),
      ),
    ),
  );
}

// Round numbers around an interval.
function ticksOf(low, high) {
  const rough = Math.max(high - low, 0.02) / 4,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((each) => each * power >= rough - 1e-12);
  const first = Math.floor(low / step + 1e-9),
    last = Math.max(Math.ceil(high / step - 1e-9), first + 1);
  return Array.from({ length: last - first + 1 }, (_, at) => (first + at) * step);
}

// Means of neighbours, so that no more points are drawn than a screen shows.
function thinned(points) {
  const size = Math.ceil(points.length / MOST_POINTS);
  if (size <= 1) return points;
  const found = [];
  for (let at = 0; at < points.length; at += size) {
    const some = points.slice(at, at + size);
    found.push([some[some.length >> 1][0], some.reduce((sum, [, value]) => sum + value, 0) / some.length]);
  }
  return found;
}
