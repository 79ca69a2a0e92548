// Pieces that several views show, and numbers as people read them. What is not known is an en dash.

import { h } from "./dom.js";

export const UNKNOWN = "–";

const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);

/** Milliseconds below a second, seconds above. */
export function seconds(value) {
  if (!isKnown(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size < 0.0995) return `${(1e3 * value).toFixed(1)} ms`;
  if (size < 0.9995) return `${(1e3 * value).toFixed(0)} ms`;
  return size < 99.95 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

export function ms(value) {
  return isKnown(value) ? value.toFixed(1) : UNKNOWN;
}

/** An age: 5 s, 3 min, 2 h, 4 d. */
export function age(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(0)} h` : `${(value / 86400).toFixed(0)} d`;
}

/** A whole number with thin groups of three. */
export function count(value) {
  return isKnown(value) ? Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f") : UNKNOWN;
}

/** A large number in three digits: 950, 12.3 k, 4.56 M. */
export function short(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (Math.abs(value) < 1000) return Number.isInteger(value) ? String(value) : value.toPrecision(3);
  for (const [limit, unit] of [[1e6, "k"], [1e9, "M"], [1e12, "G"], [Infinity, "T"]]) {
    if (Math.abs(value) < limit * 0.9995) return `${Number((value / (limit === Infinity ? 1e12 : limit / 1e3)).toPrecision(3))} ${unit}`;
  }
  return String(value);
}

export function bytes(value) {
  if (!isKnown(value)) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; Math.abs(value) >= 1024 && at < units.length - 1; at += 1) value /= 1024;
  return `${at === 0 ? value : value.toPrecision(3)} ${units[at]}`;
}

export function percent(ratio) {
  return isKnown(ratio) ? `${(100 * ratio).toFixed(0)} %` : UNKNOWN;
}

export function factor(value) {
  return isKnown(value) ? `×${value.toFixed(2)}` : UNKNOWN;
}

/** With its sign: a difference. */
export function signed(value, text = count) {
  if (!isKnown(value)) return UNKNOWN;
  return value > 0 ? `+${text(value)}` : value < 0 ? `−${text(-value)}` : text(0);
}

/** A time of day in the browser's zone, from seconds since 1970. */
export function clock(unixSeconds) {
  if (!isKnown(unixSeconds)) return UNKNOWN;
  return new Date(1e3 * unixSeconds).toLocaleTimeString("en-GB");
}

/** The value below which the share `quantile` of the sorted values lies; null without any. */
export function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
}

export function total(values) {
  return values.reduce((sum, each) => sum + each, 0);
}

const TRUST_CLASS = { EXACT: "exact", DEGRADED: "degraded", FALLBACK: "fallback" };

/** Figures in a row: [name, value, hint, class]. */
export function figures(...found) {
  return h("dl", { class: "figures" }, found.map(([name, value, hint, kind]) =>
    h("div", { key: name, class: kind ?? "", title: hint }, h("dt", null, name), h("dd", null, value))));
}

/** A word with a mark: state is never shown by colour alone. */
export function badge(word, kind, hint) {
  return h("span", { class: `badge ${kind ?? ""}`, title: hint }, word);
}

export function trust(rank) {
  return badge(rank.trust, TRUST_CLASS[rank.trust], rank.trustReason || rank.trust_reason);
}

/** A bar of shares of `of`, each with its class. */
export function bar(shares, of, label) {
  return h("span", { class: "bar", role: "img", "aria-label": label, title: label }, shares.map(([share, kind], at) =>
    h("span", { key: String(at), class: kind, style: { width: `${of > 0 ? Math.max(0, Math.min(100, (100 * share) / of)) : 0}%` } })));
}

/** Blocks by tier, as a share of the GPU's blocks. */
export function tiers(rank) {
  const [gpu, host, disk, external] = rank.blocks;
  const label = `${count(gpu)} of ${rank.totalBlocks ? count(rank.totalBlocks) : "?"} blocks on the GPU, ${count(host)} on the host, ${count(disk)} on disk, ${count(external)} external`;
  return h("span", { class: "tiers" }, bar([[gpu, "accent"]], rank.totalBlocks || gpu, label), h("span", { class: "number" }, short(gpu)),
    host + disk + external > 0 && h("span", { class: "muted" }, `+${short(host + disk + external)}`));
}

export function link(path, text, properties) {
  return h("a", { href: `#/${path.map(encodeURIComponent).join("/")}`, ...properties }, text);
}

/** A name from the network: shown whole on hover, never longer than its place. */
export function name(text) {
  return h("span", { class: "name", title: text }, text);
}

export function message(kind, title, text, ...more) {
  return h("div", { class: `message ${kind}`, role: kind === "bad" ? "alert" : "status" }, h("strong", null, title), text && h("p", null, text), more);
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter((each) => each !== null).map(([term, value]) => h("div", { key: term }, h("dt", null, term), h("dd", null, value ?? UNKNOWN))));
}

export function legend(...found) {
  return h("ul", { class: "legend" }, found.map(([kind, text]) => h("li", { key: text }, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text)));
}

/** A choice among `options`, texts by key, with its label; `changed(key)`. */
export function select(id, label, options, value, changed) {
  return [h("label", { for: id }, `${label} `),
    h("select", { id, value, onchange: (event) => changed(event.target.value) }, Object.entries(options).map(([key, text]) => h("option", { key, value: key, selected: key === value }, text)))];
}

/** The words by which a view's rows are chosen (`view.words`), and what there is of them. */
export function filter(view, id, placeholder, text) {
  return h("div", { key: "filter", class: "tools" }, h("label", { for: id }, "Filter"),
    h("input", { id, type: "search", value: view.words, placeholder, oninput: (event) => {
      view.words = event.target.value;
      view.app.redraw();
    } }),
    h("span", { class: "muted" }, text));
}

/** What a decision predicted of cached tokens; null where there is nothing to compare. */
export function predictedCached(decision) {
  const { outcome, misses } = decision;
  return outcome?.cached_tokens != null && misses?.cached_tokens != null ? outcome.cached_tokens + misses.cached_tokens : null;
}

/** What a decision predicted of its time to the first token (or its target), seconds. */
export function predictedTtft(decision) {
  const { outcome, misses } = decision;
  return outcome?.ttft_s != null && misses?.ttft_s != null ? outcome.ttft_s - misses.ttft_s : null;
}

export function outcomeOf(decision) {
  const { outcome } = decision;
  return outcome ? badge(outcome.outcome, outcome.outcome === "ok" ? "" : "bad") : badge("running", "muted");
}
