// Lines over steps and stacked bars, as SVG. Their figures stand in tables too; to a screen reader each is one picture
// with words. The mouse shows a step's figures in the legend.
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
const COLORS = 9; // of the style; further ones begin again
const MOST_POINTS = 360;
let over = {}; // the chart and the step that the mouse is at

// So that a chart fills its place and its words stay as large as those around it.
export function widthOf(columns, widest = WIDEST) {
  const wide = Math.min(document.documentElement.clientWidth - 32, widest - 32);
  const some = wide >= 900 ? columns : 1;
  return Math.max(260, (wide - GAP * (some - 1)) / some);
}

const tint = (color) => (typeof color === "number" ? `c${color % COLORS}` : color); // or `band`, or `rest`

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
              h("path", { d: "M0 4H24", class: `line ${tint(each.color)}`, "stroke-dasharray": DASHES[each.dash % 4] }),
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

// `series`: [{ name, points: [[step, value or null]], color, dash, pale }]; `color` and `dash` are numbers, `pale` the
// points of a thin line behind. `band`: { name, low, high }. `marks`: steps with a sign. `onPick` is told the step that
// is clicked on.
export function Chart({ title, series, domain, columns = 1, widest, onPick, picked, ...more }) {
  const { band, marks = [], isLog = false, fromZero = false } = more;
  const drawn = series
    .map((each) => ({ ...each, points: thinned(each.points.filter(([, y]) => y !== null)) }))
    .filter((each) => each.points.length);
  if (!drawn.length) return null;
  const width = widthOf(columns, widest);
  const steps = [...new Set(drawn.flatMap((each) => each.points.map(([x]) => x)))].sort((a, b) => a - b),
    values = drawn.flatMap((each) => [...each.points, ...(each.pale ?? [])].map(([, y]) => y)).concat(band ? [band.low, band.high] : []);
  const [x0, x1] = [steps[0], steps.at(-1)];
  const scale = isLog ? Math.log10 : (value) => value;
  const [low, high] = (domain ?? [fromZero && !isLog ? 0 : Math.min(...values), Math.max(...values)]).map(scale);
  const ticks = ticksOf(low, high, 4, isLog).map((tick) => (isLog ? 10 ** tick : tick));
  const [y0, y1] = [scale(ticks[0]), scale(ticks.at(-1))];
  const x = (step) => LEFT + 8 + (x1 > x0 ? (step - x0) / (x1 - x0) : 0.5) * (width - LEFT - RIGHT - 16);
  const y = (value) => TOP + (1 - (scale(value) - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const d = (points) => points.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
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
      keys: drawn
        .map((each) => ({
          ...each,
          told: at === null || valueAt(each) === undefined ? each.name : `${each.name} ${number(valueAt(each))}`,
        }))
        .concat(band ? [{ color: "band", dash: 0, told: band.name }] : []),
      width,
      x,
      y,
      ticks: { y: ticks, x: x1 > x0 ? ticksOf(x0, x1, width / 70, true).filter((n) => n >= x0 && n <= x1) : [x0] },
      class: onPick ? "picks" : undefined,
      onMouseMove: (event) => hover(title, nearest(event)),
      onMouseLeave: () => hover(null),
      onClick: onPick && ((event) => onPick(nearest(event))),
    },
    band && h("path", { class: "area band", d: `M${LEFT} ${y(band.high)}H${width - RIGHT}V${y(band.low)}H${LEFT}Z` }),
    marks.map((step) => step >= x0 && step <= x1 && h("text", { x: x(step), y: TOP + 4, "text-anchor": "middle" }, "↻")),
    [at, picked].map(
      (step) =>
        steps.includes(step) &&
        h("path", { class: "cursor", d: `M${x(step)} ${TOP}V${HEIGHT - BOTTOM}`, "aria-hidden": "true" }),
    ),
    drawn.map((each) => [
      each.pale?.length > 1 && h("path", { class: `line pale ${tint(each.color)}`, d: d(each.pale) }),
      each.points.length > 1 &&
        h("path", { class: `line ${tint(each.color)}`, "stroke-dasharray": DASHES[each.dash % 4], d: d(each.points) }),
      each.points
        .filter(([step]) => step === at || each.points.length <= 30)
        .map(([step, value]) => h("circle", { class: `dot ${tint(each.color)}`, cx: x(step), cy: y(value), r: 2.6 })),
    ]),
  );
}

function hover(title, step) {
  if (over.title === title && over.step === step) return;
  over = { title, step };
  draw();
}

// Heights over intervals, such as how often each value came. `parts`: [{ name, bins, color }], stacked. What is higher
// than `top` is cut off, with the words of `notes`: [[number of the bar, words]]. `hasSteps`: intervals of whole steps.
export function Bars({ title, edges, parts, columns = 1, widest, ...more }) {
  const { top, notes = [], hasSteps = false, isWhole = true } = more;
  const width = widthOf(columns, widest);
  const sums = edges.slice(1).map((_, at) => parts.reduce((sum, { bins }) => sum + bins[at], 0));
  const ticks = ticksOf(0, top ?? Math.max(...sums, 1), 4, isWhole);
  const [low, high] = [edges[0], edges.at(-1)];
  const x = (value) => LEFT + ((value - low) / (high - low)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - Math.min(value / ticks.at(-1), 1)) * (HEIGHT - TOP - BOTTOM);
  const told = parts.map(({ name, bins }) => (hasSteps ? name : `${name} ${whole(bins.reduce((sum, many) => sum + many, 0))}`));
  const gap = edges.length > 60 ? 0 : 1;
  return h(
    Frame,
    {
      title,
      told: told.join("; "),
      keys: parts.map(({ color }, at) => ({ color, told: told[at] })),
      width,
      x,
      y,
      ticks: { y: ticks, whole: isWhole, x: ticksOf(low, high, 6, hasSteps).filter((n) => n >= low - 1e-9 && n <= high + 1e-9) },
    },
    notes.map(([at, words]) => h("text", { x: x((edges[at] + edges[at + 1]) / 2), y: TOP + 4, "text-anchor": "middle" }, words)),
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
              class: `area ${tint(color)}`,
              x: x(edges[at]) + gap,
              width: Math.max(x(edges[at + 1]) - x(edges[at]) - 2 * gap, 1),
              y: y(below),
              height: y(below - many) - y(below),
            },
            h("title", null, `${from}: ${name} ${short(many)}`),
          )
        );
      });
    }),
  );
}

const short = (value) => String(Number(value.toPrecision(4))).replace("-", "−");

// Round numbers around an interval, whole ones if wanted.
function ticksOf(low, high, most = 4, isWhole = false) {
  if (!(high - low > 1e-9 * Math.abs(high))) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const rough = Math.max((high - low) / most, isWhole ? 1 : 0),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * (isWhole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).find((each) => each * power >= rough * (1 - 1e-9));
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
