// The time slider: over what is kept of the fleet, with marks of what happened.

import { cleared, h } from "./dom.js";
import { clock } from "./format.js";

const KINDS = { worker_left: "--bad", worker_silent: "--bad", log_lost: "--bad", trust: "--warn", resync: "--warn", worker_draining: "--warn" };

const RANGES = { 900: "15 min", 3600: "1 h", 43200: "12 h" };

export class Timeline {
  constructor(app) {
    this.app = app;
    this.range = 3600;
  }

  /** Times of the two ends; null while nothing is kept. */
  get span() {
    const { live } = this.app, kept = live.history?.ring.from_s ?? null, to = live.now?.at_s ?? live.history?.now_s ?? null;
    return kept === null || to === null || to <= kept ? null : [Math.max(kept, Math.min(to - this.range, live.past?.at ?? to)), to];
  }

  draw() {
    const { live } = this.app, { span } = this;
    if (!span) return h("footer", { class: "timeline", "aria-label": "Time" }, h("span", { class: "muted" }, "The past of the fleet is recorded from now on."));
    const [from, to] = span, at = live.isPast ? live.past.at : to, last = Math.ceil(to - from);
    return h("footer", { class: "timeline", "aria-label": "Time" },
      h("button", { type: "button", class: live.isPast ? "primary" : "", "aria-pressed": String(!live.isPast), onclick: () => this.app.showTime(null) }, "Live"),
      h("div", { class: "track" },
        h("canvas", { class: "marks", "aria-hidden": "true", ref: (canvas) => this.marks(canvas, from, to, live.history.marks) }),
        h("input", {
          type: "range", "aria-label": "Time that is shown", min: "0", max: String(last), step: "1", value: String(live.isPast ? Math.min(last, Math.round(at - from)) : last),
          "aria-valuetext": live.isPast ? clock(at) : "now", oninput: (event) => this.moved(event.target, from),
        })),
      h("output", { class: "time" }, live.isPast ? h("strong", null, clock(at)) : clock(at)),
      h("select", { "aria-label": "Time range", value: String(this.range), onchange: (event) => {
        this.range = Number(event.target.value);
        this.app.redraw();
      } }, Object.entries(RANGES).map(([key, text]) => h("option", { key, value: key, selected: key === String(this.range) }, text))));
  }

  /** The end of the slider is the present. */
  moved(input, from) {
    this.app.showTime(input.value === input.max ? null : from + Number(input.value));
  }

  marks(canvas, from, to, marks) {
    const { paint, width, colour } = cleared(canvas, 8);
    for (const each of marks) {
      if (each.at_s < from) continue;
      paint.fillStyle = colour(KINDS[each.kind] ?? "--muted");
      paint.fillRect(8 + ((each.at_s - from) / (to - from)) * (width - 16) - 1, 0, 2, 8);
    }
  }
}
