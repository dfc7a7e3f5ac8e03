"""Wire bytes of many messages at once, made from columns: rows of bytes, joined without a Python object per row.

A `Rows` holds one run of bytes per row, laid end to end. Fields of a message are `Rows` of equal length, in which an
absent field is a row of no bytes; `framed` joins them to whole messages. The protobuf encoding is that of
https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.formats.chakra.et_pb2 import AttributeProto
from traceloom.trace.array_types import Bools, Ints

Bytes = NDArray[np.uint8]

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
_MOST_VARINT = 10
_MOST_SIZE = 1 << 16  # bytes of pieces that are put by size
_MOST_SIZES = 512  # different ones
_LONG = 12  # bytes of a piece on average
_NUMBER = {field.name: field.number for field in AttributeProto.DESCRIPTOR.fields}
_NODE_ATTRIBUTE = b"\x52"  # field 10 of a node, length-delimited


@dataclass(frozen=True, slots=True)
class Rows:
    """Bytes of each row, one row after the other.

    Attributes:
        data: All bytes.
        lengths: How many of them each row has.
    """

    data: Bytes
    lengths: Ints

    def __len__(self) -> int:
        return len(self.lengths)


def nothing(count: int) -> Rows:
    """Rows without bytes."""
    return Rows(np.zeros(0, np.uint8), np.zeros(count, np.int64))


def constant(value: bytes, rows: int | Bools) -> Rows:
    """The same bytes in every row, or in every row that is flagged."""
    flags = np.ones(rows, np.bool_) if isinstance(rows, int) else rows
    count = int(flags.sum())
    return Rows(np.tile(np.frombuffer(value, np.uint8), count), flags.astype(np.int64) * len(value))


def varints(values: NDArray[Any]) -> Rows:
    """Each number as a varint; a negative one as its 64-bit two's complement, as protobuf does."""
    left = np.ascontiguousarray(values).astype(np.int64, copy=False).view(np.uint64)
    lengths = varint_lengths(left)
    at = np.cumsum(lengths) - lengths
    data = np.empty(int(lengths.sum()), np.uint8)
    for number in range(int(lengths.max(initial=0))):
        longer = lengths > number + 1
        data[at] = (left & np.uint64(127)).astype(np.uint8) | (longer.astype(np.uint8) << 7)
        left, at, lengths = left[longer] >> np.uint64(7), at[longer] + 1, lengths[longer]
    return Rows(data, varint_lengths(np.ascontiguousarray(values).astype(np.int64, copy=False).view(np.uint64)))


def varint_lengths(values: NDArray[np.uint64]) -> Ints:
    """How many bytes each number takes as a varint."""
    lengths = np.ones(len(values), np.int64)
    for number in range(1, _MOST_VARINT):
        longer = values >= np.uint64(1 << (7 * number))
        if not longer.any():
            break
        lengths += longer
    return lengths


def zigzag(values: Ints) -> Ints:
    """Numbers as `sint64` has them: small for small negative ones."""
    return (values << 1) ^ (values >> 63)


def texts(series: pl.Series) -> Rows:
    """Each text as UTF-8; null as no bytes."""
    if not len(series):
        return nothing(0)
    sizes = series.str.len_bytes()
    lengths = (sizes.fill_null(0) if series.null_count() else sizes).cast(pl.Int64).to_numpy()
    whole = series.str.join("").item()
    return Rows(np.frombuffer(whole.encode(), np.uint8), lengths)


def joined(parts: Sequence[Rows]) -> Rows:
    """Row by row, the bytes of all parts in order."""
    parts = [part for part in parts if len(part.data)] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    lengths = _total(parts)
    out = np.empty(int(lengths.sum()), np.uint8)
    offset = np.cumsum(lengths) - lengths
    for part in parts:
        filled = np.flatnonzero(part.lengths)
        _put(out, offset[filled], part.data, part.lengths[filled])
        offset = offset + part.lengths
    return Rows(out, lengths)


def _total(parts: Sequence[Rows]) -> Ints:
    """Bytes of each row over all parts."""
    total = parts[0].lengths.copy()
    for part in parts[1:]:
        total += part.lengths
    return total


def _put(out: Bytes, offset: Ints, data: Bytes, sizes: Ints) -> None:
    """Copy each piece of bytes to its offset; all pieces of one size at once where they are long."""
    least, most = int(sizes.min(initial=_MOST_SIZE)), int(sizes.max(initial=0))
    if least == most:
        _runs(out, most)[offset] = np.ascontiguousarray(data).view(f"V{most}")
        return
    begin = np.cumsum(sizes) - sizes
    short = len(data) < _LONG * len(sizes)
    if most >= _MOST_SIZE and not short:
        for at, start, size in zip(offset.tolist(), begin.tolist(), sizes.tolist(), strict=True):
            out[at : at + size] = data[start : start + size]
        return
    counts = np.bincount(sizes, minlength=1) if not short else begin
    used = np.flatnonzero(counts)
    if short or len(used) > _MOST_SIZES:  # an index per byte
        out[np.repeat(offset - begin, sizes) + np.arange(len(data))] = data
        return
    order = np.argsort(sizes.astype(np.uint16), kind="stable")
    for size, group in zip(used.tolist(), np.split(order, np.cumsum(counts[used])[:-1]), strict=True):
        _runs(out, size)[offset[group]] = _runs(data, size)[begin[group]]


def _runs(data: Bytes, size: int) -> NDArray[np.void]:
    """Every run of `size` bytes as one value, by where it begins; shape (bytes - size + 1,), no copy."""
    return np.ndarray((len(data) - size + 1,), f"V{size}", data, strides=(1,))


def scattered(part: Rows, rows: Ints, count: int) -> Rows:
    """The rows of `part` as the rows `rows` (ascending) of a table of `count`."""
    lengths = np.zeros(count, np.int64)
    lengths[rows] = part.lengths
    return Rows(part.data, lengths)


def picked(table: Rows, number: NDArray[Any]) -> Rows:
    """For each row the bytes of one row of a small table, by its number."""
    lengths = table.lengths[number]
    offset = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    begin = np.cumsum(table.lengths) - table.lengths
    for at in np.flatnonzero(np.bincount(number, minlength=len(table))).tolist():
        if size := int(table.lengths[at]):
            _runs(out, size)[offset[number == at]] = _runs(table.data, size)[begin[at]]
    return Rows(out, lengths)


def gathered(part: Rows, counts: Ints) -> Rows:
    """Consecutive rows run together: the first `counts[0]` become row 0, and so on."""
    ends = np.concatenate([[0], np.cumsum(part.lengths)])
    last = np.cumsum(counts)
    return Rows(part.data, ends[last] - ends[last - counts])


def delimited(tag: bytes, part: Rows, there: Bools | None = None) -> Rows:
    """A length-delimited field; absent where the row is empty, or where `there` says so."""
    flags = part.lengths > 0 if there is None else there
    rows = np.flatnonzero(flags)
    length = scattered(varints(part.lengths[rows]), rows, len(part))
    return joined([constant(tag, flags), length, part])


def number_field(tag: bytes, values: Ints) -> Rows:
    """A varint field; absent where it is 0, as proto3 wants it."""
    rows = np.flatnonzero(values)
    return joined([constant(tag, values != 0), scattered(varints(values[rows]), rows, len(values))])


def packed_field(tag: bytes, counts: Ints, values: Ints) -> Rows:
    """A packed repeated field of varints: `counts[i]` of the values belong to row i."""
    return delimited(tag, gathered(varints(values), counts))


def render_page(fields: Sequence[Rows]) -> bytes:
    """Whole messages, each after its length, from their fields in order."""
    return joined([varints(_total(fields)), *fields]).data.tobytes()


def _key(number: int, wire_type: int) -> bytes:
    key = number << 3 | wire_type
    return bytes((key,)) if key < 128 else bytes((key & 127 | 128, key >> 7))


def _named(name: str) -> bytes:
    data = name.encode()
    return b"\x0a" + bytes((len(data),)) + data


def number_attribute(name: str, member: str, values: Ints, there: Bools) -> list[Rows]:
    """The fields of an attribute with a whole number (`int64_val`, `bool_val`, ...), in the rows that are `there`."""
    rows = np.flatnonzero(there)
    numbers = values[rows]
    if member.startswith("sint"):
        numbers = zigzag(numbers)
    value = varints(numbers)
    inner = _named(name) + _key(_NUMBER[member], VARINT)
    head = [_NODE_ATTRIBUTE + bytes((len(inner) + size,)) + inner for size in range(_MOST_VARINT + 1)]
    table = np.frombuffer(b"".join(head), np.uint8).reshape(_MOST_VARINT + 1, -1)
    heads = Rows(table[value.lengths].ravel(), np.full(len(rows), table.shape[1], np.int64))
    return [scattered(heads, rows, len(there)), scattered(value, rows, len(there))]


def text_attribute(name: str, values: pl.Series) -> list[Rows]:
    """The fields of an attribute with a text, in the rows where it is not null."""
    missing = values.null_count()
    if missing == len(values):
        return []
    present = values.is_not_null().to_numpy() if missing else np.ones(len(values), np.bool_)
    return bytes_attribute(name, "string_val", texts(values), present)


def list_attribute(name: str, member: str, values: pl.Series) -> list[Rows]:
    """The fields of an attribute with a list of whole numbers, in the rows where it is not null (it may be empty)."""
    present = values.is_not_null().to_numpy()
    counts = values.list.len().fill_null(0).cast(pl.Int64).to_numpy()
    flat = values.drop_nulls().explode(empty_as_null=False, keep_nulls=False).cast(pl.Int64).to_numpy()
    return number_list_attribute(name, member, counts, flat, present)


def number_list_attribute(name: str, member: str, counts: Ints, values: Ints, there: Bools) -> list[Rows]:
    """As `list_attribute`, with `counts[i]` of the values for row i."""
    numbers = zigzag(values) if member.startswith("sint") else values
    return bytes_attribute(name, member, packed_field(b"\x0a", counts, numbers), there)


def bytes_attribute(name: str, member: str, value: Rows, there: Bools) -> list[Rows]:
    """The fields of an attribute with a length-delimited value."""
    rows = np.flatnonzero(there)
    inner = _named(name) + _key(_NUMBER[member], DELIMITED)
    size = varints(value.lengths[rows])
    whole = varints(len(inner) + size.lengths + value.lengths[rows])
    count = len(there)
    return [
        constant(_NODE_ATTRIBUTE, there),
        scattered(whole, rows, count),
        constant(inner, there),
        scattered(size, rows, count),
        value,
    ]


def bare_attribute(name: str, there: Bools) -> list[Rows]:
    """An attribute that has a name and no value, in the rows that are `there`."""
    if not there.any():
        return []
    inner = _named(name)
    return [constant(_NODE_ATTRIBUTE + bytes((len(inner),)) + inner, there)]
