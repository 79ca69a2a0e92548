// What is read of the control plane: requests with its token, what is read again and again, and the fleet that is shown.
// The token stays in this tab: sessionStorage, no cookie.

const KEY = "kv-router-token";

/** The control plane wants a token, or another one. */
export class TokenNeeded extends Error {}

/** The control plane refused, or was not reached; the message is for people. */
export class NotAnswered extends Error {
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

async function answer(path, signal, accept) {
  const token = sessionStorage.getItem(KEY);
  const headers = { accept, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  let response;
  try {
    response = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new NotAnswered("The control plane does not answer.");
  }
  if (response.status === 401) throw new TokenNeeded(token ? "The token is not this control plane's." : "");
  if (!response.ok) throw new NotAnswered(await refusal(response), response.status);
  return response;
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The control plane answered ${response.status}.`;
  }
}

/** Return the JSON of a path. */
export async function get(path, signal) {
  const response = await answer(path, signal, "application/json");
  try {
    return await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new NotAnswered("This is no answer of a control plane.");
  }
}

/** What shows a path of the control plane, which is read again and again while it is open. */
export class Poll {
  everyMs = 5000;

  /** The app draws after each reading. */
  constructor(app) {
    this.app = app;
  }

  /** Whether nothing new can come. */
  isOver() {
    return false;
  }

  follow(path) {
    if (this.stop) this.close();
    this.path = path;
    this.found = null; // the newest answer
    this.problem = ""; // of the newest reading
    this.stop = new AbortController();
    this.read(this.stop.signal);
  }

  close() {
    this.stop.abort();
    clearTimeout(this.again);
  }

  async read(signal) {
    try {
      this.found = await get(this.path, signal);
      this.problem = "";
    } catch (error) {
      if (signal.aborted) return;
      this.problem = error.message;
    }
    this.app.redraw();
    if (!this.isOver()) this.again = setTimeout(() => this.read(signal), this.everyMs);
  }
}

const EVENT_CHARACTERS_MAX = 64e6;

/** Yield the events of a stream: {event, data}, `data` decoded from JSON; return when the server ends it. */
export async function* events(path, signal) {
  const response = await answer(path, signal, "text/event-stream");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    waiting += value;
    if (waiting.length > EVENT_CHARACTERS_MAX) throw new NotAnswered("An event of the control plane is too large.");
    const blocks = waiting.split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const [event, data] = ["event", "data"].map((field) => new RegExp(`^${field}: (.*)$`, "m").exec(block)?.[1]);
      if (data) yield { event, data: JSON.parse(data) };
    }
  }
}

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
    this.now = { fleet: null, ranks: [], decisions: [] }; // the newest
    this.past = null; // those of a time, `at`; `isLoading`: they are not here yet; `problem`: they will not come
    this.history = null;
  }

  /** The fleet, its ranks and the decisions that are shown. */
  get shown() {
    return this.past ?? this.now;
  }

  /** The time that is shown, Unix seconds; null: the time of the newest fleet is not known yet. */
  get at() {
    return this.past?.at ?? this.now.fleet?.at_s ?? null;
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
    Object.assign(this.now, { fleet, ranks: ranksOf(fleet) });
  }

  async readHistory(signal) {
    this.history = await get("/v1/history", signal);
    this.changed();
  }

  /** Take newer rows: of decisions that are known, too, as their outcomes come later. */
  merge(rows) {
    const known = new Map(this.now.decisions.map((each) => [each.decision_id, each]));
    for (const each of rows) if (each.outcome || !known.get(each.decision_id)?.outcome) known.set(each.decision_id, each);
    this.now.decisions = [...known.values()].sort((left, right) => right.at_s - left.at_s).slice(0, DECISIONS_MAX);
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
    this.past = { ...this.shown, at, problem: "", isLoading: true };
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

/** Return the rows of a table that is given as columns by name. */
export function rowsOf(columns) {
  const [first] = Object.values(columns);
  return first.map((_, at) => Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column[at]])));
}

/** Return rows in the order of their ids. */
export function inOrder(rows) {
  const places = new Map(rows.map((row) => [row, natural(row.id)]));
  return rows.sort((left, right) => (places.get(left) < places.get(right) ? -1 : 1));
}

/** Return the ranks of `/v1/fleet`, each with what its worker is, in the order of their names. */
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

/** In one word, whether a rank takes new work. */
export function stateOf(rank) {
  return rank.draining ? "draining" : rank.unfit ? "unfit" : "fit";
}
