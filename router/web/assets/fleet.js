// The fleet: figures of all, a map of its ranks, each rank in a table; and one worker: its registration, ranks, decisions.

import { Poll, stateOf, View } from "./api.js";
import { decisionTable } from "./decisions.js";
import { badge, count, factor, facts, figures, filtered, go, h, legend, link, message, name, numbers, panel, percent, rankColumn, seconds, select, short, tiers, trust } from "./parts.js";
import { Table } from "./table.js";

const CELL_MIN = 9, CELL_MAX = 26, GAP = 2, MAP_WIDTH = 1200, MAP_HEIGHT = 140; // pixels: of cells, and of the map on a desktop

/** What cells may show: a value from 0 to 1 for the colour, and a text. `isScaled`: relative to the largest value. */
const MEASURES = {
  requests: { name: "active requests", value: (rank) => rank.active_requests, text: (rank) => `${count(rank.active_requests)} requests`, isScaled: true },
  fill: { name: "cache fill", value: (rank) => rank.fill, text: (rank) => `${percent(rank.fill)} of its blocks` },
  hit: { name: "hit rate", value: (rank) => rank.hit_ratio, text: (rank) => `hit rate ${percent(rank.hit_ratio)}` },
  ttft: { name: "time to first token", value: (rank) => rank.ttft_s, text: (rank) => `TTFT ${seconds(rank.ttft_s)}`, isScaled: true },
  queued: { name: "queued tokens", value: (rank) => rank.queued_tokens, text: (rank) => `${short(rank.queued_tokens)} queued tokens`, isScaled: true },
  prefill: { name: "prefill time", value: (rank) => rank.prefill_factor, text: (rank) => `prefill ${factor(rank.prefill_factor)}`, isScaled: true },
};

/** How much of the accent colour a cell has, in percent; any value above 0 differs visibly from 0. */
function shade(value, largest) {
  return value > 0 ? (15 + 85 * Math.min(1, value / largest)).toFixed(0) : "0";
}

function markOf(rank) {
  return stateOf(rank) !== "fit" ? "cross" : rank.trust === "EXACT" ? "" : rank.trust.toLowerCase();
}

const MEASURE_NAMES = Object.fromEntries(Object.entries(MEASURES).map(([key, { name: text }]) => [key, text]));
const MAPPED_MIN = 9;
const RANKED = { EXACT: 0, DEGRADED: 1, FALLBACK: 2 };

export class FleetView extends View {
  title = "Fleet";

  measure = "fill";
  words = "";
  pointed = null;
  table = new Table({
    label: "Ranks of the fleet", key: (rank) => rank.id, open: (rank) => go("workers", rank.worker_id), sorted: "Rank", descending: false,
    empty: "No rank has this in its name.", rowClass: (rank) => (stateOf(rank) === "fit" ? "" : "faded"), columns: COLUMNS, isTall: true,
  });

  draw() {
    const { live, trends } = this.app;
    if (!live.shown.fleet) return null;
    if (!live.shown.ranks.length) return message("", "There is no worker.", "Start one: worker-agent serve --worker-id w0. The router learns of it by itself.");
    const [ranks, field] = filtered(this, "fleet-filter", "name, model, role, state", live.shown.ranks, (rank) => `${rank.id} ${rank.model} ${rank.role} ${rank.trust} ${stateOf(rank)}`);
    return [
      h("p", { key: "headline", class: "headline" }, "Mode ", h("strong", null, live.shown.fleet.policy), live.version && ` · version ${live.version}`, ` · ${trends.saved()}`),
      trends.figures(), summary(live), live.shown.ranks.length >= MAPPED_MIN && this.mapped(ranks), field, this.table.with(ranks),
    ];
  }

  /** All ranks as cells, in the order of the fleet, and words for the cell under the pointer or for the scale. */
  mapped(ranks) {
    const { name: by, value, text, isScaled } = MEASURES[this.measure], { pointed } = this, rankOf = (event) => ranks[event.target.dataset.at] ?? null;
    const most = isScaled && ranks.length ? ranks.reduce((best, rank) => ((value(rank) ?? 0) > (value(best) ?? 0) ? rank : best)) : null;
    const largest = most ? Math.max(1e-9, value(most) ?? 0) : 1, room = Math.floor(Math.sqrt((MAP_WIDTH * MAP_HEIGHT) / ranks.length)) - GAP;
    const point = (rank) => rank !== this.pointed && this.show({ pointed: rank });
    return h("section", { key: "map", class: "panel", "aria-label": "Map" },
      h("div", { class: "tools" },
        select("measure", "Colour by", MEASURE_NAMES, this.measure, (measure) => this.show({ measure })),
        h("span", { class: "muted pointed" }, pointed ? [pointed.id, text(pointed), pointed.trust, pointed.unfit].filter(Boolean).join(" · ") : `full colour: ${most ? text(most) : "100 %"}`),
        legend(["accent", "more"], ["degraded", "degraded"], ["fallback", "fallback"], ["cross", "takes no work"])),
      h("div", {
        class: "map", role: "img", "aria-label": `Map of ${ranks.length} ranks by ${by}. The table below has the same figures.`,
        style: { "--cell": `${Math.max(CELL_MIN, Math.min(CELL_MAX, room))}px`, "--gap": `${GAP}px` },
        onpointerover: (event) => point(rankOf(event)), onpointerleave: () => point(null), onclick: (event) => rankOf(event) && this.table.open(rankOf(event)),
      }, ranks.map((rank, at) => h("span", { key: rank.id, "data-at": String(at), class: `cell ${markOf(rank)}`, style: { "--share": `${shade(value(rank), largest)}%` } }))));
  }
}

const COLUMNS = [
  rankColumn("minmax(110px, 1.4fr)"),
  { name: "Model", width: "minmax(80px, 1fr)", cell: (rank) => name(rank.model), sort: (rank) => rank.model },
  { name: "Role", width: "92px", cell: (rank) => rank.role, sort: (rank) => rank.role },
  { name: "State", width: "88px", cell: (rank) => badge(stateOf(rank), { fit: "", draining: "warn", unfit: "bad" }[stateOf(rank)], rank.unfit), sort: (rank) => stateOf(rank) },
  { name: "Trust", width: "96px", phone: "80px", cell: trust, sort: (rank) => RANKED[rank.trust], hint: "How far the index of this rank is trusted" },
  numbers("Requests", "active_requests", "76px", count, { phone: "60px", hint: "Requests that were sent there and have not ended" }),
  numbers("Queued tokens", "queued_tokens", "98px", short, { hint: "Prompt tokens that wait for their computation" }),
  { name: "Cache", width: "minmax(96px, 1fr)", phone: "66px", cell: tiers, sort: (rank) => rank.fill, hint: "Blocks on the GPU, of all its blocks; + on other tiers" },
  numbers("Hit", "hit_ratio", "56px", percent, { hint: "Share of prompt tokens reused, of the newest decisions" }),
  numbers("TTFT", "ttft_s", "72px", seconds, { phone: "52px", hint: "Median time to the first token, of the newest decisions" }),
  numbers("ITL", "itl_s", "72px", seconds, { hint: "Median time between tokens, of the newest decisions" }),
  numbers("Prefill", "prefill_factor", "66px", factor, { hint: "Learnt prefill time, as a multiple of the reference engine's" }),
  numbers("Decode", "decode_factor", "66px", factor, { hint: "Learnt decode time, as a multiple of the reference engine's" }),
];

function summary(live) {
  const { fleet, ranks } = live.shown;
  const unfit = ranks.filter((rank) => stateOf(rank) !== "fit").length, doubted = ranks.filter((rank) => rank.trust !== "EXACT").length;
  return figures(
    ["Queued", count(fleet.requests.queued), "Requests that wait for room", fleet.requests.queued ? "warn" : ""],
    ["Ranks", `${count(ranks.length)}`, `${fleet.workers.worker_id.length} workers`],
    ["Take no work", count(unfit), "", unfit ? "bad" : ""],
    ["Not exact", count(doubted), "Ranks whose state in the index is uncertain", doubted ? "warn" : ""]);
}

export class WorkerView extends Poll {
  title = "Worker";
  path = "/v1/workers";
  nav = "fleet";
  decisions = 200;

  ranks = new Table({ label: "Ranks of this worker", key: (rank) => rank.id, columns: COLUMNS, sorted: "Rank", descending: false });
  listed = decisionTable(this.app, {
    label: "Decisions for this worker, newest first", without: "Model", sorted: "Age", descending: false, empty: "None of the decisions that are kept is for this worker.",
  });

  open([id]) {
    this.id = id;
    super.open();
  }

  draw() {
    const { live } = this.app;
    if (!live.shown.fleet) return null;
    const ranks = live.shown.ranks.filter((rank) => rank.worker_id === this.id);
    if (!ranks.length) return message("", `There is no worker ${this.id}.`, live.past ? "It was not in the fleet at this time." : "It has left the fleet, or never joined it.", h("p", null, link(["fleet"], "All workers")));
    const { found } = this;
    const registered = found?.workers.find((each) => each.registration.worker_id === this.id);
    return [
      h("h2", { key: "id" }, name(this.id)),
      this.outdated(found ? "The registration is not current." : "The registration is not shown."),
      live.past && registered && message("", "The registration is shown as it is now."),
      registered && registration(registered),
      registered?.differs.length > 0 && message("warn", "It does not match the router.", null, h("ul", null, registered.differs.map((each) =>
        h("li", { key: each.field }, `${each.field}: found ${each.found}, allowed ${each.allowed}`)))),
      ...ranks.filter((rank) => rank.unfit || rank.trust_reason).map((rank) => message(rank.unfit ? "bad" : "warn", `${rank.id}: ${[rank.unfit, rank.trust_reason].filter(Boolean).join("; ")}`, null, eventFlag(registered, rank))),
      panel("ranks", "Ranks", this.ranks.with(ranks)),
      panel("decisions", "Decisions", this.listed.with((live.shown.decisions ?? []).filter((each) => each.worker_id === this.id))),
    ];
  }
}

function eventFlag(registered, rank) {
  const flag = registered?.ranks.find((each) => each.dp_rank === rank.dp_rank)?.event_flag;
  return flag && h("p", null, "Its engine publishes KV events with ", h("span", { class: "mono wrap" }, flag));
}

function registration({ registration: found, draining, unfit }) {
  return h("section", { key: "registration", class: "panel" }, facts([
    ["Model", name(found.model)],
    ["Role", found.role],
    ["Address", h("span", { class: "mono wrap" }, found.base_url)],
    ["Engine", `${found.event_source} ${found.version}`],
    ["New work", unfit ? `none: ${unfit}` : draining ? "none: draining" : "taken"],
    ["Blocks", `${count(found.total_kv_blocks)} of ${found.block_size} tokens`],
    ["Sequences", count(found.max_num_seqs)],
    ["Longest sequence", `${count(found.max_seq_len)} tokens`],
    found.loras.length ? ["LoRAs", found.loras.map((each) => each.name ?? String(each)).join(", ")] : null,
    found.taints.length ? ["Taints", found.taints.join(", ")] : null,
  ]));
}
