// Reads from the control plane: requests with its token, repeated readings, and the fleet that is shown.
// The token stays in this tab: sessionStorage, no cookie.

import { h, message, natural, rankId } from "./parts.js";

const KEY = "kv-router-token";
const SILENT_MS = 30000;

/** The control plane refused, or was not reached; the message is for people. Status 401: it requires a token, or another one. */
class NotAnswered extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function setToken(token) {
  if (token) sessionStorage.setItem(KEY, token);
  else sessionStorage.removeItem(KEY);
}

export function hasToken() {
  return sessionStorage.getItem(KEY) !== null;
}

/** Return the JSON of a path. */
export async function get(path, signal) {
  const token = sessionStorage.getItem(KEY);
  const headers = { accept: "application/json", ...(token ? { authorization: `Bearer ${token}` } : {}) };
  let response;
  try {
    response = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new NotAnswered("The control plane does not answer.");
  }
  if (response.status === 401) throw new NotAnswered(token ? "The token is not this control plane's." : "", 401);
  if (!response.ok) throw new NotAnswered(await refusal(response), response.status);
  try {
    return await response.json();
  } catch (error) {
    if (signal.aborted) throw error;
    throw new NotAnswered("This is no answer of a control plane.");
  }
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The control plane answered ${response.status}.`;
  }
}

/** A part of the page; the app draws what its `draw` returns. */
export class View {
  constructor(app) {
    this.app = app;
  }

  show(changed) {
    Object.assign(this, changed);
    this.app.redraw();
  }
}

/** Reads from the control plane again and again while it is open, and only while the page is visible. */
export class Poll extends View {
  everyMs = 5000;
  found = null; // the newest answer
  problem = null; // the error of the newest reading

  /** Return what becomes `found`. */
  ask(signal) {
    return get(this.path, signal);
  }

  /** Whether no newer answer can come. */
  isOver() {
    return false;
  }

  /** Begin to read `path`. */
  open() {
    Object.assign(this, { found: null, problem: null });
    this.hurry();
  }

  /** Read now. */
  hurry() {
    this.close();
    this.read((this.stop = new AbortController()));
  }

  close() {
    this.stop?.abort();
    this.stop = null;
    clearTimeout(this.again);
  }

  async read(stop) {
    if (!document.hidden) {
      const overdue = setTimeout(() => stop.abort(new NotAnswered("The control plane does not answer.")), SILENT_MS);
      let found = null, problem = null;
      try {
        found = await this.ask(stop.signal);
      } catch (error) {
        problem = error;
      }
      clearTimeout(overdue);
      if (stop !== this.stop) return; // it was closed, or reads something else
      this.show({ found: found ?? this.found, problem });
    }
    if (!this.isOver()) this.again = setTimeout(() => this.hurry(), this.everyMs);
  }

  /** What is drawn until there is an answer. */
  unread(title, ...more) {
    return this.problem ? message("bad", title, this.problem.message, ...more) : h("p", { class: "muted", role: "status" }, "Reading.");
  }

  /** What is drawn above an answer that is not the newest. */
  outdated(title) {
    return this.problem && message("warn", title, this.problem.message);
  }
}

const TRUSTS = ["EXACT", "DEGRADED", "FALLBACK"];
export const TIERS = ["gpu", "host", "disk", "external"];
const PAST_DECISIONS = 500;
const NOTHING = { fleet: null, ranks: [], decisions: null, history: null };

/** The fleet, its past, and the decisions that the view shows. */
export class Live extends Poll {
  everyMs = 1000;
  version = ""; // the router's
  past = null; // null: now is shown; else what was at `at`; `isLoading`: not read yet; `problem`: why it cannot be read

  get state() {
    return this.problem ? (this.isOver() ? "token" : "away") : this.found ? "live" : "connecting";
  }

  /** The newest answers; `decisions` is null until a view that shows them is open. */
  get now() {
    return this.found ?? NOTHING;
  }

  /** The fleet, its ranks and the decisions that are shown. */
  get shown() {
    return this.past ?? this.now;
  }

  /** The time that is shown, Unix seconds; null: no fleet has been read yet. */
  get at() {
    return this.past?.at ?? this.now.fleet?.at_s ?? null;
  }

  isOver() {
    return this.problem?.status === 401;
  }

  async ask(signal) {
    const wanted = this.app.view?.decisions ?? 0;
    if (this.state !== "live") this.version = (await get("/version", signal)).version;
    const [fleet, history, listed] = await Promise.all([get("/v1/fleet", signal), get("/v1/history", signal), wanted ? get(`/v1/decisions?limit=${wanted}`, signal) : this.now]);
    return { fleet, ranks: ranksOf(fleet), decisions: listed.decisions, history };
  }

  /** Show the fleet and the decisions of a time; null: of now. The newest call wins. */
  async showTime(at) {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    this.past = at === null ? null : { ...this.shown, at, problem: "", isLoading: true };
    this.app.redraw();
    if (at === null) return;
    try {
      const [fleet, listed] = await Promise.all([get(`/v1/fleet?at=${at}`, asking.signal), get(`/v1/decisions?limit=${PAST_DECISIONS}&at=${at}`, asking.signal)]);
      this.past = { at, fleet, ranks: ranksOf(fleet), decisions: listed.decisions, problem: "" };
    } catch (error) {
      if (asking.signal.aborted) return;
      this.past = { ...NOTHING, at, problem: error.message };
    }
    this.app.redraw();
  }
}

/** Return the rows of a table that is given as columns by name. */
export function rowsOf(columns) {
  const [first] = Object.values(columns);
  return first.map((_, at) => Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column[at]])));
}

/** Sort rows by the names of their ranks, and return them. */
export function inOrder(rows) {
  const places = new Map(rows.map((row) => [row, natural(rankId(row))]));
  return rows.sort((left, right) => (places.get(left) < places.get(right) ? -1 : 1));
}

/** Return the ranks of `/v1/fleet`, each with its worker's fields, in the order of their names. */
function ranksOf({ workers, ranks, models, roles, reasons }) {
  const known = rowsOf(workers);
  return inOrder(rowsOf(ranks).map((rank) => {
    const { worker_id, model, role, draining, unfit, total_blocks } = known[rank.worker];
    return {
      ...rank, worker_id, draining, total_blocks, id: `${worker_id}/${rank.dp_rank}`, model: models[model], role: roles[role], unfit: reasons[unfit] || reasons[rank.unfit],
      trust: TRUSTS[rank.trust], trust_reason: reasons[rank.trust_reason], blocks: TIERS.map((tier) => rank[`${tier}_blocks`]),
      fill: total_blocks ? Math.min(1, rank.gpu_blocks / total_blocks) : null,
    };
  }));
}

/** One word for whether a rank takes new work. */
export function stateOf(rank) {
  return rank.draining ? "draining" : rank.unfit ? "unfit" : "fit";
}
