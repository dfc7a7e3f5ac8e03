// The events of the timeline in typed arrays, and the rows they are drawn on.
import { unpack, unsparse, unzigzag } from "./unpack.js";
import { Row } from "./levels.js";

const GROUPS = {
  kernel: "compute", copy: "memory", fill: "memory", op: "op", annotation: "annotation", gpu_annotation: "annotation",
  runtime: "launch", driver: "launch", sync: "sync", gpu_event: "sync", python: "python", overhead: "overhead",
  collective: "communication", command: "compute", counter_range: "annotation", profiler: "other", other: "other",
};
export const GROUP_NAMES = [
  "compute", "communication", "memory", "op", "annotation", "launch", "sync", "python", "overhead", "other",
];
const GPU_WORK = new Set(["kernel", "copy", "fill"]);
const FEWEST_ROOTS = 3; // Python frames around all of a lane that are worth folding

export class Events {
  constructor({ header, columns }) {
    const count = columns.start.length;
    const unit = header.unit_ns;
    this.count = count;
    this.span = Math.max(header.span_ns, 1);
    this.epoch = BigInt(header.epoch_ns);
    this.shift = header.shift_ns ?? 0; // of the times here against those of the tables
    this.ranks = header.ranks;
    this.lanes = header.lanes;
    this.facts = header.facts;
    this.path = header.path ?? null;
    this.names = header.labels.map(([name]) => name);
    this.shortNames = this.names.map((name, label) => header.short[label] ?? name);
    this.categories = header.labels.map(([, code]) => header.categories[code]);
    const communication = new Set(header.communication);
    this.groups = Uint8Array.from(this.categories, (category, label) =>
      GROUP_NAMES.indexOf(communication.has(label) ? "communication" : GROUPS[category] ?? "other"));
    this.gpuLabels = this.categories.map((category) => GPU_WORK.has(category));
    this.label = Uint32Array.from(columns.label);
    this.fact = Uint32Array.from(columns.fact);
    this.duration = columns.duration.map((value) => unzigzag(value) * unit);
    this.clip = columns.clip.map((value) => unzigzag(value) * unit);
    this.correlation = unsparse(columns.correlation, NaN);
    this.launch = Int32Array.from(unsparse(columns.launch, 0), (place) => place - 1);
    this.forward = Int32Array.from(unsparse(columns.forward, 0), (place) => place - 1);
    // Of a what-if: the same on the lane of the other side, -1 where it is not there; and whether the changes are about it.
    this.twin = columns.twin ? Int32Array.from(unsparse(columns.twin, 0), (place) => place - 1) : null;
    this.changed = columns.changed ?? null;
    this.start = this.#starts(columns.start, unit);
    this.end = new Float64Array(count); // as drawn: clipped to the parent's
    this.parent = new Int32Array(count).fill(-1);
    this.row = new Uint16Array(count);
    this.python = this.categories.map((category) => category === "python");
    for (const lane of this.lanes) this.#prepare(lane);
  }

  #starts(steps, unit) {
    const start = new Float64Array(this.count);
    let first = 0;
    for (const lane of this.lanes) {
      lane.first = first;
      let time = 0;
      for (let i = first; i < first + lane.count; i++) start[i] = (time += steps[i]) * unit;
      first += lane.count;
    }
    return start;
  }

  #prepare(lane) {
    lane.nests = lane.kind === "host" || lane.kind === "other";
    lane.gpu = lane.kind === "device";
    lane.hasPython = false;
    for (let i = lane.first; i < lane.first + lane.count && !lane.hasPython; i++) lane.hasPython = this.python[this.label[i]];
  }

  // Puts a lane's events on rows: by nesting on host threads, on the first free row on streams. `foldRoots` leaves out
  // the Python frames that stand alone around all others, as interpreter and launcher do; the innermost of them stays.
  layOut(lane, hidePython, foldRoots) {
    let rows = lane.nests ? this.#nest(lane, hidePython) : this.#spread(lane);
    const alone = rows.findIndex(({ length, 0: first }) => length > 1 || !this.python[this.label[first]]);
    const roots = Math.max((alone < 0 ? rows.length : alone) - 1, 0);
    lane.roots = roots < FEWEST_ROOTS ? 0 : roots;
    if (lane.roots && foldRoots) {
      for (const [event] of rows.slice(0, roots)) this.end[event] = -1;
      rows = rows.slice(roots);
      rows.forEach((indices, depth) => indices.forEach((i) => (this.row[i] = depth)));
    }
    lane.rows = rows.map((indices) => new Row(this, Int32Array.from(indices)));
  }

  #nest(lane, hidePython) {
    const { start, duration, clip, end, parent, row } = this;
    const rows = [];
    const open = [];
    for (let i = lane.first; i < lane.first + lane.count; i++) {
      if (hidePython && this.python[this.label[i]]) {
        end[i] = -1;
        continue;
      }
      while (open.length && end[open[open.length - 1]] <= start[i]) open.pop();
      const above = open.length ? open[open.length - 1] : -1;
      const natural = start[i] + Math.max(duration[i], 0) - clip[i];
      parent[i] = above;
      end[i] = above >= 0 ? Math.min(natural, end[above]) : natural;
      row[i] = open.length;
      (rows[open.length] ??= []).push(i);
      open.push(i);
    }
    return rows;
  }

  #spread(lane) {
    const { start, duration, end, row } = this;
    const rows = [];
    const free = [];
    for (let i = lane.first; i < lane.first + lane.count; i++) {
      end[i] = start[i] + Math.max(duration[i], 0);
      let place = free.findIndex((time) => time <= start[i]);
      if (place < 0) place = free.length;
      free[place] = end[i];
      row[i] = place;
      (rows[place] ??= []).push(i);
    }
    return rows;
  }

  name(i) {
    return this.names[this.label[i]];
  }

  category(i) {
    return this.categories[this.label[i]];
  }

  group(i) {
    return this.groups[this.label[i]];
  }

  isGpuWork(i) {
    return this.gpuLabels[this.label[i]];
  }

  // The lane of an event, by bisection of the lanes' first events.
  laneOf(i) {
    let low = 0;
    let high = this.lanes.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.lanes[middle].first <= i) low = middle;
      else high = middle - 1;
    }
    return this.lanes[low];
  }

  // [number, name, start, end] of the step at an event's start; for GPU work, at the start of its launch.
  stepOf(i) {
    const at = this.isGpuWork(i) ? this.launch[i] : i;
    if (at < 0) return null;
    const rank = this.ranks[this.laneOf(at).trace];
    return rank.steps.find(([, , start, end]) => start <= this.start[at] && this.start[at] < end) ?? null;
  }

  // The GPU work of a launch, or of all launches inside a host event.
  gpuWorkOf(i) {
    const work = [];
    const lane = this.laneOf(i);
    const last = lane.first + lane.count;
    for (let k = 0; k < this.count; k++) {
      const launch = this.launch[k];
      if (launch < lane.first || launch >= last || !this.isGpuWork(k)) continue;
      if (launch === i || (launch > i && this.start[launch] < this.end[i])) work.push(k);
    }
    return work;
  }
}

export async function readEvents(text) {
  return new Events(await unpack(text));
}
