(() => {
  "use strict";
  const drawing = document.getElementById("drawing");
  const boxes = [...drawing.querySelectorAll(".box")];
  const lines = [...drawing.querySelectorAll(".line")];
  const said = document.getElementById("description");
  const hint = said.textContent;
  const whole = drawing.dataset.view.split(" ").map(Number);
  let view = [...whole];

  const show = () => drawing.setAttribute("viewBox", view.map((v) => v.toFixed(1)).join(" "));
  const scale = () => Math.max(view[2] / drawing.clientWidth, view[3] / drawing.clientHeight);
  // As high as the drawing needs; letters about as large as those of the page, around what was chosen or the beginning.
  function readable() {
    const least = whole[2] / drawing.clientWidth;
    const factor = Math.min(Math.max(least, 1), 1.2);
    drawing.style.height = `${Math.max(180, Math.min(whole[3] / factor, drawing.clientHeight))}px`;
    const { clientWidth: width, clientHeight: height } = drawing;
    if (whole[2] <= width * factor && whole[3] <= height * factor) return;
    view = [whole[0], whole[1] + Math.max(0, (whole[3] - height * factor) / 2), width * factor, height * factor];
    const chosen = drawing.querySelector(".chosen");
    if (chosen) center(chosen);
  }
  function center(box) {
    const [x, y] = /translate\(([-\d.]+) ([-\d.]+)\)/.exec(box.getAttribute("transform")).slice(1).map(Number);
    view[0] = x + 116 - view[2] / 2;
    view[1] = y + 25 - view[3] / 2;
  }
  function zoom(factor, x = view[0] + view[2] / 2, y = view[1] + view[3] / 2) {
    const next = Math.min(Math.max(view[2] / factor, 160), 4 * whole[2] + 400);
    const ratio = next / view[2];
    view = [x - (x - view[0]) * ratio, y - (y - view[1]) * ratio, next, view[3] * ratio];
    show();
  }
  function fit() {
    view = [...whole];
    show();
  }
  function point(event) {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(drawing.getScreenCTM().inverse());
    return [at.x, at.y];
  }

  function choose(box) {
    const number = box ? box.dataset.box : null;
    drawing.classList.toggle("choosing", Boolean(box));
    const before = new Set();
    const after = new Set();
    for (const line of lines) {
      const near = box && (line.dataset.from === number || line.dataset.to === number);
      line.classList.toggle("near", Boolean(near));
      if (!near) continue;
      if (line.dataset.to === number) before.add(line.dataset.from);
      else after.add(line.dataset.to);
    }
    for (const other of boxes) {
      other.classList.toggle("selected", other === box);
      other.classList.toggle("near", before.has(other.dataset.box) || after.has(other.dataset.box));
    }
    if (!box) {
      said.textContent = hint;
      return;
    }
    const name = document.createElement("b");
    name.textContent = box.getAttribute("aria-label");
    said.replaceChildren(name, ` · waits for ${before.size} boxes, ${after.size} wait for it`);
  }

  for (const box of boxes) {
    box.addEventListener("click", () => choose(box));
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose(box);
    });
    box.addEventListener("focus", () => {
      if (!box.matches(":focus-visible")) return;
      center(box);
      show();
    });
  }
  for (const button of document.querySelectorAll("[data-goto]")) {
    button.addEventListener("click", () => {
      const box = boxes[Number(button.dataset.goto)];
      choose(box);
      center(box);
      show();
      drawing.scrollIntoView({ block: "nearest" });
    });
  }
  for (const button of document.querySelectorAll("[data-zoom]")) {
    const factor = Number(button.dataset.zoom);
    button.addEventListener("click", () => (factor ? zoom(factor) : fit()));
  }

  let drag = null;
  drawing.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, moved: false };
  });
  addEventListener("pointermove", (event) => {
    if (!drag) return;
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    if (!drag.moved && Math.hypot(dx, dy) < 4) return;
    drag = { x: event.clientX, y: event.clientY, moved: true };
    drawing.classList.add("dragging");
    view[0] -= dx * scale();
    view[1] -= dy * scale();
    show();
  });
  addEventListener("pointerup", (event) => {
    drawing.classList.remove("dragging");
    if (drag && !drag.moved && event.target === drawing) choose(null);
    drag = null;
  });
  drawing.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.0015), ...point(event));
  }, { passive: false });

  const find = document.getElementById("find");
  const found = document.getElementById("found");
  find.addEventListener("input", () => {
    const wanted = find.value.trim().toLowerCase();
    const matches = boxes.filter((box) => {
      const match = wanted !== "" && box.dataset.name.includes(wanted);
      box.classList.toggle("match", match);
      return match;
    });
    found.textContent = wanted ? `${matches.length} of ${boxes.length} boxes` : "";
    if (matches.length) {
      center(matches[0]);
      show();
    }
  });

  document.getElementById("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme
      ? document.documentElement.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    try {
      localStorage.setItem("traceloom-theme", document.documentElement.dataset.theme);
    } catch {
      // storage is closed to pages of some browsers' file: addresses; the choice then holds for this page
    }
  });
  addEventListener("keydown", (event) => {
    if (event.target.closest?.("input") || event.ctrlKey || event.metaKey || event.altKey) {
      if (event.key === "Escape") find.blur();
      return;
    }
    if (event.key === "/") find.focus();
    else if (event.key === "t") document.getElementById("theme").click();
    else if (event.key === "f") fit();
    else if (event.key === "+") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "Escape") choose(null);
    else return;
    event.preventDefault();
  });

  readable();
  show();
  const chosen = drawing.querySelector(".chosen");
  if (chosen) choose(chosen);
})();
