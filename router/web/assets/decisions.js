// The newest decisions: which rank took each request, and what came of it beside what was predicted.

import { h } from "./dom.js";
import { age, count, seconds, UNKNOWN } from "./format.js";
import { filter, link, message, name, outcomeOf, predictedCached, predictedTtft } from "./parts.js";
import { Table } from "./table.js";

const REFRESH = 200;

export class DecisionsView {
  title = "Decisions";
  refreshes = REFRESH;

  constructor(app) {
    this.app = app;
    this.words = "";
    this.table = new Table({
      label: "Decisions, newest first", key: (each) => each.decision_id, open: (each) => app.go(["decisions", each.decision_id]),
      columns: decisionColumns(() => app.live.at), sorted: "Age", descending: false, isTall: true, empty: "No decision has this in it.",
      rowClass: (each) => (each.outcome && each.outcome.outcome !== "ok" ? "failed" : ""),
    });
  }

  draw() {
    const { live } = this.app;
    if (!live.fleet) return null;
    if (!live.decisions.length) return message("", "There is no decision yet.", live.isPast ? "None of this time is kept in memory: journal.decisions_max says how many are." : "Decisions appear here as soon as requests come.");
    const words = this.words.trim().toLowerCase();
    const found = words ? live.decisions.filter((each) => textOf(each).includes(words)) : live.decisions;
    return [
      filter(this, "decisions-filter", "worker, request, model, outcome", `${count(found.length)} of the newest ${count(live.decisions.length)}`),
      this.table.with(found),
    ];
  }
}

function textOf(each) {
  return `${each.worker_id}/${each.dp_rank} ${each.request_id} ${each.decision_id} ${each.model} ${each.policy} ${each.phase} ${each.outcome?.outcome ?? "running"}`.toLowerCase();
}

/** Columns of a list of decisions; `at()`: the time by which ages are counted. */
export function decisionColumns(at) {
  const ageOf = (each) => Math.max(0, (at() ?? each.at_s) - each.at_s);
  return [
    { name: "Age", width: "64px", phone: "42px", align: "end", cell: (each) => age(ageOf(each)), sort: ageOf },
    { name: "Decision", width: "minmax(104px, 1fr)", cell: (each) => link(["decisions", each.decision_id], tail(each.decision_id), { class: "mono name", title: each.decision_id, tabindex: "-1" }) },
    { name: "Rank", width: "minmax(84px, 1fr)", phone: "minmax(60px, 1fr)", cell: (each) => name(`${each.worker_id}/${each.dp_rank}`), sort: (each) => `${each.worker_id}/${each.dp_rank}` },
    { name: "Model", width: "minmax(80px, 1fr)", cell: (each) => name(each.model), sort: (each) => each.model },
    { name: "Phase", width: "72px", cell: (each) => each.phase, sort: (each) => each.phase },
    { name: "Tokens", width: "76px", phone: "52px", align: "end", cell: (each) => count(each.isl_tokens), sort: (each) => each.isl_tokens, hint: "Length of the prompt" },
    { name: "Cached", width: "128px", align: "end", cell: (each) => pair(each.outcome?.cached_tokens, predictedCached(each), count), sort: (each) => each.outcome?.cached_tokens, hint: "Cached tokens: reported by the worker / predicted" },
    { name: "Margin", width: "84px", align: "end", cell: (each) => (each.margin === null ? UNKNOWN : `${each.margin.toFixed(1)} ${each.cost_unit === "ms" ? "ms" : "bl"}`), sort: (each) => each.margin, hint: "By how much the next best rank cost more" },
    { name: "TTFT", width: "minmax(72px, 148px)", phone: "60px", align: "end", cell: (each) => pair(each.outcome?.ttft_s, predictedTtft(each), seconds), sort: (each) => each.outcome?.ttft_s, hint: "Time to the first token: measured / predicted" },
    { name: "Outcome", width: "88px", phone: "66px", cell: outcomeOf, sort: (each) => each.outcome?.outcome ?? "running" },
  ];
}

function pair(actual, predicted, text) {
  return [h("span", null, text(actual)), predicted !== null && h("span", { class: "muted beside" }, ` / ${text(predicted)}`)];
}

function tail(id) {
  return id.length > 12 ? `…${id.slice(-11)}` : id;
}
