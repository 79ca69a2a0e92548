// What is known of the fleet: now, by server-sent events, or at a past time that was chosen.

import { NotAnswered, TokenNeeded, events, get } from "./api.js";

const TRUSTS = ["EXACT", "DEGRADED", "FALLBACK"];
export const TIERS = ["gpu", "host", "disk", "external"];
const DECISIONS_MAX = 1000;
const MARKS_MAX = 1000;
const AGAIN_MS = 2000;
const SILENT_MS = 30000;
const HISTORY_MS = 10000;

export class Live {
  /** `changed` is called after every change. */
  constructor(changed) {
    this.changed = changed;
    this.state = "connecting"; // connecting, live, away, token
    this.problem = "";
    this.version = ""; // of the router
    this.now = null; // the newest fleet
    this.decisionsNow = [];
    this.history = null;
    this.past = null; // {at, fleet, ranks, decisions, problem}
    this.ranksNow = [];
  }

  /** The fleet that is shown. */
  get fleet() {
    return this.past ? this.past.fleet : this.now;
  }

  get ranks() {
    return this.past ? this.past.ranks : this.ranksNow;
  }

  get decisions() {
    return this.past ? this.past.decisions : this.decisionsNow;
  }

  /** The time that is shown, Unix seconds; null: the time of the newest fleet is not known yet. */
  get at() {
    return this.past ? this.past.at : (this.now?.at_s ?? null);
  }

  get isPast() {
    return this.past !== null;
  }

  /** Follow the control plane until the page ends. */
  async run() {
    for (;;) {
      const stop = new AbortController();
      try {
        await this.follow(stop);
        this.lost(new NotAnswered("The control plane ended the stream."));
      } catch (error) {
        this.lost(error);
        if (error instanceof TokenNeeded) return;
      } finally {
        stop.abort();
      }
      await new Promise((resume) => setTimeout(resume, AGAIN_MS));
    }
  }

  lost(error) {
    this.state = error instanceof TokenNeeded ? "token" : "away";
    this.problem = error instanceof TokenNeeded || error instanceof NotAnswered ? error.message : "The connection to the control plane was lost.";
    this.changed();
  }

  async follow(stop) {
    const [fleet, listed] = await Promise.all([get("/v1/fleet", stop.signal), get("/v1/decisions?limit=500", stop.signal), this.readHistory(stop.signal)]);
    this.takeFleet(fleet);
    this.merge(listed.decisions);
    let silent = setTimeout(() => stop.abort(), SILENT_MS);
    const reading = setInterval(() => this.readHistory(stop.signal).catch(() => {}), HISTORY_MS);
    try {
      for await (const { event, data } of events("/v1/live", stop.signal)) {
        clearTimeout(silent);
        silent = setTimeout(() => stop.abort(), SILENT_MS);
        this.take(event, data);
      }
    } finally {
      clearTimeout(silent);
      clearInterval(reading);
    }
  }

  take(event, data) {
    this.state = "live";
    this.problem = "";
    if (event === "hello") this.version = data.version;
    else if (event === "fleet") this.takeFleet(data);
    else if (event === "decisions") this.merge(data.decisions);
    else if (event === "mark" && this.history) this.history.marks = [...this.history.marks, data].slice(-MARKS_MAX);
    this.changed();
  }

  takeFleet(fleet) {
    this.now = fleet;
    this.ranksNow = ranksOf(fleet);
  }

  async readHistory(signal) {
    this.history = await get("/v1/history", signal);
    this.changed();
  }

  /** Take newer rows: of decisions that are known, too, as their outcomes come later. */
  merge(rows) {
    const known = new Map(this.decisionsNow.map((each) => [each.decision_id, each]));
    for (const each of rows) if (each.outcome || !known.get(each.decision_id)?.outcome) known.set(each.decision_id, each);
    this.decisionsNow = [...known.values()].sort((left, right) => right.at_s - left.at_s).slice(0, DECISIONS_MAX);
  }

  /** Read the newest decisions again, for their outcomes. */
  async refresh(count, signal) {
    this.merge((await get(`/v1/decisions?limit=${count}`, signal)).decisions);
    this.changed();
  }

  /** Show the fleet and the decisions of a time; null: of now. The newest call wins. */
  async show(at) {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    if (at === null) {
      this.past = null;
      this.changed();
      return;
    }
    this.past = { ...(this.past ?? { fleet: this.now, ranks: this.ranksNow, decisions: this.decisionsNow }), at, problem: "", isLoading: true };
    this.changed();
    try {
      const [fleet, listed] = await Promise.all([get(`/v1/fleet?at=${at}`, asking.signal), get(`/v1/decisions?limit=500&at=${at}`, asking.signal)]);
      this.past = { at, fleet, ranks: ranksOf(fleet), decisions: listed.decisions, problem: "" };
    } catch (error) {
      if (asking.signal.aborted) return;
      this.past = { at, fleet: null, ranks: [], decisions: [], problem: error.message };
    }
    this.changed();
  }
}

/** Return a text by which w2 comes before w10. */
export function natural(text) {
  return text.replace(/\d+/g, (digits) => digits.padStart(12, "0"));
}

/** Return the ranks, in the order of their names. */
export function ranksOf(fleet) {
  const order = new Map(), place = (rank) => order.get(rank.id) ?? order.set(rank.id, natural(rank.id)).get(rank.id);
  return rowsOf(fleet).sort((left, right) => (place(left) < place(right) ? -1 : 1));
}

function rowsOf({ workers, ranks, models, roles, reasons }) {
  return ranks.worker.map((worker, at) => {
    const totalBlocks = workers.total_blocks[worker];
    return {
      id: `${workers.worker_id[worker]}/${ranks.dp_rank[at]}`,
      workerId: workers.worker_id[worker],
      dpRank: ranks.dp_rank[at],
      model: models[workers.model[worker]],
      role: roles[workers.role[worker]],
      isDraining: workers.draining[worker],
      unfit: reasons[workers.unfit[worker]] || reasons[ranks.unfit[at]],
      trust: TRUSTS[ranks.trust[at]],
      trustReason: reasons[ranks.trust_reason[at]],
      requests: ranks.active_requests[at],
      activeBlocks: ranks.active_blocks[at],
      queuedTokens: ranks.queued_tokens[at],
      blocks: TIERS.map((tier) => ranks[`${tier}_blocks`][at]),
      totalBlocks,
      fill: totalBlocks ? Math.min(1, ranks.gpu_blocks[at] / totalBlocks) : null,
      prefill: ranks.prefill_factor[at],
      decode: ranks.decode_factor[at],
      hit: ranks.hit_ratio[at],
      ttft: ranks.ttft_s[at],
      itl: ranks.itl_s[at],
    };
  });
}

/** In one word, whether a rank takes new work. */
export function stateOf(rank) {
  return rank.isDraining ? "draining" : rank.unfit ? "unfit" : "fit";
}
