// Search over the page: sections by their titles and sentences, rows of tables by their texts.
import { element } from "./element.js";
import { visit } from "./state.js";
import { dataOf, drawTables } from "./tables.js";
import { go } from "./views.js";

const MOST_RESULTS = 40; // results
const FEWEST_LETTERS = 2; // letters

// The tables of the page, drawn or not, with the view and the section that they stand in.
function* everywhere(selector) {
  for (const view of document.querySelectorAll("main > [data-view]")) {
    for (const part of (view.content ?? view).querySelectorAll(selector)) {
      const section = part.closest("section");
      if (section) yield [part, `${view.dataset.view}/${section.id}`, section];
    }
  }
}

function titleOf(section) {
  return section.querySelector("h2").textContent;
}

// [title, more, place, figure to filter] of what has the text.
function* matches(wanted) {
  const fits = (text) => text?.toLowerCase().includes(wanted);
  for (const [section, place] of everywhere("section[id]")) {
    const sentence = section.querySelector(".sentence")?.textContent ?? "";
    if (fits(titleOf(section)) || fits(sentence)) yield [titleOf(section), sentence, place, null];
  }
  for (const [figure, place, section] of everywhere(".table")) {
    const { columns, rows, label } = dataOf(figure);
    const texts = columns.filter((column) => column.texts?.some((text) => fits([text].flat().pop())));
    if (!texts.length) continue;
    let count = 0;
    let first = "";
    for (let row = 0; row < rows; row++) {
      const text = texts.map((column) => column.whole(row)).find(fits);
      first ||= text ?? "";
      count += text !== undefined;
    }
    const rank = figure.closest("[data-of-rank]")?.dataset.ofRank;
    const title = label === titleOf(section) ? label : `${titleOf(section)}: ${label}`;
    if (count) yield [title, count === 1 ? first : `${count} rows: ${first}, …`, place, [figure.id, rank]];
  }
}

async function leadTo(wanted, place, table) {
  visit(place);
  await go(place);
  if (!table) return;
  const [id, rank] = table;
  const choice = document.getElementById("rank");
  if (rank && choice && choice.value !== rank) {
    choice.value = rank;
    choice.dispatchEvent(new Event("change"));
  }
  const figure = document.getElementById(id);
  for (let fold = figure.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  drawTables(figure.parentElement);
  figure.table.filterBy(wanted);
  figure.scrollIntoView({ behavior: "instant", block: "center" });
}

export function startLookup() {
  const input = document.getElementById("lookup");
  const list = document.getElementById("results");
  const close = () => (list.hidden = true);
  const find = () => {
    const wanted = input.value.trim().toLowerCase();
    list.hidden = wanted.length < FEWEST_LETTERS;
    if (list.hidden) return;
    const rows = [];
    for (const [title, more, place, table] of matches(wanted)) {
      if (rows.push([title, more, place, table]) === MOST_RESULTS) break;
    }
    list.replaceChildren(...rows.map(([title, more, place, table]) =>
      element("button", { type: "button", onclick: () => (close(), leadTo(wanted, place, table)) },
        element("b", {}, title), more ? element("span", {}, more) : null)));
    if (!rows.length) list.append(element("p", { className: "quiet" }, "Nothing in sections and tables; the timeline has its own search."));
  };
  const beside = (event) => {
    const all = [input, ...list.querySelectorAll("button")];
    const at = all.indexOf(document.activeElement);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && !list.hidden) all[Math.min(Math.max(at + step, 0), all.length - 1)].focus();
    else if (event.key === "Enter" && at === 0 && !list.hidden) all[1]?.click();
    else if (event.key === "Escape") close(input.focus());
    else return;
    event.preventDefault();
  };
  input.addEventListener("input", find);
  input.addEventListener("focus", find);
  input.parentElement.addEventListener("keydown", beside);
  addEventListener("click", (event) => input.parentElement.contains(event.target) || close());
}
