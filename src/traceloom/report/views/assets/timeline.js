// The timeline: one view of time over all rows, drawn on demand.
import { Painter } from "./draw.js";
import { BothSides } from "./sides.js";
import { Palette } from "./palette.js";
import { Pace } from "./pace.js";
import { PathOverlay } from "./path.js";
import { Rows, ROW } from "./rows.js";
import { Overview } from "./overview.js";
import { ticks, tickLabel } from "./scale.js";
import { duration } from "./units.js";
import { getState, setState, onState } from "./state.js";

const SHORTEST = 20; // nanoseconds over the whole width

export class Timeline {
  constructor(root, events) {
    this.root = root;
    this.events = events;
    this.part = (name) => root.querySelector(`[data-part="${name}"]`);
    this.scroller = this.part("scroll");
    this.content = this.part("content");
    this.canvas = this.part("canvas");
    this.painter = new Painter(this.canvas, events);
    this.ruler = new Painter(this.part("ruler"), events);
    this.rows = new Rows(events, this.part("labels"), () => this.#relaid());
    this.overview = new Overview(this.part("overview"), this);
    this.pace = new Pace(() => this.resize());
    this.view = { from: 0, to: events.span };
    this.selected = -1;
    this.hovered = -1;
    this.pointer = null; // where it stands on the canvas
    this.range = null;
    this.search = null;
    this.listeners = new Map();
    this.#python();
    this.#filter();
    this.rows.pinned = new Set((getState("pin") ?? "").split(",").filter(Boolean));
    this.rows.update();
    this.path = null;
    this.#fromAddress(getState("t"));
    onState("t", (value) => this.#fromAddress(value));
    this.scroller.addEventListener("scroll", () => this.#moved());
    new ResizeObserver(() => this.resize()).observe(this.scroller);
    this.path = new PathOverlay(this);
    this.sides = new BothSides(this);
    this.resize();
  }

  on(name, callback) {
    this.listeners.set(name, [...(this.listeners.get(name) ?? []), callback]);
  }

  emit(name, ...values) {
    for (const callback of this.listeners.get(name) ?? []) callback(...values);
  }

  // Python frames nest deep and hide the operators; they start hidden where there is something else to see.
  #python() {
    const box = this.part("python");
    const some = this.events.lanes.some((lane) => lane.hasPython) && !this.events.twin;
    box.closest("label").hidden = !some;
    this.rows.hidePython = some && this.events.categories.includes("op");
    box.checked = !this.rows.hidePython;
    box.addEventListener("change", () => {
      this.rows.hidePython = !box.checked;
      this.rows.update();
      this.#relaid();
    });
  }

  #filter() {
    const input = this.part("filter");
    const apply = () => {
      this.rows.filter = input.value.trim().toLowerCase();
      setState("rows", this.rows.filter || null);
      this.rows.update();
      this.#relaid();
    };
    this.rows.filter = input.value = getState("rows") ?? "";
    input.addEventListener("input", apply);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") apply((input.value = ""));
    });
  }

  #fromAddress(value) {
    const match = /^(-?\d+)-(\d+)$/.exec(value ?? "");
    if (match && Number(match[2]) > Number(match[1])) this.setView(Number(match[1]), Number(match[2]));
    else this.setView(-0.005 * this.events.span, 1.005 * this.events.span);
  }

  #relaid() {
    this.part("python").checked = !this.rows.hidePython;
    if (!this.rows.filter) this.part("filter").value = "";
    setState("pin", [...this.rows.pinned].join(",") || null);
    this.content.style.height = `${this.rows.height}px`;
    this.resize();
    this.overview.stale = true;
    this.#moved();
  }

  // What stands under the pointer is another event than before, or none.
  #moved() {
    this.stale = true;
    this.request();
  }

  // Tells what is under the pointer; null where that is not over the canvas.
  hover(at) {
    this.pointer = at;
    const event = at ? this.eventAt(at.x, at.y) : -1;
    this.emit("hover", event, at);
    if (event === this.hovered) return;
    this.hovered = event;
    this.request();
  }

  resize() {
    const { scale } = this.pace;
    this.content.style.height = `${this.rows.height}px`;
    this.scroller.style.maxHeight = `${this.rows.height + 8}px`;
    const width = Math.max(this.scroller.clientWidth - this.canvas.offsetLeft, 50);
    const height = Math.min(this.scroller.clientHeight, Math.max(this.rows.height, 60));
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.painter.resize(width, height, scale);
    this.ruler.canvas.style.width = `${width}px`;
    this.ruler.resize(width, 22, scale);
    this.overview.resize(width, scale);
    this.request();
  }

  recolour(printing = false) {
    this.palette = new Palette(this.events, printing);
    this.overview.stale = true;
    this.draw();
  }

  setView(from, to) {
    const { span } = this.events;
    const wide = Math.min(Math.max(to - from, SHORTEST), span * 1.2);
    const middle = (from + to) / 2;
    const low = Math.min(Math.max(middle - wide / 2, -0.1 * span), 1.1 * span - wide);
    this.view = { from: low, to: low + wide };
    this.#moved();
    const whole = wide >= span;
    setState("t", whole ? null : `${Math.round(this.view.from)}-${Math.round(this.view.to)}`);
  }

  zoom(factor, at = this.painter.width / 2) {
    const { from, to } = this.view;
    const centre = from + ((to - from) * at) / this.painter.width;
    this.setView(centre - (centre - from) * factor, centre + (to - centre) * factor);
  }

  pan(pixels) {
    const shift = ((this.view.to - this.view.from) * pixels) / this.painter.width;
    this.setView(this.view.from + shift, this.view.to + shift);
  }

  fit() {
    this.setView(-0.005 * this.events.span, 1.005 * this.events.span);
  }

  zoomTo(event) {
    const { start, end } = this.events;
    const length = Math.max(end[event] - start[event], 1);
    this.setView(start[event] - length * 0.1, end[event] + length * 0.1);
  }

  // The whole window, or back into the page.
  enlarge() {
    const large = this.root.classList.toggle("large");
    document.documentElement.classList.toggle("covered", large);
    this.part("large").setAttribute("aria-pressed", String(large));
    this.scroller.focus({ preventScroll: true });
  }

  timeAt(x) {
    return this.view.from + ((this.view.to - this.view.from) * x) / this.painter.width;
  }

  // The event drawn at a point of the canvas, -1 where there is none.
  eventAt(x, y) {
    const line = this.rows.at(y, this.scroller.scrollTop);
    if (!line || line.kind !== "row") return -1;
    const reach = (2 * (this.view.to - this.view.from)) / this.painter.width;
    return line.row.at(this.timeAt(x), reach);
  }

  // The curve drawn at a height of the canvas, null where there is none.
  curveAt(y) {
    const line = this.rows.at(y, this.scroller.scrollTop);
    return line?.kind === "track" ? line.curve : null;
  }

  // Selects an event (-1: none) and, on demand, brings it into view.
  select(event, reveal = false) {
    this.selected = event;
    if (event >= 0 && reveal) this.#bring(event);
    this.emit("select", event);
    this.request();
  }

  #bring(event) {
    if (this.rows.reveal(event)) this.#relaid();
    const { start, end } = this.events;
    const { from, to } = this.view;
    const length = Math.max(end[event] - start[event], 1);
    if (start[event] < from || end[event] > to || length < (to - from) / 400) {
      const wide = Math.min(Math.max(length * 12, SHORTEST * 10), Math.max(to - from, length * 3));
      const middle = (start[event] + end[event]) / 2;
      this.setView(middle - wide / 2, middle + wide / 2);
    }
    if (this.events.laneOf(event).pinned) return;
    const top = this.rows.topOf(event);
    const { scrollTop } = this.scroller;
    if (top < scrollTop + this.rows.pinnedHeight + 8 || top > scrollTop + this.painter.height - ROW - 8) {
      this.scroller.scrollTop = Math.max(top - this.painter.height / 3, 0);
    }
  }

  setRange(range) {
    this.range = range;
    this.emit("range", range);
    this.request();
  }

  request() {
    this.frame ??= requestAnimationFrame((now) => {
      this.pace.frame(now);
      this.draw();
    });
  }

  draw() {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = undefined;
    this.palette ??= new Palette(this.events, false);
    const { painter, scroller, rows } = this;
    const shift = scroller.scrollTop;
    if (this.stale && this.pointer) this.hover(this.pointer);
    this.stale = false;
    painter.begin(this.view, this.palette, this.search !== null);
    this.#grid(painter);
    const seen = rows.inView(shift, painter.height);
    const first = seen.findIndex(([line]) => line.lane?.pinned);
    seen.forEach(([line, top], k) => {
      if (k === first) this.#cover(rows.pinnedHeight);
      this.#line(line, top);
    });
    painter.finish();
    this.sides?.draw(painter, shift, this.palette);
    this.path?.draw(painter, shift, this.palette);
    this.#marks(shift);
    this.#ruler();
    this.overview.draw(this.palette);
  }

  #grid(painter) {
    const { marks } = ticks(this.view.from, this.view.to, painter.width, 110);
    painter.grid(marks.map((time) => painter.x(time)));
  }

  // The ground of the lanes that stay in view, over what scrolls beneath them.
  #cover(height) {
    const { painter, palette } = this;
    painter.finish(); // the names of what is covered
    painter.box(0, 0, painter.width, height, palette.background);
    painter.box(0, height + 2, painter.width, 1, palette.line);
  }

  #line(line, top) {
    if (line.kind === "row") {
      this.painter.row(line.row, top, line.height);
      if (this.search) this.painter.matches(line.row, this.search, top, line.height);
    } else if (line.kind === "rank") this.#steps(line, top);
    else {
      const { time_ns: times, values = line.curve.allocated_bytes } = line.curve;
      this.painter.area({ times, values, ...line }, top, this.palette.accent);
    }
  }

  #steps({ rank, height }, top) {
    const { painter, palette } = this;
    painter.box(0, top, painter.width, height, palette.panel);
    if (rank.said) painter.text(rank.said, 6, top + height / 2, palette.ink);
    for (const [step, , start, end] of rank.steps) {
      const left = painter.x(start);
      const right = painter.x(end);
      if (right < 0 || left > painter.width) continue;
      painter.box(left, top, 1, height, palette.line);
      painter.box(right, top, 1, height, palette.line);
      const shown = [`step ${step} · ${duration(end - start)}`, `step ${step}`, String(step)];
      const room = Math.min(right, painter.width) - Math.max(left, 0) - 10;
      const text = shown.find((candidate) => candidate.length * 6.2 < room);
      if (text) painter.text(text, Math.max(left, 0) + 6, top + height / 2, palette.ink);
    }
  }

  #marks(shift) {
    const { painter, palette, events, rows } = this;
    if (this.range) {
      const left = painter.x(this.range.from);
      const right = painter.x(this.range.to);
      painter.context.globalAlpha = 0.12;
      painter.box(left, 0, right - left, painter.height, palette.accent);
      painter.context.globalAlpha = 1;
      for (const x of [left, right]) painter.box(x, 0, 1, painter.height, palette.accent);
    }
    if (this.selected >= 0) this.#arrows(shift);
    const twin = events.twin?.[this.selected] ?? -1;
    for (const [event, colour, width] of [[this.hovered, palette.muted, 1], [twin, palette.accent, 2], [this.selected, palette.ink, 2]]) {
      const top = event >= 0 && event < events.count ? this.#topOf(event, shift) : null;
      if (top !== null) painter.outline(event, top, ROW, colour, width);
    }
  }

  // Where an event is drawn on the canvas; null where it is not, or lies under pinned lanes.
  #topOf(event, shift) {
    const { rows, events } = this;
    const lane = events.laneOf(event);
    const top = rows.topOf(event);
    const there = top === null ? null : top - rows.shiftOf(lane, shift);
    return there !== null && (lane.pinned || there >= rows.pinnedHeight) ? there : null;
  }

  // From the launch to its GPU work, or from the forward op to the backward op.
  #arrows(shift) {
    const { events, painter, palette, selected } = this;
    const pairs = [];
    if (events.launch[selected] >= 0) pairs.push([events.launch[selected], selected]);
    if (events.forward[selected] >= 0) pairs.push([events.forward[selected], selected]);
    for (const work of this.work ?? []) pairs.push([events.launch[work], work]);
    for (const [from, to] of pairs.slice(0, 200)) {
      const tops = [this.#topOf(from, shift), this.#topOf(to, shift)];
      if (tops.includes(null)) continue;
      const [fromY, toY] = tops.map((top) => top + ROW / 2);
      painter.arrow(painter.x(events.start[from]), fromY, painter.x(events.start[to]), toY, palette.accent);
    }
  }

  #ruler() {
    const { ruler, palette } = this;
    ruler.begin(this.view, palette, false);
    const { marks, step } = ticks(this.view.from, this.view.to, ruler.width, 110);
    for (const time of marks) {
      const x = ruler.x(time);
      ruler.box(x, 14, 1 / ruler.scale, 8, palette.line);
      const text = tickLabel(time, step);
      if (x > -40 && x + text.length * 6.5 < ruler.width) ruler.text(text, x + 4, 11, palette.muted);
    }
  }
}
