// Numbers for people, as `traceloom.model.units` writes them: three digits, thin spaces, honest rounding.

const THIN = "\u202f";
const TIME_UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]];
const BYTE_UNITS = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];

export function grouped(value) {
  const [whole, ...fraction] = String(value).split(".");
  return [whole.replace(/\B(?=(\d{3})+(?!\d))/g, THIN), ...fraction].join(".");
}

function threeDigits(value) {
  const size = Math.abs(value);
  return grouped(value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0));
}

function inUnits(value, units, smallest) {
  if (value === null || value === undefined) return "–";
  for (const [factor, unit] of units) {
    if (Math.abs(value) >= factor * 0.9995) return `${threeDigits(value / factor)}${THIN}${unit}`;
  }
  return `${Math.round(value)}${THIN}${smallest}`;
}

export function duration(ns) {
  return inUnits(ns, TIME_UNITS, "ns");
}

export function byteSize(bytes) {
  return inUnits(bytes, BYTE_UNITS, "B");
}

export function share(part, whole) {
  if (!whole) return "–";
  const fraction = part / whole;
  if (part === 0) return "0 %";
  if (fraction > 0 && fraction < 0.001) return "<0.1 %";
  if (fraction < 1 && fraction > 0.999) return ">99.9 %";
  return `${(fraction * 100).toFixed(part === whole ? 0 : 1)} %`;
}

// The exact value behind a rounded number.
export function exact(value, unit) {
  return `${grouped(value)} ${unit}`;
}
