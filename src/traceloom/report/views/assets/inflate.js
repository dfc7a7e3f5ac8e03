// Inflate (RFC 1951) for browsers without DecompressionStream. Plain, not fast: about 30 MB/s.

const LENGTH_BASE = [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258];
const LENGTH_BITS = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];
const DISTANCE_BASE = [
  1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145,
  8193, 12289, 16385, 24577,
];
const DISTANCE_BITS = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13];
const CODE_ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

// A canonical Huffman code: how many codes of each length, and the symbols in the order of their codes.
function huffman(lengths) {
  const counts = new Uint16Array(16);
  for (const length of lengths) counts[length]++;
  counts[0] = 0;
  const offsets = new Uint16Array(16);
  for (let length = 1; length < 15; length++) offsets[length + 1] = offsets[length] + counts[length];
  const symbols = new Uint16Array(lengths.length);
  lengths.forEach((length, symbol) => {
    if (length) symbols[offsets[length]++] = symbol;
  });
  return { counts, symbols };
}

class BitReader {
  constructor(bytes) {
    this.bytes = bytes;
    this.position = 0;
    this.buffer = 0;
    this.available = 0;
  }

  bits(count) {
    while (this.available < count) {
      if (this.position >= this.bytes.length) throw new Error("the embedded data ends too early");
      this.buffer |= this.bytes[this.position++] << this.available;
      this.available += 8;
    }
    const value = this.buffer & ((1 << count) - 1);
    this.buffer >>>= count;
    this.available -= count;
    return value;
  }

  symbol({ counts, symbols }) {
    let code = 0;
    let first = 0;
    let index = 0;
    for (let length = 1; length < 16; length++) {
      code |= this.bits(1);
      const count = counts[length];
      if (code - count < first) return symbols[index + (code - first)];
      index += count;
      first = (first + count) << 1;
      code <<= 1;
    }
    throw new Error("the embedded data is damaged");
  }

  alignToByte() {
    this.position -= this.available >> 3;
    this.buffer = 0;
    this.available = 0;
  }
}

class GrowingBytes {
  constructor(size) {
    this.bytes = new Uint8Array(size);
    this.length = 0;
  }

  reserve(count) {
    if (this.length + count <= this.bytes.length) return;
    const grown = new Uint8Array(Math.max(this.bytes.length * 2, this.length + count));
    grown.set(this.bytes.subarray(0, this.length));
    this.bytes = grown;
  }
}

function dynamicCodes(reader) {
  const literals = reader.bits(5) + 257;
  const distances = reader.bits(5) + 1;
  const codes = reader.bits(4) + 4;
  const short = new Array(19).fill(0);
  for (let i = 0; i < codes; i++) short[CODE_ORDER[i]] = reader.bits(3);
  const code = huffman(short);
  const lengths = [];
  while (lengths.length < literals + distances) {
    const symbol = reader.symbol(code);
    if (symbol < 16) lengths.push(symbol);
    else {
      const repeated = symbol === 16 ? lengths[lengths.length - 1] : 0;
      const times = symbol === 16 ? 3 + reader.bits(2) : symbol === 17 ? 3 + reader.bits(3) : 11 + reader.bits(7);
      for (let i = 0; i < times; i++) lengths.push(repeated);
    }
  }
  return [huffman(lengths.slice(0, literals)), huffman(lengths.slice(literals))];
}

function fixedCodes() {
  const lengths = [];
  for (let i = 0; i < 288; i++) lengths.push(i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8);
  return [huffman(lengths), huffman(new Array(30).fill(5))];
}

function copyStored(reader, out) {
  reader.alignToByte();
  const length = reader.bits(16);
  reader.bits(16); // its complement
  reader.alignToByte();
  out.reserve(length);
  out.bytes.set(reader.bytes.subarray(reader.position, reader.position + length), out.length);
  reader.position += length;
  out.length += length;
}

function copyCoded(reader, out, [literals, distances]) {
  for (;;) {
    const symbol = reader.symbol(literals);
    if (symbol === 256) return;
    out.reserve(258);
    if (symbol < 256) {
      out.bytes[out.length++] = symbol;
      continue;
    }
    const length = LENGTH_BASE[symbol - 257] + reader.bits(LENGTH_BITS[symbol - 257]);
    const far = reader.symbol(distances);
    const distance = DISTANCE_BASE[far] + reader.bits(DISTANCE_BITS[far]);
    for (let i = 0; i < length; i++, out.length++) out.bytes[out.length] = out.bytes[out.length - distance];
  }
}

// The bytes behind a raw deflate stream.
export function inflate(bytes) {
  const reader = new BitReader(bytes);
  const out = new GrowingBytes(bytes.length * 4);
  for (let last = 0; !last; ) {
    last = reader.bits(1);
    const kind = reader.bits(2);
    if (kind === 0) copyStored(reader, out);
    else copyCoded(reader, out, kind === 1 ? fixedCodes() : dynamicCodes(reader));
  }
  return out.bytes.subarray(0, out.length);
}
