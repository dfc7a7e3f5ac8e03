// Finds events by name, counts them, and steps through them in the order of time.
import { duration, grouped } from "./units.js";
import { getState, onState, setState } from "./state.js";

export class Search {
  constructor(timeline) {
    this.timeline = timeline;
    this.input = timeline.part("search");
    this.count = timeline.part("count");
    this.previous = timeline.part("previous");
    this.next = timeline.part("next");
    this.input.addEventListener("input", () => this.find(this.input.value));
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") this.find((this.input.value = ""));
    });
    this.previous.addEventListener("click", () => this.step(-1));
    this.next.addEventListener("click", () => this.step(1));
    onState("find", (value) => this.find((this.input.value = value ?? "")));
    this.find((this.input.value = getState("find") ?? ""));
  }

  find(text) {
    const { events } = this.timeline;
    const wanted = text.trim().toLowerCase();
    setState("find", wanted || null);
    this.order = null;
    this.at = -1;
    let total = 0;
    let sum = 0;
    let longest = 0;
    if (wanted) {
      const labels = Uint8Array.from(events.names, (name) => Number(name.toLowerCase().includes(wanted)));
      for (let i = 0; i < events.count; i++) {
        if (!labels[events.label[i]]) continue;
        total++;
        sum += Math.max(events.duration[i], 0);
        longest = Math.max(longest, events.duration[i]);
      }
      this.timeline.search = { labels };
    } else this.timeline.search = null;
    this.total = total;
    this.previous.disabled = this.next.disabled = total === 0;
    const times = `${duration(sum)} in sum, ${duration(sum / total)} each, longest ${duration(longest)}`;
    this.count.textContent = !wanted ? "" : total ? `${grouped(total)} found: ${times}` : "nothing found";
    this.timeline.request();
  }

  step(direction) {
    if (!this.total) return;
    const { events, search } = this.timeline;
    if (!this.order) {
      const found = [];
      for (let i = 0; i < events.count; i++) if (search.labels[events.label[i]]) found.push(i);
      this.order = found.sort((a, b) => events.start[a] - events.start[b]);
    }
    const from = this.timeline.view.from;
    if (this.at < 0) {
      const visible = this.order.findIndex((i) => events.start[i] >= from);
      this.at = direction > 0 ? Math.max(visible, 0) : (visible - 1 + this.total) % this.total;
    } else this.at = (this.at + direction + this.total) % this.total;
    const event = this.order[this.at];
    this.count.textContent = `${grouped(this.at + 1)} of ${grouped(this.total)}: ${duration(events.duration[event])}`;
    this.timeline.select(event, true);
  }
}
