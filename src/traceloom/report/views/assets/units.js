// Numbers for people, as `traceloom.system.units` writes them: three digits, thin spaces, honest rounding.

const THIN = "\u202f";
const TIME_UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
const BYTE_UNITS = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
const prefixed = (unit) => PREFIXES.map(([factor, prefix]) => [factor, prefix + unit]);
const SCALES = {
  time: TIME_UNITS, bytes: BYTE_UNITS, flops: prefixed("FLOP"), flop_rate: prefixed("FLOP/s"), byte_rate: prefixed("B/s"),
};
const LEAST = 0.001; // of a unit that is shown

export function grouped(value) {
  const [whole, ...fraction] = String(value).split(".");
  return [whole.replace(/\B(?=(\d{3})+(?!\d))/g, THIN), ...fraction].join(".");
}

function threeDigits(value) {
  const size = Math.abs(value);
  return grouped(value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0));
}

function inUnits(value, units) {
  if (value === null || value === undefined) return "–";
  for (const [factor, unit] of units) {
    if (factor > 1 && Math.abs(value) >= factor * 0.9995) return `${threeDigits(value / factor)}${THIN}${unit}`;
  }
  return `${Math.round(value)}${THIN}${units[units.length - 1][1]}`;
}

export function duration(ns) {
  return inUnits(ns, TIME_UNITS);
}

export function byteSize(bytes) {
  return inUnits(bytes, BYTE_UNITS);
}

export function share(part, whole) {
  return whole ? `${perCent(part / whole)} %` : "–";
}

// A fraction in per cent, without the sign; never 0 or 100 unless it is exactly that.
export function perCent(fraction) {
  if (fraction === 0 || fraction === 1) return `${fraction * 100}`;
  if (fraction > 0 && fraction < 0.001) return "<0.1";
  return fraction < 1 && fraction > 0.999 ? ">99.9" : (fraction * 100).toFixed(1);
}

// A relative change with its sign; never 0 or -100 % unless it is exactly that.
export function change(fraction) {
  const size = Math.abs(fraction);
  const shown = size >= 10 ? grouped(Math.round(100 * size)) : perCent(size).replace(">", "");
  return `${fraction > 0 ? "+" : fraction < 0 ? "-" : ""}${shown} %`;
}

// The exact value behind a rounded number.
export function exact(value, unit) {
  return `${grouped(value)} ${unit}`;
}

// [factor, unit] in which all values of a column stand: the largest is at least 1, the smallest can still be read.
export function commonScale(kind, values) {
  let largest = 0;
  let smallest = Infinity;
  for (const value of values) {
    const size = Math.abs(value ?? 0);
    if (size > largest) largest = size;
    if (size && size < smallest) smallest = size;
  }
  const scales = SCALES[kind];
  if (kind === "share" || kind === "change") return [0.01, "%"];
  if (!scales || !largest) return [1, ""];
  return scales.find(([factor]) => factor <= largest && factor * LEAST <= smallest) ?? scales[scales.length - 1];
}

// The unit of the value behind a rounded one.
export function exactUnit(kind) {
  return kind === "share" || kind === "change" ? "%" : SCALES[kind]?.find(([factor]) => factor === 1)[1] ?? "";
}

// Three significant digits, at most three decimals; what is not zero never shows as zero.
export function rounded(value) {
  const size = Math.abs(value);
  if (Number.isInteger(value)) return grouped(value);
  if (size < LEAST) return value.toPrecision(2);
  const decimals = size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3;
  const shown = grouped(value.toFixed(decimals));
  return size < 0.01 ? shown.replace(/0+$/, "") : shown;
}
