"""Builds the wire bytes of many messages at once from columns, without a Python object per row.

A `ByteRows` holds one run of bytes per row, laid end to end. Fields of a message are `ByteRows` of
equal length, in which an absent field is a row of no bytes; `encode_messages` joins them to whole
messages. The protobuf encoding is that of https://protobuf.dev/programming-guides/encoding/.
"""

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
_MAX_VARINT_BYTES = 10
_MAX_PIECE_BYTES = 1 << 16  # bytes of pieces that are copied by size
_MAX_PIECE_SIZES = 512  # max number of different sizes
_LONG_PIECE_BYTES = 12  # bytes of a piece on average
_FIELD_NUMBERS = {field.name: field.number for field in AttributeProto.DESCRIPTOR.fields}
_NODE_ATTRIBUTE = b"\x52"  # field 10 of a node, length-delimited


@dataclass(frozen=True, slots=True)
class ByteRows:
    """Bytes of all rows, concatenated.

    Attributes:
        data: All bytes.
        lengths: How many bytes each row has.
    """

    data: Bytes
    lengths: Ints

    def __len__(self) -> int:
        return len(self.lengths)


def build_empty_rows(count: int) -> ByteRows:
    return ByteRows(np.zeros(0, np.uint8), np.zeros(count, np.int64))


def repeat_bytes(value: bytes, rows: int | Bools) -> ByteRows:
    """Returns rows that all hold `value`, or only those that are flagged."""
    flags = np.ones(rows, np.bool_) if isinstance(rows, int) else rows
    count = int(flags.sum())
    return ByteRows(
        np.tile(np.frombuffer(value, np.uint8), count), flags.astype(np.int64) * len(value)
    )


def encode_varints(values: NDArray[Any]) -> ByteRows:
    """Encodes each number as a varint; a negative one as its 64-bit two's complement, as protobuf
    does.
    """
    remaining = np.ascontiguousarray(values).astype(np.int64, copy=False).view(np.uint64)
    lengths = count_varint_bytes(remaining)
    offset = np.cumsum(lengths) - lengths
    data = np.empty(int(lengths.sum()), np.uint8)
    for number in range(int(lengths.max(initial=0))):
        longer = lengths > number + 1
        data[offset] = (remaining & np.uint64(127)).astype(np.uint8) | (
            longer.astype(np.uint8) << 7
        )
        remaining, offset, lengths = (
            remaining[longer] >> np.uint64(7),
            offset[longer] + 1,
            lengths[longer],
        )
    return ByteRows(
        data,
        count_varint_bytes(
            np.ascontiguousarray(values).astype(np.int64, copy=False).view(np.uint64)
        ),
    )


def count_varint_bytes(values: NDArray[np.uint64]) -> Ints:
    lengths = np.ones(len(values), np.int64)
    for number in range(1, _MAX_VARINT_BYTES):
        longer = values >= np.uint64(1 << (7 * number))
        if not longer.any():
            break
        lengths += longer
    return lengths


def encode_zigzag(values: Ints) -> Ints:
    """Returns numbers in the zigzag encoding of `sint64`: small for small negative ones."""
    return (values << 1) ^ (values >> 63)


def encode_texts(series: pl.Series) -> ByteRows:
    """Encodes each text as UTF-8; null as no bytes."""
    if not len(series):
        return build_empty_rows(0)
    sizes = series.str.len_bytes()
    lengths = (sizes.fill_null(0) if series.null_count() else sizes).cast(pl.Int64).to_numpy()
    return ByteRows(np.frombuffer(series.str.join("").item().encode(), np.uint8), lengths)


def encode_binary(series: pl.Series) -> ByteRows:
    """Returns rows of bytes that are encoded already; null as no bytes."""
    lengths = series.bin.size("b").fill_null(0).cast(pl.Int64).to_numpy()
    return ByteRows(np.frombuffer(b"".join(series.drop_nulls()), np.uint8), lengths)


def join_columns(parts: Sequence[ByteRows]) -> ByteRows:
    parts = [part for part in parts if len(part.data)] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    lengths = _add_lengths(parts)
    out = np.empty(int(lengths.sum()), np.uint8)
    offset = np.cumsum(lengths) - lengths
    for part in parts:
        filled = np.flatnonzero(part.lengths)
        _put(out, offset[filled], part.data, part.lengths[filled])
        offset = offset + part.lengths
    return ByteRows(out, lengths)


def _add_lengths(parts: Sequence[ByteRows]) -> Ints:
    total = parts[0].lengths.copy()
    for part in parts[1:]:
        total += part.lengths
    return total


def _put(out: Bytes, offset: Ints, data: Bytes, sizes: Ints) -> None:
    """Copies each piece of bytes to its offset; all pieces of one size at once where
    they are long.
    """
    min_size, max_size = int(sizes.min(initial=_MAX_PIECE_BYTES)), int(sizes.max(initial=0))
    if min_size == max_size:
        _slice_runs(out, max_size)[offset] = np.ascontiguousarray(data).view(f"V{max_size}")
        return
    starts = np.cumsum(sizes) - sizes
    short = len(data) < _LONG_PIECE_BYTES * len(sizes)
    if max_size >= _MAX_PIECE_BYTES and not short:
        for target, start, size in zip(
            offset.tolist(), starts.tolist(), sizes.tolist(), strict=True
        ):
            out[target : target + size] = data[start : start + size]
        return
    counts = np.bincount(sizes, minlength=1) if not short else starts
    used = np.flatnonzero(counts)
    if short or len(used) > _MAX_PIECE_SIZES:  # an index per byte
        out[np.repeat(offset - starts, sizes) + np.arange(len(data))] = data
        return
    order = np.argsort(sizes.astype(np.uint16), kind="stable")
    for size, group in zip(
        used.tolist(), np.split(order, np.cumsum(counts[used])[:-1]), strict=True
    ):
        _slice_runs(out, size)[offset[group]] = _slice_runs(data, size)[starts[group]]


def _slice_runs(data: Bytes, size: int) -> NDArray[np.void]:
    """Returns every run of `size` bytes as one value, by its start; shape (bytes - size + 1,), no
    copy.
    """
    return np.ndarray((len(data) - size + 1,), f"V{size}", data, strides=(1,))


def expand_rows(part: ByteRows, rows: Ints, count: int) -> ByteRows:
    """Places the rows of `part` at the rows `rows` (ascending) of a table of `count` rows."""
    lengths = np.zeros(count, np.int64)
    lengths[rows] = part.lengths
    return ByteRows(part.data, lengths)


def pick_rows(table: ByteRows, number: NDArray[Any]) -> ByteRows:
    lengths = table.lengths[number]
    offset = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    starts = np.cumsum(table.lengths) - table.lengths
    for row in np.flatnonzero(np.bincount(number, minlength=len(table))).tolist():
        if size := int(table.lengths[row]):
            _slice_runs(out, size)[offset[number == row]] = _slice_runs(table.data, size)[
                starts[row]
            ]
    return ByteRows(out, lengths)


def concatenate_rows(part: ByteRows, counts: Ints) -> ByteRows:
    """Joins consecutive rows: the first `counts[0]` become row 0, and so on."""
    bounds = np.concatenate([[0], np.cumsum(part.lengths)])
    last = np.cumsum(counts)
    return ByteRows(part.data, bounds[last] - bounds[last - counts])


def encode_delimited(tag: bytes, part: ByteRows, present: Bools | None = None) -> ByteRows:
    """Encodes a length-delimited field; absent where the row is empty, or where
    `present` is false.
    """
    flags = part.lengths > 0 if present is None else present
    rows = np.flatnonzero(flags)
    length = expand_rows(encode_varints(part.lengths[rows]), rows, len(part))
    return join_columns([repeat_bytes(tag, flags), length, part])


def encode_number_field(tag: bytes, values: Ints) -> ByteRows:
    """Encodes a varint field; absent where it is 0, as proto3 requires."""
    rows = np.flatnonzero(values)
    return join_columns(
        [
            repeat_bytes(tag, values != 0),
            expand_rows(encode_varints(values[rows]), rows, len(values)),
        ]
    )


def encode_packed_field(tag: bytes, counts: Ints, values: Ints) -> ByteRows:
    """Encodes a packed repeated field of varints: `counts[i]` of the values belong to row i."""
    return encode_delimited(tag, concatenate_rows(encode_varints(values), counts))


def encode_messages(fields: Sequence[ByteRows]) -> bytes:
    """Joins fields, in order, to messages, each preceded by its length."""
    return join_columns([encode_varints(_add_lengths(fields)), *fields]).data.tobytes()


def _encode_key(number: int, wire_type: int) -> bytes:
    key = number << 3 | wire_type
    return bytes((key,)) if key < 128 else bytes((key & 127 | 128, key >> 7))


def _encode_name(name: str) -> bytes:
    data = name.encode()
    return b"\x0a" + bytes((len(data),)) + data


def encode_number_attribute(name: str, member: str, values: Ints, present: Bools) -> list[ByteRows]:
    """Returns the fields of an attribute with an integer (`int64_val`, `bool_val`, ...), in the
    rows that are `present`.
    """
    rows = np.flatnonzero(present)
    numbers = values[rows]
    if member.startswith("sint"):
        numbers = encode_zigzag(numbers)
    value = encode_varints(numbers)
    inner = _encode_name(name) + _encode_key(_FIELD_NUMBERS[member], VARINT)
    head = [
        _NODE_ATTRIBUTE + bytes((len(inner) + size,)) + inner
        for size in range(_MAX_VARINT_BYTES + 1)
    ]
    table = np.frombuffer(b"".join(head), np.uint8).reshape(_MAX_VARINT_BYTES + 1, -1)
    heads = ByteRows(table[value.lengths].ravel(), np.full(len(rows), table.shape[1], np.int64))
    return [expand_rows(heads, rows, len(present)), expand_rows(value, rows, len(present))]


def encode_text_attribute(name: str, values: pl.Series) -> list[ByteRows]:
    """Returns the fields of an attribute with a text, in the rows where it is not null."""
    missing = values.null_count()
    if missing == len(values):
        return []
    present = values.is_not_null().to_numpy() if missing else np.ones(len(values), np.bool_)
    return encode_bytes_attribute(name, "string_val", encode_texts(values), present)


def encode_list_attribute(name: str, member: str, values: pl.Series) -> list[ByteRows]:
    """Returns the fields of an attribute with a list of integers, in the rows where it is not null
    (it may be empty).
    """
    present = values.is_not_null().to_numpy()
    counts = values.list.len().fill_null(0).cast(pl.Int64).to_numpy()
    flat = (
        values.drop_nulls().explode(empty_as_null=False, keep_nulls=False).cast(pl.Int64).to_numpy()
    )
    return encode_number_list_attribute(name, member, counts, flat, present)


def encode_number_list_attribute(
    name: str, member: str, counts: Ints, values: Ints, present: Bools
) -> list[ByteRows]:
    """As `encode_list_attribute`, with `counts[i]` of the values for row i."""
    numbers = encode_zigzag(values) if member.startswith("sint") else values
    return encode_bytes_attribute(
        name, member, encode_packed_field(b"\x0a", counts, numbers), present
    )


def encode_bytes_attribute(
    name: str, member: str, value: ByteRows, present: Bools
) -> list[ByteRows]:
    """Returns the fields of an attribute with a length-delimited value."""
    rows = np.flatnonzero(present)
    inner = _encode_name(name) + _encode_key(_FIELD_NUMBERS[member], DELIMITED)
    size = encode_varints(value.lengths[rows])
    attribute_size = encode_varints(len(inner) + size.lengths + value.lengths[rows])
    count = len(present)
    return [
        repeat_bytes(_NODE_ATTRIBUTE, present),
        expand_rows(attribute_size, rows, count),
        repeat_bytes(inner, present),
        expand_rows(size, rows, count),
        value,
    ]


def encode_bare_attribute(name: str, present: Bools) -> list[ByteRows]:
    """Returns an attribute that has a name and no value, in the rows that are `present`."""
    if not present.any():
        return []
    inner = _encode_name(name)
    return [repeat_bytes(_NODE_ATTRIBUTE + bytes((len(inner),)) + inner, present)]
