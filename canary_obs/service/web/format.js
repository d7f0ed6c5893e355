// Numbers and times for people. An unknown value is a dash, never 0.

export const DASH = "–";
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function short(value, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  for (const [size, letter] of UNITS) {
    if (Math.abs(value) >= size) return `${trim(value / size)} ${letter}${unit}`;
  }
  return unit ? `${trim(value)} ${unit}` : trim(value);
}

function trim(value) {
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toFixed(digits);
}

export function percent(share) {
  if (share === null || share === undefined) return DASH;
  if (share >= 1) return "100 %";
  const value = share * 100;
  return `${value < 10 ? value.toFixed(2) : Math.min(99.9, value).toFixed(1)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function ago(ns, nowNs) {
  return `${duration(Math.max(0, (nowNs - ns) / 1e9))} ago`;
}

export function clock(ns) {
  return new Date(ns / 1e6).toISOString().replace("T", " ").replace("Z", "").slice(0, 23) + " UTC";
}

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
