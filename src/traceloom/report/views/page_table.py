"""Packs tables for the script of a page.

Numbers are stored unchanged, each distinct text once.

base64( zlib( header length as 4 bytes, little endian | header as JSON | column | column | ... ) )

A column is a row of varints: seven bits per byte, lowest first, the high bit set on all bytes but
the last. The header lists the columns in order with their length in bytes. The script `unpack.js`
reads the same layout.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traceloom.report.document import Bar, Col
from traceloom.report.figure import render_inline_code, render_json_script
from traceloom.report.labels import clean_name, fit_name
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.array_types import Ints
from traceloom.trace.columns import IDENTITY

MAX_ROWS = 2_000  # of one table in the page; the JSON report has all
MAX_NAME_CHARS = 64


def render_html_table(
    identity: str,
    columns: Sequence[Col],
    rows: Sequence[Mapping[str, Any]],
    reasons: Mapping[str, str],
    label: str,
    *,
    max_rows: int = MAX_ROWS,
    full_command: str = "traceloom report -o report.json",
) -> str:
    """Renders a figure with one table. Its first name column comes first, so that rows can be
    distinguished on every screen.

    Args:
        identity: Its id in the page and in the URL.
        columns: The columns; rows omit unknown values. A column that is 0 or unknown in all rows is
            only named.
        rows: In initial display order; `range` (start-end in ns) links a row to the timeline.
        reasons: Why a column's unknown values are unknown, by key.
        label: Description for screen readers.
        max_rows: Max number of rows.
        full_command: The command that writes all rows.
    """
    visible_rows = rows[:max_rows]
    lead = next((column for column in columns if column.kind == "name"), None)
    ordered = sorted(
        (column for column in columns if column.kind != "spark"),
        key=lambda column: column is not lead,
    )
    packed_columns, zero, unknown = [], [], []
    for column in ordered:
        values = [row.get(column.key) for row in visible_rows]
        if visible_rows and all(value is None or value == "" for value in values):
            reason = reasons.get(column.key)
            unknown.append(column.title + (f" ({reason})" if reason else ""))
        elif visible_rows and column.numeric and column.key not in IDENTITY and not any(values):
            zero.append(column.title)
        else:
            packed_columns.append(pack_column(column, values, reasons.get(column.key, "")))
    data: dict[str, Any] = {"label": label, "rows": len(visible_rows), "columns": packed_columns}
    if any("range" in row for row in visible_rows):
        data["ranges"] = [row.get("range") for row in visible_rows]
    notes = []
    if len(rows) > max_rows:
        notes.append(
            f"The first {units.format_count(max_rows)} of {units.format_count(len(rows))} rows; "
            f"<code>{escape(full_command)}</code> has all of them."
        )
    if zero or unknown:
        parts = [", ".join(zero) + ": 0 in all rows"] * bool(zero) + [
            ", ".join(unknown) + ": unknown"
        ] * bool(unknown)
        notes.append(f"Not shown: {render_inline_code('; '.join(parts))}.")
    after = "".join(f'<p class="quiet">{note}</p>' for note in notes)
    return (
        f'<figure class="table" id="{escape(identity)}">{render_json_script(data)}{after}</figure>'
    )


def pack_column(column: Col, values: list[Any], reason: str) -> dict[str, Any]:
    """Packs the data from which `cells.js` draws a column.

    Args:
        column: Its declaration.
        values: Values of all rows; None where unknown.
        reason: Why they are unknown.
    """
    entry = {
        "key": column.key,
        "title": column.title,
        "kind": column.kind,
        "hint": column.hint,
        "swatch": column.swatch,
        "scale": column.scale,
        "why": reason if None in values else "",
    }
    entry = {name: value for name, value in entry.items() if value}
    if column.numeric or column.kind in ("bar", "delta"):
        bars = (
            [v.whole, v.longest or v.whole, [list(part) for part in v.parts if part[2]]]
            if isinstance(v, Bar)
            else v
            for v in values
        )
        return {**entry, "values": list(bars)}
    index_by_text: dict[Any, int] = {}
    indices = [
        -1 if value is None else index_by_text.setdefault(str(value), len(index_by_text))
        for value in values
    ]
    texts: list[str | list[str]] = []
    for value in index_by_text:  # a name that is too long becomes [displayed text, whole text]
        clean_text = sanitize(value)
        cut = fit_name(clean_text, MAX_NAME_CHARS) if column.kind == "name" else clean_name(value)
        texts.append(clean_text if cut == clean_text else [cut, clean_text])
    return {**entry, "texts": texts, "at": indices}


def encode_zigzag(values: Ints) -> Ints:
    """Encodes signed integers as non-negative ones: 0, -1, 1, -2 become 0, 1, 2, 3."""
    return (values << 1) ^ (values >> 63)


def encode_start_deltas(start: Ints, counts: list[int]) -> Ints:
    """Returns differences between consecutive starts on a lane; the first of a lane stays
    unchanged.

    Args:
        start: Starts, lane by lane, ascending on each; none negative.
        counts: Number of events of each lane.
    """
    heads = np.cumsum([0, *counts])[:-1][np.asarray(counts, dtype=np.int64) > 0]
    steps = np.diff(start, prepend=0)
    steps[heads] = start[heads]
    return steps


def encode_sparse(values: Ints, present: NDArray[np.bool_]) -> Ints:
    """Encodes absent values as 0, others as one plus the (zigzag) difference to the previous
    present value.
    """
    out = np.zeros(values.shape, dtype=np.int64)
    out[present] = encode_zigzag(np.diff(values[present], prepend=0)) + 1
    return out


def encode_varints(values: Ints) -> bytes:
    """Encodes non-negative integers in as few seven-bit bytes as each needs."""
    if not values.size:
        return b""
    if int(values.min()) < 0:
        raise ValueError("varints are for non-negative integers")
    remaining = values.astype(np.uint64)
    length = np.ones(values.shape, dtype=np.int64)
    for shift_bits in range(7, 64, 7):
        continues = remaining >> np.uint64(shift_bits) > 0
        if not continues.any():
            break
        length += continues
    end_offsets = np.cumsum(length)
    out = np.zeros(int(end_offsets[-1]), dtype=np.uint8)
    starts = end_offsets - length
    for byte in range(int(length.max())):
        active = length > byte
        digits = (remaining[active] >> np.uint64(7 * byte)) & np.uint64(0x7F)
        out[starts[active] + byte] = digits.astype(np.uint8) | np.where(
            length[active] == byte + 1, 0, 0x80
        ).astype(np.uint8)
    return out.tobytes()


def pack(header: dict[str, Any], columns: dict[str, Ints]) -> str:
    """Packs the header (any JSON) and the columns (non-negative integers of any lengths) into one
    line of base64.
    """
    bodies = {name: encode_varints(values) for name, values in columns.items()}
    listing = [[name, len(body), int(columns[name].size)] for name, body in bodies.items()]
    text = json.dumps({**header, "columns": listing}, separators=(",", ":")).encode()
    raw = len(text).to_bytes(4, "little") + text + b"".join(bodies.values())
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")
