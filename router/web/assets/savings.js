// The last 15 minutes as sparklines, from the rows of `/v1/trends`; what reused prompts saved, and for whom.

import { Poll } from "./api.js";
import { clock, count, figures, h, legend, message, name, numbers, percent, ratio, seconds, select, short, signed, total, UNKNOWN } from "./parts.js";
import { Table } from "./table.js";

const WINDOW = 6; // rows in a point: 30 s
const SPAN_S = 900;
const WIDTH = 180, HEIGHT = 36;

const sum = (rows, field) => total(rows.map((row) => row[field]));

/** The figures. Each function in `lines` draws a line: from a window of rows it computes the value at one point. */
const FIGURES = [
  { name: "Requests", lines: [(rows, { step_s: step }) => sum(rows, "requests") / (rows.length * step)], text: (value) => (value === null ? UNKNOWN : `${value.toFixed(1)}/s`) },
  { name: "TTFT p50, p90", lines: [(rows, found) => quantile(rows, found, 0.5), (rows, found) => quantile(rows, found, 0.9)], text: seconds, hint: "Time to the first token" },
  { name: "Hit rate", lines: [(rows) => ratio(sum(rows, "reused_tokens"), sum(rows, "prompt_tokens"))], text: percent, hint: "Share of prompt tokens reused", most: 1 },
  { name: "In flight", lines: [(rows) => rows.at(-1).in_flight], text: count, hint: "Requests that were sent to a rank and have not ended" },
  { name: "Event lag", lines: [(rows) => rows.at(-1).event_lag_s], text: seconds, hint: "Age of the newest KV events when they were applied, of the slowest rank" },
];

export class Trends extends Poll {
  path = "/v1/trends";

  get rows() {
    return this.found?.rows ?? [];
  }

  /** The figures, each with its sparkline; at a past time the values of that time, or a text that they are not kept. */
  figures() {
    const { live } = this.app, { rows } = this, { found } = this;
    const at = live.past ? rows.findLastIndex((row) => row.at_s <= live.at) : rows.length - 1;
    if (live.past && found && at < 0) return h("p", { key: "trends", class: "muted" }, "Rates and latencies are kept for 15 minutes, and no longer of this moment.");
    return h("dl", { key: "trends", class: "figures trends" }, FIGURES.map(({ name, lines, text, hint, most }) => {
      const drawn = lines.map((value) => this.points((window) => value(window, found)));
      const values = drawn.map((points) => text(points[at]?.[1] ?? null));
      return h("div", { key: name, title: hint }, h("dt", null, name), h("dd", null, values.join(" · ")),
        h("dd", { class: "spark" }, lined(drawn, most ?? largest(drawn), this.begin, `${name} in the last 15 minutes: ${values.join(", ")} now`, live.past && at >= 0 ? rows[at].at_s : null)));
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
      h("div", { class: "tools" }, h("h2", null, "Prefill seconds saved a second"), legend(["line-1", "saved"], ["line-2", "by workers drawn evenly"])),
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

/** The time within which this share of the rows' first tokens came; null without any. */
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

const DIMENSIONS = { model: ["Model", "no name"], tenant: ["Tenant", "not told apart"], lora: ["LoRA adapter", "base model"], prefix: ["Prefix family", "no full block"] };
const NAMES = Object.fromEntries(Object.entries(DIMENSIONS).map(([by, [text]]) => [by, text]));
const WHY = {
  not_answered: "failed, were cancelled or were refused by the worker (another may have answered the request)", unseen: "had a prompt that was not encoded", dropped: "had an outcome that came too late",
  not_repeated: "could not be repeated", pending: "have not ended",
};

export class SavingsView extends Poll {
  title = "Savings";
  path = "/v1/report";
  by = "model";
  tables = Object.fromEntries(Object.entries(DIMENSIONS).map(([by, [text]]) => [by, new Table({
    label: `Savings by ${text}`, key: (row) => row.key, columns: columnsOf(by), sorted: "Requests", empty: "No request has been answered yet.",
  })]));

  draw() {
    const { found } = this;
    if (!found) return this.unread("The report is not shown.");
    const left = Object.entries(found.not_counted).filter(([, decisions]) => decisions);
    return [
      this.app.live.past && message("", "Sums are shown as they are now.", "For a period: router report --since TIME --until TIME --html."),
      this.outdated("These figures are not current."),
      h("p", { key: "period", class: "muted" }, `Of the requests that were answered since ${when(found.since)}. Seconds are those of one rank's prefill.`),
      summary(found.total),
      this.app.trends.chart(),
      h("section", { key: "rows", class: "panel" },
        h("div", { class: "tools" }, select("savings-by", "By", NAMES, this.by, (by) => this.show({ by }))),
        this.tables[this.by].with(rowsOf(found.by[this.by]))),
      left.length > 0 && h("p", { key: "left", class: "muted" }, `Not counted: ${left.map(([why, decisions]) => `${count(decisions)} decisions that ${WHY[why] ?? why}`).join("; ")}.`),
    ];
  }
}

function when(iso) {
  const time = new Date(iso);
  return Number.isNaN(time.valueOf()) ? "the oldest record" : time.toLocaleString("en-GB");
}

function summary(all) {
  return figures(
    ["Requests", count(all.requests)],
    ["Prompt tokens", short(all.prompt_tokens)],
    ["Reused", percent(ratio(all.reused_tokens, all.prompt_tokens)), `${count(all.reused_tokens)} prompt tokens that a cache provided`],
    ["Due to routing", signed(all.routing_tokens, short), "Tokens beyond what a worker drawn evenly would have reused"],
    ["Foregone", short(all.foregone_tokens), "Tokens that another worker held and the chosen one did not"],
    ["Prefill saved", secondsOf(all.saved_s), "Seconds of a rank"],
    ["By routing", secondsOf(all.routing_s), "The part of them that is due to routing"],
    ["By learnt rates", percent(ratio(all.learnt_s, all.saved_s)), "The rest is by the reference engine's rates"]);
}

/** The rows of a dimension; names without a row of their own share one. */
function rowsOf({ rows, other }) {
  const named = rows.map((row) => ({ ...row, key: `name ${row.name}` }));
  return other.requests ? [...named, { ...other, name: "", key: "other", isOther: true }] : named;
}

function secondsOf(value) {
  return `${short(Number(value.toPrecision(3)))} s`;
}

const reuse = (row) => ratio(row.reused_tokens, row.prompt_tokens);
const summed = (text, field, shown, hint, phone) => numbers(text, field, "minmax(76px, 1fr)", shown, { hint, phone });

function columnsOf(by) {
  const [text, nameless] = DIMENSIONS[by];
  return [
    { name: text, width: "minmax(140px, 2fr)", phone: "minmax(64px, 1fr)", cell: (row) => (row.isOther ? h("em", null, "all others") : row.name ? name([row.title, row.name].filter(Boolean).join(" ")) : h("em", null, nameless)), sort: (row) => row.title || row.name },
    summed("Requests", "requests", count, "Answered requests", "66px"),
    summed("Prompt", "prompt_tokens", short, "Tokens of their prompts"),
    { ...summed("Reused", "reused_tokens", short, "Of the prompts' tokens", "54px"), cell: (row) => percent(reuse(row)), sort: reuse },
    summed("Routing", "routing_tokens", (value) => signed(value, short), "Tokens beyond what a worker drawn evenly would have reused", "58px"),
    summed("Foregone", "foregone_tokens", short, "Tokens that another worker held and the chosen one did not"),
    summed("Saved", "saved_s", secondsOf, "Seconds of a rank's prefill", "58px"),
    summed("By routing", "routing_s", secondsOf, "The part of them that is due to routing"),
  ];
}
