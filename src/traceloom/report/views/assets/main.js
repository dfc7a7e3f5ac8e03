// Starts everything. Without scripts the page shows its first view, without tables.
import { readCurve } from "./curve.js";
import { Details } from "./details.js";
import { readEvents } from "./events.js";
import { listenToGestures, measureOnRuler } from "./gestures.js";
import { Icicle } from "./icicle.js";
import { leadToTimeline, linkFindings } from "./links.js";
import { startLookup } from "./lookup.js";
import { Owners } from "./owners.js";
import { chooseRank, help, showRank, switchTheme } from "./page.js";
import { Search } from "./search.js";
import { visit } from "./state.js";
import { drawTables } from "./tables.js";
import { Timeline } from "./timeline.js";
import { go, printAll, startViews } from "./views.js";

let timeline = null;

async function startTimeline(root) {
  const data = document.getElementById("timeline-data");
  const events = await readEvents(data.textContent);
  data.textContent = ""; // the packed text is no longer needed
  root.classList.add("ready");
  timeline = new Timeline(root, events);
  timeline.details = new Details(timeline);
  timeline.searching = new Search(timeline);
  listenToGestures(timeline);
  measureOnRuler(timeline);
  timeline.part("in").addEventListener("click", () => timeline.zoom(0.6));
  timeline.part("out").addEventListener("click", () => timeline.zoom(1 / 0.6));
  timeline.part("fit").addEventListener("click", () => timeline.fit());
  timeline.part("large").addEventListener("click", () => timeline.enlarge());
  root.timeline = timeline;
}

// A view that was just made.
async function bringToLife(view) {
  showRank(view);
  view.addEventListener("toggle", (event) => drawTables(event.target), true);
  for (const figure of view.querySelectorAll(".curve")) readCurve(figure);
  for (const figure of view.querySelectorAll(".modules, .stacks")) new Icicle(figure);
  for (const figure of view.querySelectorAll(".owners")) new Owners(figure);
  const root = view.querySelector("#timeline-view");
  if (!root) return;
  try {
    await startTimeline(root);
  } catch (reason) {
    root.querySelector("[data-part=says]").textContent = `The timeline could not be read: ${reason.message}`;
    document.documentElement.dataset.ready = "failed";
  }
}

async function start() {
  chooseRank();
  help();
  startLookup();
  switchTheme(() => timeline?.recolour());
  printAll();
  addEventListener("beforeprint", () => timeline?.recolour(true));
  addEventListener("afterprint", () => timeline?.recolour());
  matchMedia("print").addEventListener("change", ({ matches }) => timeline?.recolour(matches));
  leadToTimeline(async () => {
    visit("timeline");
    await go("timeline/timeline");
    return timeline;
  });
  linkFindings();
  await startViews(bringToLife);
  document.documentElement.dataset.ready ??= "yes";
}

start();
