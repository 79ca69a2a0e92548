// A path of the control plane that is read again and again while its view is open.

import { get } from "./api.js";

export class Poll {
  /** `changed` is called after each reading; no reading follows one after which `isOver(poll)`. */
  constructor(changed, everyMs, isOver = () => false) {
    Object.assign(this, { changed, everyMs, isOver });
  }

  open(path) {
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
    this.changed();
    if (!this.isOver(this)) this.again = setTimeout(() => this.read(signal), this.everyMs);
  }
}
