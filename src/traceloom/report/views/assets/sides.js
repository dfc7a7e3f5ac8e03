// A what-if: every lane as it was and, below, as it would be; what the changes are about is marked.
import { firstEndingAfter } from "./levels.js";
import { duration, exact, grouped } from "./units.js";

const THICK = 3; // CSS pixels of a mark
const SAYS = "Click a piece of time for when it is and how long it takes before and after. Drag to move, click and use the " +
  "wheel to zoom, drag on the ruler to measure.";

// [before, after] of an event: where it stands, -1 where it is not there.
function sidesOf(events, event) {
  const other = events.twin[event];
  return events.laneOf(event).side === "before" ? [event, other] : [other, event];
}

function when(events, at) {
  const time = `${grouped((events.start[at] / 1e6).toFixed(3))}\u202fms`;
  return `${duration(events.duration[at])} from ${time} on`;
}

// Name, value and exact value of the times of an event on both sides.
export function bothSides(events, event) {
  const sides = sidesOf(events, event);
  const rows = sides.map((at, k) => [
    k ? "after" : "before",
    at < 0 ? "takes no time" : when(events, at),
    at < 0 ? "" : `${exact(events.start[at], "ns after the beginning")}, ${exact(events.duration[at], "ns")}`,
  ]);
  const [before, after] = sides.map((at) => (at < 0 ? 0 : events.duration[at]));
  const less = before - after;
  if (less) rows.push([less > 0 ? "shorter by" : "longer by", duration(Math.abs(less)), exact(Math.abs(less), "ns")]);
  const moves = !sides.includes(-1) && events.start[sides[0]] !== events.start[sides[1]];
  rows.push(["changed", events.changed[event] ? "yes" : moves ? "no: it only moves" : "no"]);
  return rows;
}

export function inShort(events, event) {
  return sidesOf(events, event).map((at, k) => `${k ? "after" : "before"} ${at < 0 ? "no time" : when(events, at)}`).join(" · ");
}

export class BothSides {
  constructor(timeline) {
    this.timeline = timeline;
    this.shown = timeline.events.changed !== null;
    if (!this.shown) return;
    timeline.part("says").textContent = SAYS;
    timeline.part("changed-legend").hidden = false;
  }

  draw(painter, shift, palette) {
    if (!this.shown) return;
    const { rows } = this.timeline;
    for (const [line, top] of rows.inView(shift, painter.height)) {
      if (line.kind === "row") this.#row(line.row, top + line.height - THICK, painter, palette);
    }
  }

  // Marks that touch within a pixel are one.
  #row(row, top, painter, palette) {
    const { events } = this.timeline;
    const [{ start, end, event }] = row.levels;
    const { from, to } = painter.view;
    let left = 0;
    let right = -1;
    const flush = () => right > left && painter.box(left, top, right - left, THICK, palette.ink);
    for (let i = firstEndingAfter(end, from); i < start.length && start[i] < to; i++) {
      if (!events.changed[event[i]]) continue;
      const x = Math.max(painter.x(start[i]), 0);
      const until = Math.min(Math.max(painter.x(end[i]), x + 1), painter.width);
      if (x > right + 0.5) {
        flush();
        left = x;
      }
      right = until;
    }
    flush();
  }
}
