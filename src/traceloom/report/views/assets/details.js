// What is known about the selected event or time range, the tooltip, and the ways on from there.
import { element } from "./element.js";
import { GROUP_NAMES } from "./events.js";
import { bothSides, inShort } from "./sides.js";
import { reading, readingAt } from "./tracks.js";
import { byteSize, duration, exact, grouped, share } from "./units.js";

const RECORD = "\u001e";
const UNIT = "\u001f";
const FACT_BYTES = new Set(["bytes", "bytes in", "bytes out", "shared memory"]);
const RANGE_NOTE = "Sums of the time inside it over all ranks; work that overlaps counts twice.";
const MOST = 6; // rows of the sums of a range

export class Details {
  constructor(timeline) {
    this.timeline = timeline;
    this.events = timeline.events;
    this.panel = timeline.part("details");
    this.tip = timeline.part("tip");
    this.idle = [...this.panel.childNodes];
    timeline.on("select", (event) => this.#select(event));
    timeline.on("range", (range) => this.#range(range));
    timeline.on("hover", (event, at) => this.#hover(event, at));
  }

  #hover(event, at) {
    const { tip, timeline } = this;
    const said = event < 0 ? this.#track(at) : this.#event(event);
    tip.hidden = !said;
    if (!said) return;
    tip.replaceChildren(element("b", { textContent: said[0] }), element("span", { textContent: said[1] }));
    const box = timeline.canvas.getBoundingClientRect();
    const outer = timeline.root.getBoundingClientRect();
    const left = Math.min(box.left - outer.left + at.x + 14, outer.width - tip.offsetWidth - 8);
    const below = box.top - outer.top + at.y + 18;
    tip.style.transform = `translate(${Math.max(left, 0)}px, ${below}px)`;
  }

  #event(event) {
    const { events } = this;
    if (events.twin) return [events.shortNames[events.label[event]], inShort(events, event)];
    return [events.shortNames[events.label[event]], `${duration(events.duration[event])} · ${events.category(event)}`];
  }

  // Name and value of the curve under the pointer.
  #track(at) {
    const curve = at ? this.timeline.curveAt(at.y) : null;
    const value = curve ? readingAt(curve, this.timeline.timeAt(at.x)) : null;
    return value === null ? null : [curve.name, reading(value)];
  }

  #select(event) {
    this.timeline.work = null;
    if (event < 0) {
      this.panel.replaceChildren(...this.idle);
      return;
    }
    const { events } = this;
    const lane = events.laneOf(event);
    const work = events.isGpuWork(event) ? [] : events.gpuWorkOf(event);
    this.timeline.work = work;
    const facts = element("dl", { className: "tl-facts" }, ...this.#rows(event, lane, work));
    this.panel.replaceChildren(
      element("h3", { className: "tl-name", textContent: events.name(event) }),
      this.#ways(event, work),
      facts,
    );
  }

  #absolute(event) {
    const { start, epoch } = this.events;
    return `${exact(start[event], "ns after the epoch")} (${epoch + BigInt(start[event])} ns)`;
  }

  #rows(event, lane, work) {
    const { events } = this;
    const rank = events.ranks[lane.trace];
    const step = events.stepOf(event);
    const times = events.twin ? bothSides(events, event) : [
      ["start", `${grouped((events.start[event] / 1e6).toFixed(3))}\u202fms`, this.#absolute(event)],
      ["duration", duration(events.duration[event]), exact(events.duration[event], "ns")],
      ["step", step ? `${step[1]}` : "–", step ? "" : "the event lies outside all steps, or its launch was not recorded"],
    ];
    const rows = [
      ["kind", kindOf(events, event)],
      ["where", `${rank.rank === null ? `trace ${lane.trace + 1}` : `rank ${rank.rank}`} · ${lane.name}`],
      ...times,
    ];
    if (!Number.isNaN(events.correlation[event])) rows.push(["correlation", String(events.correlation[event])]);
    const launch = events.launch[event];
    if (launch >= 0) {
      const delay = events.start[event] - events.start[launch];
      rows.push(["after its launch", duration(delay), exact(delay, "ns from the start of the launch call to the start")]);
    }
    if (work.length) {
      const total = work.reduce((sum, k) => sum + events.duration[k], 0);
      rows.push(["GPU work", `${grouped(work.length)}, ${duration(total)} in sum`, exact(total, "ns")]);
    }
    rows.push(...factsOf(events, event));
    const operator = operatorOf(events, event);
    if (operator >= 0) rows.push(["operator", events.name(operator)], ...factsOf(events, operator));
    return rows.map(([key, value, more]) =>
      element("div", {}, element("dt", { textContent: key }), element("dd", { textContent: value, title: more ?? "" })));
  }

  #ways(event, work) {
    const { events, timeline } = this;
    const go = (text, target, hint) =>
      target >= 0 && target < events.count
        ? element("button", { type: "button", title: hint, textContent: text, onclick: () => timeline.select(target, true) })
        : null;
    const backward = events.forward.indexOf(event);
    return element(
      "div",
      { className: "tl-ways" },
      go("Launch", events.launch[event], "the call that submitted this work (l)"),
      go("Operator", operatorOf(events, event), "the operator that launched this work"),
      go("GPU work", work[0] ?? -1, "the first GPU work launched in here (l)"),
      go("Parent", events.end[event] >= 0 ? events.parent[event] : -1, "the event around this one (p)"),
      go(events.laneOf(event).side === "before" ? "After" : "Before", events.twin?.[event] ?? -1, "the same on the other side (l)"),
      go("Forward", events.forward[event], "the forward operator of this backward one"),
      go("Backward", backward, "the backward operator of this forward one"),
      element("button", { type: "button", textContent: "Zoom to it", title: "(Enter)", onclick: () => timeline.zoomTo(event) }),
    );
  }

  #range(range) {
    if (!range) {
      if (this.timeline.selected < 0) this.panel.replaceChildren(...this.idle);
      return;
    }
    const wide = range.to - range.from;
    const { sums, names, count } = sumRange(this.events, range);
    const groups = [...sums].filter(([, ns]) => ns > 0).sort((a, b) => b[1] - a[1]);
    const longest = [...names].sort((a, b) => b[1] - a[1]).slice(0, MOST);
    const row = ([key, ns]) => {
      const value = { textContent: `${duration(ns)} · ${share(ns, wide)}`, title: exact(Math.round(ns), "ns") };
      return element("div", {}, element("dt", { textContent: key }), element("dd", value));
    };
    const zoom = () => this.timeline.setView(range.from, range.to);
    this.panel.replaceChildren(
      element("h3", { className: "tl-name", textContent: `${duration(wide)} selected` }),
      element("p", { className: "quiet", textContent: `${grouped(count)} events touch it. ${RANGE_NOTE}` }),
      element("div", { className: "tl-ways" }, element("button", { type: "button", textContent: "Zoom to it", title: "(Enter)", onclick: zoom })),
      element("dl", { className: "tl-facts" }, ...groups.map(row)),
      element("h4", { textContent: "Longest GPU work, or operators where there is none" }),
      element("dl", { className: "tl-facts tl-long" }, ...longest.map(([label, ns]) => row([this.events.shortNames[label], ns]))),
    );
  }
}

// Names and values of what the profiler recorded of an event.
function factsOf(events, event) {
  const text = events.fact[event] ? events.facts[events.fact[event] - 1] : "";
  return (text ? text.split(RECORD) : []).map((pair) => {
    const [key, value] = pair.split(UNIT);
    return FACT_BYTES.has(key) ? [key, byteSize(Number(value)), `${value} B`] : [key, value];
  });
}

// The innermost operator around the launch of GPU work, -1 where there is none.
function operatorOf(events, event) {
  let at = events.isGpuWork(event) ? events.launch[event] : -1;
  while (at >= 0 && events.category(at) !== "op") at = events.parent[at];
  return at;
}

function kindOf(events, event) {
  const category = events.category(event);
  const group = GROUP_NAMES[events.group(event)];
  return group === category || !events.isGpuWork(event) ? category : `${category} · ${group}`;
}

// Sums of GPU work by group and of outermost host events, clipped to the range; and by name.
function sumRange(events, { from, to }) {
  const sums = new Map();
  const names = new Map();
  const hostNames = new Map();
  let count = 0;
  for (const lane of events.lanes) {
    const side = lane.side ? `${lane.side}: ` : "";
    for (let i = lane.first; i < lane.first + lane.count; i++) {
      const inside = Math.min(events.start[i] + events.duration[i], to) - Math.max(events.start[i], from);
      if (inside <= 0) continue;
      count++;
      const label = events.label[i];
      if (events.isGpuWork(i)) {
        const key = `${side}GPU ${GROUP_NAMES[events.groups[label]]}`;
        sums.set(key, (sums.get(key) ?? 0) + inside);
        if (lane.side !== "after") names.set(label, (names.get(label) ?? 0) + inside);
      } else if (lane.kind === "host" && events.category(i) === "op") {
        const above = events.parent[i];
        if (above < 0 || events.category(above) !== "op") {
          const key = `${side}host operators`;
          sums.set(key, (sums.get(key) ?? 0) + inside);
          if (lane.side !== "after") hostNames.set(label, (hostNames.get(label) ?? 0) + inside);
        }
      }
    }
  }
  return { sums, names: names.size ? names : hostNames, count };
}
