// Whether predictions hold: reuse and first tokens, predicted and measured, as points of decisions and by rank.

import { Poll } from "./api.js";
import { decisionColumns } from "./decisions.js";
import { cleared, Drawing, h } from "./dom.js";
import { natural } from "./live.js";
import { badge, bar, count, figures, link, message, percent, predictedCached, predictedTtft, quantile, seconds, UNKNOWN } from "./parts.js";
import { Table } from "./table.js";

const EVERY_MS = 5000;
const WORST = 20;

export class AccuracyView extends Poll {
  title = "Accuracy";
  refreshes = 1000;

  constructor(app) {
    super(app, EVERY_MS);
    const open = (point) => app.go(["decisions", point.id]);
    this.cached = new Scatter({ label: "Cached tokens, predicted and reported", text: count, open });
    this.first = new Scatter({ label: "Time to the first token, predicted and measured", text: seconds, open });
    this.ranks = new Table({
      label: "Predictions by rank", key: (each) => `${each.worker_id}/${each.dp_rank}`, columns: RANK_COLUMNS, sorted: "Doubted", empty: "No worker has reported what it reused.",
      open: (each) => app.go(["workers", each.worker_id]),
    });
    this.worst = new Table({
      label: "Decisions with the largest misses", key: (each) => each.decision_id, open: (each) => app.go(["decisions", each.decision_id]), columns: decisionColumns(() => app.live.at),
      empty: "No decision missed by a block or more.",
    });
  }

  open() {
    this.follow("/v1/predictions");
  }

  draw() {
    const { live } = this.app;
    if (!live.fleet) return null;
    const compared = live.decisions.map(comparedOf).filter((each) => each.cached || each.first);
    if (!compared.length) return message("", "There is nothing to compare yet.", "Predictions are compared when requests end and the worker reports what it reused.");
    const cached = compared.filter((each) => each.cached), first = compared.filter((each) => each.first);
    const doubts = new Map((this.found?.ranks ?? []).map((each) => [`${each.worker_id}/${each.dp_rank}`, each.doubt]));
    return [
      this.problem && message("warn", "Which ranks are doubted is not current.", this.problem),
      summary(cached, first),
      h("div", { key: "plots", class: "columns" },
        h("section", { class: "panel" }, h("h2", null, "Cached tokens"), this.cached.with(cached.map((each) => ({ id: each.decision.decision_id, x: each.cached[0], y: each.cached[1] })))),
        h("section", { class: "panel" }, h("h2", null, "Time to the first token"), this.first.with(first.map((each) => ({ id: each.decision.decision_id, x: each.first[0], y: each.first[1] }))))),
      h("section", { key: "ranks", class: "panel" }, h("h2", null, "By rank"),
        this.ranks.with(sumsOf(cached, doubts))),
      h("section", { key: "worst", class: "panel" }, h("h2", null, "Largest misses of cached tokens"), this.worst.with(worstOf(cached))),
    ];
  }
}

function comparedOf(decision) {
  const cached = predictedCached(decision), first = predictedTtft(decision);
  return {
    decision, block: decision.block_size ?? 1,
    cached: cached === null ? null : [cached, decision.outcome.cached_tokens],
    first: first === null || first < 0 ? null : [first, decision.outcome.ttft_s],
  };
}

/** Sums of the compared decisions by rank, each with its doubt. */
function sumsOf(compared, doubts) {
  const sums = new Map();
  for (const { decision, cached: [predicted, reported] } of compared) {
    const key = `${decision.worker_id}/${decision.dp_rank}`;
    const sum = sums.get(key) ?? { worker_id: decision.worker_id, dp_rank: decision.dp_rank, requests: 0, overpredicted: 0, underpredicted: 0, held_tokens: 0, reported_tokens: 0, possible_tokens: 0, doubt: doubts.get(key) };
    sum.requests += 1;
    sum.overpredicted += predicted > reported;
    sum.underpredicted += predicted < reported;
    sum.held_tokens += predicted;
    sum.reported_tokens += reported;
    sum.possible_tokens += decision.isl_tokens;
    sums.set(key, sum);
  }
  return [...sums.values()];
}

function worstOf(compared) {
  const missed = compared.filter((each) => each.cached[0] !== each.cached[1]);
  return missed.sort((left, right) => Math.abs(right.cached[0] - right.cached[1]) - Math.abs(left.cached[0] - left.cached[1])).slice(0, WORST).map((each) => each.decision);
}

function summary(cached, first) {
  const sum = (at) => cached.reduce((all, each) => all + each.cached[at], 0), reported = sum(1);
  const isOff = (sign) => cached.filter((each) => sign * (each.cached[0] - each.cached[1]) > 0).length / (cached.length || 1);
  const errors = first.map((each) => Math.abs(each.first[1] - each.first[0])).sort((left, right) => left - right);
  const later = first.map((each) => each.first[1] - each.first[0]).sort((left, right) => left - right);
  return figures(
    ["Compared", count(cached.length), "Decisions of which the worker reported its reuse"],
    ["Exact", cached.length ? percent(1 - isOff(1) - isOff(-1)) : UNKNOWN, "Cached tokens as predicted"],
    ["Too high", cached.length ? percent(isOff(1)) : UNKNOWN, "The worker reused less than was predicted"],
    ["Too low", cached.length ? percent(isOff(-1)) : UNKNOWN, "The worker reused more"],
    ["Tokens predicted", reported ? percent(sum(0) / reported) : UNKNOWN, "Of the tokens that were reused"],
    ["TTFT error p50", seconds(quantile(errors, 0.5)), "Between predicted and measured, without its sign"],
    ["TTFT error p90", seconds(quantile(errors, 0.9))],
    ["TTFT bias", seconds(quantile(later, 0.5)), "Median of measured minus predicted"]);
}

const RANK_COLUMNS = [
  { name: "Rank", width: "minmax(100px, 1fr)", phone: "minmax(60px, 1fr)", cell: (each) => link(["workers", each.worker_id], `${each.worker_id}/${each.dp_rank}`, { class: "name", tabindex: "-1" }), sort: (each) => natural(`${each.worker_id}/${each.dp_rank}`) },
  { name: "Requests", width: "80px", phone: "58px", align: "end", cell: (each) => count(each.requests), sort: (each) => each.requests, hint: "Decisions that are compared" },
  { name: "Too high", width: "72px", phone: "56px", align: "end", cell: (each) => count(each.overpredicted), sort: (each) => each.overpredicted },
  { name: "Too low", width: "72px", phone: "56px", align: "end", cell: (each) => count(each.underpredicted), sort: (each) => each.underpredicted },
  { name: "Predicted", width: "92px", align: "end", cell: (each) => count(each.held_tokens), sort: (each) => each.held_tokens, hint: "Tokens that it held by the index" },
  { name: "Reused", width: "92px", align: "end", cell: (each) => count(each.reported_tokens), sort: (each) => each.reported_tokens, hint: "Tokens that it reported as reused" },
  { name: "Of prompts", width: "minmax(90px, 1fr)", cell: (each) => [bar([[each.reported_tokens, "accent"]], each.possible_tokens, `${count(each.reported_tokens)} of ${count(each.possible_tokens)} tokens`), h("span", { class: "number" }, percent(each.possible_tokens ? each.reported_tokens / each.possible_tokens : null))], sort: (each) => (each.possible_tokens ? each.reported_tokens / each.possible_tokens : null) },
  { name: "Doubted", width: "120px", phone: "74px", cell: (each) => (each.doubt ? badge(each.doubt, "warn") : badge("no", "muted")), sort: (each) => (each.doubt ? 1 : 0), hint: "Whether the router trusts the rank less for its misses, now" },
];

const LEFT = 58, BOTTOM = 30, TOP = 10, RIGHT = 12, HEIGHT = 260, NEAR = 12;

/** Predicted against measured, as points: on the diagonal the prediction held. */
class Scatter extends Drawing {
  /** `text(value)` writes a value; `open(point)`: a point was clicked. Points: {id, x: predicted, y: measured}. */
  constructor({ label, text, open }) {
    super();
    Object.assign(this, { label, text, open });
    this.points = [];
  }

  with(points) {
    this.points = points;
    const label = `${this.label}: ${points.length} decisions. The figures above and the tables below say the same.`;
    return h("canvas", { class: "plot", role: "img", "aria-label": label, ref: (canvas) => this.mounted(canvas) });
  }

  listen(canvas) {
    canvas.addEventListener("click", (event) => {
      const point = this.nearest(event.offsetX, event.offsetY);
      if (point) this.open(point);
    });
  }

  /** The largest value of both axes, rounded up to 1, 2 or 5 of a power of ten. */
  largest() {
    const found = this.points.reduce((best, { x, y }) => Math.max(best, x, y), 0);
    if (found <= 0) return 1;
    const power = 10 ** Math.floor(Math.log10(found));
    return power * [1, 2, 5, 10].find((each) => each * power >= found);
  }

  place(point) {
    const width = this.canvas.clientWidth - LEFT - RIGHT, height = HEIGHT - TOP - BOTTOM;
    return [LEFT + (point.x / this.scale) * width, TOP + height - (point.y / this.scale) * height];
  }

  nearest(x, y) {
    let best = null, distance = NEAR;
    for (const point of this.points) {
      const [left, top] = this.place(point), far = Math.hypot(left - x, top - y);
      if (far < distance) [best, distance] = [point, far];
    }
    return best;
  }

  draw() {
    const { canvas } = this;
    if (!canvas?.isConnected) return;
    this.scale = this.largest();
    const { paint, width, font, colour } = cleared(canvas, HEIGHT);
    paint.font = `11px ${font}`;
    this.axes(paint, width, colour("--line"), colour("--muted"));
    paint.fillStyle = colour("--accent");
    paint.globalAlpha = this.points.length > 200 ? 0.4 : 0.65;
    for (const point of this.points) {
      const [x, y] = this.place(point);
      paint.beginPath();
      paint.arc(x, y, 2.5, 0, 7);
      paint.fill();
    }
  }

  axes(paint, width, line, muted) {
    const right = width - RIGHT, bottom = HEIGHT - BOTTOM;
    paint.strokeStyle = line;
    paint.fillStyle = muted;
    paint.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      const y = Math.round(bottom - share * (bottom - TOP)) + 0.5, x = Math.round(LEFT + share * (right - LEFT)) + 0.5, text = this.text(share * this.scale);
      paint.beginPath();
      paint.moveTo(LEFT, y);
      paint.lineTo(right, y);
      paint.moveTo(x, TOP);
      paint.lineTo(x, bottom);
      paint.stroke();
      paint.textAlign = "right";
      paint.fillText(text, LEFT - 6, y + 4);
      paint.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center";
      paint.fillText(text, x, bottom + 13);
    }
    paint.textAlign = "center";
    paint.fillText("predicted", (LEFT + right) / 2, HEIGHT - 4);
    paint.textAlign = "left";
    paint.fillText("measured", LEFT + 6, TOP + 12);
    paint.strokeStyle = muted;
    paint.setLineDash([3, 4]);
    paint.beginPath();
    paint.moveTo(LEFT, bottom);
    paint.lineTo(right, TOP);
    paint.stroke();
    paint.setLineDash([]);
  }
}
