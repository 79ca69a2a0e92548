// Time: the slider over what is kept of the fleet, and the last 15 minutes by the rows of `/v1/trends`, with sparklines.

import { Poll } from "./api.js";
import { cleared, h } from "./dom.js";
import { clock, count, percent, seconds, total, UNKNOWN } from "./parts.js";

const KINDS = { worker_left: "--bad", worker_silent: "--bad", log_lost: "--bad", trust: "--warn", resync: "--warn", worker_draining: "--warn" };

const RANGES = { 900: "15 min", 3600: "1 h", 43200: "12 h" };

export class Timeline {
  constructor(app) {
    this.app = app;
    this.range = 3600;
  }

  /** Times of the two ends; null while nothing is kept. */
  get span() {
    const { live } = this.app, kept = live.history?.ring.from_s ?? null, to = live.now?.at_s ?? live.history?.now_s ?? null;
    return kept === null || to === null || to <= kept ? null : [Math.max(kept, Math.min(to - this.range, live.past?.at ?? to)), to];
  }

  draw() {
    const { live } = this.app, { span } = this;
    if (!span) return h("footer", { class: "timeline", "aria-label": "Time" }, h("span", { class: "muted" }, "The past of the fleet is recorded from now on."));
    const [from, to] = span, at = live.isPast ? live.past.at : to, last = Math.ceil(to - from);
    return h("footer", { class: "timeline", "aria-label": "Time" },
      h("button", { type: "button", class: live.isPast ? "primary" : "", "aria-pressed": String(!live.isPast), onclick: () => this.app.showTime(null) }, "Live"),
      h("div", { class: "track" },
        h("canvas", { class: "marks", "aria-hidden": "true", ref: (canvas) => this.marks(canvas, from, to, live.history.marks) }),
        h("input", {
          type: "range", "aria-label": "Time that is shown", min: "0", max: String(last), step: "1", value: String(live.isPast ? Math.min(last, Math.round(at - from)) : last),
          "aria-valuetext": live.isPast ? clock(at) : "now", oninput: (event) => this.moved(event.target, from),
        })),
      h("output", { class: "time" }, live.isPast ? h("strong", null, clock(at)) : clock(at)),
      h("select", { "aria-label": "Time range", value: String(this.range), onchange: (event) => {
        this.range = Number(event.target.value);
        this.app.redraw();
      } }, Object.entries(RANGES).map(([key, text]) => h("option", { key, value: key, selected: key === String(this.range) }, text))));
  }

  /** The end of the slider is the present. */
  moved(input, from) {
    this.app.showTime(input.value === input.max ? null : from + Number(input.value));
  }

  marks(canvas, from, to, marks) {
    const { paint, width, colour } = cleared(canvas, 8);
    for (const each of marks) {
      if (each.at_s < from) continue;
      paint.fillStyle = colour(KINDS[each.kind] ?? "--muted");
      paint.fillRect(8 + ((each.at_s - from) / (to - from)) * (width - 16) - 1, 0, 2, 8);
    }
  }
}

const EVERY_MS = 5000;
const WINDOW = 6; // rows that a point is of: 30 s
const SPAN_S = 900;
const WIDTH = 180, HEIGHT = 36;

const sum = (rows, field) => total(rows.map((row) => row[field]));
const ratio = (part, whole) => (whole ? part / whole : null);

/** Each figure: what a point is of a window of rows, one value a line. */
const FIGURES = [
  { name: "Requests", lines: [(rows, { step_s: step }) => sum(rows, "requests") / (rows.length * step)], text: (value) => (value === null ? UNKNOWN : `${value.toFixed(1)}/s`) },
  { name: "TTFT p50, p90", lines: [(rows, found) => quantile(rows, found, 0.5), (rows, found) => quantile(rows, found, 0.9)], text: seconds, hint: "Time to the first token" },
  { name: "Hit rate", lines: [(rows) => ratio(sum(rows, "reused_tokens"), sum(rows, "prompt_tokens"))], text: percent, hint: "Share of prompt tokens reused", most: 1 },
  { name: "In flight", lines: [(rows) => rows.at(-1).in_flight], text: count, hint: "Requests that were sent to a rank and have not ended" },
  { name: "Event lag", lines: [(rows) => rows.at(-1).event_lag_s], text: seconds, hint: "Age of the newest KV events when they were applied, of the slowest rank" },
];

export class Trends extends Poll {
  constructor(app) {
    super(app, EVERY_MS);
  }

  open() {
    this.follow("/v1/trends");
  }

  get rows() {
    return this.found?.rows ?? [];
  }

  /** The figures, each with its sparkline; at a past time the values of that time, or that they are not kept. */
  figures() {
    const { live } = this.app, { rows } = this, { found } = this;
    const at = live.isPast ? rows.findLastIndex((row) => row.at_s <= live.at) : rows.length - 1;
    if (live.isPast && found && at < 0) return h("p", { key: "trends", class: "muted" }, "Rates and latencies are kept for 15 minutes, and no longer of this moment.");
    return h("dl", { key: "trends", class: "figures trends" }, FIGURES.map(({ name, lines, text, hint, most }) => {
      const drawn = lines.map((value) => this.points((window) => value(window, found)));
      const values = drawn.map((points) => text(points[at]?.[1] ?? null));
      return h("div", { key: name, title: hint }, h("dt", null, name), h("dd", null, values.join(" · ")),
        h("dd", { class: "spark" }, lined(drawn, most ?? largest(drawn), this.begin, `${name} in the last 15 minutes: ${values.join(", ")} now`, live.isPast && at >= 0 ? rows[at].at_s : null)));
    }));
  }

  /** What routing saved in the last 15 minutes. */
  saved() {
    const { rows } = this, all = sum(rows, "saved_s"), routing = all - sum(rows, "baseline_s");
    if (!sum(rows, "prompt_tokens")) return "no prompt was answered in the last 15 minutes";
    return `in the last 15 minutes caches saved ${seconds(all)} of prefill, ${seconds(Math.max(0, routing))} of it by routing`;
  }

  /** Seconds of prefill that are saved each second, with and without routing. */
  chart() {
    const of = (field) => this.points((rows) => sum(rows, field) / (rows.length * this.found.step_s)), drawn = [of("saved_s"), of("baseline_s")], top = largest(drawn);
    return h("section", { key: "chart", class: "panel", "aria-label": "The last 15 minutes" },
      h("div", { class: "tools" }, h("h2", null, "Prefill seconds saved a second"), h("ul", { class: "legend" },
        h("li", null, h("span", { class: "swatch line-1", "aria-hidden": "true" }), "saved"), h("li", null, h("span", { class: "swatch line-2", "aria-hidden": "true" }), "by workers drawn evenly"))),
      h("div", { class: "chart" }, h("span", { class: "muted" }, `${top.toPrecision(2)} s`),
        lined(drawn, top, this.begin, `Prefill seconds saved a second in the last 15 minutes, at most ${top.toPrecision(2)}`),
        h("span", { class: "muted" }, clock(this.begin)), h("span", { class: "muted" }, clock(this.begin + SPAN_S))));
  }

  get begin() {
    return (this.rows.at(-1)?.at_s ?? SPAN_S) - SPAN_S;
  }

  points(value) {
    return this.rows.map((row, at) => [row.at_s, value(this.rows.slice(Math.max(0, at - WINDOW + 1), at + 1))]);
  }
}

/** The time below which the share of the first tokens of these rows came; null without any. */
function quantile(rows, { ttft_bounds_s: bounds }, share) {
  const counts = rows[0].first_tokens.map((_, at) => total(rows.map((row) => row.first_tokens[at])));
  let missing = share * total(counts);
  if (!missing) return null;
  for (const [at, found] of counts.entries()) {
    if (found >= missing && at < bounds.length) return (bounds[at - 1] ?? 0) + ((bounds[at] - (bounds[at - 1] ?? 0)) * missing) / found;
    missing -= found;
  }
  return bounds.at(-1);
}

function largest(drawn) {
  return Math.max(1e-9, ...drawn.flat().map(([, value]) => value ?? 0));
}

function lined(drawn, most, begin, label, mark = null) {
  const x = (at) => (((at - begin) / SPAN_S) * WIDTH).toFixed(1), y = (value) => (HEIGHT - 1 - (value / most) * (HEIGHT - 3)).toFixed(1);
  const path = (points) => points.map(([at, value], place) => (value === null ? "" : `${place && points[place - 1][1] !== null ? "L" : "M"}${x(at)} ${y(value)}`)).join("");
  return h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    h("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }),
    drawn.map((points, at) => h("path", { key: `${at}`, class: `line-${at + 1}`, d: path(points) })),
    mark !== null && h("line", { class: "moment", x1: x(mark), x2: x(mark), y1: 0, y2: HEIGHT }));
}
