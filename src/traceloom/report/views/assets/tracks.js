// Curves of counters under the lanes: what stands in their labels and under the pointer.
import { grouped } from "./units.js";

// A number with three digits that count; the unit stands in the curve's name.
export function reading(value) {
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return grouped(String(Number(value.toPrecision(size >= 100 ? 6 : 3))));
}

// The value that holds at a time; null before the first and after the last.
export function readingAt({ time_ns: times, values }, time) {
  if (!times.length || time < times[0] || time > times[times.length - 1]) return null;
  let low = 0;
  let high = times.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (times[middle] <= time) low = middle;
    else high = middle - 1;
  }
  return values[low];
}
