// From the tables to the evidence: a kernel or operator is found in the timeline, a step is shown in it.
import { element } from "./element.js";

function toTimeline() {
  document.getElementById("timeline").scrollIntoView();
}

function findName(timeline, name) {
  const { input } = timeline.searching;
  input.value = name;
  timeline.searching.find(name);
  timeline.fit();
  toTimeline();
  input.focus({ preventScroll: true });
}

function rangeOf(timeline, row) {
  return row.dataset.range.split("-").map((time) => Number(time) - timeline.events.shift);
}

function showRange(timeline, [from, to], rank) {
  const margin = (to - from) * 0.02;
  timeline.rows.open(rank);
  timeline.setView(from - margin, to + margin);
  toTimeline();
  timeline.scroller.focus({ preventScroll: true });
}

function way(label, action) {
  return element("button", { type: "button", className: "way", title: label, "aria-label": label, onclick: action });
}

function linkFindings(timeline) {
  for (const link of document.querySelectorAll(".findings a[data-range]")) {
    const range = rangeOf(timeline, link);
    if (range[1] <= 0 || range[0] >= timeline.events.span) continue;
    link.addEventListener("click", (event) => {
      event.preventDefault();
      showRange(timeline, range, Number(link.dataset.rank));
    });
  }
}

export function linkTables(timeline) {
  linkFindings(timeline);
  for (const table of ["kernel-table", "operator-table"]) {
    for (const cell of document.querySelectorAll(`#${table} td.name:first-child`)) {
      const name = cell.title || cell.textContent;
      cell.append(way("Find it in the timeline", () => findName(timeline, name)));
    }
  }
  for (const row of document.querySelectorAll("tr[data-range]")) {
    const rank = Number(row.closest(".table").id.split("-").pop());
    const range = rangeOf(timeline, row);
    if (range[1] <= 0 || range[0] >= timeline.events.span) continue; // of many ranks only one step is there
    row.cells[0].prepend(way("Show it in the timeline", () => showRange(timeline, range, rank)));
  }
}
