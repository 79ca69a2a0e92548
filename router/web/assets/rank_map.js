// All ranks as cells of one canvas, in the order of the fleet: 1,000 of them are one drawing.

import { Drawing, cleared, h } from "./dom.js";
import { count, factor, percent, seconds, short } from "./format.js";
import { stateOf } from "./live.js";

const CELL_MIN = 9, CELL_MAX = 26, GAP = 2;

/** What cells may show: a value from 0 to 1 for the colour, and a text. `isScaled`: relative to the largest value. */
export const MEASURES = {
  requests: { name: "active requests", value: (rank) => rank.requests, text: (rank) => `${count(rank.requests)} requests`, isScaled: true },
  fill: { name: "cache fill", value: (rank) => rank.fill, text: (rank) => `${percent(rank.fill)} of its blocks` },
  hit: { name: "hit rate", value: (rank) => rank.hit, text: (rank) => `hit rate ${percent(rank.hit)}` },
  ttft: { name: "time to first token", value: (rank) => rank.ttft, text: (rank) => `TTFT ${seconds(rank.ttft)}`, isScaled: true },
  queued: { name: "queued tokens", value: (rank) => rank.queuedTokens, text: (rank) => `${short(rank.queuedTokens)} queued tokens`, isScaled: true },
  prefill: { name: "prefill time", value: (rank) => rank.prefill, text: (rank) => `prefill ${factor(rank.prefill)}`, isScaled: true },
};

export class RankMap extends Drawing {
  constructor(open) {
    super();
    this.open = open;
    this.ranks = [];
    this.measure = "fill";
    this.under = null;
  }

  with(ranks, measure, pointed) {
    this.ranks = ranks;
    this.measure = measure;
    this.pointed = pointed;
    return h("canvas", { class: "map", role: "img", "aria-label": this.label(), ref: (canvas) => this.mounted(canvas) });
  }

  label() {
    const { name } = MEASURES[this.measure];
    return `Map of ${this.ranks.length} ranks by ${name}. The table below has the same figures.`;
  }

  listen(canvas) {
    canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("click", (event) => {
      const rank = this.at(event);
      if (rank) this.open(rank);
    });
  }

  point(rank) {
    if (rank !== this.under) {
      this.under = rank;
      this.pointed(rank);
    }
  }

  layout() {
    const width = this.canvas.clientWidth || 300;
    let cell = CELL_MAX;
    while (cell > CELL_MIN && Math.ceil(this.ranks.length / Math.floor(width / (cell + GAP))) * (cell + GAP) > 140) cell -= 1;
    const across = Math.max(1, Math.floor(width / (cell + GAP)));
    return { cell, across, height: Math.max(1, Math.ceil(this.ranks.length / across)) * (cell + GAP) };
  }

  at(event) {
    const { cell, across } = this.layout();
    const column = Math.floor(event.offsetX / (cell + GAP)), row = Math.floor(event.offsetY / (cell + GAP));
    return column < across ? (this.ranks[row * across + column] ?? null) : null;
  }

  draw() {
    const { canvas } = this;
    if (!canvas?.isConnected) return;
    const { cell, across, height } = this.layout();
    canvas.style.setProperty("height", `${height}px`);
    const { paint, colour } = cleared(canvas, height), { value, isScaled } = MEASURES[this.measure];
    const [accent, track, bad, degraded, fallback] = ["--accent", "--track", "--bad", "--degraded", "--fallback"].map(colour);
    const largest = isScaled ? Math.max(1e-9, ...this.ranks.map((rank) => value(rank) ?? 0)) : 1;
    this.ranks.forEach((rank, at) => {
      const x = (at % across) * (cell + GAP), y = Math.floor(at / across) * (cell + GAP), share = value(rank);
      paint.globalAlpha = 1;
      paint.fillStyle = track;
      paint.fillRect(x, y, cell, cell);
      if (share !== null && share > 0) {
        paint.globalAlpha = 0.15 + 0.85 * Math.min(1, share / largest);
        paint.fillStyle = accent;
        paint.fillRect(x, y, cell, cell);
      }
      paint.globalAlpha = 1;
      if (stateOf(rank) !== "fit") cross(paint, x, y, cell, bad);
      else if (rank.trust !== "EXACT") corner(paint, x, y, cell, rank.trust === "FALLBACK" ? fallback : degraded);
    });
  }
}

function cross(paint, x, y, cell, colour) {
  paint.strokeStyle = colour;
  paint.lineWidth = 1.5;
  paint.beginPath();
  paint.moveTo(x + 2, y + 2);
  paint.lineTo(x + cell - 2, y + cell - 2);
  paint.moveTo(x + cell - 2, y + 2);
  paint.lineTo(x + 2, y + cell - 2);
  paint.stroke();
}

function corner(paint, x, y, cell, colour) {
  paint.fillStyle = colour;
  paint.beginPath();
  paint.moveTo(x + cell, y);
  paint.lineTo(x + cell, y + cell * 0.6);
  paint.lineTo(x + cell * 0.4, y);
  paint.fill();
}
