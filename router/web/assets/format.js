// Numbers as people read them. What is not known is an en dash.

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
