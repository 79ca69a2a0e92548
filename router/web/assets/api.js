// Requests to the control plane, with its token where one is set. The token stays in this tab: sessionStorage, no cookie.

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
  /** The app draws after each reading; no reading follows one after which `isOver(poll)`. */
  constructor(app, everyMs, isOver = () => false) {
    Object.assign(this, { app, everyMs, isOver });
  }

  follow(path) {
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
    if (!this.isOver(this)) this.again = setTimeout(() => this.read(signal), this.everyMs);
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
      const found = parsed(block);
      if (found !== null) yield found;
    }
  }
}

function parsed(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5));
  }
  return data.length ? { event, data: JSON.parse(data.join("\n")) } : null;
}
