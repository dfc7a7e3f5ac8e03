// Starts everything; the page without scripts already shows all but the timeline and the icicle.
import { readCurve } from "./curve.js";
import { Details } from "./details.js";
import { readEvents } from "./events.js";
import { listenToGestures, measureOnRuler } from "./gestures.js";
import { Icicle } from "./icicle.js";
import { linkTables } from "./links.js";
import { Owners } from "./owners.js";
import { chooseRank, help, sectionLinks, sectionMenus, switchTheme, unfoldForPrint } from "./page.js";
import { Search } from "./search.js";
import { bringToLife } from "./tables.js";
import { Timeline } from "./timeline.js";

async function startTimeline() {
  const root = document.getElementById("timeline-view");
  if (!root) return null;
  const data = document.getElementById("timeline-data");
  const events = await readEvents(data.textContent);
  data.textContent = ""; // the packed text is no longer needed
  root.classList.add("ready");
  const timeline = new Timeline(root, events);
  timeline.details = new Details(timeline);
  timeline.searching = new Search(timeline);
  listenToGestures(timeline);
  measureOnRuler(timeline);
  linkTables(timeline);
  timeline.part("in").addEventListener("click", () => timeline.zoom(0.6));
  timeline.part("out").addEventListener("click", () => timeline.zoom(1 / 0.6));
  timeline.part("fit").addEventListener("click", () => timeline.fit());
  timeline.part("large").addEventListener("click", () => timeline.enlarge());
  root.timeline = timeline;
  return timeline;
}

function start() {
  chooseRank();
  for (const figure of document.querySelectorAll(".table")) bringToLife(figure);
  for (const figure of document.querySelectorAll(".curve")) readCurve(figure);
  for (const figure of document.querySelectorAll(".modules, .stacks")) new Icicle(figure);
  for (const figure of document.querySelectorAll(".owners")) new Owners(figure);
  help();
  sectionLinks();
  sectionMenus();
  unfoldForPrint();
  let timeline = null;
  switchTheme(() => timeline?.recolour());
  addEventListener("beforeprint", () => timeline?.recolour(true));
  addEventListener("afterprint", () => timeline?.recolour());
  matchMedia("print").addEventListener("change", ({ matches }) => timeline?.recolour(matches));
  startTimeline().then(
    (made) => {
      timeline = made;
      document.documentElement.dataset.ready = "yes";
    },
    (reason) => {
      const text = `The timeline could not be read: ${reason.message}`;
      document.querySelector("[data-part=says]").textContent = text;
      document.documentElement.dataset.ready = "failed";
    },
  );
}

start();
