// What the reader has chosen lives in the address: #place&key=value&key=value. The place is a view, a section, or both
// (`gpu/kernels`); the rest are rank, sorting, filters, time range, theme.

const chosen = new Map();
const listeners = new Map();
let timer = 0;

function read() {
  chosen.clear();
  const [first, ...rest] = location.hash.slice(1).split("&");
  if (first && !first.includes("=")) chosen.set("at", decodeURIComponent(first));
  else rest.unshift(first);
  for (const [key, value] of new URLSearchParams(rest.join("&"))) chosen.set(key, value);
}

function address() {
  const entries = [...chosen].filter(([key]) => key !== "at").sort(([a], [b]) => (a < b ? -1 : 1));
  const place = encodeURIComponent(getState("at") ?? "").replace("%2F", "/");
  const parts = [place, String(new URLSearchParams(entries))].filter(Boolean);
  return parts.length ? `#${parts.join("&")}` : location.pathname + location.search;
}

function write() {
  timer = 0;
  history.replaceState(null, "", address());
}

export function getState(key) {
  return chosen.get(key) ?? null;
}

// Sets one key (null removes it); the address follows a moment later, so that a drag does not flood it.
export function setState(key, value) {
  if (getState(key) === value) return;
  if (value === null || value === "") chosen.delete(key);
  else chosen.set(key, String(value));
  if (!timer) timer = setTimeout(write, 150);
}

// Goes to a place, with other choices or the same; the reader can go back from it.
export function visit(place, choices = []) {
  for (const [key, value] of [["at", place], ...choices]) chosen.set(key, value);
  history.pushState(null, "", address());
  callBack();
}

// Calls back when the address is changed by the reader (back, forward, a pasted link).
export function onState(key, callback) {
  listeners.set(key, [...(listeners.get(key) ?? []), callback]);
}

function callBack() {
  for (const [key, callbacks] of listeners) for (const callback of callbacks) callback(getState(key));
}

addEventListener("hashchange", () => {
  read();
  callBack();
});
read();
