// Pages work without this script. With it, times stand in the reader's zone, filters answer while one types, and
// what changes is shown as it does.
"use strict";

const root = document.documentElement;

// Times: UTC stays on hover.
const sameDay = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const otherDay = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });
const otherYear = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

function localTimes(inside) {
  const now = new Date();
  for (const time of inside.querySelectorAll("time[datetime]")) {
    const when = new Date(time.dateTime);
    const write = when.toDateString() === now.toDateString() ? sameDay : when.getFullYear() === now.getFullYear() ? otherDay : otherYear;
    time.textContent = write.format(when);
  }
}

// Makes `now` what `next` is, and leaves alone what is the same: focus, what is typed, unfolded or scrolled stays.
function morph(now, next) {
  const old = [...now.childNodes];
  const fresh = [...next.childNodes];
  fresh.forEach((node, at) => {
    const there = old[at];
    if (!there) now.append(node);
    else if (there.nodeType !== node.nodeType || there.nodeName !== node.nodeName || (there.id ?? "") !== (node.id ?? "")) there.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (there.data !== node.data) there.data = node.data;
    } else if (node.nodeType === Node.ELEMENT_NODE && !there.isEqualNode(node)) {
      for (const { name } of [...there.attributes]) if (!node.hasAttribute(name) && name !== "open") there.removeAttribute(name);
      for (const { name, value } of node.attributes) if (there.getAttribute(name) !== value) there.setAttribute(name, value);
      morph(there, node);
    }
  });
  for (const extra of old.slice(fresh.length)) extra.remove();
}

const PARTS = ["head", "parts"]; // what of a page changes

// `page` is a document that has the same parts.
function show(page) {
  for (const name of PARTS) {
    const next = page.getElementById(name);
    prepare(next);
    morph(document.getElementById(name), next);
  }
}

function prepare(inside) {
  localTimes(inside);
  for (const button of inside.querySelectorAll("[data-copy]")) button.hidden = !navigator.clipboard;
}

// What is live: one stream of a page, closed while nobody sees it.
let stream = null;
let lastEvent = "";
const status = document.createElement("p");
status.className = "live";
status.setAttribute("role", "status");

function say(words) {
  if (!words) status.remove();
  else {
    status.textContent = words;
    if (!status.isConnected) document.body.append(status);
  }
}

function follow() {
  const head = document.getElementById("head");
  if (stream || !head?.dataset.live || document.hidden) return;
  stream = new EventSource(location.href.split("#")[0]);
  stream.onopen = () => say("");
  stream.onmessage = ({ data, lastEventId }) => {
    if (lastEventId === lastEvent) return;
    lastEvent = lastEventId;
    const html = JSON.parse(data);
    show(new DOMParser().parseFromString(PARTS.map((name) => `<div id="${name}">${html[name]}</div>`).join(""), "text/html"));
  };
  stream.addEventListener("ended", () => {
    delete head.dataset.live;
    leave();
  });
  stream.onerror = () => {
    const closed = stream && stream.readyState === EventSource.CLOSED;
    say(closed ? "No longer live: reload the page" : "Connecting again …");
    if (closed) leave();
  };
}

function leave() {
  stream?.close();
  stream = null;
}

// Filters answer while one types, and stand in the address.
let typing = 0;
let asked = 0;

async function filter(form) {
  const address = `${form.action.split("?")[0]}?${new URLSearchParams([...new FormData(form)].filter(([, value]) => value))}`;
  const mine = ++asked;
  const response = await fetch(address, { headers: { Accept: "text/html" } });
  if (!response.ok || response.redirected) {
    location.assign(address);
    return;
  }
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  if (mine !== asked) return;
  show(page);
  history.replaceState(null, "", address);
  leave();
  follow();
}

document.addEventListener("input", ({ target }) => {
  const form = target.closest("form.filter");
  if (!form) return;
  clearTimeout(typing);
  typing = setTimeout(() => filter(form), 250);
});

document.addEventListener("click", async ({ target }) => {
  const button = target.closest("button");
  if (!button) return;
  if (button.id === "theme") turnTheme();
  if (button.dataset.copy) {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  }
});

function turnTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("traceloom-theme", root.dataset.theme);
}

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const search = document.querySelector("form.filter input[type=search]");
  if (event.key === "/" && search) {
    event.preventDefault();
    search.focus();
  } else if (event.key === "t") turnTheme();
});

document.addEventListener("visibilitychange", () => (document.hidden ? leave() : follow()));
addEventListener("pagehide", leave);

prepare(document);
follow();
root.dataset.ready = "yes";
