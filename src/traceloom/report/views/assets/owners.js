// Whose memory it is: a stacked curve, and an icicle of who holds what at the chosen instant, made here from the levels.
import { element, svgElement } from "./element.js";
import { Icicle } from "./icicle.js";
import { byteSize, duration, exact, share } from "./units.js";
import { readIsland } from "./unpack.js";

const TALL = 260;
const MARGIN_LEFT = 66;
const MARGIN_RIGHT = 10;
const MARGIN_TOP = 22;
const MARGIN_BOTTOM = 24;
const MOST_LAYERS = 8; // layers by scope
const SHORT_CHAIN = 34; // characters; of longer ones the last name is written
const LEAST_LAYER = 0.01; // of the highest level; smaller groups are one
const LAYER_HUES = ["compute", "communication", "memory", "optimizer", "forward", "loading", "annotation", "python"];

// A level for each instant, from pairs (instants since the last change, change).
function levelsOf(changes, count) {
  const levels = new Float64Array(count);
  let at = 0;
  let level = 0;
  for (let k = 0; k < changes.length; k += 2) {
    levels.fill(level, at, at + changes[k]);
    at += changes[k];
    level += changes[k + 1];
  }
  return levels.fill(level, at);
}

function leavesOf(names, rows, count) {
  return rows.map(([path, changes]) => ({ path: path.map((k) => names[k]), levels: levelsOf(changes, count) }));
}

// The leaves as a tree: children by name, levels only at leaves.
function treeOf(leaves) {
  const root = { name: "", children: new Map(), leaves: [] };
  for (const leaf of leaves) {
    let node = root;
    for (const name of leaf.path) {
      if (!node.children.has(name)) node.children.set(name, { name, children: new Map(), leaves: [] });
      node = node.children.get(name);
    }
    node.leaves.push(leaf);
  }
  return root;
}

function bytesAt(node, k) {
  let sum = 0;
  for (const leaf of node.leaves) sum += leaf.levels[k];
  for (const child of node.children.values()) sum += bytesAt(child, k);
  return sum;
}

function addLevels(node, into) {
  for (const leaf of node.leaves) for (let k = 0; k < into.length; k++) into[k] += leaf.levels[k];
  for (const child of node.children.values()) addLevels(child, into);
  return into;
}

// Boxes of an instant, parents first; a box that holds nothing but one other is drawn as one with it.
function boxesAt(root, k, joint) {
  const boxes = [];
  const place = (node, parent, path) => {
    let last = node;
    let chain = node.name;
    let hidden = 0;
    const whole = bytesAt(node, k);
    if (whole <= 0) return; // nothing there now
    let names = [...path, node.name];
    for (;;) {
      const inside = [...last.children.values()].filter((child) => bytesAt(child, k) > 0);
      if (inside.length !== 1 || bytesAt(inside[0], k) !== whole) break;
      last = inside[0];
      names = [...names, last.name];
      chain += joint + last.name;
      hidden++;
    }
    const id = boxes.length;
    boxes.push({
      id, parent, key: names.join(joint), name: chain.length <= SHORT_CHAIN || !hidden ? chain : `${last.name} (+${hidden})`,
      full: names.slice(-6).join(joint), bytes: whole, children: [],
    });
    for (const child of last.children.values()) place(child, id, names);
  };
  for (const child of root.children.values()) place(child, -1, []);
  return boxes;
}

// The largest branches that are few enough to tell apart by colour: the heaviest is opened as long as it helps.
function layersOf(root, peak, count) {
  const weight = (node) => bytesAt(node, peak);
  const least = LEAST_LAYER * bytesAt(root, peak);
  const large = (nodes) => nodes.filter((node) => weight(node) >= least).length;
  let groups = [...root.children.values()].map((node) => ({ node, path: [node.name] }));
  for (;;) {
    const room = MOST_LAYERS + 1 - large(groups.map(({ node }) => node));
    const heaviest = groups
      .filter(({ node }) => !node.leaves.length && weight(node) > least && large([...node.children.values()]) <= room)
      .sort((a, b) => weight(b.node) - weight(a.node))[0];
    if (!heaviest) break;
    const inside = [...heaviest.node.children.values()].map((node) => ({ node, path: [...heaviest.path, node.name] }));
    groups = [...groups.filter((group) => group !== heaviest), ...inside];
  }
  const all = groups.map(({ node, path }) => ({
    name: path.slice(-3).join("."), full: path.join("."), levels: addLevels(node, new Float64Array(count)),
  }));
  const most = (layer) => layer.levels.reduce((top, level) => Math.max(top, level), 0);
  const highest = Math.max(...all.map(most), 1);
  // what was there from the start lies at the bottom, where it is flat
  const early = ({ full }) => Number(full.startsWith("("));
  all.sort((a, b) => most(b) - most(a));
  const shown = all.filter((layer, k) => k < MOST_LAYERS && most(layer) >= LEAST_LAYER * highest);
  shown.sort((a, b) => early(b) - early(a));
  shown.forEach((layer, k) => (layer.colour = LAYER_HUES[k]));
  const rest = all.filter((layer) => !shown.includes(layer));
  if (rest.length) {
    const levels = new Float64Array(count);
    for (const layer of rest) layer.levels.forEach((level, k) => (levels[k] += level));
    shown.push({ name: `${rest.length} smaller`, full: `${rest.length} smaller`, levels, colour: "idle" });
  }
  return shown;
}

function ticksOf(highest) {
  const rough = highest / 4;
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((size) => size >= rough) ?? highest;
  const ticks = [];
  for (let value = 0; value <= highest; value += step) ticks.push(value);
  return ticks;
}

export class Owners {
  constructor(figure) {
    this.figure = figure;
    const { times, peak, chosen, steps, kinds, trees } = readIsland(figure);
    Object.assign(this, { times, peak, steps });
    this.kinds = kinds.map(([name, colour, changes]) => ({ name, full: name, colour, levels: levelsOf(changes, times.length) }));
    this.totals = times.map((_, k) => this.kinds.reduce((sum, { levels }) => sum + levels[k], 0));
    this.trees = {};
    for (const key of ["scopes", "stacks"]) {
      if (trees[key]) this.trees[key] = treeOf(leavesOf(trees.names, trees[key], times.length));
    }
    this.layers = this.kinds;
    this.tree = "scopes";
    this.at = chosen;
    this.areas = figure.querySelector(".areas");
    this.says = figure.querySelector(".owners-says");
    this.holders = figure.querySelector(".holders");
    this.icicle = new Icicle(this.holders, this.#boxes());
    this.#listen();
    new ResizeObserver(() => this.draw()).observe(this.areas);
    this.choose(chosen);
    figure.owners = this;
  }

  get highest() {
    return Math.max(...this.totals, 1);
  }

  #boxes() {
    return boxesAt(this.trees[this.tree], this.at, this.tree === "stacks" ? " › " : ".");
  }

  #pressed(name, value) {
    for (const button of this.figure.querySelectorAll(`[data-${name}]`)) {
      button.setAttribute("aria-pressed", String(button.dataset[name] === value));
    }
  }

  #listen() {
    for (const button of this.figure.querySelectorAll("[data-layers]")) {
      button.addEventListener("click", () => {
        const by = button.dataset.layers;
        this.layers = by === "kinds" ? this.kinds : (this.scopeLayers ??= layersOf(this.trees.scopes, this.peak, this.times.length));
        this.#pressed("layers", by);
        this.draw();
        this.#legend();
      });
    }
    for (const button of this.figure.querySelectorAll("[data-tree]")) {
      button.addEventListener("click", () => {
        this.tree = button.dataset.tree;
        this.#pressed("tree", this.tree);
        this.icicle.show(this.#boxes(), this.tree === "stacks");
      });
    }
    this.figure.querySelector("[data-peak]").addEventListener("click", () => this.choose(this.peak));
    this.areas.addEventListener("pointerdown", (event) => {
      this.areas.setPointerCapture(event.pointerId);
      this.choose(this.#near(event));
    });
    this.areas.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) this.choose(this.#near(event));
      else this.#tell(this.#near(event));
    });
    this.areas.addEventListener("pointerleave", () => this.#tell(this.at));
    this.areas.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: -20, PageDown: 20 };
    if (event.key in moves) this.choose(this.at + moves[event.key]);
    else if (event.key === "Home") this.choose(0);
    else if (event.key === "End") this.choose(this.times.length - 1);
    else if (event.key === "Enter" || event.key === " ") this.choose(this.peak);
    else return;
    event.preventDefault();
  }

  // The last instant at or before the pointer: levels hold until the next.
  #near(event) {
    const box = this.areas.getBoundingClientRect();
    const { first, span } = this.#range();
    const time = first + ((event.clientX - box.left - MARGIN_LEFT) / (box.width - MARGIN_LEFT - MARGIN_RIGHT)) * span;
    let low = 0;
    let high = this.times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return Math.max(low - 1, 0);
  }

  #range() {
    const first = this.times[0];
    return { first, span: this.times[this.times.length - 1] - first || 1 };
  }

  choose(k) {
    this.at = Math.min(Math.max(k, 0), this.times.length - 1);
    this.icicle.show(this.#boxes(), this.tree === "stacks");
    this.#legend();
    this.#mark();
    this.#tell(this.at);
    this.areas.setAttribute("aria-valuemin", "0");
    this.areas.setAttribute("aria-valuemax", String(this.times.length - 1));
    this.areas.setAttribute("aria-valuenow", String(this.at));
    this.areas.setAttribute("aria-label", "Instant");
    this.areas.setAttribute("aria-valuetext", this.says.textContent);
  }

  #tell(k) {
    const step = this.steps.find(([, start, end]) => start <= this.times[k] && this.times[k] < end);
    const where = step ? `, step ${step[0]}` : "";
    const [total, most] = [this.totals[k], this.totals[this.peak]];
    const peak = total === most ? ", the peak" : ` (${share(total, most)} of the peak)`;
    const size = element("b", { textContent: byteSize(total) });
    this.says.replaceChildren(size, ` at ${duration(this.times[k])}${where}${peak}`);
    this.says.title = exact(total, "B");
  }

  #legend() {
    const rows = [...this.layers].reverse().filter(({ levels }) => levels.some((level) => level > 0));
    const items = rows.map(({ name, full, colour, levels }) => {
      const part = share(levels[this.at], this.totals[this.at]);
      const item = element("li", {}, element("i", { className: `swatch b-${colour}` }), element("span", { textContent: name }), " ");
      item.append(element("b", { textContent: byteSize(levels[this.at]) }), " ", element("span", { className: "quiet", textContent: part }));
      item.title = full;
      return item;
    });
    this.figure.querySelector(".legend").replaceChildren(...items);
  }

  draw() {
    const width = this.areas.clientWidth;
    if (!width) return;
    const svg = svgElement("svg", { width, height: TALL, viewBox: `0 0 ${width} ${TALL}`, "aria-hidden": "true" });
    const { first, span } = this.#range();
    this.x = (time) => MARGIN_LEFT + ((width - MARGIN_LEFT - MARGIN_RIGHT) * (time - first)) / span;
    const y = (value) => TALL - MARGIN_BOTTOM - ((TALL - MARGIN_TOP - MARGIN_BOTTOM) * value) / this.highest;
    for (const value of ticksOf(this.highest)) {
      svg.append(svgElement("line", { class: "mark", x1: MARGIN_LEFT, x2: width - MARGIN_RIGHT, y1: y(value), y2: y(value) }));
      const text = svgElement("text", { x: MARGIN_LEFT - 8, y: y(value) + 4, "text-anchor": "end" });
      text.textContent = byteSize(value);
      svg.append(text);
    }
    const below = new Float64Array(this.times.length);
    for (const { colour, levels, full } of this.layers) {
      const path = svgElement("path", { class: `f-${colour}`, d: this.#area(below, levels, y) });
      const title = svgElement("title");
      title.textContent = full;
      path.append(title);
      svg.append(path);
      levels.forEach((level, k) => (below[k] += level));
    }
    this.#axis(svg, width);
    this.cursor = svgElement("g", { class: "chosen" });
    this.cursor.append(svgElement("line", { y1: MARGIN_TOP - 8, y2: TALL - MARGIN_BOTTOM }));
    this.cursor.append(svgElement("path", { d: `M-6 ${MARGIN_TOP - 16}H6L0 ${MARGIN_TOP - 7}Z` }));
    svg.append(this.cursor);
    this.areas.replaceChildren(svg);
    this.#mark();
  }

  // A staircase between two levels: a value holds until the next.
  #area(below, levels, y) {
    const at = this.times.map((time) => this.x(time).toFixed(1));
    const point = (k) => y(below[k] + levels[k]).toFixed(1);
    let path = `M${at[0]} ${point(0)}`;
    for (let k = 1; k < at.length; k++) path += `H${at[k]}V${point(k)}`;
    path += `V${y(below[at.length - 1]).toFixed(1)}`;
    for (let k = at.length - 1; k > 0; k--) path += `H${at[k]}V${y(below[k - 1]).toFixed(1)}`;
    return `${path}H${at[0]}Z`;
  }

  #axis(svg, width) {
    const { first, span } = this.#range();
    for (const [number, start, end] of this.steps) {
      const [left, right] = [Math.max(this.x(start), MARGIN_LEFT), Math.min(this.x(end), width - MARGIN_RIGHT)];
      if (right <= left) continue;
      const border = { class: "step", x1: left, x2: left, y1: MARGIN_TOP, y2: TALL - MARGIN_BOTTOM };
      if (this.x(start) >= MARGIN_LEFT) svg.append(svgElement("line", border));
      if (right - left < 46) continue;
      const text = svgElement("text", { x: (left + right) / 2, y: MARGIN_TOP - 8, "text-anchor": "middle" });
      text.textContent = `step ${number}`;
      svg.append(text);
    }
    for (const [time, anchor] of [[first, "start"], [first + span, "end"]]) {
      const text = svgElement("text", { x: this.x(time), y: TALL - 6, "text-anchor": anchor });
      text.textContent = duration(time);
      svg.append(text);
    }
  }

  #mark() {
    this.cursor?.setAttribute("transform", `translate(${this.x(this.times[this.at]).toFixed(1)} 0)`);
  }
}
