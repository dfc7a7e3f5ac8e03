// Keeps motion smooth on fine screens: where frames come too slowly, a moving picture is drawn with fewer pixels and
// drawn again, sharp, as soon as it rests.

const SLOW = 32; // milliseconds between frames
const PAUSE = 160; // without a frame: the picture rests

export class Pace {
  constructor(changed) {
    this.changed = changed;
    this.coarse = false;
    this.average = 0;
    this.last = -Infinity;
    this.timer = 0;
  }

  // To be called with the time of every frame; calls back when the resolution is to change.
  frame(now) {
    const gap = now - this.last;
    this.last = now;
    if (gap > PAUSE) this.average = 0; // the first frame of a motion
    else this.average = this.average ? this.average * 0.7 + gap * 0.3 : gap;
    if (!this.coarse && this.average > SLOW && window.devicePixelRatio > 1) this.#set(true);
    if (!this.coarse) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#set(false), PAUSE);
  }

  #set(coarse) {
    this.coarse = coarse;
    this.average = 0;
    this.changed();
  }

  // Device pixels per CSS pixel to draw with now.
  get scale() {
    return this.coarse ? 1 : window.devicePixelRatio || 1;
  }
}
