// Levels of detail: a row of many events, merged once into runs that are about as wide as a pixel.

const FEW = 400; // rows with fewer events are drawn as they are
const FACTOR = 4; // each level merges runs four times as wide as the one below

function mergeRuns(below, width) {
  const { start, end, event, busy } = below;
  const out = { width, start: [], end: [], event: [], busy: [] };
  let open = false;
  let heaviest = 0;
  const last = () => out.start.length - 1;
  for (let i = 0; i < start.length; i++) {
    const wide = end[i] - start[i] >= width;
    if (!open || wide || end[i] - out.start[last()] > width) {
      out.start.push(start[i]);
      out.end.push(end[i]);
      out.event.push(event[i]);
      out.busy.push(busy[i]);
      heaviest = busy[i];
      open = !wide;
      continue;
    }
    const run = last();
    out.end[run] = end[i];
    out.busy[run] += busy[i];
    if (busy[i] > heaviest) {
      heaviest = busy[i];
      out.event[run] = event[i];
    }
  }
  return {
    width,
    start: Float64Array.from(out.start),
    end: Float64Array.from(out.end),
    event: Int32Array.from(out.event),
    busy: Float64Array.from(out.busy),
  };
}

export class Row {
  constructor(events, indices) {
    this.events = events;
    this.indices = indices;
    this.count = indices.length;
    const start = Float64Array.from(indices, (i) => events.start[i]);
    const end = Float64Array.from(indices, (i) => events.end[i]);
    const busy = end.map((time, k) => time - start[k]);
    this.levels = [{ width: 0, start, end, event: indices, busy }];
    this.deep = this.count <= FEW;
  }

  // The coarsest level whose runs are not wider than `width` nanoseconds.
  level(width) {
    if (!this.deep) this.#deepen();
    let best = this.levels[0];
    for (const level of this.levels) if (level.width <= width) best = level;
    return best;
  }

  #deepen() {
    const { start, end } = this.levels[0];
    const span = end[end.length - 1] - start[0];
    let width = Math.max(span / this.count / 4, 1);
    for (let level = this.levels[0]; level.start.length > FEW / 4 && width < span; width *= FACTOR) {
      level = mergeRuns(level, width);
      this.levels.push(level);
    }
    this.deep = true;
  }

  // The row's events that a search found; kept until the next search.
  found(search) {
    if (this.foundFor !== search) {
      this.foundFor = search;
      this.foundEvents = this.indices.filter((i) => search.labels[this.events.label[i]]);
    }
    return this.foundEvents;
  }

  // The event at a time, or the nearest within `reach` nanoseconds; -1 where there is none.
  at(time, reach) {
    const { start, end } = this.levels[0];
    let place = firstEndingAfter(end, time - reach);
    let best = -1;
    let distance = Infinity;
    for (; place < start.length && start[place] <= time + reach; place++) {
      const away = Math.max(start[place] - time, time - end[place], 0);
      if (away <= distance) {
        distance = away;
        best = this.indices[place];
      }
      if (away === 0) break;
    }
    return best;
  }
}

// The first run that ends after a time; the ends of a row ascend.
export function firstEndingAfter(end, time) {
  let low = 0;
  let high = end.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}
