// Sorting, filtering and unfolding of the tables; the rows themselves stand in the page.
import { exact } from "./units.js";
import { getState, onState, setState } from "./state.js";

const FIRST = 12; // rows shown before "show all"

export function bringToLife(figure) {
  const table = figure.querySelector("table");
  const key = figure.id;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const headers = [...table.tHead.rows[0].cells];
  const filter = figure.querySelector("input[type=search]");
  const more = figure.querySelector(".more");
  const count = figure.querySelector(".count");
  const keepOrder = table.dataset.order === "fixed";
  let open = false;

  function show() {
    const wanted = (filter?.value ?? "").trim().toLowerCase();
    let kept = 0;
    for (const row of body.rows) {
      const fits = !wanted || row.textContent.toLowerCase().includes(wanted) || (row.dataset.full ?? "").toLowerCase().includes(wanted);
      kept += fits;
      row.hidden = !fits;
      row.classList.toggle("beyond", fits && !open && kept > FIRST);
    }
    if (count) count.textContent = wanted ? `${kept} of ${rows.length}` : "";
    more.hidden = kept <= FIRST;
    more.textContent = open ? `Show the first ${FIRST}` : `Show all ${kept}`;
  }

  function sort(column, direction) {
    headers.forEach((header, k) => header.removeAttribute("aria-sort") ?? k);
    const sorted = [...rows];
    if (column >= 0) {
      headers[column].setAttribute("aria-sort", direction < 0 ? "descending" : "ascending");
      sorted.sort((a, b) => direction * compare(a.cells[column], b.cells[column]) || rows.indexOf(a) - rows.indexOf(b));
    }
    body.append(...sorted);
    show();
  }

  function sortFromAddress() {
    const [name, way] = (getState(`${key}.sort`) ?? "").split(":");
    sort(headers.findIndex((header) => header.dataset.key === name), way === "up" ? 1 : -1);
  }

  if (!keepOrder) {
    headers.forEach((header) => {
      header.querySelector("button")?.addEventListener("click", () => {
        const numeric = header.classList.contains("n");
        const now = header.getAttribute("aria-sort");
        const first = numeric ? "descending" : "ascending";
        const down = now ? now === "ascending" : numeric;
        // The third click gives the first order back.
        setState(`${key}.sort`, now && now !== first ? null : `${header.dataset.key}:${down ? "down" : "up"}`);
        sortFromAddress();
      });
    });
    onState(`${key}.sort`, sortFromAddress);
  }
  filter?.addEventListener("input", () => {
    setState(`${key}.q`, filter.value || null);
    show();
  });
  if (filter) {
    filter.value = getState(`${key}.q`) ?? "";
    onState(`${key}.q`, (value) => show((filter.value = value ?? "")));
  }
  more.addEventListener("click", () => show((open = !open)));
  addEventListener("beforeprint", () => body.querySelectorAll(".beyond").forEach((row) => row.classList.remove("beyond")));
  addEventListener("afterprint", () => show());
  // The exact value stands in the cell's data; it becomes the tooltip when somebody asks.
  const tell = (event) => {
    const cell = event.target.closest("td[data-v]");
    if (cell && !cell.title) cell.title = exact(cell.dataset.v, headers[cell.cellIndex].dataset.exact ?? "");
  };
  table.addEventListener("mouseover", tell);
  table.addEventListener("focusin", tell);
  if (keepOrder) show();
  else sortFromAddress();
}

// Unknown values stand last whatever the direction means for numbers.
function compare(a, b) {
  const [left, right] = [a, b].map((cell) => cell.dataset.v ?? cell.dataset.s ?? null);
  if (left !== null && right !== null) return Number(left) - Number(right);
  if (left !== null || right !== null) return left === null ? -1 : 1;
  return a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
}
