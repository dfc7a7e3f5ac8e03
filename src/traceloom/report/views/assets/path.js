// The critical path over the timeline: a line along the lanes it goes through, and from lane to lane.
import { duration } from "./units.js";
import { getState, onState, setState } from "./state.js";

const WIDTH = 2.5; // CSS pixels
const HALO = 3;
const OPENED = 3; // ranks that are unfolded for the line
const APART = 0.4; // CSS pixels: what is nearer than this is one point of the line

export class PathOverlay {
  constructor(timeline) {
    this.timeline = timeline;
    this.path = timeline.events.path;
    this.shown = false;
    this.box = timeline.part("path");
    if (!this.path) return;
    const { step, start, end } = this.path;
    const label = this.box.closest("label");
    label.hidden = false;
    label.title = `What decides the ${duration(end - start)} of ${step === null ? "the window" : `step ${step}`} (c)`;
    this.box.addEventListener("change", () => this.show(this.box.checked));
    onState("path", (value) => this.show(this.path.after ? value !== "0" : value === "1"));
    this.show(getState("path") === "1" || (this.path.after !== undefined && getState("path") !== "0"), getState("t") === null);
  }

  toggle() {
    if (this.path) this.show(!this.shown);
  }

  // Shows or hides the line; where it was not in view, or a small part of it, the view goes there.
  show(shown, move = true) {
    if (!this.path || shown === this.shown) return;
    this.shown = shown;
    this.box.checked = shown;
    this.timeline.part("path-legend").hidden = !shown;
    if (this.path.after) setState("path", shown ? null : "0");
    else setState("path", shown ? "1" : null);
    if (shown && move) this.#bring();
    this.timeline.request();
  }

  #bring() {
    const { start, end } = this.path;
    const { view } = this.timeline;
    this.#open();
    const inside = Math.min(end, view.to) - Math.max(start, view.from);
    if (inside < 0.3 * (view.to - view.from)) {
      const margin = (end - start) * 0.02;
      this.timeline.setView(start - margin, end + margin);
    }
  }

  // Unfolds the ranks with the most of the path where all of it lies in folded ones, and folds the others.
  #open() {
    const { events, rows, scroller } = this.timeline;
    const spent = new Map();
    for (const [place, start, end] of this.path.stretches) {
      const { trace } = events.lanes[place];
      spent.set(trace, (spent.get(trace) ?? 0) + end - start);
    }
    const most = [...spent].sort((a, b) => b[1] - a[1]).slice(0, OPENED).map(([trace]) => trace);
    if (most.some((trace) => !rows.folded.has(`r${trace}`))) return;
    rows.unfoldOnly(most);
    const line = rows.lines.find((one) => one.kind === "rank" && one.rank === events.ranks[Math.min(...most)]);
    if (line) scroller.scrollTop = line.top;
  }

  // The height at which the line runs along a lane; on the rank's own line where that is folded; null for no place.
  #height(lane) {
    const { rows } = this.timeline;
    if (lane.top !== undefined) return lane.top + rows.heightOf(lane) + 1;
    const line = rows.lines.find((one) => one.kind === "rank" && one.rank === this.timeline.events.ranks[lane.trace]);
    return line ? line.top + line.height - 2 : null;
  }

  draw(painter, shift, palette) {
    if (!this.shown) return;
    for (const stretches of [this.path.stretches, this.path.after ?? []]) this.#line(stretches, painter, shift, palette);
  }

  #line(stretches, painter, shift, palette) {
    const points = this.#points(stretches, painter, shift);
    if (points.length < 4) return;
    const { context, scale } = painter;
    context.lineJoin = "round";
    context.lineCap = "butt";
    for (const [colour, width] of [[palette.background, WIDTH + HALO], [palette.path, WIDTH]]) {
      context.strokeStyle = colour;
      context.lineWidth = width * scale;
      context.beginPath();
      let down = false; // the pen; lifted where the path goes over lanes that are not there
      for (let i = 0; i < points.length; i += 2) {
        if (!Number.isNaN(points[i])) context[down ? "lineTo" : "moveTo"](points[i] * scale, points[i + 1] * scale);
        down = !Number.isNaN(points[i]);
      }
      context.stroke();
    }
  }

  // x, y, x, y, ... of the line in view. Many changes within one pixel become one line from the highest to the lowest.
  #points(stretches, painter, shift) {
    const { events } = this.timeline;
    const { from, to } = painter.view;
    const heights = events.lanes.map((lane) => this.#height(lane));
    const points = [];
    let last = -Infinity;
    let low = 0;
    let high = 0;
    for (const [place, start, end, apart] of stretches) {
      if (apart && points.length) {
        if (high > low) points.push(last, low, last, high);
        points.push(NaN, NaN);
        last = -Infinity;
        low = high = 0;
      }
      if (end < from || start > to || heights[place] === null) continue;
      const y = heights[place] - this.timeline.rows.shiftOf(events.lanes[place], shift);
      const left = Math.min(Math.max(painter.x(start), -9), painter.width + 9);
      const right = Math.min(Math.max(painter.x(end), -9), painter.width + 9);
      if (right - last < APART && points.length) {
        low = Math.min(low, y);
        high = Math.max(high, y);
        continue;
      }
      if (high > low) points.push(last, low, last, high);
      points.push(left, y, right, y);
      last = right;
      low = high = y;
    }
    if (high > low) points.push(last, low, last, high);
    return points;
  }
}
