// The strip above the timeline: all of the time at once, with a window that can be dragged.

const HEIGHT = 40;

export class Overview {
  constructor(canvas, timeline) {
    this.canvas = canvas;
    this.timeline = timeline;
    this.context = canvas.getContext("2d");
    this.picture = document.createElement("canvas");
    this.stale = true;
    this.grip = null;
    canvas.addEventListener("pointerdown", (event) => this.#grab(event));
    canvas.addEventListener("pointermove", (event) => this.#drag(event));
    canvas.addEventListener("pointerup", () => (this.grip = null));
    canvas.addEventListener("pointercancel", () => (this.grip = null));
  }

  resize(width, scale) {
    this.width = width;
    this.scale = scale;
    this.canvas.style.width = `${width}px`;
    for (const canvas of [this.canvas, this.picture]) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(HEIGHT * scale);
    }
    this.stale = true;
  }

  #grab(event) {
    const { from, to } = this.timeline.view;
    const time = this.#time(event);
    this.canvas.setPointerCapture(event.pointerId);
    if (time < from || time > to) this.timeline.setView(time - (to - from) / 2, time + (to - from) / 2);
    this.grip = time - this.timeline.view.from;
  }

  #drag(event) {
    if (this.grip === null) return;
    const { from, to } = this.timeline.view;
    const low = this.#time(event) - this.grip;
    this.timeline.setView(low, low + to - from);
  }

  #time(event) {
    const box = this.canvas.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * this.timeline.events.span;
  }

  // Per column: time of GPU work by group where there is any, else of the outermost host events, over all ranks.
  #columns() {
    const { events } = this.timeline;
    const columns = Math.max(Math.floor(this.width / 2), 1);
    const bins = new Map();
    const gpu = events.lanes.some((lane) => lane.gpu);
    let lanes = 0;
    for (const lane of events.lanes) {
      if ((gpu ? !lane.gpu : lane.kind !== "host") || lane.side === "after") continue;
      lanes++;
      for (let i = lane.first; i < lane.first + lane.count; i++) {
        if (!gpu && (events.parent[i] >= 0 || events.end[i] < 0)) continue; // only the outermost of what is shown
        const group = events.group(i);
        if (!bins.has(group)) bins.set(group, new Float64Array(columns));
        spread(bins.get(group), events.start[i], events.start[i] + Math.max(events.duration[i], 0), events.span / columns);
      }
    }
    return { bins, lanes, columns };
  }

  #paint(palette) {
    const context = this.picture.getContext("2d");
    const { width, height } = this.picture;
    context.fillStyle = palette.panel;
    context.fillRect(0, 0, width, height);
    const { bins, columns } = this.#columns();
    const full = new Float64Array(columns);
    for (const values of bins.values()) values.forEach((value, k) => (full[k] += value));
    const highest = full.reduce((most, value) => Math.max(most, value), 0) || 1;
    const base = new Float64Array(columns);
    for (const [group, values] of [...bins].sort(([a], [b]) => a - b)) {
      context.fillStyle = palette.fills[group * 3];
      values.forEach((value, k) => {
        if (!value) return;
        const tall = (value / highest) * (height - 6 * this.scale);
        context.fillRect((k * width) / columns, height - base[k] - tall, width / columns + 0.5, tall);
        base[k] += tall;
      });
    }
    this.stale = false;
  }

  draw(palette) {
    if (!this.width) return;
    if (this.stale) this.#paint(palette);
    const { context, canvas, timeline } = this;
    context.drawImage(this.picture, 0, 0);
    const { span } = timeline.events;
    const left = Math.max((timeline.view.from / span) * canvas.width, 0);
    const right = Math.min((timeline.view.to / span) * canvas.width, canvas.width);
    context.fillStyle = palette.background;
    context.globalAlpha = 0.7;
    context.fillRect(0, 0, left, canvas.height);
    context.fillRect(right, 0, canvas.width - right, canvas.height);
    context.globalAlpha = 1;
    context.strokeStyle = palette.accent;
    context.lineWidth = 1.5 * this.scale;
    if (right - left < canvas.width - 1) context.strokeRect(left, this.scale, Math.max(right - left, 3), canvas.height - 2 * this.scale);
  }
}

// Adds a span to bins of equal width.
function spread(bins, start, end, width) {
  const first = Math.max(Math.floor(start / width), 0);
  const last = Math.min(Math.floor(end / width), bins.length - 1);
  for (let k = first; k <= last; k++) bins[k] += Math.min(end, (k + 1) * width) - Math.max(start, k * width);
}
