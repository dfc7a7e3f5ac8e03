"""Packing: integer columns and a header into one short text for the page, and the layout of that text.

    base64( zlib( header length as 4 bytes, little endian | header as JSON | column | column | ... ) )

A column is a row of varints: seven bits per byte, lowest first, the high bit set on all bytes but the last. The header
lists the columns in order with their length in bytes. The script `unpack.js` reads the same layout.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traceloom.array_types import Ints


def zigzag(values: Ints) -> Ints:
    """Signed integers as non-negative ones: 0, -1, 1, -2 become 0, 1, 2, 3."""
    return (values << 1) ^ (values >> 63)


def lane_steps(start: Ints, counts: list[int]) -> Ints:
    """Differences between the starts of neighbours on a lane; the first of a lane stays as it is.

    Args:
        start: Starts, lane by lane, ascending on each; none negative.
        counts: Events of each lane.
    """
    heads = np.cumsum([0, *counts])[:-1][np.asarray(counts, dtype=np.int64) > 0]
    steps = np.diff(start, prepend=0)
    steps[heads] = start[heads]
    return steps


def sparse(values: Ints, present: NDArray[np.bool_]) -> Ints:
    """0 where absent, else one more than the (zigzag) difference to the value before."""
    out = np.zeros(values.shape, dtype=np.int64)
    out[present] = zigzag(np.diff(values[present], prepend=0)) + 1
    return out


def varints(values: Ints) -> bytes:
    """Non-negative integers, each in as few seven-bit bytes as it needs."""
    if not values.size:
        return b""
    if int(values.min()) < 0:
        raise ValueError("varints are for non-negative integers")
    rest = values.astype(np.uint64)
    length = np.ones(values.shape, dtype=np.int64)
    for bits in range(7, 64, 7):
        more = rest >> np.uint64(bits) > 0
        if not more.any():
            break
        length += more
    ends = np.cumsum(length)
    out = np.zeros(int(ends[-1]), dtype=np.uint8)
    starts = ends - length
    for byte in range(int(length.max())):
        active = length > byte
        digits = (rest[active] >> np.uint64(7 * byte)) & np.uint64(0x7F)
        last = length[active] == byte + 1
        out[starts[active] + byte] = digits.astype(np.uint8) | np.where(last, 0, 0x80).astype(np.uint8)
    return out.tobytes()


def pack(header: dict[str, Any], columns: dict[str, Ints]) -> str:
    """The header (any JSON) and the columns (non-negative integers, one length or another) as one line of base64."""
    bodies = {name: varints(values) for name, values in columns.items()}
    listing = [[name, len(body), int(columns[name].size)] for name, body in bodies.items()]
    text = json.dumps({**header, "columns": listing}, separators=(",", ":")).encode()
    raw = len(text).to_bytes(4, "little") + text + b"".join(bodies.values())
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")
