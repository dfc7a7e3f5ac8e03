// The views of the page: one is open at a time, made when it is first opened; the side bar keeps the place.
import { getState, onState, visit } from "./state.js";

const links = [...document.querySelectorAll("nav .links a")];
const scrolled = new Map(); // view -> where the reader left it
const readiness = new Map(); // view -> when all in it stands
let bring = async () => {}; // what brings a new part of the page to life

function placeOf(link) {
  return link.getAttribute("href").slice(1);
}

export function openView() {
  return document.querySelector("main > .view:not([hidden])");
}

// The view of a section or of anything else with an id, opened before or not.
function viewWith(id) {
  const within = (view) => view.dataset.view === id || (view.content ?? view).querySelector(`#${CSS.escape(id)}`);
  return [...document.querySelectorAll("main > [data-view]")].find(within)?.dataset.view;
}

// A view by its name, made from its template where it was not yet.
function made(name) {
  const view = document.querySelector(`main > [data-view="${CSS.escape(name)}"]`);
  if (!view?.content) return view;
  const box = document.createElement("div");
  box.className = "view";
  box.dataset.view = name;
  box.append(view.content);
  view.replaceWith(box);
  readiness.set(name, bring(box));
  return box;
}

// Opens a view; done once all in it stands.
async function show(name) {
  const before = openView();
  const view = made(name);
  if (!view) return;
  if (before && before !== view) {
    scrolled.set(before.dataset.view, scrollY);
    before.hidden = true;
  }
  view.hidden = false;
  for (const link of links) if (link.dataset.view) link.toggleAttribute("aria-current", link.dataset.view === name);
  for (const inside of document.querySelectorAll("nav .inside")) inside.hidden = inside.dataset.of !== name;
  await readiness.get(name);
}

// On paper all views stand one after the other; afterwards the one that was open.
export function printAll() {
  let open = null;
  addEventListener("beforeprint", () => {
    open ??= openView();
    for (const { dataset } of document.querySelectorAll("main > [data-view]")) made(dataset.view).hidden = false;
  });
  addEventListener("afterprint", () => {
    for (const view of document.querySelectorAll("main > .view")) view.hidden = view !== open;
    open = null;
  });
}

// Goes to a place of the address: `gpu/kernels`, `gpu`, `kernels`; nothing is the first view.
export async function go(place) {
  const [first, second] = (place ?? "").split("/");
  const named = document.querySelector(`main > [data-view="${CSS.escape(first)}"]`);
  const name = first ? (named ? first : viewWith(first)) : document.querySelector("main > [data-view]").dataset.view;
  if (!name) return;
  const was = openView()?.dataset.view;
  const ready = show(name);
  const target = document.getElementById(second ?? (named ? "" : first));
  const jump = () => {
    if (!target) {
      if (was !== name) scrollTo({ top: scrolled.get(name) ?? 0, behavior: "instant" });
      return;
    }
    for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    target.scrollIntoView({ behavior: "instant" });
    mark(target.id);
  };
  jump();
  await ready;
  if (!document.documentElement.dataset.ready) jump(); // what was made above it has moved it
}

function mark(id) {
  for (const link of links) {
    if (!link.dataset.view) link.toggleAttribute("aria-current", placeOf(link).split("/").pop() === id);
  }
}

export async function startViews(bringToLife) {
  bring = bringToLife;
  addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#']");
    if (!link || event.defaultPrevented || link.classList.contains("skip")) return;
    event.preventDefault();
    const [place, ...choices] = placeOf(link).split("&");
    visit(place, new URLSearchParams(choices.join("&")));
  });
  onState("at", go);
  const seen = new IntersectionObserver(
    (entries) => entries.filter(({ isIntersecting }) => isIntersecting).forEach(({ target }) => mark(target.id)),
    { rootMargin: "-10% 0px -75% 0px" },
  );
  const first = openView();
  await bring(first);
  new MutationObserver(() => openView().querySelectorAll("section[id]").forEach((section) => seen.observe(section))).observe(
    document.getElementById("main"), { childList: true });
  first.querySelectorAll("section[id]").forEach((section) => seen.observe(section));
  await go(getState("at") ?? (getState("t") ? "timeline" : null));
}
