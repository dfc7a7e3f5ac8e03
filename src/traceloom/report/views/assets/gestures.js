// Mouse, touch and keyboard on the timeline.

const CLICK = 4; // pixels a pointer may move and still be a click
const NUDGE = 0.18; // share of the width one key press moves
const STEP_IN = 0.7; // factor of one zoom by key

export function listenToGestures(timeline) {
  const pointers = new Map();
  const { canvas, scroller } = timeline;
  let drag = null;

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button > 0) return;
    scroller.focus({ preventScroll: true });
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, place(event));
    const at = place(event);
    drag = { at, last: at, moved: false, range: event.shiftKey, anchor: timeline.timeAt(at.x) };
  });

  canvas.addEventListener("pointermove", (event) => {
    const at = place(event);
    if (!pointers.has(event.pointerId)) {
      timeline.hover(at);
      return;
    }
    if (pointers.size === 2) pinch(timeline, pointers, event.pointerId, at);
    else if (drag) follow(timeline, drag, at);
    pointers.set(event.pointerId, at);
  });

  const release = (event) => {
    pointers.delete(event.pointerId);
    if (!drag || pointers.size) return;
    if (!drag.moved) {
      timeline.setRange(null);
      timeline.select(timeline.eventAt(drag.at.x, drag.at.y));
    }
    drag = null;
    canvas.classList.remove("dragging");
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => timeline.hover(null));
  canvas.addEventListener("dblclick", () => {
    if (timeline.selected >= 0) timeline.zoomTo(timeline.selected);
  });

  scroller.addEventListener("wheel", (event) => wheel(timeline, event, place(event)), { passive: false });
  scroller.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("button") && (event.key === "Enter" || event.key === " ")) return; // folds a lane
    if (key(timeline, event)) event.preventDefault();
  });
}

// A drag on the ruler measures, as a drag with Shift does.
export function measureOnRuler(timeline) {
  const { canvas } = timeline.ruler;
  let anchor = null;
  const time = (event) => timeline.timeAt(event.clientX - canvas.getBoundingClientRect().left);
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    anchor = time(event);
    timeline.setRange(null);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (anchor === null) return;
    const here = time(event);
    timeline.setRange({ from: Math.min(anchor, here), to: Math.max(anchor, here) });
  });
  const release = () => (anchor = null);
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
}

function follow(timeline, drag, at) {
  if (!drag.moved && Math.hypot(at.x - drag.at.x, at.y - drag.at.y) < CLICK) return;
  drag.moved = true;
  timeline.canvas.classList.add("dragging");
  timeline.hover(null);
  if (drag.range) {
    const here = timeline.timeAt(at.x);
    timeline.setRange({ from: Math.min(drag.anchor, here), to: Math.max(drag.anchor, here) });
  } else {
    timeline.pan(drag.last.x - at.x);
    timeline.scroller.scrollTop += drag.last.y - at.y;
  }
  drag.last = at;
}

function pinch(timeline, pointers, moved, at) {
  const [other] = [...pointers].filter(([id]) => id !== moved).map(([, point]) => point);
  const before = Math.abs(pointers.get(moved).x - other.x);
  const now = Math.abs(at.x - other.x);
  if (before > 4 && now > 4) timeline.zoom(before / now, (at.x + other.x) / 2);
}

// Sideways or with Shift: pan. With Ctrl (also a pinch on a touch pad), or once the timeline has the focus: zoom.
// Otherwise the page scrolls on, so that the timeline is no trap.
function wheel(timeline, event, at) {
  const unit = event.deltaMode === 1 ? 16 : 1;
  const focused = timeline.scroller.contains(document.activeElement);
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    timeline.pan((event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX) * unit);
  } else if (event.ctrlKey || event.metaKey || (focused && !event.altKey)) {
    timeline.zoom(Math.exp(event.deltaY * unit * (event.ctrlKey ? 0.008 : 0.002)), Math.max(at.x, 0));
  } else return;
  event.preventDefault();
}

const KEYS = {
  w: (timeline) => timeline.zoom(STEP_IN),
  s: (timeline) => timeline.zoom(1 / STEP_IN),
  "+": (timeline) => timeline.zoom(STEP_IN),
  "-": (timeline) => timeline.zoom(1 / STEP_IN),
  a: (timeline) => timeline.pan(-NUDGE * timeline.painter.width),
  d: (timeline) => timeline.pan(NUDGE * timeline.painter.width),
  ArrowLeft: (timeline) => timeline.pan(-NUDGE * timeline.painter.width),
  ArrowRight: (timeline) => timeline.pan(NUDGE * timeline.painter.width),
  ArrowUp: (timeline) => (timeline.scroller.scrollTop -= 54),
  ArrowDown: (timeline) => (timeline.scroller.scrollTop += 54),
  f: (timeline) => timeline.fit(),
  "0": (timeline) => timeline.fit(),
  ".": (timeline) => neighbour(timeline, 1),
  ",": (timeline) => neighbour(timeline, -1),
  p: (timeline) => parent(timeline),
  l: (timeline) => linked(timeline),
  m: (timeline) => timeline.enlarge(),
  c: (timeline) => timeline.path.toggle(),
  Enter: (timeline) => {
    if (timeline.range) timeline.setView(timeline.range.from, timeline.range.to);
    else if (timeline.selected >= 0) timeline.zoomTo(timeline.selected);
    else first(timeline);
  },
  Escape: (timeline) => {
    if (timeline.selected < 0 && !timeline.range && timeline.root.classList.contains("large")) timeline.enlarge();
    timeline.setRange(null);
    timeline.select(-1);
  },
};

function key(timeline, event) {
  const action = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  action?.(timeline);
  return Boolean(action);
}

// The next or previous event on the selected one's row.
function neighbour(timeline, direction) {
  const { selected, events } = timeline;
  if (selected < 0) return first(timeline);
  const lane = events.laneOf(selected);
  const { indices } = lane.rows[events.row[selected]];
  const next = indices[indices.indexOf(selected) + direction];
  if (next !== undefined) timeline.select(next, true);
}

function parent(timeline) {
  const above = timeline.selected >= 0 ? timeline.events.parent[timeline.selected] : -1;
  if (above >= 0) timeline.select(above, true);
}

function linked(timeline) {
  const { events, selected } = timeline;
  if (selected < 0) return;
  if (events.twin) {
    if (events.twin[selected] >= 0) timeline.select(events.twin[selected], true);
    return;
  }
  const other = events.launch[selected] >= 0 ? events.launch[selected] : events.gpuWorkOf(selected)[0] ?? -1;
  if (other >= 0) timeline.select(other, true);
}

// The first event in view on the first row in view: where the keyboard starts.
function first(timeline) {
  for (const [line] of timeline.rows.inView(timeline.scroller.scrollTop, timeline.painter.height)) {
    if (line.kind !== "row") continue;
    const found = line.row.indices.find((i) => timeline.events.end[i] > timeline.view.from);
    if (found !== undefined && timeline.events.start[found] < timeline.view.to) return timeline.select(found, true);
  }
  return undefined;
}
