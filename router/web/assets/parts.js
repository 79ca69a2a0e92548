// What views are made of: descriptions of elements, pieces that several views show, and numbers as people read them.
//
// A view is a function from data to descriptions of elements, made by `h`. `render` compares them with the elements that are
// there, keeps what is equal, and so keeps focus, scroll position and selection. Text and attributes are set as such: nothing
// that comes from the network is ever parsed as HTML.

const DESCRIBED = Symbol("described");
const DRAWN = new Set(["svg", "path", "line", "circle"]);

/** Describe an element. `properties`: attributes; `class`; `on...`: listeners; `style`: an object; `value`, `checked`: properties;
 *  `key`: its name among its siblings; `own`: its children are not compared; `ref`: called with the element after
 *  each change. Children that are null, undefined or false are left out. */
export function h(tag, properties, ...children) {
  return { tag, properties: properties ?? {}, children: children.flat(Infinity).filter(isShown) };
}

/** Make the children of `parent` match these descriptions. */
export function render(parent, ...children) {
  renderChildren(parent, children.flat(Infinity).filter(isShown));
}

function isShown(child) {
  return child !== null && child !== undefined && child !== false;
}

function renderChildren(parent, wanted) {
  const keyed = new Map();
  for (const node of parent.childNodes) {
    const key = node[DESCRIBED]?.properties.key;
    if (key !== undefined) keyed.set(key, node);
  }
  let next = parent.firstChild;
  for (const each of wanted) {
    const node = reusable(each, keyed, next) ?? created(each);
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
    update(node, each);
  }
  while (next !== null) {
    const after = next.nextSibling;
    next.remove();
    next = after;
  }
}

function reusable(wanted, keyed, next) {
  if (typeof wanted !== "object") return next?.nodeType === Node.TEXT_NODE ? next : null;
  const key = wanted.properties.key;
  const found = key === undefined ? next : keyed.get(key);
  const described = found?.[DESCRIBED];
  return described?.tag === wanted.tag && described.properties.key === key ? found : null;
}

function created(wanted) {
  if (typeof wanted !== "object") return document.createTextNode("");
  return DRAWN.has(wanted.tag) ? document.createElementNS("http://www.w3.org/2000/svg", wanted.tag) : document.createElement(wanted.tag);
}

function update(node, wanted) {
  if (typeof wanted !== "object") {
    if (node.data !== String(wanted)) node.data = String(wanted);
    return;
  }
  const before = node[DESCRIBED]?.properties ?? {};
  node[DESCRIBED] = wanted;
  for (const name of Object.keys(before)) if (!(name in wanted.properties)) setProperty(node, name, undefined, before[name]);
  if (!wanted.properties.own) renderChildren(node, wanted.children);
  for (const [name, value] of Object.entries(wanted.properties)) setProperty(node, name, value, before[name]);
  wanted.properties.ref?.(node);
}

function setProperty(node, name, value, before) {
  if (name === "key" || name === "own" || name === "ref") return;
  if (name.startsWith("on")) {
    if (value === before) return;
    if (before) node.removeEventListener(name.slice(2), before);
    if (value) node.addEventListener(name.slice(2), value);
  } else if (name === "style") {
    for (const property of Object.keys(before ?? {})) if (!(property in (value ?? {}))) node.style.removeProperty(property);
    for (const [property, text] of Object.entries(value ?? {})) node.style.setProperty(property, text);
  } else if (name === "value" || name === "checked" || name === "disabled") {
    if (node[name] !== (value ?? "")) node[name] = value ?? "";
  } else if (value === undefined || value === null || value === false) {
    node.removeAttribute(name);
  } else if (value !== before) {
    node.setAttribute(name, value === true ? "" : value);
  }
}

export const UNKNOWN = "–";

/** Return a function that writes a value with `text`; what is not known is an en dash. */
const known = (text) => (value, ...more) => (value === null || value === undefined || Number.isNaN(value) ? UNKNOWN : text(value, ...more));

/** Milliseconds below a second, seconds above. */
export const seconds = known((value) => {
  const size = Math.abs(value);
  if (size < 0.0995) return `${(1e3 * value).toFixed(1)} ms`;
  if (size < 0.9995) return `${(1e3 * value).toFixed(0)} ms`;
  return size < 99.95 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
});

export const ms = known((value) => value.toFixed(1));

/** An age: 5 s, 3 min, 2 h, 4 d. */
export const age = known((value) => {
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(0)} h` : `${(value / 86400).toFixed(0)} d`;
});

/** A whole number with thin groups of three. */
export const count = known((value) => Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f"));

/** A large number in three digits: 950, 12.3 k, 4.56 M. */
export const short = known((value) => {
  if (Math.abs(value) < 1000) return Number.isInteger(value) ? String(value) : value.toPrecision(3);
  const units = ["k", "M", "G", "T"], at = units.findIndex((_, place) => Math.abs(value) < 0.9995 * 1e3 ** (place + 2));
  return `${Number((value / 1e3 ** ((at < 0 ? 3 : at) + 1)).toPrecision(3))} ${units.at(at)}`;
});

export const bytes = known((value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; Math.abs(value) >= 1024 && at < units.length - 1; at += 1) value /= 1024;
  return `${at === 0 ? value : value.toPrecision(3)} ${units[at]}`;
});

export const percent = known((ratio) => `${(100 * ratio).toFixed(0)} %`);

export const factor = known((value) => `×${value.toFixed(2)}`);

/** A difference, with its sign. */
export const signed = known((value, text = count) => (value > 0 ? `+${text(value)}` : value < 0 ? `−${text(-value)}` : text(0)));

/** A time of day in the browser's zone, from seconds since 1970. */
export const clock = known((unixSeconds) => new Date(1e3 * unixSeconds).toLocaleTimeString("en-GB"));

/** The value below which this share of the sorted values lies; null without any. */
export function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
}

export function total(values) {
  return values.reduce((sum, each) => sum + each, 0);
}

/** The part as a ratio of the whole; null of nothing. */
export function ratio(part, whole) {
  return whole ? part / whole : null;
}

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
  return badge(rank.trust, rank.trust.toLowerCase(), rank.trust_reason);
}

/** A bar with parts of the whole `of`, each with its class. */
export function bar(shares, of, label) {
  return h("span", { class: "bar", role: "img", "aria-label": label, title: label }, shares.map(([share, kind], at) =>
    h("span", { key: String(at), class: kind, style: { width: `${of > 0 ? Math.max(0, Math.min(100, (100 * share) / of)) : 0}%` } })));
}

/** A rank's blocks on its GPU, as a share of all that fit there and as a number; then how many other tiers have. */
export function tiers(rank) {
  const [gpu, host, disk, external] = rank.blocks;
  const label = `${count(gpu)} of ${rank.total_blocks ? count(rank.total_blocks) : "?"} blocks on the GPU, ${count(host)} on the host, ${count(disk)} on disk, ${count(external)} external`;
  return h("span", { class: "tiers" }, bar([[gpu, "accent"]], rank.total_blocks || gpu, label), h("span", { class: "number" }, short(gpu)),
    host + disk + external > 0 && h("span", { class: "muted" }, `+${short(host + disk + external)}`));
}

const addressOf = (path) => `#/${path.map(encodeURIComponent).join("/")}`;

export function link(path, text, properties) {
  return h("a", { href: addressOf(path), ...properties }, text);
}

/** Go to a place of the page. */
export function go(...path) {
  location.hash = addressOf(path);
}

/** A name from the network: shown whole on hover, never longer than its place. */
export function name(text) {
  return h("span", { class: "name", title: text }, text);
}

export function message(kind, title, text, ...more) {
  return h("div", { class: `message ${kind}`, role: kind === "bad" ? "alert" : "status" }, h("strong", null, title), text && h("p", null, text), more);
}

export function panel(key, title, ...inside) {
  return h("section", { key, class: "panel" }, h("h2", null, title), inside);
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter((each) => each !== null).map(([term, value]) => h("div", { key: term }, h("dt", null, term), h("dd", null, value ?? UNKNOWN))));
}

export function legend(...found) {
  return h("ul", { class: "legend" }, found.map(([kind, text]) => h("li", { key: text }, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text)));
}

/** A choice among `options`, texts by key, with its label; `changed(key)` is called when one is chosen. */
export function select(id, label, options, value, changed) {
  return [h("label", { for: id }, `${label} `),
    h("select", { id, value, onchange: (event) => changed(event.target.value) }, Object.entries(options).map(([key, text]) => h("option", { key, value: key, selected: key === value }, text)))];
}

/** The rows that have a view's words (`view.words`) in their text, and the field for the words. */
export function filtered(view, id, placeholder, rows, textOf) {
  const words = view.words.trim().toLowerCase(), found = words ? rows.filter((row) => textOf(row).toLowerCase().includes(words)) : rows;
  return [found, h("div", { key: "filter", class: "tools" }, h("label", { for: id }, "Filter"),
    h("input", { id, type: "search", value: view.words, placeholder, oninput: (event) => view.show({ words: event.target.value }) }),
    h("span", { class: "muted" }, `${count(found.length)} of ${count(rows.length)}`))];
}

/** The name of a row's rank. */
export function rankId({ worker_id: workerId, dp_rank: dpRank }) {
  return `${workerId}/${dpRank}`;
}

/** Return a text by which w2 comes before w10. */
export function natural(text) {
  return text.replace(/\d+/g, (digits) => digits.padStart(12, "0"));
}

/** A column of a table with a field of each row, a number that `text` writes. */
export function numbers(name, field, width, text, more) {
  return { name, width, align: "end", cell: (row) => text(row[field]), sort: (row) => row[field], ...more };
}

/** A column of a table with the rank of each row, which leads to its worker. */
export function rankColumn(width) {
  return { name: "Rank", width, phone: "minmax(56px, 1fr)", cell: (row) => link(["workers", row.worker_id], rankId(row), { class: "name", title: rankId(row), tabindex: "-1" }), sort: (row) => natural(rankId(row)) };
}

/** What a decision predicted of a field of its outcome, from its miss; null if there is nothing to compare. */
const predicted = (field, sign) => ({ outcome, misses }) => (outcome?.[field] != null && misses?.[field] != null ? outcome[field] + sign * misses[field] : null);
export const predictedCached = predicted("cached_tokens", 1);
export const predictedTtft = predicted("ttft_s", -1); // or its target, in seconds

export function outcomeOf(decision) {
  const { outcome } = decision;
  return outcome ? badge(outcome.outcome, outcome.outcome === "ok" ? "" : "bad") : badge("running", "muted");
}
