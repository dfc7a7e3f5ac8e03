// From the tables to the evidence: a kernel or operator is found in the timeline, a step is shown in it.
import { element } from "./element.js";

const OF_EVENTS = ["kernel-table", "operator-table"]; // whose names are those of events

let open = async () => null;

// How to come to the timeline: a function that gives it once it is drawn, or null where there is none.
export function leadToTimeline(opener) {
  open = opener;
}

async function findName(name) {
  const timeline = await open();
  if (!timeline) return;
  const { input } = timeline.searching;
  input.value = name;
  timeline.searching.find(name);
  timeline.fit();
  input.focus({ preventScroll: true });
}

async function showRange([from, to], rank) {
  const timeline = await open();
  if (!timeline) return;
  const { shift } = timeline.events;
  const margin = (to - from) * 0.02;
  timeline.rows.open(rank);
  timeline.setView(from - shift - margin, to - shift + margin);
  timeline.scroller.focus({ preventScroll: true });
}

// The stretch of time, where the timeline has some of it: of many ranks it shows one step.
function rangeOf(text) {
  const [from, to] = text.split("-").map(Number);
  const [first, last] = (document.getElementById("main").dataset.window ?? "0-0").split("-").map(Number);
  return to > first && from < last ? [from, to] : null;
}

function way(label, action) {
  return element("button", { type: "button", className: "way", title: label, "aria-label": label, onclick: action });
}

export function rowWay(table, row, line) {
  const { id } = table.figure;
  const [lead] = table.columns;
  if (OF_EVENTS.includes(id) && lead.kind === "name") {
    line.cells[0].append(way("Find it in the timeline", () => findName(lead.whole(row))));
  }
  const range = table.ranges?.[row] && rangeOf(table.ranges[row]);
  if (range) line.cells[0].prepend(way("Show it in the timeline", () => showRange(range, Number(id.split("-").pop()))));
}

export function linkFindings() {
  for (const link of document.querySelectorAll(".findings a[data-range]")) {
    const range = rangeOf(link.dataset.range);
    if (!range) continue;
    link.addEventListener("click", (event) => {
      event.preventDefault();
      event.stopPropagation();
      showRange(range, Number(link.dataset.rank));
    });
  }
}
