// The page frame: header, keyboard shortcuts, and live updates.
import { h, Fragment } from "./vendor/preact.mjs";
import { spoken, t, whole } from "./words.js";
import { ask, choose, DATA, draw, HOME, load, page, readAddress, start, views } from "./core.js";

const FOLLOW_MS = 2000;
const PAGE = 50; // items per request
const total = () => page.state.runs.reduce((sum, run) => sum + run.many, 0);

function App() {
  const view = views[page.shown?.route] ?? views[HOME];
  const tab = (route) =>
    h("li", null, h("a", { href: `#${route}`, "aria-current": page.route === route ? "page" : undefined }, t(route)));
  const other = spoken() === "zh" ? "en" : "zh";
  return h(
    Fragment,
    null,
    h("a", { class: "skip", href: "#main", onClick: skip }, t("skip")),
    h(
      "header",
      null,
      !DATA &&
        h(
          "nav",
          { "aria-label": "salesrl" },
          h("ul", null, tab("overview"), tab("list"), tab("report"), page.state.runs.length > 1 && tab("compare")),
        ),
      h(
        "p",
        { class: "runs muted" },
        page.state.runs.map((run) => run.name).join(" · "),
        !DATA && ` · ${whole(total())} ${t("completions")}`,
      ),
      !DATA &&
        h(
          "label",
          { class: "follow" },
          h("input", {
            type: "checkbox",
            checked: page.follow,
            onChange: (event) => {
              page.follow = event.target.checked;
            },
          }),
          t("follow"),
        ),
      h(
        "button",
        { type: "button", class: "language", lang: other === "zh" ? "zh-CN" : "en", onClick: () => choose(other) },
        t("language"),
      ),
    ),
    h("p", { class: "unseen", role: "status", "aria-live": "polite" }, page.said),
    h(
      "main",
      { id: "main", "aria-busy": page.busy ? "true" : "false" },
      page.state.reading && h("p", { class: "notice" }, t("reading", whole(total()))),
      page.state.trouble && h("p", { class: "notice bad" }, t("trouble", page.state.trouble)),
      page.error
        ? h(
            Fragment,
            null,
            h("h1", { tabIndex: -1 }, t("title")),
            h("p", { class: "bad", role: "alert" }, page.error),
            h("p", null, h("a", { href: page.list.hash }, t("back"))),
          )
        : page.shown
          ? view.View(page.shown.data, page.shown.params)
          : h("p", null, t("loading")),
    ),
  );
}

function skip(event) {
  event.preventDefault();
  document.querySelector("main h1")?.focus();
}

// Shortcuts depend on the view; input fields keep all keys.
function pressed(event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const typing = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape") {
    if (typing) typing.blur();
    else if (page.route === "completion") location.hash = page.list.hash;
    return;
  }
  if (typing) return;
  const way = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  if (event.key === "/" && page.route === "list") {
    event.preventDefault();
    document.querySelector("input[name=text]")?.focus();
  } else if (way && page.route === "list") {
    const links = [...document.querySelectorAll(".items a.open")],
      at = links.indexOf(document.activeElement);
    const next = links[at < 0 ? 0 : Math.min(Math.max(at + way, 0), links.length - 1)];
    if (next) {
      event.preventDefault();
      next.focus();
    }
  } else if (page.route === "completion" && (event.key === "j" || event.key === "k")) {
    const next = page.list.ids[page.list.ids.indexOf(page.params.id) + way];
    if (next && page.list.ids.includes(page.params.id)) location.hash = `#completion?id=${next}`;
  }
}

// Poll for new completions. A list extended by hand is left unchanged.
async function follow() {
  try {
    page.state = await ask("state");
  } catch (error) {
    page.state = { ...page.state, trouble: error.message };
  }
  const { route, data } = page.shown ?? {};
  const still = ["completion", "report"].includes(route) || (route === "list" && data.items.length > PAGE);
  const isNew = page.follow && page.state.version !== page.seen && !still;
  if (!page.busy && (!page.shown || isNew)) await load({ quiet: true });
  else draw();
}

async function begin() {
  readAddress();
  start(App);
  await follow();
  addEventListener("hashchange", () => load({ arrive: true }));
  addEventListener("keydown", pressed);
  addEventListener("resize", draw);
  if (DATA) return;
  const again = async () => {
    if (!document.hidden) await follow();
    setTimeout(again, page.state.reading ? FOLLOW_MS / 4 : FOLLOW_MS);
  };
  setTimeout(again, FOLLOW_MS / 4);
}

begin();
