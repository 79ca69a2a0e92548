// The list of the newest decisions, and the page of one: its outcome beside what was predicted, its candidates and their costs.

import { Poll, View } from "./api.js";
import { age, badge, bar, clock, count, facts, filtered, go, h, legend, link, message, ms, name, numbers, outcomeOf, panel, percent, predictedCached, predictedTtft, rankId, ratio, seconds, signed, trust, UNKNOWN } from "./parts.js";
import { Table } from "./table.js";

export class DecisionsView extends View {
  title = "Decisions";
  decisions = 200;
  words = "";
  table = decisionTable(this.app, { label: "Decisions, newest first", sorted: "Age", descending: false, isTall: true, empty: "No decision matches." });

  draw() {
    const { live } = this.app;
    if (!live.shown.decisions) return null;
    if (!live.shown.decisions.length) return message("", "There is no decision yet.", live.past ? "None of this time is in memory, which keeps the newest decisions (journal.decisions_max)." : "Decisions appear here as soon as requests come.");
    const [found, field] = filtered(this, "decisions-filter", "worker, request, model, outcome", live.shown.decisions, textOf);
    return [field, this.table.with(found)];
  }
}

function textOf(each) {
  return `${rankId(each)} ${each.request_id} ${each.decision_id} ${each.model} ${each.policy} ${each.phase} ${each.outcome?.outcome ?? "running"}`;
}

/** A table of decisions, which opens them; ages are counted from the time that `app` shows. `without`: the name of a column that it lacks. */
export function decisionTable(app, { without, ...more }) {
  const columns = decisionColumns((each) => Math.max(0, (app.live.at ?? each.at_s) - each.at_s)).filter(({ name }) => name !== without);
  return new Table({ key: (each) => each.decision_id, open: (each) => go("decisions", each.decision_id), columns, ...more });
}

function decisionColumns(ageOf) {
  return [
    { name: "Age", width: "64px", phone: "42px", align: "end", cell: (each) => age(ageOf(each)), sort: ageOf },
    { name: "Decision", width: "minmax(104px, 1fr)", cell: (each) => link(["decisions", each.decision_id], tail(each.decision_id), { class: "mono name", title: each.decision_id, tabindex: "-1" }) },
    { name: "Rank", width: "minmax(84px, 1fr)", phone: "minmax(60px, 1fr)", cell: (each) => name(rankId(each)), sort: rankId },
    { name: "Model", width: "minmax(80px, 1fr)", cell: (each) => name(each.model), sort: (each) => each.model },
    { name: "Phase", width: "72px", cell: (each) => each.phase, sort: (each) => each.phase },
    numbers("Tokens", "isl_tokens", "76px", count, { phone: "52px", hint: "Length of the prompt" }),
    { name: "Cached", width: "128px", align: "end", cell: (each) => pair(each.outcome?.cached_tokens, predictedCached(each), count), sort: (each) => each.outcome?.cached_tokens, hint: "Cached tokens: reported by the worker / predicted" },
    { name: "Margin", width: "84px", align: "end", cell: (each) => (each.margin === null ? UNKNOWN : `${each.margin.toFixed(1)} ${each.cost_unit === "ms" ? "ms" : ""}`), sort: (each) => each.margin, hint: "By how much the next best rank cost more" },
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

const FIRST = ["first-1", "first-2", "first-3"], REST = ["rest-1", "rest-2", "rest-3"];

export class DecisionView extends Poll {
  title = "Decision";
  nav = "decisions";
  everyMs = 2000;
  ranks = new Table({
    label: "Candidates", key: rankId, sorted: "Cost", descending: false, isWhole: true,
    rowClass: (row) => (row.isWinner ? "winner" : ""), columns: [],
  });
  others = new Table({
    label: "Ranks that were not eligible", key: rankId, isWhole: true,
    columns: [
      { name: "Rank", width: "minmax(110px, 1fr)", cell: (row) => name(rankId(row)) },
      { name: "Reason", width: "3fr", cell: (row) => name(row.reason) },
    ],
  });

  isOver() {
    return Boolean(this.found?.outcome);
  }

  open([id]) {
    this.path = `/v1/decisions/${encodeURIComponent(id)}`;
    super.open();
  }

  draw() {
    const { found } = this;
    if (!found) return this.unread("This decision is not shown.", h("p", null, link(["decisions"], "All decisions")));
    const { decision, decisions } = found;
    return [
      this.outdated("This decision is not current."),
      h("p", { key: "sentence", class: "sentence" }, found.sentence),
      decision.action !== "admit" && message("warn", "It was not predicted to meet its targets there.", `policy.unmet: ${decision.action}`),
      h("div", { key: "beside", class: "columns" }, outcome(found), about(found)),
      this.candidates(found),
      found.prompt && promptOf(found.prompt),
      decision.excluded.length > 0 && panel("excluded", `${count(decision.excluded.length)} not eligible`, this.others.with(decision.excluded)),
      decisions.length > 1 && siblings(decisions, decision),
    ];
  }

  candidates({ decision, addends }) {
    const terms = decision.cost_unit === "ms" ? termsOf(addends) : [];
    const rows = decision.candidates.map((each, at) => ({ ...each, at, isWinner: at === decision.winner }));
    const largest = Math.max(1e-9, ...rows.map((row) => row.terms.cost));
    this.ranks.columns = columnsOf(decision, terms, largest);
    return h("section", { key: "candidates", class: "panel" },
      h("div", { class: "tools" }, h("h2", null, `${count(rows.length)} ${rows.length === 1 ? "candidate" : "candidates"}`),
        h("span", { class: "muted" }, `Cost: ${decision.cost_unit === "ms" ? "milliseconds that the choice takes, of this request and of those already there" : "as the mode computes it"}; the lowest wins.`),
        decision.candidates[decision.winner].is_weighed && legend(...terms.map((term) => [term.kind, term.name]))),
      this.ranks.with(rows));
  }
}

/** The addends of the cost, those before the first token first: name, field, hint, isFirst, and class of its colour. */
function termsOf(addends) {
  const coloured = (isFirst, colours) => Object.entries(addends).filter(([, each]) => each.until_first === isFirst)
    .map(([text, each], at) => ({ name: text, field: `${text}_ms`, hint: each.hint, isFirst, kind: colours[at % colours.length] }));
  return [...coloured(true, FIRST), ...coloured(false, REST)];
}

function columnsOf(decision, terms, largest) {
  const isWeighed = decision.candidates[decision.winner].is_weighed;
  const weighed = [
    { name: "Cost", width: "84px", align: "end", cell: (row) => h("strong", null, ms(row.terms.cost)), sort: (row) => row.terms.cost, hint: "Sum of the terms, times its constraints' factor" },
    { name: "Share of terms", width: "minmax(110px, 1.4fr)", cell: (row) => bar(terms.map((term) => [weighted(row, terms, term), term.kind]), largest, terms.map((term) => `${term.name} ${ms(weighted(row, terms, term))}`).join(", ")) },
    ...terms.map((term) => ({ name: term.name, width: "76px", align: "end", cell: (row) => ms(weighted(row, terms, term)), sort: (row) => row.terms[term.field], hint: `Milliseconds ${term.hint}${term.isFirst ? ", times policy.ttft_weight" : ""}` })),
    ...(decision.candidates.some((row) => row.terms.constraint_multiplier !== 1) ? [{ name: "Factor", width: "64px", align: "end", cell: (row) => row.terms.constraint_multiplier.toFixed(2), hint: "For its constraints; the sum of the terms is multiplied by it" }] : []),
  ];
  return [
    { name: "Rank", width: "minmax(120px, 1.2fr)", cell: (row) => [h("span", { class: "mark", "aria-hidden": "true" }, row.isWinner ? "→" : ""), name(rankId(row)), row.isWinner && h("span", { class: "hidden" }, " chosen")], sort: rankId },
    ...(isWeighed ? weighed : []),
    { name: "Blocks held", width: "90px", align: "end", cell: (row) => count(row.overlap_blocks[0]), sort: (row) => row.overlap_blocks[0], hint: "Leading blocks of the prompt on its GPU" },
    { name: "Blocks expected", width: "120px", align: "end", cell: (row) => count(Math.max(row.overlap_blocks[0], row.predicted_blocks)), sort: (row) => Math.max(row.overlap_blocks[0], row.predicted_blocks), hint: "Including those that earlier requests will leave there" },
    { name: "Trust", width: "minmax(96px, 160px)", cell: (row) => [trust(row), row.terms.overlap_lost_blocks > 0 && badge("evicts", "warn", `It lacks room, and will evict ${count(row.terms.overlap_lost_blocks)} blocks before it computes the prompt`)], sort: (row) => row.trust },
  ];
}

/** A term times its weight. The weight of terms before the first token follows from the cost; others have 1. */
function weighted({ terms: values }, terms, term) {
  const sum = (isFirst) => terms.reduce((found, each) => found + (each.isFirst === isFirst ? values[each.field] : 0), 0);
  const first = sum(true);
  return values[term.field] * (term.isFirst && first > 0 ? (values.cost / values.constraint_multiplier - sum(false)) / first : 1);
}

function outcome({ decision, outcome: found, predicted, misses }) {
  const rows = [
    ["Cached tokens", count(predicted.cached_tokens), count(found?.cached_tokens), misses.cached_tokens === null ? UNKNOWN : signed(-misses.cached_tokens)],
    ["First token", seconds(decision.ttft_target_s ?? predicted.ttft_s), seconds(found?.ttft_s), misses.ttft_s === null ? UNKNOWN : signed(misses.ttft_s, seconds)],
    ["Between tokens", seconds(decision.candidates[decision.winner].predicted_itl_s), seconds(found?.itl_s), UNKNOWN],
  ];
  return h("section", { class: "panel" },
    h("div", { class: "tools" }, h("h2", null, "Outcome"), found ? badge(found.outcome, found.outcome === "ok" ? "good" : "bad") : badge("running", "muted")),
    h("table", { class: "small" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, ""), h("th", { scope: "col" }, decision.ttft_target_s === null ? "Predicted" : "Predicted, or target"), h("th", { scope: "col" }, "Measured"), h("th", { scope: "col" }, "Difference"))),
      h("tbody", null, rows.map(([text, ...values]) => h("tr", { key: text }, h("th", { scope: "row" }, text), values.map((value, at) => h("td", { key: String(at) }, value)))))),
    found && h("p", { class: "muted" }, `The whole answer took ${seconds(found.duration_s)}, ${count(found.output_tokens)} tokens.`));
}

function about({ decision, at_s: at, trace_url: traceUrl }) {
  const chosen = decision.candidates[decision.winner];
  const isHttp = typeof traceUrl === "string" && /^https?:\/\//.test(traceUrl);
  return panel("about", "Request", facts([
    ["Request", h("span", { class: "mono wrap" }, decision.request_id)],
    ["Decision", h("span", { class: "mono wrap" }, decision.decision_id)],
    at === undefined ? null : ["Time", clock(at)],
    ["Model", name(decision.model)],
    ["Rank", link(["workers", chosen.worker_id], rankId(chosen))],
    ["Policy", [decision.policy, decision.reason && ` (${decision.reason})`, decision.phase !== "whole" && `, ${decision.phase}`]],
    ["Prompt", `${count(decision.isl_tokens)} tokens, ${count(decision.reusable_blocks)} blocks could be reused, ${percent(ratio(chosen.overlap_blocks[0], decision.reusable_blocks))} held`],
    isHttp ? ["Trace", h("a", { href: traceUrl, rel: "noreferrer noopener", target: "_blank" }, "Open its trace")] : null,
  ]));
}

function promptOf({ head, tail, omitted_tokens: omitted }) {
  return h("details", { key: "prompt" }, h("summary", null, "Prompt"), h("pre", null, head,
    omitted > 0 && h("span", { class: "muted" }, `\n\n… ${count(omitted)} tokens are not kept …\n\n`), tail));
}

function siblings(decisions, decision) {
  return panel("siblings", `All ${decisions.length} decisions of this request, eldest first`,
    h("ol", { class: "list" }, decisions.map(({ decision: each, outcome: found, sentence }) => h("li", { key: each.decision_id, class: each.decision_id === decision.decision_id ? "current" : "" },
      link(["decisions", each.decision_id], each.decision_id, { class: "mono" }), " ", found ? found.outcome : "running", h("br", null), sentence))));
}
