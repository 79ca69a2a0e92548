// What is known of the fleet: now, by server-sent events, or at a past time that was chosen.

import { NotAnswered, TokenNeeded, events, get } from "./api.js";
import { ranksOf } from "./fleet_rows.js";

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
