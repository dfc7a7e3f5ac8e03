// Hover and keyboard on the memory curves: the value at a time.
import { byteSize, duration, exact } from "./units.js";
import { readIsland } from "./unpack.js";

export function readCurve(figure) {
  const { times, series, left, right } = readIsland(figure);
  const svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const says = figure.querySelector(".curve-says");
  const rest = says.textContent;
  let at = -1;

  function show(k) {
    at = Math.min(Math.max(k, 0), times.length - 1);
    const { width } = svg.viewBox.baseVal;
    const span = times[times.length - 1] - times[0] || 1;
    const x = left + ((width - left - right) * (times[at] - times[0])) / span;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.classList.add("on");
    const values = series.map(({ name, values }) => `${name} ${byteSize(values[at])}`);
    says.textContent = `${duration(times[at])}: ${values.join(", ")}`;
    says.title = series.map(({ name, values }) => `${name} ${exact(values[at] ?? "–", "B")}`).join(", ");
  }

  function leave() {
    at = -1;
    cursor.classList.remove("on");
    says.textContent = rest;
  }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const { width } = svg.viewBox.baseVal;
    const x = ((event.clientX - box.left) / box.width) * width;
    const time = times[0] + ((x - left) / (width - left - right)) * (times[times.length - 1] - times[0]);
    let place = times.findIndex((value) => value > time);
    if (place < 0) place = times.length;
    show(place - 1);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (!step) return;
    show(at + step);
    event.preventDefault();
  });
}
