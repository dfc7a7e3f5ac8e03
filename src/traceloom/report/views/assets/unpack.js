// Reads what `packing.py` wrote: base64 of zlib of a header (JSON) and columns of varints.
import { inflate } from "./inflate.js";

function fromBase64(text) {
  if (typeof Uint8Array.fromBase64 === "function") return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function decompress(bytes) {
  if (typeof DecompressionStream !== "function") return inflate(bytes.subarray(2)); // two bytes of zlib header
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Non-negative integers up to 2^53, exact as doubles.
function varints(bytes, position, count) {
  const values = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    let value = 0;
    let scale = 1;
    let byte;
    do {
      byte = bytes[position++];
      value += (byte & 0x7f) * scale;
      scale *= 128;
    } while (byte & 0x80);
    values[i] = value;
  }
  return values;
}

export function unzigzag(value) {
  return value % 2 ? -(value + 1) / 2 : value / 2;
}

// 0 means absent, everything else one more than the zigzag difference to the value before.
export function unsparse(values, absent) {
  let last = 0;
  return values.map((value) => {
    if (value === 0) return absent;
    last += unzigzag(value - 1);
    return last;
  });
}

// {header, columns}: the columns as Float64Array, still coded as `timeline.py` describes.
export async function unpack(text) {
  const bytes = await decompress(fromBase64(text.trim()));
  const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const columns = {};
  let position = 4 + length;
  for (const [name, size, count] of header.columns) {
    columns[name] = varints(bytes, position, count);
    position += size;
  }
  return { header, columns };
}

// What `island.py` wrote into a part of the page: JSON, packed where it is long.
export function readIsland(root) {
  const text = root.querySelector("script").textContent;
  return JSON.parse(text.startsWith("{") ? text : new TextDecoder().decode(inflate(fromBase64(text).subarray(2))));
}
