// The colours of the timeline, taken from the style sheet's custom properties so that light and dark have one source.
import { GROUP_NAMES } from "./events.js";

const SHADES = 3; // neighbours of one group but with other names get another shade

function parse(colour) {
  const digits = colour.trim().slice(1);
  return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16));
}

function mix(a, b, part) {
  return a.map((value, k) => Math.round(value + (b[k] - value) * part));
}

function css(rgb) {
  return `#${rgb.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

function packed([red, green, blue], alpha) {
  return ((alpha << 24) | (blue << 16) | (green << 8) | red) >>> 0; // ImageData is little endian on every browser's host
}

function luminance([red, green, blue]) {
  return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255;
}

function hash(text) {
  let value = 0;
  for (let i = 0; i < text.length; i++) value = (value * 31 + text.charCodeAt(i)) | 0;
  return value >>> 0;
}

export class Palette {
  constructor(events, printing) {
    const style = getComputedStyle(printing ? document.getElementById("print-colours") : document.documentElement);
    const value = (name) => style.getPropertyValue(name);
    const background = parse(value("--paper"));
    this.background = css(background);
    for (const name of ["ink", "muted", "line", "panel", "accent", "grid", "path"]) this[name] = css(parse(value(`--${name}`)));
    this.gridPixel = packed(parse(value("--grid")), 255);
    const ink = parse(value("--ink"));
    const strong = parse(value("--paper"));
    const dark = luminance(background) < 0.5;
    this.fills = [];
    this.texts = [];
    this.pixels = [];
    for (const group of GROUP_NAMES) {
      const base = parse(value(`--c-${group}`));
      for (let shade = 0; shade < SHADES; shade++) {
        const fill = mix(base, dark ? [255, 255, 255] : background, shade * (dark ? 0.1 : 0.16));
        this.fills.push(css(fill));
        this.texts.push(css(luminance(fill) > 0.52 ? (dark ? strong : ink) : dark ? ink : strong));
        this.pixels.push(Uint32Array.from({ length: 256 }, (_, alpha) => packed(mix(background, fill, alpha / 255), 255)));
      }
    }
    this.colourOf = Uint8Array.from(events.names, (name, label) => events.groups[label] * SHADES + (hash(name) % SHADES));
  }
}
