// Tables: the first rows are drawn, the others as the reader comes to them; sorting and filtering.
import { readColumns } from "./cells.js";
import { element } from "./element.js";
import { rowWay } from "./links.js";
import { getState, onState, setState } from "./state.js";
import { readIsland } from "./unpack.js";

const FIRST = 12; // rows shown before "show all"
const MORE = 150; // rows that are drawn at a time from then on
const FILTER_FROM = 13; // rows; a filter over fewer is clutter
const FEW_COLUMNS = 7; // short columns stand close together, so that the eye finds the way along a row

const decoded = new WeakMap();

// What a figure holds, drawn or not: {label, columns, rows, ranges}.
export function dataOf(figure) {
  if (!decoded.has(figure)) {
    const { label, columns, rows, ranges } = readIsland(figure);
    decoded.set(figure, { label, rows, ranges, columns: readColumns(columns) });
  }
  return decoded.get(figure);
}

export class DataTable {
  constructor(figure) {
    this.figure = figure;
    Object.assign(this, dataOf(figure));
    this.order = Array.from({ length: this.rows }, (_, row) => row);
    this.most = FIRST;
    this.body = element("tbody");
    this.heads = this.columns.map((column) => column.head());
    this.count = element("span", { className: "count", role: "status" });
    this.more = element("button", { type: "button", className: "more", onclick: () => this.#unfold() });
    this.filter = element("input", {
      type: "search", placeholder: `Filter ${this.rows} rows`, "aria-label": `Filter: ${this.label}`, autocomplete: "off", spellcheck: false,
      value: getState(`${figure.id}.q`) ?? "", oninput: () => this.filterBy(this.filter.value),
    });
    this.search = element("div", { className: "filter", hidden: this.rows < FILTER_FROM && !this.filter.value }, this.filter, this.count);
    const caption = element("caption", { className: "unseen" }, this.label);
    const table = element("table", {}, caption, element("thead", {}, element("tr", {}, ...this.heads)), this.body);
    const scroll = element("div", { className: "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${this.label}` }, table);
    const narrow = this.columns.length <= FEW_COLUMNS && !this.columns.some(({ kind, picture }) => kind === "name" || picture);
    figure.classList.toggle("narrow", narrow);
    figure.prepend(this.search, scroll, this.more);
    this.#listen(table);
    this.#sortAsAddressed();
    figure.table = this;
  }

  #listen(table) {
    this.heads.forEach((head, k) => head.querySelector("button")?.addEventListener("click", () => this.#turn(head, this.columns[k])));
    onState(`${this.figure.id}.sort`, () => this.#sortAsAddressed());
    onState(`${this.figure.id}.q`, (value) => (value ?? "") === this.filter.value || this.filterBy(value ?? ""));
    // The exact value becomes the tooltip when somebody asks.
    const tell = ({ target }) => {
      const cell = target.closest("td[data-v]");
      if (cell && !cell.title) cell.title = this.columns[cell.cellIndex].exact(cell.dataset.v);
    };
    table.addEventListener("mouseover", tell);
    table.addEventListener("focusin", tell);
    const nearEnd = new IntersectionObserver(
      ([entry]) => entry.isIntersecting && this.most > FIRST && this.#draw((this.most += MORE)), { rootMargin: "600px" });
    nearEnd.observe(this.more);
  }

  // The third click gives the first order back.
  #turn(head, { key, numeric }) {
    const now = head.getAttribute("aria-sort");
    const first = numeric ? "descending" : "ascending";
    const down = now ? now === "ascending" : numeric;
    setState(`${this.figure.id}.sort`, now && now !== first ? null : `${key}:${down ? "down" : "up"}`);
    this.#sortAsAddressed();
  }

  #sortAsAddressed() {
    const [name, way] = (getState(`${this.figure.id}.sort`) ?? "").split(":");
    const at = this.columns.findIndex(({ key }) => key === name);
    const direction = way === "up" ? 1 : -1;
    for (const head of this.heads) head.removeAttribute("aria-sort");
    this.heads[at]?.setAttribute("aria-sort", direction < 0 ? "descending" : "ascending");
    this.order.sort((a, b) => (at < 0 ? 0 : this.columns[at].compare(a, b, direction)) || a - b);
    this.#draw();
  }

  filterBy(text) {
    if (this.filter.value !== text) this.filter.value = text;
    this.search.hidden = this.rows < FILTER_FROM && !text;
    setState(`${this.figure.id}.q`, text || null);
    this.most = Math.min(this.most, FIRST);
    this.#draw();
  }

  #unfold() {
    this.most = this.most > FIRST ? FIRST : MORE;
    this.#draw();
  }

  #draw() {
    const wanted = this.filter.value.trim().toLowerCase();
    const fits = (row) => this.columns.some((column) => column.words(row).toLowerCase().includes(wanted));
    const kept = wanted ? this.order.filter(fits) : this.order;
    this.body.replaceChildren(...kept.slice(0, this.most).map((row) => this.#row(row)));
    this.count.textContent = wanted ? `${kept.length} of ${this.rows}` : "";
    this.more.hidden = kept.length <= FIRST;
    this.more.textContent = this.most > FIRST ? `Show the first ${FIRST}` : `Show all ${kept.length}`;
  }

  #row(row) {
    const line = element("tr", {}, ...this.columns.map((column) => column.cell(row)));
    rowWay(this, row, line);
    return line;
  }
}

// Draws what can be seen of a part of the page: not what is folded, and not other ranks.
export function drawTables(root) {
  for (const figure of root.querySelectorAll(".table")) {
    if (!figure.table && !figure.closest("[hidden], details:not([open])")) new DataTable(figure);
  }
}
