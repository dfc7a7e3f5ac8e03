// What the reader has chosen (rank, sorting, filters, time range, theme) lives in the address: #key=value&key=value.

const chosen = new Map();
const listeners = new Map();
let timer = 0;

function read() {
  chosen.clear();
  const text = location.hash.slice(1);
  if (!text) return;
  if (!text.includes("=")) chosen.set("at", text); // a plain link to a section
  else for (const [key, value] of new URLSearchParams(text)) chosen.set(key, value);
}

function write() {
  timer = 0;
  const entries = [...chosen].sort(([a], [b]) => (a < b ? -1 : 1));
  const hash = entries.length ? `#${new URLSearchParams(entries)}` : location.pathname + location.search;
  history.replaceState(null, "", hash);
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

// Calls back when the address is changed by the reader (back, forward, a pasted link).
export function onState(key, callback) {
  listeners.set(key, [...(listeners.get(key) ?? []), callback]);
}

addEventListener("hashchange", () => {
  read();
  for (const [key, callbacks] of listeners) for (const callback of callbacks) callback(getState(key));
});
read();
