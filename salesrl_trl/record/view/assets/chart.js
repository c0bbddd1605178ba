// Line charts over steps, as SVG. Tables contain the values too; screen readers announce each chart as one labelled
// image. Hovering shows a step's values in the legend.
import { h } from "./vendor/preact.mjs";
import { number, t } from "./words.js";
import { draw } from "./core.js";

const HEIGHT = 240,
  LEFT = 46,
  RIGHT = 12,
  TOP = 10,
  BOTTOM = 28,
  WIDEST = 1760, // the page's width in style.css
  GAP = 24;
const DASHES = ["", "7 4", "2 3", "10 3 2 3"];
const COLORS = 9; // colours in style.css, reused cyclically
const MOST_POINTS = 360;
let over = {}; // the hovered chart and step

// Charts fill their container while labels keep the text size.
function widthOf(columns, widest = WIDEST) {
  const wide = Math.min(document.documentElement.clientWidth - 32, widest - 32);
  const some = wide >= 900 ? columns : 1;
  return Math.max(260, (wide - GAP * (some - 1)) / some);
}

const tint = (color) => (typeof color === "number" ? `c${color % COLORS}` : color); // or `band`

// `series`: [{ name, points: [[step, value or null]], color, dash }]; `color` and `dash` are numbers. `band`: { name,
// low, high }.
export function Chart({ title, series, domain, columns = 1, widest, band }) {
  const drawn = series
    .map((each) => ({ ...each, points: thinned(each.points.filter(([, y]) => y !== null)) }))
    .filter((each) => each.points.length);
  if (!drawn.length) return null;
  const width = widthOf(columns, widest);
  const steps = [...new Set(drawn.flatMap((each) => each.points.map(([x]) => x)))].sort((a, b) => a - b),
    values = drawn.flatMap((each) => each.points.map(([, y]) => y)).concat(band ? [band.low, band.high] : []);
  const [x0, x1] = [steps[0], steps.at(-1)];
  const [low, high] = domain ?? [Math.min(...values), Math.max(...values)];
  const ticks = ticksOf(low, high),
    across = x1 > x0 ? ticksOf(x0, x1, width / 70, true).filter((n) => n >= x0 && n <= x1) : [x0];
  const [y0, y1] = [ticks[0], ticks.at(-1)];
  const x = (step) => LEFT + 8 + (x1 > x0 ? (step - x0) / (x1 - x0) : 0.5) * (width - LEFT - RIGHT - 16);
  const y = (value) => TOP + (1 - (value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
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
  const keys = drawn
    .map((each) => ({ ...each, told: valueAt(each) === undefined ? each.name : `${each.name} ${number(valueAt(each))}` }))
    .concat(band ? [{ color: "band", dash: 0, told: band.name }] : []);
  return h(
    "figure",
    null,
    h(
      "figcaption",
      null,
      h("strong", null, at === null ? title : `${title} · ${t("at_step", at)}`),
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
      {
        viewBox: `0 0 ${width} ${HEIGHT}`,
        role: "img",
        "aria-label": t("chart_of", title, told.join("; ")),
        onMouseMove: (event) => hover(title, nearest(event)),
        onMouseLeave: () => hover(null),
      },
      band && h("path", { class: "area band", d: `M${LEFT} ${y(band.high)}H${width - RIGHT}V${y(band.low)}H${LEFT}Z` }),
      ticks.map((value) =>
        h(
          "g",
          { class: "axis" },
          h("path", { d: `M${LEFT} ${y(value)}H${width - RIGHT}` }),
          h("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, short(value)),
        ),
      ),
      across.map((value) => h("text", { x: x(value), y: HEIGHT - 9, "text-anchor": "middle" }, short(value))),
      at !== null && h("path", { class: "cursor", d: `M${x(at)} ${TOP}V${HEIGHT - BOTTOM}`, "aria-hidden": "true" }),
      drawn.map((each) => [
        each.points.length > 1 &&
          h("path", { class: `line ${tint(each.color)}`, "stroke-dasharray": DASHES[each.dash % 4], d: d(each.points) }),
        each.points
          .filter(([step]) => step === at || each.points.length <= 30)
          .map(([step, value]) => h("circle", { class: `dot ${tint(each.color)}`, cx: x(step), cy: y(value), r: 2.6 })),
      ]),
    ),
  );
}

function hover(title, step) {
  if (over.title === title && over.step === step) return;
  over = { title, step };
  draw();
}

export const short = (value) => String(Number(value.toPrecision(4))).replace("-", "−");

// Round tick values around an interval, optionally integers.
function ticksOf(low, high, most = 4, isWhole = false) {
  if (!(high - low > 1e-9 * Math.abs(high))) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const rough = Math.max((high - low) / most, isWhole ? 1 : 0),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * (isWhole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).find((each) => each * power >= rough * (1 - 1e-9));
  const first = Math.floor(low / step + 1e-9),
    last = Math.max(Math.ceil(high / step - 1e-9), first + 1);
  return Array.from({ length: last - first + 1 }, (_, at) => (first + at) * step);
}

// Averages neighbouring points to the screen's resolution.
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
