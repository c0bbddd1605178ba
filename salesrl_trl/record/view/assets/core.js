// Page state: address, loaded data, and navigation.
import { h, render } from "./vendor/preact.mjs";
import { speak, t } from "./words.js";

const given = document.getElementById("data").textContent;
export const DATA = given ? JSON.parse(given) : null;

// A standalone report does not list completions.
export const HOME = DATA ? "report" : "overview";

export const page = {
  route: HOME,
  params: {}, // of the address
  state: { runs: [], facets: {} }, // runs and filter options
  shown: null, // { route, params, data } last loaded
  error: "",
  busy: false,
  said: "",
  follow: true,
  seen: undefined, // version of the displayed state
  list: { hash: "#list", ids: [], at: null }, // the previous list
};

export async function ask(question, params = {}) {
  if (DATA) return DATA[question];
  const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const answer = await fetch(`api/${question}?${new URLSearchParams(kept)}`);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

export function address(route, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(kept).toString();
  return `#${route}${query ? `?${query}` : ""}`;
}

export function readAddress() {
  const [route, query] = location.hash.slice(1).split(/\?(.*)/s);
  page.route = route || HOME;
  page.params = Object.fromEntries(new URLSearchParams(query || ""));
  speak(page.params.lang ?? DATA?.language ?? stored());
}

// The last chosen language, or the browser's if storage is unavailable, e.g. for a file.
function stored() {
  try {
    return localStorage.getItem("salesrl.lang");
  } catch {
    return null;
  }
}
export function choose(lang) {
  try {
    localStorage.setItem("salesrl.lang", lang);
  } catch {
    // kept until the page closes
  }
  speak(lang);
  draw();
}

// Replaces the address within a view, so that Back leaves the view.
export function change(params) {
  note(params);
  return load();
}

// Replaces the address only. Concurrent renders use it too, so that typing is not reverted.
export function note(params) {
  page.params = { ...page.params, ...params };
  history.replaceState(null, "", address(page.route, page.params));
}

export const views = {}; // by route: { ask(params), View(data, params), title(data, params), focus }
let asked = 0;

// Loads and renders the address. Outdated responses are dropped.
export async function load({ arrive = false, quiet = false } = {}) {
  const mine = ++asked;
  page.seen = page.state.version;
  readAddress();
  const view = views[page.route] ?? views[HOME];
  if (!quiet) {
    page.busy = true;
    draw();
  }
  try {
    const data = await view.ask(page.params);
    if (mine !== asked) return;
    page.shown = { route: page.route, params: page.params, data };
    page.error = "";
    if (!quiet) page.said = view.told?.(data, page.params) ?? view.title(data, page.params);
  } catch (error) {
    if (mine !== asked) return;
    page.error = page.said = t("failed", error.message);
    page.shown = null;
  }
  page.busy = false;
  draw();
  if (arrive) (view.focus?.() || document.querySelector("main h1"))?.focus();
  document.title = `${page.shown ? view.title(page.shown.data, page.params) : t("title")} · salesrl`;
}

let root = null;
export function start(App) {
  root = App;
  draw();
}
export function draw() {
  if (root) render(h(root), document.getElementById("app"));
}
