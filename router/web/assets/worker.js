// One worker: its registration, its ranks, and the decisions for it.

import { Poll } from "./api.js";
import { decisionColumns } from "./decisions.js";
import { h } from "./dom.js";
import { count } from "./format.js";
import { RANK_COLUMNS } from "./fleet.js";
import { facts, link, message, name } from "./parts.js";
import { Table } from "./table.js";

const EVERY_MS = 5000;

export class WorkerView extends Poll {
  title = "Worker";
  nav = "fleet";
  refreshes = 100;

  constructor(app) {
    super(app, EVERY_MS);
    this.ranks = new Table({ label: "Ranks of this worker", key: (rank) => rank.id, select: () => {}, columns: RANK_COLUMNS, sorted: "Rank", descending: false });
    this.decisions = new Table({
      label: "Decisions for this worker, newest first", key: (each) => each.decision_id, open: (each) => app.go(["decisions", each.decision_id]),
      columns: decisionColumns(() => app.live.at).filter((each) => each.name !== "Model"), sorted: "Age", descending: false, empty: "None of the decisions that are kept is for this worker.",
    });
  }

  open([id]) {
    this.id = id;
    this.follow("/v1/workers");
  }

  draw() {
    const { live } = this.app;
    if (!live.fleet) return null;
    const ranks = live.ranks.filter((rank) => rank.workerId === this.id);
    if (!ranks.length) return message("", `There is no worker ${this.id}.`, live.isPast ? "It was not in the fleet at this time." : "It has left the fleet, or never joined it.", h("p", null, link(["fleet"], "All workers")));
    const { found, problem } = this;
    const registered = found?.workers.find((each) => each.registration.worker_id === this.id);
    return [
      h("h2", { key: "id" }, name(this.id)),
      problem && message("warn", found ? "The registration is not current." : "The registration is not shown.", problem),
      live.isPast && registered && message("", "The registration is shown as it is now."),
      registered && registration(registered),
      registered?.differs.length > 0 && message("warn", "It does not match the router.", null, h("ul", null, registered.differs.map((each) =>
        h("li", { key: each.field }, `${each.field}: found ${each.found}, allowed ${each.allowed}`)))),
      ...ranks.filter((rank) => rank.unfit || rank.trustReason).map((rank) => message(rank.unfit ? "bad" : "warn", `${rank.id}: ${[rank.unfit, rank.trustReason].filter(Boolean).join("; ")}`, null, eventFlag(registered, rank))),
      h("section", { key: "ranks", class: "panel" }, h("h2", null, "Ranks"), this.ranks.with(ranks)),
      h("section", { key: "decisions", class: "panel" }, h("h2", null, "Decisions"), this.decisions.with(live.decisions.filter((each) => each.worker_id === this.id))),
    ];
  }
}

function eventFlag(registered, rank) {
  const flag = registered?.ranks.find((each) => each.dp_rank === rank.dpRank)?.event_flag;
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
