// Columns of tables: how their values are written, aligned, compared; heads and cells.
import { element, svgElement } from "./element.js";
import { change, commonScale, duration, exact, exactUnit, grouped, perCent, rounded, share } from "./units.js";

const ONE_LINE = 32; // characters that never wrap
const CODE = /\u0060([^\u0060]+)\u0060/; // between backticks
const WORDS = ["text", "name", "grade"];
const PICTURES = { bar: stack, delta: fromTheMiddle };

export class Column {
  constructor(told) {
    Object.assign(this, { hint: "", swatch: "", why: "", scale: told.key }, told);
    this.picture = PICTURES[this.kind];
    this.numeric = !this.picture && !WORDS.includes(this.kind);
  }

  // Numbers of one column stand in one unit, with the decimals below each other.
  write([factor, unit]) {
    this.unit = unit;
    if (!this.numeric) return;
    const write = { count: grouped, share: perCent, change: (value) => change(value).replace(" %", "") }[this.kind] ?? ((value) => rounded(value / factor));
    this.shown = this.values.map((value) => (value === null ? null : write(value)));
    this.widest = this.shown.reduce((most, text) => Math.max(most, decimals(text)), 0);
  }

  // All of a text; what is shown may be cut.
  whole(row) {
    const text = this.texts[this.at[row]] ?? null;
    return Array.isArray(text) ? text[1] : text;
  }

  // What a filter looks at.
  words(row) {
    if (this.picture) return "";
    return (this.numeric ? this.shown[row] : this.whole(row)) ?? "";
  }

  // Unknown values stand last whatever the direction.
  compare(a, b, direction) {
    const [left, right] = this.numeric ? [this.values[a], this.values[b]] : [this.whole(a), this.whole(b)];
    if (left === null || right === null) return (left === null) - (right === null);
    return direction * (this.numeric ? left - right : left.localeCompare(right, undefined, { numeric: true }));
  }

  head() {
    const look = this.numeric ? "n" : this.picture ? this.kind : this.kind === "name" ? "name" : "";
    const head = element("th", { scope: "col", className: look, "data-key": this.key });
    const inside = [
      this.swatch ? element("i", { className: `swatch b-${this.swatch}` }) : null,
      this.title,
      this.unit ? element("small", {}, ` ${this.unit}`) : null,
    ];
    if (this.picture) head.append(...inside.filter(Boolean));
    else head.append(element("button", { type: "button", title: this.hint }, ...inside));
    return head;
  }

  cell(row) {
    if (this.picture) return element("td", { className: this.kind }, this.picture(this.values[row], this.values));
    const text = this.numeric ? this.shown[row] : this.texts[this.at[row]] ?? null;
    const look = this.numeric ? "n" : "";
    if (text === null) return element("td", { className: `${look} none`.trim(), title: this.why }, "–");
    if (this.numeric) return this.#number(row, text);
    const [shown, whole] = Array.isArray(text) ? text : [text, ""];
    const hover = whole && { title: whole };
    if (this.kind === "name") return element("td", { className: "name", ...hover }, shown);
    if (this.kind === "grade") return element("td", {}, element("b", { className: `grade ${shown}` }, shown));
    const pieces = shown.split(CODE).map((piece, k) => (k % 2 ? element("code", {}, piece) : piece));
    return element("td", { className: shown.length <= ONE_LINE ? "s" : "", ...hover }, ...pieces);
  }

  #number(row, text) {
    const value = this.values[row];
    const missing = this.widest - decimals(text);
    const look = missing ? ` p${missing}${text.includes(".") ? "" : " w"}` : "";
    const perCents = this.kind === "share" || this.kind === "change";
    const cell = element("td", { className: `n${look}`, "data-v": perCents ? Number((value * 100).toFixed(6)) : value }, text);
    if (this.kind !== "share") return cell;
    cell.className = "n share";
    cell.style.setProperty("--part", Math.min(Math.max(value, 0), 1));
    return cell;
  }

  exact(value) {
    return exact(value, exactUnit(this.kind));
  }
}

function decimals(text) {
  const at = text === null ? -1 : text.indexOf(".");
  return at < 0 ? 0 : text.length - at - 1;
}

// Columns of one scale share a unit, so that they can be compared.
export function readColumns(told) {
  const columns = told.map((column) => new Column(column));
  for (const column of columns) {
    const values = columns.filter(({ numeric, scale }) => numeric && scale === column.scale).flatMap((other) => other.values);
    column.write(column.numeric ? commonScale(column.kind, values) : [1, ""]);
  }
  return columns;
}

// One stretch of time as a line of colours.
function stack(bar) {
  if (bar === null) return "–";
  const [whole, longest, parts] = bar;
  const svg = svgElement("svg", { class: "stack", viewBox: "0 0 1000 1", preserveAspectRatio: "none", role: "img" });
  const words = [];
  let left = 0;
  for (const [label, colour, ns] of parts) {
    const width = (ns * 1000) / Math.max(longest, 1);
    const box = svgElement("rect", { class: `f-${colour}`, x: left.toFixed(2), width: width.toFixed(2), height: 1 });
    const title = svgElement("title");
    title.textContent = `${label} ${duration(ns)} (${share(ns, whole)})`;
    words.push(title.textContent);
    box.append(title);
    svg.append(box);
    left += width;
  }
  svg.setAttribute("aria-label", words.join("; "));
  return svg;
}

// A difference from the line in the middle: to the right what takes longer, to the left what takes less.
function fromTheMiddle(ns, values) {
  const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 1);
  const size = (Math.abs(ns) * 1000) / largest;
  const svg = svgElement("svg", { class: "stack", viewBox: "-1000 0 2000 1", preserveAspectRatio: "none", role: "img" });
  svg.setAttribute("aria-label", ns ? `${ns > 0 ? "slower" : "faster"} by ${duration(Math.abs(ns))}` : "no difference");
  if (ns) svg.append(svgElement("rect", { class: ns > 0 ? "f-slower" : "f-faster", x: Math.min(Math.sign(ns) * size, 0), width: size, height: 1 }));
  svg.append(svgElement("line", { class: "middle", y2: 1 }));
  return svg;
}
