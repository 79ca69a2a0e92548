// The fleet: figures of all, a map of its ranks, and each rank in a table.

import { h } from "./dom.js";
import { count, factor, percent, seconds, short } from "./format.js";
import { natural, stateOf } from "./live.js";
import { badge, figures, filter, legend, link, message, name, select, tiers, trust } from "./parts.js";
import { MEASURES, RankMap } from "./rank_map.js";
import { Table } from "./table.js";

const MEASURE_NAMES = Object.fromEntries(Object.entries(MEASURES).map(([key, { name: text }]) => [key, text]));
const MAPPED_MIN = 9;
const RANKED = { EXACT: 0, DEGRADED: 1, FALLBACK: 2 };

export class FleetView {
  title = "Fleet";

  constructor(app) {
    this.app = app;
    this.measure = "fill";
    this.words = "";
    this.pointed = null;
    const open = (rank) => app.go(["workers", rank.workerId]);
    this.map = new RankMap(open);
    this.table = new Table({
      label: "Ranks of the fleet", key: (rank) => rank.id, open, sorted: "Rank", descending: false,
      empty: "No rank has this in its name.", rowClass: (rank) => (stateOf(rank) === "fit" ? "" : "faded"), columns: COLUMNS, isTall: true,
    });
  }

  open() {
    this.app.trends.open();
  }

  close() {
    this.app.trends.close();
  }

  draw() {
    const { live, trends } = this.app;
    if (!live.fleet) return null;
    if (!live.ranks.length) return message("", "There is no worker.", "Start one: worker-agent serve --worker-id w0. The router learns of it by itself.");
    const words = this.words.trim().toLowerCase();
    const ranks = words ? live.ranks.filter((rank) => `${rank.id} ${rank.model} ${rank.role} ${rank.trust} ${stateOf(rank)}`.toLowerCase().includes(words)) : live.ranks;
    return [headline(live, trends), trends.figures(), summary(live), live.ranks.length >= MAPPED_MIN && this.mapped(ranks), filter(this, "fleet-filter", "name, model, role, state", `${count(ranks.length)} of ${count(live.ranks.length)} ranks`), this.table.with(ranks)];
  }

  mapped(ranks) {
    return h("section", { key: "map", class: "panel", "aria-label": "Map" },
      h("div", { class: "tools" },
        select("measure", "Colour by", MEASURE_NAMES, this.measure, (measure) => this.showMeasure(measure)),
        h("span", { class: "muted pointed" }, this.pointed ? described(this.pointed, this.measure) : scaleOf(ranks, this.measure)),
        legend(["accent", "more"], ["degraded", "degraded"], ["fallback", "fallback"], ["cross", "takes no work"])),
      this.map.with(ranks, this.measure, (rank) => {
        this.pointed = rank;
        this.app.redraw();
      }));
  }

  showMeasure(measure) {
    this.measure = measure;
    this.app.redraw();
  }

}

const COLUMNS = [
  { name: "Rank", width: "minmax(110px, 1.4fr)", phone: "minmax(52px, 1fr)", cell: (rank) => link(["workers", rank.workerId], rank.id, { class: "name", title: rank.id, tabindex: "-1" }), sort: (rank) => natural(rank.id) },
  { name: "Model", width: "minmax(80px, 1fr)", cell: (rank) => name(rank.model), sort: (rank) => rank.model },
  { name: "Role", width: "92px", cell: (rank) => rank.role, sort: (rank) => rank.role },
  { name: "State", width: "88px", cell: (rank) => badge(stateOf(rank), { fit: "", draining: "warn", unfit: "bad" }[stateOf(rank)], rank.unfit), sort: (rank) => stateOf(rank) },
  { name: "Trust", width: "96px", phone: "80px", cell: trust, sort: (rank) => RANKED[rank.trust], hint: "How far the index of this rank is trusted" },
  { name: "Requests", width: "76px", phone: "60px", align: "end", cell: (rank) => count(rank.requests), sort: (rank) => rank.requests, hint: "Requests that were sent there and have not ended" },
  { name: "Queued tokens", width: "98px", align: "end", cell: (rank) => short(rank.queuedTokens), sort: (rank) => rank.queuedTokens, hint: "Prompt tokens that wait for their computation" },
  { name: "Cache", width: "minmax(96px, 1fr)", phone: "66px", cell: tiers, sort: (rank) => rank.fill, hint: "Blocks on the GPU, of all its blocks; + on other tiers" },
  { name: "Hit", width: "56px", align: "end", cell: (rank) => percent(rank.hit), sort: (rank) => rank.hit, hint: "Share of prompt tokens reused, of the newest decisions" },
  { name: "TTFT", width: "72px", phone: "52px", align: "end", cell: (rank) => seconds(rank.ttft), sort: (rank) => rank.ttft, hint: "Median time to the first token, of the newest decisions" },
  { name: "ITL", width: "72px", align: "end", cell: (rank) => seconds(rank.itl), sort: (rank) => rank.itl, hint: "Median time between tokens, of the newest decisions" },
  { name: "Prefill", width: "66px", align: "end", cell: (rank) => factor(rank.prefill), sort: (rank) => rank.prefill, hint: "Learnt prefill time, as a multiple of the reference engine's" },
  { name: "Decode", width: "66px", align: "end", cell: (rank) => factor(rank.decode), sort: (rank) => rank.decode, hint: "Learnt decode time, as a multiple of the reference engine's" },
];
/** The same columns, for the ranks of one worker. */
export const RANK_COLUMNS = COLUMNS;

function headline({ fleet, version }, trends) {
  return h("p", { key: "headline", class: "headline" }, "Mode ", h("strong", null, fleet.policy), version && ` · version ${version}`, ` · ${trends.saved()}`);
}

function summary(live) {
  const { fleet, ranks } = live;
  const unfit = ranks.filter((rank) => stateOf(rank) !== "fit").length, doubted = ranks.filter((rank) => rank.trust !== "EXACT").length;
  return figures(
    ["Queued", count(fleet.requests.queued), "Requests that wait for room", fleet.requests.queued ? "warn" : ""],
    ["Ranks", `${count(ranks.length)}`, `${fleet.workers.worker_id.length} workers`],
    ["Take no work", count(unfit), "", unfit ? "bad" : ""],
    ["Not exact", count(doubted), "Ranks of which the index is not sure", doubted ? "warn" : ""]);
}

function described(rank, measure) {
  return [rank.id, MEASURES[measure].text(rank), rank.trust, rank.unfit].filter(Boolean).join(" · ");
}

function scaleOf(ranks, measure) {
  const { value, isScaled, text } = MEASURES[measure];
  if (!isScaled || !ranks.length) return "full colour: 100 %";
  const largest = ranks.reduce((best, rank) => ((value(rank) ?? 0) > (value(best) ?? 0) ? rank : best));
  return `full colour: ${text(largest)}`;
}
