// A tree as an icicle: each box as wide as its time or its bytes, children below their parents. Click or Enter zooms.
import { element, svgElement } from "./element.js";
import { byteSize, change, duration, exact, grouped, rounded, share } from "./units.js";
import { readIsland } from "./unpack.js";

const BOX = 26;
const SLIM_BOX = 20; // of call stacks, which are deep
const THINNEST = 1.5; // pixels
const LETTER = 7; // pixels
const LEAST_NAME = 6; // letters, beside which a change is written
const SAME = 0.02; // of the larger of two runs
const SAME_NS = 1000;

function timesOf(figure) {
  const { nodes, sides = [] } = readIsland(figure);
  return nodes.map(([parent, name, count, host, device], id) => ({ id, parent, name, count, host, device, sides: sides[id], children: [] }));
}

// What became of the time of a base.
function became([base, now]) {
  return !now && base ? "removed" : !base && now ? "added" : change(base ? now / base - 1 : 0);
}

// A name that is too long loses its middle: what it begins and ends with tells it apart.
function middleOut(name, room) {
  if (name.length <= room) return name;
  const back = Math.floor((room - 1) / 3);
  return room > 2 ? `${name.slice(0, room - 1 - back)}…${back ? name.slice(-back) : ""}` : "";
}

export class Icicle {
  // `given`: boxes made elsewhere (parent, name, full, key, bytes), parents first; else those of the figure's own script.
  constructor(figure, given = null) {
    this.figure = figure;
    this.measure = figure.dataset.measure;
    this.box = figure.classList.contains("stacks") ? SLIM_BOX : BOX;
    this.#take(given ?? timesOf(figure));
    this.picture = figure.querySelector(".icicle");
    this.say = figure.querySelector(".icicle-says");
    for (const button of figure.querySelectorAll("[data-measure-as]")) {
      button.addEventListener("click", () => this.#measureAs(button.dataset.measureAs));
    }
    this.picture.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(this.picture);
    this.draw();
  }

  #take(nodes) {
    this.nodes = nodes;
    for (const node of nodes) if (node.parent >= 0) nodes[node.parent].children.push(node);
    this.roots = nodes.filter((node) => node.parent < 0);
    this.top = null;
  }

  // Other boxes; what was zoomed into stays so where it is still there.
  show(nodes, slim) {
    const key = this.top?.key;
    this.#take(nodes);
    this.top = nodes.find((node) => key !== undefined && node.key === key) ?? null;
    this.box = slim ? SLIM_BOX : BOX;
    this.draw();
  }

  #measureAs(measure) {
    this.measure = measure;
    for (const button of this.figure.querySelectorAll("[data-measure-as]")) {
      button.setAttribute("aria-pressed", String(button.dataset.measureAs === measure));
    }
    this.draw();
  }

  #value(node) {
    return node[this.measure] ?? 0;
  }

  // A value as text; of two runs both, and what changed.
  #written(node, measure = this.measure) {
    if (measure === "bytes") return byteSize(this.#value(node));
    if (!node.sides) return duration(node[measure] ?? 0);
    return `${node.sides[measure].map(duration).join(" → ")} (${became(node.sides[measure])})`;
  }

  // Less than 2 % or 1 µs is no change; from a half on the colour is at its strongest.
  #colour(box, [base, now]) {
    const part = (now - base) / Math.max(base, now, 1);
    const same = Math.abs(part) < SAME || Math.abs(now - base) < SAME_NS;
    box.setAttribute("class", same ? "same" : part > 0 ? "slower" : "faster");
    box.style.setProperty("--change", Math.min(2 * Math.abs(part), 1));
    return same ? "" : became([base, now]);
  }

  draw() {
    const width = this.picture.clientWidth;
    if (!width) return;
    const placed = [];
    const above = [];
    for (let node = this.top && this.nodes[this.top.parent]; node; node = this.nodes[node.parent]) above.unshift(node);
    above.forEach((node, depth) => placed.push({ node, left: 0, wide: width, depth, faded: true }));
    const tops = this.top ? [this.top] : this.roots;
    const total = tops.reduce((sum, node) => sum + this.#value(node), 0);
    this.#place(tops, 0, total ? width / total : 0, above.length, placed);
    const height = (Math.max(...placed.map(({ depth }) => depth), 0) + 1) * this.box;
    const svg = svgElement("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "tree", "aria-label": this.figure.dataset.label });
    placed.forEach((box) => svg.append(this.#box(box, total)));
    this.picture.replaceChildren(svg);
    const first = svg.querySelector("[role=treeitem]:not(.faded)") ?? svg.querySelector("[role=treeitem]");
    first?.setAttribute("tabindex", "0");
  }

  #place(nodes, left, scale, depth, placed) {
    for (const node of [...nodes].sort((a, b) => this.#value(b) - this.#value(a))) {
      const wide = this.#value(node) * scale;
      if (wide >= THINNEST) {
        placed.push({ node, left, wide, depth });
        this.#place(node.children, left, scale, depth + 1, placed);
      }
      left += wide;
    }
  }

  #box({ node, left, wide, depth, faded }, total) {
    const box = svgElement("g", {
      role: "treeitem", tabindex: "-1", "data-node": node.id, "aria-level": depth + 1, class: faded ? "faded" : `d${depth % 4}`,
      transform: `translate(${left.toFixed(2)} ${depth * this.box})`,
    });
    const beside = node.sides && !faded ? this.#colour(box, node.sides[this.measure]) : "";
    box.append(svgElement("rect", { width: Math.max(wide - 1, 0.5).toFixed(2), height: this.box - 1, rx: 2 }));
    if (wide > 30) {
      const text = svgElement("text", { x: 7, y: this.box / 2 + 4 });
      const room = Math.floor((wide - 12) / LETTER);
      const left = room - beside.length - 1;
      text.textContent = beside && left >= LEAST_NAME ? `${middleOut(node.name, left)} ${beside}` : middleOut(node.name, room);
      box.append(text);
    }
    const part = node.sides ? [] : [share(this.#value(node), total)];
    box.setAttribute("aria-label", [node.name, this.#written(node), ...part].join(", "));
    const tell = () => this.#tell(node, total);
    box.addEventListener("mouseenter", tell);
    box.addEventListener("focus", tell);
    box.addEventListener("click", () => this.zoom(node));
    return box;
  }

  #tell(node, total) {
    const bytes = this.measure === "bytes";
    const facts = [bytes ? this.#written(node) : `${this.#written(node, "host")} on the host`];
    if (!bytes && node.device !== null) facts.push(`${this.#written(node, "device")} on the GPU`);
    if (node.sides) {
      const counts = [...new Set(node.sides.count.map(rounded))];
      facts.push(`${counts.join(" → ")} ${counts.join() === "1" ? "call" : "calls"} per step`);
    }
    else {
      if (!bytes) facts.push(`${grouped(node.count)} ${node.count === 1 ? "call" : "calls"}`);
      facts.push(`${share(this.#value(node), total)} of what is shown`);
    }
    this.say.replaceChildren(element("b", { textContent: node.full ?? node.name }), ` ${facts.join(" · ")}`);
    this.say.title = (node.sides?.[this.measure] ?? [this.#value(node)]).map((value) => exact(value, bytes ? "B" : "ns")).join(" → ");
  }

  zoom(node) {
    this.top = node === this.top ? this.nodes[node.parent] ?? null : node;
    this.draw();
    this.#focus(this.top);
  }

  #focus(node) {
    const box = node && this.picture.querySelector(`[data-node="${node.id}"]`);
    if (!box) return;
    for (const other of this.picture.querySelectorAll("[tabindex='0']")) other.setAttribute("tabindex", "-1");
    box.setAttribute("tabindex", "0");
    box.focus();
  }

  #key(event) {
    const at = event.target.closest("[data-node]");
    if (!at) return;
    const node = this.nodes[Number(at.dataset.node)];
    const order = [...(this.nodes[node.parent]?.children ?? this.roots)].sort((a, b) => this.#value(b) - this.#value(a));
    const beside = (step) => order[order.indexOf(node) + step];
    const heaviest = [...node.children].sort((a, b) => this.#value(b) - this.#value(a))[0];
    const moves = { ArrowUp: this.nodes[node.parent], ArrowDown: heaviest, ArrowLeft: beside(-1), ArrowRight: beside(1) };
    if (event.key in moves) this.#focus(moves[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.zoom(node);
    else if (event.key === "Escape" || event.key === "Backspace") {
      this.top = this.top ? this.nodes[this.top.parent] ?? null : null;
      this.draw();
      this.#focus(this.top ?? this.roots[0]);
    } else return;
    event.preventDefault();
  }
}
