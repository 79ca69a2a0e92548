// The page: its places (`#/decisions/ID`), what is drawn at each, and when.

import { AccuracyView } from "./accuracy.js";
import { hasToken, Live, setToken, View } from "./api.js";
import { DecisionsView, DecisionView } from "./decisions.js";
import { EventLogView } from "./event_log.js";
import { FleetView, WorkerView } from "./fleet.js";
import { clock, h, link, message, render } from "./parts.js";
import { PrefixesView } from "./prefixes.js";
import { SavingsView, Trends } from "./savings.js";

class App {
  constructor() {
    this.live = new Live(this);
    this.timeline = new Timeline(this);
    this.trends = new Trends(this);
    this.views = {
      fleet: new FleetView(this), prefixes: new PrefixesView(this), decisions: new DecisionsView(this), accuracy: new AccuracyView(this),
      savings: new SavingsView(this), log: new EventLogView(this), workers: new WorkerView(this), decision: new DecisionView(this),
    };
  }

  start() {
    addEventListener("hashchange", () => this.arrive());
    this.arrive({ isFirst: true });
    this.connect();
  }

  connect() {
    this.live.open();
    this.trends.open();
  }

  arrive({ isFirst = false } = {}) {
    const { path: [place = "", ...names], at } = placeOf(location.hash);
    const key = place === "decisions" && names.length ? "decision" : place || "fleet";
    this.view?.close?.();
    this.key = key;
    this.view = Object.hasOwn(this.views, key) ? this.views[key] : null;
    if (at !== null) this.live.showTime(at);
    this.address();
    this.view?.open?.(names);
    if (this.view?.decisions && !isFirst) this.live.hurry();
    document.title = this.view ? `${this.view.title} · kv-router` : "kv-router";
    this.drawNow();
    if (!isFirst) document.getElementById("title")?.focus();
  }

  /** Show the fleet of a time; null: of now. */
  showTime(at) {
    this.live.showTime(at);
    this.address();
    this.view?.moved?.();
  }

  /** Add the time that is shown to the address, so that the address is a link to it. */
  address() {
    const place = location.hash.split("?")[0], { past } = this.live;
    history.replaceState(null, "", past ? `${place || "#/fleet"}?at=${past.at}` : place || location.pathname);
  }

  /** Draw at the next frame, once for all changes until then. */
  redraw() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.drawNow();
    });
  }

  drawNow() {
    const { live } = this;
    render(document.getElementById("page"), this.header(),
      h("main", { key: "main", id: "content", "aria-busy": live.past?.isLoading ? "true" : undefined }, h("h1", { key: "title", id: "title", tabindex: "-1" }, this.view?.title ?? "There is no such page"), live.state === "token" ? this.asked() : this.content()),
      live.state !== "token" && this.timeline.draw());
  }

  header() {
    const current = this.view?.nav ?? this.key, listed = Object.entries(this.views).filter(([, view]) => !view.nav);
    return h("header", { key: "header" },
      h("a", { class: "brand", href: "#/fleet" }, "kv-router"),
      h("nav", { "aria-label": "Pages" }, h("ul", null, listed.map(([key, { title }]) =>
        h("li", { key }, link([key], title, { "aria-current": key === current ? "page" : undefined }))))),
      this.status());
  }

  status() {
    const { live } = this, word = live.past ? "past" : { connecting: "connecting", live: "live", away: "away", token: "locked" }[live.state];
    return h("p", { class: `status ${word}`, role: "status" }, h("span", { class: "dot", "aria-hidden": "true" }), word,
      hasToken() && h("button", { type: "button", class: "plain", onclick: () => { setToken(null); location.reload(); } }, "Forget token"));
  }

  content() {
    const { live } = this;
    if (!this.view) return message("", "There is no such page.", "Choose one above.");
    const drawn = this.view.draw();
    return [
      live.state === "away" && message("bad", live.problem.message, `${live.found ? "What is shown is older. " : ""}The page tries again each second.`),
      live.past?.problem && message("warn", "This time is not recorded.", live.past.problem),
      drawn ?? (live.state === "away" || live.past?.problem ? null : h("p", { class: "muted" }, "Reading the fleet.")),
    ];
  }

  asked() {
    const { live } = this;
    return h("form", { key: "token", class: "panel token", onsubmit: (event) => {
      event.preventDefault();
      setToken(new FormData(event.target).get("token").trim());
      this.connect();
      this.arrive();
    } },
      h("p", null, "The control plane has a token (", h("code", null, "control.token"), "). The page keeps it in this tab until the tab is closed."),
      live.problem.message && message("bad", live.problem.message),
      h("label", { for: "token" }, "Token"),
      h("input", { id: "token", name: "token", type: "password", autocomplete: "off", required: true, autofocus: true }),
      h("button", { type: "submit", class: "primary" }, "Connect"));
  }
}

const KINDS = { worker_left: "bad", worker_silent: "bad", log_lost: "bad", trust: "warn", resync: "warn", worker_draining: "warn" };

const RANGES = { 900: "15 min", 3600: "1 h", 43200: "12 h" };

class Timeline extends View {
  range = 3600;

  /** The times of the slider's two ends; null while nothing is kept. */
  get span() {
    const { live } = this.app, kept = live.now.history?.ring.from_s ?? null, to = live.now.fleet?.at_s ?? null;
    return kept === null || to === null || to <= kept ? null : [Math.max(kept, Math.min(to - this.range, live.past?.at ?? to)), to];
  }

  draw() {
    const { live } = this.app, { span } = this;
    if (!span) return h("footer", { class: "timeline", "aria-label": "Time" }, h("span", { class: "muted" }, "The past of the fleet is recorded from now on."));
    const [from, to] = span, at = live.past ? live.past.at : to, last = Math.ceil(to - from);
    return h("footer", { class: "timeline", "aria-label": "Time" },
      h("button", { type: "button", class: live.past ? "primary" : "", "aria-pressed": String(!live.past), onclick: () => this.app.showTime(null) }, "Live"),
      h("div", { class: "track" },
        h("svg", { class: "marks", "aria-hidden": "true" }, live.now.history.marks.filter((each) => each.at_s >= from).map((each) => mark(each, (each.at_s - from) / (to - from)))),
        h("input", {
          type: "range", "aria-label": "Time that is shown", min: "0", max: String(last), step: "1", value: String(live.past ? Math.min(last, Math.round(at - from)) : last),
          "aria-valuetext": live.past ? clock(at) : "now", oninput: (event) => this.moved(event.target, from),
        })),
      h("output", { class: "time" }, live.past ? h("strong", null, clock(at)) : clock(at)),
      h("select", { "aria-label": "Time range", value: String(this.range), onchange: (event) => this.show({ range: Number(event.target.value) }) }, Object.entries(RANGES).map(([key, text]) => h("option", { key, value: key, selected: key === String(this.range) }, text))));
  }

  /** Show the time at which the slider is; its end is the present. */
  moved(input, from) {
    this.app.showTime(input.value === input.max ? null : from + Number(input.value));
  }
}

function mark({ kind }, share) {
  const x = `${(100 * share).toFixed(2)}%`;
  return h("line", { class: KINDS[kind] ?? "", x1: x, x2: x, y1: "0", y2: "100%" });
}

/** The parts of `#/decisions/ID?at=TIME`; `at` is null without a time. */
function placeOf(hash) {
  const [place, query] = hash.replace(/^#\/?/, "").split("?"), at = Number(new URLSearchParams(query).get("at"));
  try {
    return { path: place.split("/").map(decodeURIComponent).filter(Boolean), at: at > 0 ? at : null };
  } catch {
    return { path: ["?"], at: null };
  }
}

new App().start();
