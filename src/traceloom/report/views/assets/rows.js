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
const PINNED_GAP = 6; // below the lanes that stay in view

function rankName(rank, number) {
  return rank.rank === null ? `trace ${number + 1}` : `rank ${rank.rank}`;
}

function shownDevice(curve) {
  return curve.device === null || curve.device_type.startsWith("cpu") ? curve.device_type : `${curve.device_type} ${curve.device}`;
}

export class Rows {
  constructor(events, labels, changed) {
    this.events = events;
    this.labels = labels;
    this.changed = changed;
    this.folded = new Set(); // keys of folded ranks, lanes and root frames
    this.pinned = new Set(); // keys of lanes that stay in view, above all others
    this.filter = ""; // what the names of shown lanes have in them, in lower case
    this.hidePython = false;
    this.height = 0;
    const few = events.ranks.length <= 2 || events.twin; // of before and after only what matters is there
    for (const [number] of events.ranks.entries()) if (number > 0 && !few) this.folded.add(`r${number}`);
    events.lanes.forEach((lane, k) => {
      if (lane.kind === "device_annotation" || lane.kind === "other" || lane.kind === "device_sync") this.folded.add(`l${k}`);
      if (lane.hasPython) this.folded.add(`p${k}`);
    });
  }

  // Lays out pinned lanes, then those of open ranks that pass the filter (of all ranks, where there is one), and
  // writes the labels.
  update() {
    const { lanes, ranks } = this.events;
    const { filter } = this;
    this.lines = [];
    for (const lane of lanes) lane.top = undefined;
    this.column = element("div", { className: "tl-pinned" });
    this.labels.replaceChildren(this.column);
    let top = 0;
    for (const [k, lane] of lanes.entries()) {
      lane.pinned = this.pinned.has(`l${k}`);
      if (lane.pinned) top = this.#lane(lane, k, top, ranks.length > 1 ? `${rankName(ranks[lane.trace], lane.trace)} · ` : "");
    }
    this.pinnedHeight = top;
    this.column.style.height = `${top}px`;
    this.column = this.labels;
    top += top ? PINNED_GAP : 0;
    ranks.forEach((rank, number) => {
      const name = rankName(rank, number);
      const fits = (text) => `${name} · ${text} · ${rank.host ?? ""}`.toLowerCase().includes(filter);
      const shown = [...lanes.entries()].filter(([, lane]) => lane.trace === number && !lane.pinned && fits(lane.name));
      const memory = rank.memory.filter((curve) => fits(`memory · ${shownDevice(curve)}`));
      const curves = rank.curves.filter((curve) => fits(curve.name));
      if (filter && !shown.length && !memory.length && !curves.length) return;
      top = this.#rank(rank, number, top);
      if (!filter && this.folded.has(`r${number}`)) return;
      for (const curve of memory) top = this.#curve(curve, top);
      for (const [k, lane] of shown) top = this.#lane(lane, k, top);
      if (curves.length) top = this.#tracks(curves, `c${number}`, top);
      top += LANE_GAP;
    });
    this.height = top + 4;
  }

  #rank(rank, number, top) {
    this.lines.push({ kind: "rank", top, height: RANK, rank });
    const name = rankName(rank, number);
    this.#label(rank.host ? `${name} · ${rank.host}` : name, `r${number}`, top, RANK, "tl-rank");
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

  #lane(lane, k, top, rank = "") {
    const key = `l${k}`;
    const hide = this.hidePython && lane.hasPython;
    const foldRoots = this.folded.has(`p${k}`);
    if (!lane.rows || lane.hid !== hide || lane.rootsFolded !== foldRoots) this.events.layOut(lane, hide, foldRoots);
    lane.hid = hide;
    lane.rootsFolded = foldRoots;
    if (!lane.rows.length && lane.count) return top; // nothing but Python frames, and these are hidden
    const folded = this.folded.has(key);
    const rows = folded ? lane.rows.slice(0, 1) : lane.rows;
    lane.top = top;
    rows.forEach((row, depth) => {
      this.lines.push({ kind: "row", top: top + depth * (ROW + GAP), height: ROW, row, lane, depth });
    });
    const roots = !folded && lane.roots && `${lane.roots} Python frames around all`;
    if (roots) this.#label(roots, `p${k}`, top + ROW + GAP, ROW + GAP, "tl-roots");
    const height = Math.max(rows.length, roots ? 2 : 1) * (ROW + GAP);
    const foldable = lane.rows.length > 1;
    const look = lane.side === "after" ? "tl-after" : lane.gpu ? "tl-gpu" : "";
    const name = `${rank}${lane.label ?? lane.name}`;
    this.#label(name, foldable ? key : null, top, ROW + GAP, look);
    const pin = element("button", { type: "button", className: "tl-pin", title: "Keep it in view, above all others, or not" });
    pin.style.top = `${top}px`;
    pin.dataset.pin = key;
    pin.setAttribute("aria-label", `Pin ${name}`);
    pin.setAttribute("aria-pressed", String(lane.pinned));
    pin.addEventListener("click", () => this.pin(key));
    this.column.append(pin);
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
    this.column.append(label);
  }

  toggle(key) {
    if (!this.folded.delete(key)) this.folded.add(key);
    this.#again(`[data-key="${key}"]`);
  }

  pin(key) {
    if (!this.pinned.delete(key)) this.pinned.add(key);
    this.#again(`[data-pin="${key}"]`);
  }

  #again(focused) {
    this.update();
    this.changed();
    this.labels.querySelector(focused)?.focus({ preventScroll: true });
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
    if (this.topOf(event) !== null) return false;
    const lane = this.events.laneOf(event);
    const k = this.events.lanes.indexOf(lane);
    if (lane.top === undefined) this.filter = "";
    this.folded.delete(`r${lane.trace}`);
    if (this.events.end[event] < 0) {
      if (this.hidePython) this.hidePython = false;
      else this.folded.delete(`p${k}`);
    }
    this.folded.delete(`l${k}`);
    this.update();
    return true;
  }

  // Where an event is drawn, in CSS pixels from the top of all rows; null where it is folded away or filtered out.
  topOf(event) {
    const lane = this.events.laneOf(event);
    const folded = this.folded.has(`l${this.events.lanes.indexOf(lane)}`);
    if (lane.top === undefined || this.events.end[event] < 0) return null;
    if (folded && this.events.row[event] > 0) return null;
    return lane.top + this.events.row[event] * (ROW + GAP);
  }

  // What is to be taken off a height among all rows to have it on the canvas: nothing of lanes that stay in view.
  shiftOf(lane, scrolled) {
    return lane?.pinned ? 0 : scrolled;
  }

  // How high a lane is, in CSS pixels.
  heightOf(lane) {
    const folded = this.folded.has(`l${this.events.lanes.indexOf(lane)}`);
    return Math.max(folded ? 1 : lane.rows?.length ?? 1, 1) * (ROW + GAP);
  }

  // [line, top on the canvas] of what is in view; pinned lanes, which cover others, last.
  inView(scrolled, height) {
    const lines = this.lines.map((line) => [line, line.top - this.shiftOf(line.lane, scrolled)]);
    const seen = lines.filter(([line, top]) => top + line.height > (line.lane?.pinned ? 0 : this.pinnedHeight) && top < height);
    return seen.sort(([one], [other]) => Number(one.lane?.pinned ?? 0) - Number(other.lane?.pinned ?? 0));
  }

  // The line at a height of the canvas, null where there is none.
  at(y, scrolled) {
    const wanted = y < this.pinnedHeight ? y : y + scrolled;
    return this.lines.find((line) => line.top <= wanted && wanted < line.top + line.height + GAP) ?? null;
  }
}
