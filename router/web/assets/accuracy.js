// Whether predictions hold: predicted against measured reuse and first tokens, one point a decision, and by rank.

import { inOrder, Poll } from "./api.js";
import { decisionTable } from "./decisions.js";
import { badge, count, figures, go, h, message, numbers, panel, percent, predictedCached, predictedTtft, quantile, rankColumn, rankId, ratio, seconds, total } from "./parts.js";
import { Table } from "./table.js";

const WORST = 20;

export class AccuracyView extends Poll {
  title = "Accuracy";
  path = "/v1/predictions";
  decisions = 500;
  ranks = new Table({
    label: "Predictions by rank", key: rankId, columns: RANK_COLUMNS, sorted: "Doubted", empty: "No worker has reported what it reused.",
    open: (each) => go("workers", each.worker_id),
  });
  worst = decisionTable(this.app, { label: "Decisions with the largest misses", empty: "No decision missed by a block or more." });

  /** Predicted against measured, as points that lead to their decisions: on the diagonal the prediction held. `text(value)` writes a value of `field`. */
  scatter(label, text, compared, field) {
    const most = rounded(compared.reduce((best, each) => Math.max(best, ...each[field]), 0)), place = (value) => `${((100 * value) / most).toFixed(2)}%`;
    const ticks = [0, most / 2, most].map((value) => h("span", { key: String(value) }, text(value)));
    const line = (x1, y1, x2, y2, kind = "axis") => h("line", { class: kind, x1: `${x1}%`, y1: `${y1}%`, x2: `${x2}%`, y2: `${y2}%` });
    return h("div", { class: "plot" }, h("span", { class: "across" }, "measured"), h("div", { class: "up" }, ticks.toReversed()),
      h("svg", {
        role: "img", "aria-label": `${label}: ${compared.length} decisions. The figures above and the tables below say the same.`,
        onclick: (event) => event.target.dataset.id && go("decisions", event.target.dataset.id),
      }, [0, 50, 100].map((at) => [line(0, at, 100, at), line(at, 0, at, 100)]), line(0, 100, 100, 0, "diagonal"),
      compared.map(({ decision: { decision_id: id }, [field]: [x, y] }) => h("circle", { key: id, "data-id": id, r: "2.5", cx: place(x), cy: place(most - y) }))),
      h("div", { class: "across ticks" }, ticks), h("span", { class: "across" }, "predicted"));
  }

  draw() {
    const { live } = this.app;
    if (!live.shown.decisions) return null;
    const compared = live.shown.decisions.map(comparedOf).filter((each) => each.cached || each.first);
    if (!compared.length) return message("", "There is nothing to compare yet.", "Predictions are compared when requests end and the worker reports what it reused.");
    const cached = compared.filter((each) => each.cached), first = compared.filter((each) => each.first);
    return [
      this.outdated("The figures by rank are not current."),
      summary(cached, first),
      h("div", { key: "plots", class: "columns" },
        panel("cached", "Cached tokens", this.scatter("Cached tokens, predicted and reported", count, cached, "cached")),
        panel("first", "Time to the first token", this.scatter("Time to the first token, predicted and measured", seconds, first, "first"))),
      panel("ranks", "By rank, now", this.ranks.with(inOrder(this.found?.ranks ?? []))),
      panel("worst", "Largest misses of cached tokens", this.worst.with(worstOf(cached))),
    ];
  }
}

/** Round up to 1, 2 or 5 times a power of ten; 1 for 0. */
function rounded(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((each) => each * power >= value);
}

function comparedOf(decision) {
  const cached = predictedCached(decision), first = predictedTtft(decision);
  return {
    decision,
    cached: cached === null ? null : [cached, decision.outcome.cached_tokens],
    first: first === null || first < 0 ? null : [first, decision.outcome.ttft_s],
  };
}

function worstOf(compared) {
  const missed = compared.filter((each) => each.cached[0] !== each.cached[1]);
  return missed.sort((left, right) => Math.abs(right.cached[0] - right.cached[1]) - Math.abs(left.cached[0] - left.cached[1])).slice(0, WORST).map((each) => each.decision);
}

function summary(cached, first) {
  const sum = (at) => total(cached.map((each) => each.cached[at]));
  const share = (sign) => percent(ratio(cached.filter((each) => Math.sign(each.cached[0] - each.cached[1]) === sign).length, cached.length));
  const later = first.map((each) => each.first[1] - each.first[0]).sort((left, right) => left - right);
  const errors = later.map(Math.abs).sort((left, right) => left - right);
  return figures(
    ["Compared", count(cached.length), "Decisions with a reuse that the worker reported"],
    ["Exact", share(0), "Cached tokens as predicted"],
    ["Too high", share(1), "The worker reused less than was predicted"],
    ["Too low", share(-1), "The worker reused more"],
    ["Tokens predicted", percent(ratio(sum(0), sum(1))), "Of the tokens that were reused"],
    ["TTFT error p50", seconds(quantile(errors, 0.5)), "Between predicted and measured, without its sign"],
    ["TTFT error p90", seconds(quantile(errors, 0.9))],
    ["TTFT bias", seconds(quantile(later, 0.5)), "Median of measured minus predicted"]);
}

const RANK_COLUMNS = [
  rankColumn("minmax(100px, 1fr)"),
  numbers("Requests", "requests", "80px", count, { phone: "58px", hint: "The newest that are compared" }),
  numbers("Too high", "overpredicted", "72px", count, { phone: "56px" }),
  numbers("Too low", "underpredicted", "72px", count, { phone: "56px" }),
  { name: "Doubted", width: "minmax(120px, 1fr)", phone: "74px", cell: (each) => (each.doubt ? badge(each.doubt, "warn") : badge("no", "muted")), sort: (each) => (each.doubt ? 1 : 0), hint: "Whether the router trusts the rank less for its misses, now" },
];
