// Which rows stand where: ranks, their memory curves, lanes, other curves; and the column of labels beside the canvas.
import { element } from "./element.js";
import { reading } from "./tracks.js";
import { byteSize } from "./units.js";

export const ROW = 17; // CSS pixels of a row of events
const GAP = 1;
const RANK = 26;
const CURVE = 40;
const TRACK = 28;
const LANE_GAP = 9;
const SIDE_GAP = 4; // between a lane as it was and as it would be

function rankName(rank, number) {
  const name = rank.rank === null ? `trace ${number + 1}` : `rank ${rank.rank}`;
  return rank.host ? `${name} · ${rank.host}` : name;
}

function shownDevice(curve) {
  return curve.device === null || curve.device_type.startsWith("cpu") ? curve.device_type : `${curve.device_type} ${curve.device}`;
}

export class Rows {
  constructor(events, labels, changed) {
    this.events = events;
    this.labels = labels;
    this.changed = changed;
    this.folded = new Set(); // keys of folded ranks and lanes
    this.hidePython = false;
    this.height = 0;
    const few = events.ranks.length <= 2 || events.twin; // of before and after only what matters is there
    for (const [number] of events.ranks.entries()) if (number > 0 && !few) this.folded.add(`r${number}`);
    events.lanes.forEach((lane, k) => {
      if (lane.kind === "device_annotation" || lane.kind === "other" || lane.kind === "device_sync") this.folded.add(`l${k}`);
    });
  }

  // Lays out the lanes of open ranks and writes the labels.
  update() {
    this.lines = [];
    this.labels.replaceChildren();
    let top = 0;
    this.events.ranks.forEach((rank, number) => {
      top = this.#rank(rank, number, top);
      if (this.folded.has(`r${number}`)) return;
      for (const curve of rank.memory) top = this.#curve(curve, top);
      this.events.lanes.forEach((lane, k) => {
        if (lane.trace === number) top = this.#lane(lane, `l${k}`, top);
      });
      if (rank.curves.length) top = this.#tracks(rank.curves, `c${number}`, top);
      top += LANE_GAP;
    });
    this.height = top + 4;
  }

  #rank(rank, number, top) {
    this.lines.push({ kind: "rank", top, height: RANK, rank });
    this.#label(rankName(rank, number), `r${number}`, top, RANK, "tl-rank");
    return top + RANK + 3;
  }

  #curve(curve, top) {
    const highest = curve.allocated_bytes.reduce((most, bytes) => Math.max(most, bytes), 1);
    const lowest = curve.allocated_bytes.reduce((least, bytes) => Math.min(least, bytes), 0);
    this.lines.push({ kind: "curve", top, height: CURVE, curve, highest, lowest });
    this.#label(`memory · ${shownDevice(curve)}`, null, top, CURVE, "tl-quiet", `peak ${byteSize(highest)}`);
    return top + CURVE + LANE_GAP;
  }

  #tracks(curves, key, top) {
    this.#label("counters", key, top, ROW + GAP, "tl-quiet", this.folded.has(key) ? String(curves.length) : "");
    top += ROW + GAP + 3;
    if (this.folded.has(key)) return top;
    for (const curve of curves) {
      const highest = curve.values.reduce((most, value) => Math.max(most, value), -Infinity);
      const lowest = curve.values.reduce((least, value) => Math.min(least, value), 0);
      this.lines.push({ kind: "track", top, height: TRACK, curve, highest: Math.max(highest, lowest + 1e-12), lowest });
      this.#label(curve.name, null, top, TRACK, "tl-quiet", `up to ${reading(highest)}`);
      top += TRACK + LANE_GAP;
    }
    return top;
  }

  #lane(lane, key, top) {
    const hide = this.hidePython && lane.hasPython;
    if (!lane.rows || lane.hid !== hide) this.events.layOut(lane, hide);
    lane.hid = hide;
    if (!lane.rows.length && lane.count) return top; // nothing but Python frames, and these are hidden
    const folded = this.folded.has(key);
    const rows = folded ? lane.rows.slice(0, 1) : lane.rows;
    lane.top = top;
    rows.forEach((row, depth) => {
      this.lines.push({ kind: "row", top: top + depth * (ROW + GAP), height: ROW, row, lane, depth });
    });
    const height = Math.max(rows.length, 1) * (ROW + GAP);
    const foldable = lane.rows.length > 1;
    const look = lane.side === "after" ? "tl-after" : lane.gpu ? "tl-gpu" : "";
    this.#label(lane.label ?? lane.name, foldable ? key : null, top, ROW + GAP, look);
    return top + height + (lane.side === "before" ? SIDE_GAP : LANE_GAP);
  }

  #label(text, key, top, height, look, more = "") {
    const label = element(key ? "button" : "span", { className: `tl-label ${look}`, title: text });
    label.style.top = `${top}px`;
    label.style.height = `${height}px`;
    label.append(element("span", { textContent: text }));
    if (more) label.append(element("small", { textContent: more }));
    if (key) {
      label.type = "button";
      label.dataset.key = key;
      label.setAttribute("aria-expanded", String(!this.folded.has(key)));
      label.addEventListener("click", () => this.toggle(key));
    }
    this.labels.append(label);
  }

  toggle(key) {
    if (!this.folded.delete(key)) this.folded.add(key);
    this.update();
    this.changed();
    this.labels.querySelector(`[data-key="${key}"]`)?.focus();
  }

  // Unfolds a rank.
  open(rank) {
    if (!this.folded.delete(`r${rank}`)) return;
    this.update();
    this.changed();
  }

  // Unfolds these ranks and folds all others.
  unfoldOnly(ranks) {
    this.events.ranks.forEach((rank, number) => {
      if (ranks.includes(number)) this.folded.delete(`r${number}`);
      else this.folded.add(`r${number}`);
    });
    this.update();
    this.changed();
  }

  // Unfolds whatever hides an event; true where something changed.
  reveal(event) {
    const lane = this.events.laneOf(event);
    const before = this.folded.size;
    this.folded.delete(`r${lane.trace}`);
    if (this.events.end[event] < 0 && this.hidePython) this.hidePython = false;
    else if (this.folded.size === before && lane.top !== undefined && this.topOf(event) !== null) return false;
    if (this.events.row[event] > 0) this.folded.delete(`l${this.events.lanes.indexOf(lane)}`);
    this.update();
    return true;
  }

  // Where an event is drawn, in CSS pixels from the top of all rows; null where it is folded away.
  topOf(event) {
    const lane = this.events.laneOf(event);
    const folded = this.folded.has(`l${this.events.lanes.indexOf(lane)}`);
    if (this.folded.has(`r${lane.trace}`) || this.events.end[event] < 0) return null;
    if (folded && this.events.row[event] > 0) return null;
    return lane.top + this.events.row[event] * (ROW + GAP);
  }

  // How high a lane is, in CSS pixels.
  heightOf(lane) {
    const folded = this.folded.has(`l${this.events.lanes.indexOf(lane)}`);
    return Math.max(folded ? 1 : lane.rows?.length ?? 1, 1) * (ROW + GAP);
  }

  // The lines between two heights.
  between(from, to) {
    return this.lines.filter((line) => line.top + line.height > from && line.top < to);
  }

  at(y) {
    return this.lines.find((line) => line.top <= y && y < line.top + line.height + GAP) ?? null;
  }
}
