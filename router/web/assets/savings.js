// What reused prompts saved, and for whom: by model, tenant, LoRA adapter or prefix family.

import { Poll } from "./api.js";
import { h } from "./dom.js";
import { count, figures, message, name, percent, select, short, signed, UNKNOWN } from "./parts.js";
import { Table } from "./table.js";

const EVERY_MS = 5000;
const DIMENSIONS = { model: ["Model", "no name"], tenant: ["Tenant", "not told apart"], lora: ["LoRA adapter", "base model"], prefix: ["Prefix family", "no full block"] };
const NAMES = Object.fromEntries(Object.entries(DIMENSIONS).map(([by, [text]]) => [by, text]));
const WHY = {
  not_answered: "failed, were cancelled or were refused by the worker (another may have answered the request)", unseen: "had a prompt that was not encoded", dropped: "had an outcome that came too late",
  not_repeated: "could not be repeated", pending: "have not ended",
};

export class SavingsView extends Poll {
  title = "Savings";

  constructor(app) {
    super(app, EVERY_MS);
    this.by = "model";
    this.tables = Object.fromEntries(Object.entries(DIMENSIONS).map(([by, [text]]) => [by, new Table({
      label: `Savings by ${text}`, key: (row) => row.key, select: () => {}, columns: columnsOf(by), sorted: "Requests", empty: "No request has been answered yet.",
    })]));
  }

  open() {
    this.app.trends.open();
    this.follow("/v1/report");
  }

  close() {
    this.app.trends.close();
    super.close();
  }

  draw() {
    const { found, problem } = this;
    if (!found) return problem ? message("bad", "The report is not shown.", problem) : h("p", { class: "muted", role: "status" }, "Reading the report.");
    const left = Object.entries(found.not_counted).filter(([, decisions]) => decisions);
    return [
      this.app.live.isPast && message("", "Sums are shown as they are now.", "For a period: router report --since TIME --until TIME --html."),
      problem && message("warn", "These figures are not current.", problem),
      h("p", { key: "period", class: "muted" }, `Of the requests that were answered since ${when(found.since)}. Seconds are those of one rank's prefill.`),
      summary(found.total),
      this.app.trends.chart(),
      h("section", { key: "rows", class: "panel" },
        h("div", { class: "tools" }, select("savings-by", "By", NAMES, this.by, (by) => this.show(by))),
        this.tables[this.by].with(rowsOf(found.by[this.by]))),
      left.length > 0 && h("p", { key: "left", class: "muted" }, `Not counted: ${left.map(([why, decisions]) => `${count(decisions)} decisions that ${WHY[why] ?? why}`).join("; ")}.`),
    ];
  }

  show(by) {
    this.by = by;
    this.app.redraw();
  }
}

function when(iso) {
  const time = new Date(iso);
  return Number.isNaN(time.valueOf()) ? "the oldest record" : time.toLocaleString("en-GB");
}

function summary(total) {
  return figures(
    ["Requests", count(total.requests)],
    ["Prompt tokens", short(total.prompt_tokens)],
    ["Reused", share(total.reused_tokens, total.prompt_tokens), `${count(total.reused_tokens)} prompt tokens that a cache provided`],
    ["Due to routing", signed(total.routing_tokens, short), "Tokens beyond what a worker drawn evenly would have reused"],
    ["Foregone", short(total.foregone_tokens), "Tokens that another worker held and the chosen one did not"],
    ["Prefill saved", secondsOf(total.saved_s), "Seconds of a rank"],
    ["By routing", secondsOf(total.routing_s), "The part of them that is due to routing"],
    ["By learnt rates", share(total.learnt_s, total.saved_s), "The rest is by the reference engine's rates"]);
}

/** The rows of a dimension; what has no row of its own is one, too. */
function rowsOf({ rows, other }) {
  const named = rows.map((row) => ({ ...row, key: `name ${row.name}` }));
  return other.requests ? [...named, { ...other, name: "", key: "other", isOther: true }] : named;
}

function share(part, whole) {
  return whole ? percent(part / whole) : UNKNOWN;
}

function secondsOf(value) {
  return `${short(Number(value.toPrecision(3)))} s`;
}

const summed = (text, field, shown, hint, phone) => ({ name: text, width: "minmax(76px, 1fr)", phone, align: "end", cell: (row) => shown(row[field]), sort: (row) => row[field], hint });

function columnsOf(by) {
  const [text, nameless] = DIMENSIONS[by];
  return [
    { name: text, width: "minmax(140px, 2fr)", phone: "minmax(64px, 1fr)", cell: (row) => (row.isOther ? h("em", null, "all others") : row.name ? name([row.title, row.name].filter(Boolean).join(" ")) : h("em", null, nameless)), sort: (row) => row.title || row.name },
    summed("Requests", "requests", count, "Answered requests", "66px"),
    summed("Prompt", "prompt_tokens", short, "Tokens of their prompts"),
    { ...summed("Reused", "reused_tokens", short, "Of the prompts' tokens", "54px"), cell: (row) => share(row.reused_tokens, row.prompt_tokens), sort: (row) => (row.prompt_tokens ? row.reused_tokens / row.prompt_tokens : null) },
    summed("Routing", "routing_tokens", (value) => signed(value, short), "Tokens beyond what a worker drawn evenly would have reused", "58px"),
    summed("Foregone", "foregone_tokens", short, "Tokens that another worker held and the chosen one did not"),
    summed("Saved", "saved_s", secondsOf, "Seconds of a rank's prefill", "58px"),
    summed("By routing", "routing_s", secondsOf, "The part of them that is due to routing"),
  ];
}
