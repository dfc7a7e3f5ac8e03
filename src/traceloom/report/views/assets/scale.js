// Round times for the ruler.
import { grouped } from "./units.js";

export function tickStep(span, room) {
  const rough = span / Math.max(room, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  for (const factor of [1, 2, 5, 10]) if (power * factor >= rough) return Math.max(power * factor, 1);
  return Math.max(power * 10, 1);
}

// Times to mark between two times, with at least `gap` pixels between marks.
export function ticks(from, to, width, gap) {
  const step = tickStep(to - from, width / gap);
  const marks = [];
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) marks.push(time);
  return { marks, step };
}

export function tickLabel(time, step) {
  if (time === 0) return "0";
  const [factor, unit] = step >= 1e8 ? [1e9, "s"] : step >= 1e5 ? [1e6, "ms"] : step >= 1e2 ? [1e3, "µs"] : [1, "ns"];
  const digits = Math.max(0, Math.ceil(Math.log10(factor / step) - 1e-9));
  const [whole, fraction] = (time / factor).toFixed(digits).split(".");
  return `${grouped(whole)}${fraction ? `.${fraction}` : ""}\u202f${unit}`;
}

