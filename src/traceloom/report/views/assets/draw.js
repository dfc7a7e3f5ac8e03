// Draws the rows of the timeline. What is narrower than a few pixels goes, pixel by pixel, into a strip of one line per
// row that is stretched to the row's height; the rest are rectangles with names. So the cost follows the pixels on
// the screen, not the number of events.
import { firstEndingAfter } from "./levels.js";

const WIDE = 2.5; // device pixels from which an event is a rectangle of its own
const NAMED = 34; // CSS pixels from which it shows its name
const MAX_NAMES = 900; // per frame; the widest are kept

export class Painter {
  constructor(canvas, events) {
    this.canvas = canvas;
    this.events = events;
    this.context = canvas.getContext("2d", { alpha: false });
    this.strip = document.createElement("canvas");
    this.stripContext = this.strip.getContext("2d", { alpha: false });
  }

  resize(width, height, scale) {
    this.width = width;
    this.height = height;
    this.scale = scale;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.strip.width = this.canvas.width;
    this.strip.height = 1;
    this.image = this.stripContext.createImageData(this.canvas.width, 1);
    this.line = new Uint32Array(this.image.data.buffer);
    this.cover = new Float32Array(this.canvas.width + 1);
    this.heaviest = new Float32Array(this.canvas.width + 1);
    this.colour = new Uint8Array(this.canvas.width + 1);
  }

  begin(view, palette, dim) {
    const { context, scale } = this;
    this.view = view;
    this.palette = palette;
    this.dim = dim;
    this.perPixel = (view.to - view.from) / this.canvas.width;
    this.names = [];
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.globalAlpha = 1;
    context.fillStyle = palette.background;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    context.imageSmoothingEnabled = false;
    this.font = `${Math.round(11 * scale)}px ${getComputedStyle(document.body).fontFamily}`;
  }

  x(time) {
    return ((time - this.view.from) / (this.view.to - this.view.from)) * this.width;
  }

  // Vertical lines that show through the blank pixels of the rows.
  grid(places) {
    const { context, canvas, scale, palette } = this;
    this.blank = new Uint32Array(canvas.width).fill(palette.pixels[0][0]);
    context.fillStyle = palette.grid;
    for (const place of places) {
      const pixel = Math.round(place * scale);
      this.blank[pixel] = palette.gridPixel;
      context.fillRect(pixel, 0, 1, canvas.height);
    }
  }

  // One row of events at `top`, `height` CSS pixels high.
  row(row, top, height) {
    const { canvas, scale, perPixel, events, palette } = this;
    const { from, to } = this.view;
    const level = row.level(perPixel);
    const { start, end, event, busy } = level;
    const y = Math.round(top * scale);
    const tall = Math.round((top + height) * scale) - y;
    const width = canvas.width;
    const wide = [];
    let low = width;
    let high = -1;
    for (let i = firstEndingAfter(end, from - perPixel); i < start.length && start[i] < to; i++) {
      const left = (start[i] - from) / perPixel;
      const right = (end[i] - from) / perPixel;
      const colour = palette.colourOf[events.label[event[i]]];
      if (right - left >= WIDE) {
        wide.push(Math.max(left, -2), Math.min(right, width + 2), colour, event[i], (busy[i] || 1) / (end[i] - start[i] || 1));
        continue;
      }
      const pixel = left < 0 ? 0 : left | 0;
      if (pixel >= width) break;
      if (pixel < low) low = pixel;
      if (pixel > high) high = pixel;
      const part = Math.max(busy[i] / perPixel, 0.15);
      this.cover[pixel] += part;
      if (part >= this.heaviest[pixel]) {
        this.heaviest[pixel] = part;
        this.colour[pixel] = colour;
      }
      const rest = right - pixel - 1;
      if (rest > 0.3 && pixel + 1 < width) {
        this.cover[pixel + 1] += rest;
        this.heaviest[pixel + 1] = rest;
        this.colour[pixel + 1] = colour;
        if (pixel + 1 > high) high = pixel + 1;
      }
    }
    this.context.globalAlpha = this.dim ? 0.22 : 1;
    if (high >= 0) this.#pixels(low, high, y, tall);
    this.#rectangles(wide, y, tall);
    this.context.globalAlpha = 1;
  }

  #pixels(low, high, y, tall) {
    for (let pixel = low; pixel <= high; pixel++) {
      const cover = this.cover[pixel];
      this.line[pixel] = cover === 0 ? this.blank[pixel] : this.palette.pixels[this.colour[pixel]][Math.min(70 + cover * 185, 255) | 0];
      this.cover[pixel] = 0;
      this.heaviest[pixel] = 0;
    }
    const width = high - low + 1;
    this.stripContext.putImageData(this.image, 0, 0, low, 0, width, 1);
    this.context.drawImage(this.strip, low, 0, width, 1, low, y, width, tall);
  }

  #rectangles(wide, y, tall) {
    const { context, palette, scale } = this;
    let last = -1;
    for (let k = 0; k < wide.length; k += 5) {
      const left = wide[k];
      const right = wide[k + 1];
      if (wide[k + 2] !== last) context.fillStyle = palette.fills[(last = wide[k + 2])];
      const gap = right - left > 4 * scale ? scale / 2 : 0; // a hairline between neighbours
      context.globalAlpha = (this.dim ? 0.22 : 1) * (wide[k + 4] < 0.9 ? 0.45 + 0.55 * wide[k + 4] : 1);
      context.fillRect(left, y, right - left - gap, tall);
      if (right - left >= NAMED * scale && !this.dim) this.names.push([left, right, y, tall, wide[k + 2], wide[k + 3]]);
    }
    context.globalAlpha = 1;
  }

  // Names last, all in one go: switching between text and rectangles is slow.
  finish() {
    const { context, scale, palette, events } = this;
    let names = this.names;
    if (names.length > MAX_NAMES) names = names.sort((a, b) => b[1] - b[0] - (a[1] - a[0])).slice(0, MAX_NAMES);
    context.font = this.font;
    context.textBaseline = "middle";
    context.textAlign = "left";
    const advance = this.#advance();
    for (const [left, right, y, tall, colour, event] of names) {
      const x = Math.max(left, 0) + 4 * scale;
      const room = Math.floor((Math.min(right, this.canvas.width) - x - 3 * scale) / advance);
      if (room < 3) continue;
      const name = events.shortNames[events.label[event]];
      context.fillStyle = palette.texts[colour];
      context.fillText(name.length <= room ? name : `${name.slice(0, room - 1)}…`, x, y + tall / 2 + scale / 2);
    }
    this.names = [];
  }

  #advance() {
    if (this.measured !== this.font) {
      this.measured = this.font;
      this.context.font = this.font;
      this.letter = this.context.measureText("void_at::native_vectorized_elementwise_kernel").width / 45;
    }
    return this.letter * 1.04;
  }

  // An outline around an event; at least three pixels wide so that it is seen.
  outline(event, top, height, colour, width) {
    const { context, scale, events } = this;
    const left = this.x(events.start[event]);
    const right = Math.max(this.x(events.end[event]), left + 3);
    if (right < 0 || left > this.width) return;
    context.strokeStyle = colour;
    context.lineWidth = width * scale;
    const inset = width / 2;
    context.strokeRect((left - inset) * scale, (top - inset) * scale, (right - left + width) * scale, (height + width) * scale);
  }

  // Events of one row that a search found in full colour and with their names, merged where they share a pixel.
  matches(row, found, top, height) {
    const { context, scale, events, palette } = this;
    const { from, to } = this.view;
    let last = -Infinity;
    for (const event of row.found(found)) {
      if (events.end[event] < from || events.start[event] > to) continue;
      const left = this.x(events.start[event]);
      const right = Math.max(this.x(events.end[event]), left + 1.5);
      if (right <= last) continue;
      last = right;
      const colour = palette.colourOf[events.label[event]];
      context.fillStyle = palette.fills[colour];
      context.fillRect(left * scale, top * scale, (right - left) * scale, height * scale);
      if (right - left >= NAMED) this.names.push([left * scale, right * scale, top * scale, height * scale, colour, event]);
    }
  }

  // A curve from one event to another.
  arrow(fromX, fromY, toX, toY, colour) {
    const { context, scale } = this;
    const bend = Math.max(Math.abs(toX - fromX) / 2, 24);
    context.strokeStyle = colour;
    context.lineWidth = 1.5 * scale;
    context.beginPath();
    context.moveTo(fromX * scale, fromY * scale);
    context.bezierCurveTo((fromX + bend) * scale, fromY * scale, (toX - bend) * scale, toY * scale, toX * scale, toY * scale);
    context.stroke();
    context.fillStyle = colour;
    context.beginPath();
    context.arc(toX * scale, toY * scale, 3 * scale, 0, 2 * Math.PI);
    context.fill();
  }

  // Plain text and boxes in CSS pixels, for steps, rulers and curves.
  text(text, x, y, colour, align = "left") {
    const { context, scale } = this;
    context.font = this.font;
    context.textBaseline = "middle";
    context.textAlign = align;
    context.fillStyle = colour;
    context.fillText(text, x * scale, y * scale);
  }

  box(left, top, width, height, colour) {
    const { context, scale } = this;
    context.fillStyle = colour;
    context.fillRect(Math.round(left * scale), Math.round(top * scale), Math.max(Math.round(width * scale), 1), Math.max(Math.round(height * scale), 1));
  }

  // A staircase of values over times as a filled area, from `lowest` to `highest`.
  area({ times, values, lowest, highest, height }, top, colour) {
    const { context, scale } = this;
    const y = (value) => (top + height - ((value - lowest) / (highest - lowest)) * height) * scale;
    context.beginPath();
    context.moveTo(this.x(times[0]) * scale, y(0));
    for (let i = 0; i < times.length; i++) {
      const left = this.x(times[i]);
      if (i + 1 < times.length && this.x(times[i + 1]) < -1) continue;
      context.lineTo(left * scale, y(values[Math.max(i - 1, 0)]));
      context.lineTo(left * scale, y(values[i]));
      if (left > this.width + 1) break;
    }
    const last = this.x(times[times.length - 1]);
    context.lineTo(last * scale, y(0));
    context.closePath();
    context.globalAlpha = 0.25;
    context.fillStyle = colour;
    context.fill();
    context.globalAlpha = 1;
    context.strokeStyle = colour;
    context.lineWidth = scale;
    context.stroke();
  }
}
