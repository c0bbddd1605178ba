// Lines over steps and bars over rewards, as SVG. Their figures stand in tables too; to a screen reader each is one
// picture with words. The mouse shows a step's figures in the legend.
import { h } from "./vendor/preact.mjs";
import { number, t, whole } from "./words.js";
import { draw } from "./core.js";

const HEIGHT = 240,
  LEFT = 46,
  RIGHT = 12,
  TOP = 10,
  BOTTOM = 28,
  WIDEST = 1760, // of the page, as the style has it
  GAP = 24;
const DASHES = ["", "7 4", "2 3", "10 3 2 3"];
const MOST_POINTS = 360;
let over = {}; // the chart and the step that the mouse is at

// So that a chart fills its place and its words stay as large as those around it.
export function widthOf(columns) {
  const wide = Math.min(document.documentElement.clientWidth, WIDEST) - 32;
  const some = wide >= 900 ? columns : 1;
  return Math.max(260, (wide - GAP * (some - 1)) / some);
}

function Frame({ title, told, keys, width, x, y, ticks, children, ...more }) {
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
        keys.map((each) =>
          h(
            "li",
            null,
            h(
              "svg",
              { viewBox: "0 0 24 8", width: 24, height: 8, "aria-hidden": "true" },
              h("path", { d: "M0 4H24", class: `line c${each.color % 6}`, "stroke-dasharray": DASHES[each.dash % 4] }),
            ),
            each.told,
          ),
        ),
      ),
    ),
    h(
      "svg",
      { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": t("chart_of", title, told), ...more },
      ticks.y.map((value) =>
        h(
          "g",
          { class: "axis" },
          h("path", { d: `M${LEFT} ${y(value)}H${width - RIGHT}` }),
          h("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, ticks.whole ? whole(value) : short(value)),
        ),
      ),
      ticks.x.map((value) => h("text", { x: x(value), y: HEIGHT - 9, "text-anchor": "middle" }, short(value))),
      children,
    ),
  );
}

// `series`: [{ name, points: [[step, value or null]], color, dash }]; `color` and `dash` are numbers. `onPick` is told
// the step that is clicked on.
export function Chart({ title, series, domain, columns = 1, onPick, picked }) {
  const drawn = series
    .map((each) => ({ ...each, points: thinned(each.points.filter(([, y]) => y !== null)) }))
    .filter((each) => each.points.length);
  if (!drawn.length) return null;
  const width = widthOf(columns);
  const steps = [...new Set(drawn.flatMap((each) => each.points.map(([x]) => x)))].sort((a, b) => a - b),
    values = drawn.flatMap((each) => each.points.map(([, y]) => y));
  const [x0, x1] = [steps[0], steps.at(-1)];
  const ticks = ticksOf(...(domain ?? [Math.min(...values), Math.max(...values)]));
  const [y0, y1] = [ticks[0], ticks.at(-1)];
  const x = (step) => LEFT + 8 + (x1 > x0 ? (step - x0) / (x1 - x0) : 0.5) * (width - LEFT - RIGHT - 16);
  const y = (value) => TOP + (1 - (value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const at = over.title === title && steps.includes(over.step) ? over.step : null;
  const valueAt = (each) => each.points.find(([step]) => step === at)?.[1];
  const nearest = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * width;
    return steps.reduce((best, step) => (Math.abs(x(step) - place) < Math.abs(x(best) - place) ? step : best));
  };
  const told = drawn.map((each) =>
    t("chart_series", each.name, number(each.points[0][1], 2), number(each.points.at(-1)[1], 2)),
  );
  return h(
    Frame,
    {
      title: at === null ? title : `${title} · ${t("step")} ${at}`,
      told: told.join("; "),
      keys: drawn.map((each) => ({
        ...each,
        told: at === null || valueAt(each) === undefined ? each.name : `${each.name} ${number(valueAt(each))}`,
      })),
      width,
      x,
      y,
      ticks: { y: ticks, x: x1 > x0 ? ticksOf(x0, x1, width / 70, true).filter((n) => n >= x0 && n <= x1) : [x0] },
      class: onPick ? "picks" : undefined,
      onMouseMove: (event) => hover(title, nearest(event)),
      onMouseLeave: () => hover(null),
      onClick: onPick && ((event) => onPick(nearest(event))),
    },
    [at, picked].map(
      (step) =>
        steps.includes(step) &&
        h("path", { class: "cursor", d: `M${x(step)} ${TOP}V${HEIGHT - BOTTOM}`, "aria-hidden": "true" }),
    ),
    drawn.map((each) => [
      each.points.length > 1 &&
        h("path", {
          class: `line c${each.color % 6}`,
          "stroke-dasharray": DASHES[each.dash % 4],
          d: each.points
            .map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`)
            .join(""),
        }),
      each.points
        .filter(([step]) => step === at || each.points.length <= 30)
        .map(([step, value]) => h("circle", { class: `dot c${each.color % 6}`, cx: x(step), cy: y(value), r: 2.6 })),
    ]),
  );
}

function hover(title, step) {
  if (over.title === title && over.step === step) return;
  over = { title, step };
  draw();
}

// How often each value came. `parts`: [{ name, bins, color }], stacked.
export function Bars({ title, edges, parts, columns = 1 }) {
  const width = widthOf(columns);
  const sums = edges.slice(1).map((_, at) => parts.reduce((sum, { bins }) => sum + bins[at], 0));
  const ticks = ticksOf(0, Math.max(...sums, 1), 4, true);
  const [low, high] = [edges[0], edges.at(-1)];
  const x = (value) => LEFT + ((value - low) / (high - low)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / ticks.at(-1)) * (HEIGHT - TOP - BOTTOM);
  const told = parts.map(({ name, bins }) => `${name} ${whole(bins.reduce((sum, many) => sum + many, 0))}`);
  return h(
    Frame,
    {
      title,
      told: told.join("; "),
      keys: parts.map(({ color }, at) => ({ color, told: told[at] })),
      width,
      x,
      y,
      ticks: { y: ticks, whole: true, x: ticksOf(low, high, 6).filter((n) => n >= low - 1e-9 && n <= high + 1e-9) },
    },
    sums.map((sum, at) => {
      let below = 0;
      return parts.map(({ name, bins, color }) => {
        const many = bins[at];
        below += many;
        const from = `${short(edges[at])} – ${short(edges[at + 1])}`;
        return (
          many > 0 &&
          h(
            "rect",
            {
              class: `area c${color % 6}`,
              x: x(edges[at]) + 1,
              width: Math.max(x(edges[at + 1]) - x(edges[at]) - 2, 1),
              y: y(below),
              height: y(below - many) - y(below),
            },
            h("title", null, `${from}: ${name} ${many}`),
          )
        );
      });
    }),
  );
}

const short = (value) => String(Number(value.toPrecision(4))).replace("-", "−");

// Round numbers around an interval, whole ones if wanted.
function ticksOf(low, high, most = 4, isWhole = false) {
  const rough = Math.max((high - low) / most, isWhole ? 1 : 0.005),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * (isWhole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).find((each) => each * power >= rough - 1e-12);
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
