"""Decodes many messages at once into columns.

The opposite of `traceloom.formats.chakra.encode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from traceloom.errors import InputError
from traceloom.formats.chakra.encode import (
    DELIMITED,
    FIXED32,
    FIXED64,
    VARINT,
    ByteRows,
    Bytes,
    concatenate_rows,
    encode_varints,
    join_columns,
)
from traceloom.formats.chakra.et_pb2 import AttributeProto, Node
from traceloom.formats.chakra.files import Block
from traceloom.trace.array_types import Ints

_PADDING = 32  # reading a little past the last message must find bytes
_FEW_MESSAGES = 24  # up to so many messages are faster one by one
_MAX_SHIFT = 63


class DamageError(ValueError):
    """A message violates the protobuf encoding; `row` is its number."""

    def __init__(self, row: int) -> None:
        super().__init__("a value breaks the encoding")
        self.row = row


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that can be read from any place as units of 1, 4 and 8 bytes."""

    data: bytes
    bytes: Bytes
    halves: NDArray[np.uint32]
    words: NDArray[np.uint64]


def build_buffer(data: bytes) -> Buffer:
    padded = data + bytes(_PADDING)
    length = len(data) + _PADDING // 2
    return Buffer(
        padded,
        np.frombuffer(padded, np.uint8),
        np.ndarray(length, "<u4", padded, strides=(1,)),
        np.ndarray(length, "<u8", padded, strides=(1,)),
    )


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of messages, grouped by message and in their order.

    Attributes:
        row: Number of the message.
        number: Field number.
        kind: Wire type.
        value: Of a number: its bits; of a length-delimited field: its length.
        begin: Where a length-delimited value begins.
    """

    row: Ints
    number: Ints
    kind: Ints
    value: Ints
    begin: Ints

    def where(self, flags: NDArray[np.bool_]) -> Fields:
        indices = np.flatnonzero(flags)
        return Fields(
            self.row[indices],
            self.number[indices],
            self.kind[indices],
            self.value[indices],
            self.begin[indices],
        )

    def numbered(self, number: int, kind: int) -> Fields:
        """Returns the fields of a number that have the expected wire type."""
        return self.where((self.number == number) & (self.kind == kind))


def decode_fields(source: Buffer, starts: Ints, stops: Ints) -> Fields:
    """Returns the fields of all messages.

    Args:
        source: The bytes.
        starts: Where each message begins.
        stops: Where each message ends.

    Raises:
        DamageError: A message violates the encoding, or a field extends beyond its end.
    """
    steps: list[Fields] = []
    rows = np.flatnonzero(starts < stops)
    offset, stop = starts[rows], stops[rows]
    while len(rows) > _FEW_MESSAGES:
        step, offset = _decode_next_fields(source, rows, offset, stop)
        steps.append(step)
        unfinished = offset < stop
        rows, offset, stop = rows[unfinished], offset[unfinished], stop[unfinished]
    last = _decode_one_by_one(source, rows, offset, stop)
    counts = np.bincount(
        np.concatenate([last.row, *(step.row for step in steps)]), minlength=len(starts)
    )
    first = np.cumsum(counts) - counts
    # The n-th step holds the n-th field of its messages; the remaining ones are in order already.
    positions = [first[step.row] + number for number, step in enumerate(steps)]
    within = np.arange(len(last.row))  # 0, 1, 2, ... in each run of equal rows
    within[1:] -= np.maximum.accumulate(np.where(last.row[1:] != last.row[:-1], within[1:], 0))
    positions.append(first[last.row] + len(steps) + within)
    position = np.concatenate(positions)
    columns = []
    for name in ("row", "number", "kind", "value", "begin"):
        column = np.empty(len(position), np.int64)
        column[position] = np.concatenate([getattr(step, name) for step in (*steps, last)])
        columns.append(column)
    return Fields(*columns)


def _decode_next_fields(
    source: Buffer, rows: Ints, offset: Ints, stop: Ints
) -> tuple[Fields, Ints]:
    """Returns the next field of each message, and where the following one begins."""
    key, offset = _decode_varints(source, rows, offset)
    kind, number = key & 7, key >> 3
    value, start = np.zeros(len(rows), np.int64), offset.copy()
    for wire_type, indices in (
        (t, np.flatnonzero(kind == t)) for t in (VARINT, DELIMITED, FIXED64, FIXED32)
    ):
        if not len(indices):
            continue
        if wire_type in {VARINT, DELIMITED}:
            value[indices], start[indices] = _decode_varints(source, rows[indices], offset[indices])
        elif wire_type == FIXED64:
            value[indices], start[indices] = (
                source.words[offset[indices]].view(np.int64),
                offset[indices] + 8,
            )
        else:
            value[indices], start[indices] = source.halves[offset[indices]], offset[indices] + 4
    after = start + np.where(kind == DELIMITED, value, 0)
    wrong = (after > stop) | ((kind == DELIMITED) & (value < 0)) | (number == 0) | (kind > FIXED32)
    wrong |= (kind > DELIMITED) & (kind < FIXED32)  # groups, which no version of the schema has
    if wrong.any():
        raise DamageError(int(rows[np.flatnonzero(wrong)[0]]))
    return Fields(rows, number, kind, value, start), after


def _decode_varints(source: Buffer, rows: Ints, offset: Ints) -> tuple[Ints, Ints]:
    """Returns the varint at each position, and where it ends."""
    last = len(source.bytes) - 1
    byte = source.bytes[np.minimum(offset, last)]
    value = (byte & 127).astype(np.uint64)
    after = offset + 1
    unfinished = np.flatnonzero(byte > 127)
    shift = 7
    while len(unfinished):
        if shift > _MAX_SHIFT:
            raise DamageError(int(rows[unfinished[0]]))
        byte = source.bytes[np.minimum(after[unfinished], last)]
        value[unfinished] |= (byte & 127).astype(np.uint64) << np.uint64(shift)
        after[unfinished] += 1
        unfinished = unfinished[byte > 127]
        shift += 7
    return value.view(np.int64), after


def _decode_one_by_one(source: Buffer, rows: Ints, offset: Ints, stop: Ints) -> Fields:
    parsed: list[tuple[int, int, int, int, int]] = []
    for row, start, end in zip(rows.tolist(), offset.tolist(), stop.tolist(), strict=True):
        position = start
        while position < end:
            key, position = _decode_varint(source.data, position, row)
            number, kind = key >> 3, key & 7
            value = 0
            if kind in {VARINT, DELIMITED}:
                value, position = _decode_varint(source.data, position, row)
            elif kind in {FIXED64, FIXED32}:
                size = 8 if kind == FIXED64 else 4
                value = int.from_bytes(source.data[position : position + size], "little")
                position += size
            else:
                raise DamageError(row)
            after = position + value if kind == DELIMITED else position
            if after > end or not number:
                raise DamageError(row)
            parsed.append(
                (row, number, kind, value if value < 1 << 63 else value - (1 << 64), position)
            )
            position = after
    return Fields(*(np.array([f[n] for f in parsed], np.int64) for n in range(5)))


def _decode_varint(data: bytes, offset: int, row: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, _MAX_SHIFT + 1, 7):
        byte = data[offset] if offset < len(data) else 128
        value |= (byte & 127) << shift
        offset += 1
        if byte < 128:
            return value & (1 << 64) - 1, offset
    raise DamageError(row)


def decode_packed(source: Buffer, start: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Decodes packed varints: how many each run of bytes holds, and all values concatenated.

    Raises:
        DamageError: A run ends inside a number, or has a number of more than ten bytes.
    """
    run_ends = np.cumsum(length)
    total = int(run_ends[-1]) if len(run_ends) else 0
    data = source.bytes[np.repeat(start - (run_ends - length), length) + np.arange(total)]
    last = np.flatnonzero(data < 128)
    counts = np.searchsorted(last, run_ends) - np.searchsorted(last, run_ends - length)
    complete = (length == 0) | np.isin(run_ends - 1, last)
    first = np.concatenate([[0], last[:-1] + 1]) if len(last) else last
    sizes = last - first + 1
    if not complete.all() or (sizes > 10).any():
        raise DamageError(int(np.flatnonzero(~complete)[0]) if not complete.all() else 0)
    value = np.zeros(len(first), np.uint64)
    unfinished = np.arange(len(first))
    for number in range(int(sizes.max(initial=0))):
        value[unfinished] |= (data[first[unfinished] + number] & 127).astype(
            np.uint64
        ) << np.uint64(7 * number)
        unfinished = unfinished[sizes[unfinished] > number + 1]
    return counts, value.view(np.int64)


def decode_zigzag(values: Ints) -> Ints:
    """Decodes numbers from the zigzag encoding of `sint64`."""
    return (values.view(np.uint64) >> np.uint64(1)).view(np.int64) ^ -(values & 1)


class NameIndex:
    """Finds which of the known names (of at most 24 bytes) is at a place.

    Args:
        names: The names; their positions are the results.
    """

    _FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)

    def __init__(self, names: tuple[str, ...]) -> None:
        source = build_buffer("".join(names).encode())
        length = np.array([len(name.encode()) for name in names])
        if length.max() > 24:
            raise ValueError("a name is too long to be found")
        hashes = self._hashes(source, np.cumsum(length) - length, length)
        self._order = np.argsort(hashes)
        self._hashed = hashes[self._order]
        if (self._hashed[1:] == self._hashed[:-1]).any():
            raise ValueError("two names cannot be distinguished")

    def find(self, source: Buffer, start: Ints, length: Ints) -> Ints:
        """Returns the number of the name at each place, or -1; compares 64 bits of hash, so that no
        other name is mistaken for it.
        """
        hashes = self._hashes(source, start, np.minimum(length, 25))
        slot = np.minimum(np.searchsorted(self._hashed, hashes), len(self._hashed) - 1)
        return np.where((self._hashed[slot] == hashes) & (length <= 24), self._order[slot], -1)

    def _hashes(self, source: Buffer, start: Ints, length: Ints) -> NDArray[np.uint64]:
        total = length.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
        for number, factor in enumerate(self._FACTORS):
            word_bytes = np.clip(length - 8 * number, 0, 8)
            index = np.minimum(start + 8 * number, len(source.words) - 1)
            word: Any = source.words[index]
            # A shift by 64 is undefined, so the removal of 8 bytes takes two shifts.
            dropped_bits = np.uint64(8) * (np.uint64(8) - word_bytes.astype(np.uint64))
            half = dropped_bits >> np.uint64(1)
            word = (word << half << (dropped_bits - half)) >> half >> (dropped_bits - half)
            word[word_bytes == 0] = 0
            total = (total ^ word) * np.uint64(factor)
            total ^= total >> np.uint64(29)
        return total


def decode_texts(source: Buffer, starts: Ints, length: Ints) -> list[str]:
    """Returns the UTF-8 texts at given places; equal ones are one object.

    Raises:
        DamageError: One of them is not UTF-8.
    """
    interned: dict[bytes, str] = {}
    out: list[str] = []
    data = source.data
    for number, (start, stop) in enumerate(
        zip(starts.tolist(), (starts + length).tolist(), strict=True)
    ):
        raw = data[start:stop]
        text = interned.get(raw)
        if text is None:
            try:
                text = interned[raw] = raw.decode()
            except UnicodeDecodeError as error:
                raise DamageError(number) from error
        out.append(text)
    return out


_MEMBERS = {
    member.number: member.name
    for member in AttributeProto.DESCRIPTOR.oneofs_by_name["value"].fields
}
_NUMBER_OF = {name: number for number, name in _MEMBERS.items()}
_ZIGZAG = [_NUMBER_OF[name] for name in ("sint32_val", "sint64_val")]
_SIGNED_HALF = _NUMBER_OF["sfixed32_val"]
_INTEGER_MEMBERS = [
    number
    for number, name in _MEMBERS.items()
    if name.endswith("_val") and any(part in name for part in ("int", "fixed", "bool"))
]


@dataclass(frozen=True)
class RaggedColumn:
    """Numbers of some nodes: node `row[i]` has `count[i]` of the values."""

    row: Ints
    count: Ints
    values: Ints


@dataclass(frozen=True)
class NodeColumns:
    """The nodes of one block.

    Attributes:
        source: The bytes.
        id: Bit pattern as int64: ids of 2**63 and above are negative.
        type: As written, known or not.
        start_us: Bit pattern as int64.
        duration_us: Bit pattern as int64.
        names: Name of each node.
        control: Control dependencies, as bit patterns.
        data: Data dependencies, as bit patterns.
        inputs: IOInfo fields 1, 2 and 3 (row and text).
        outputs: As `inputs`.
    """

    source: Buffer
    id: Ints
    type: Ints
    start_us: Ints
    duration_us: Ints
    names: list[str]
    control: RaggedColumn
    data: RaggedColumn
    inputs: dict[int, tuple[Ints, list[str]]]
    outputs: dict[int, tuple[Ints, list[str]]]
    attributes: dict[str, _Attributes] = field(repr=False)
    _rest: tuple[Fields, Ints] = field(repr=False)

    def __len__(self) -> int:
        return len(self.id)

    def has(self, name: str) -> NDArray[np.bool_]:
        """Returns which nodes have the attribute, with or without a value."""
        flags = np.zeros(len(self), np.bool_)
        if name in self.attributes:
            flags[self.attributes[name].row] = True
        return flags

    def numbers(self, name: str) -> pl.Series:
        """Returns an integer per node, of any integer type; null where it is absent or of another
        type.
        """
        values, present = np.zeros(len(self), np.int64), np.zeros(len(self), np.bool_)
        if (attribute := self.attributes.get(name)) is not None:
            member, value = attribute.member, attribute.value
            value = np.where(np.isin(member, _ZIGZAG), decode_zigzag(value), value)
            value = np.where(member == _SIGNED_HALF, value.astype(np.int32).astype(np.int64), value)
            is_integer = np.isin(member, _INTEGER_MEMBERS)
            values[attribute.row[is_integer]], present[attribute.row[is_integer]] = (
                value[is_integer],
                True,
            )
        return pl.Series(name, values).set(pl.Series(~present), None)

    def others(self, held: NDArray[np.bool_]) -> pl.Series:
        """Returns the tensors and attributes of each node that are held nowhere else, as encoded;
        null where there are none.

        Args:
            held: Whether each node's attribute is held elsewhere, by the position of its name
                among those that were asked for; the last row is of all other names, the one before
                of the tensors. Shape (names + 2, nodes).
        """
        rest, code = self._rest
        fields = rest.where(~held[code, rest.row])
        total = int(fields.value.sum())
        offset = np.repeat(fields.begin - np.cumsum(fields.value) + fields.value, fields.value)
        rows = join_columns(
            [
                encode_varints(fields.number << 3 | DELIMITED),
                encode_varints(fields.value),
                ByteRows(self.source.bytes[offset + np.arange(total)], fields.value),
            ]
        )
        rows = concatenate_rows(rows, np.bincount(fields.row, minlength=len(self)))
        data, ends = rows.data.tobytes(), np.cumsum(rows.lengths)
        out: list[bytes | None] = [None] * len(self)
        for row in np.flatnonzero(rows.lengths).tolist():
            out[row] = data[ends[row] - rows.lengths[row] : ends[row]]
        return pl.Series("attributes", out, dtype=pl.Binary)

    def strings(self, name: str) -> pl.Series:
        """Returns a text per node; null where it is absent or not a text."""
        attribute = self.attributes.get(name)
        out: list[str | None] = [None] * len(self)
        if attribute is not None:
            text = attribute.member == _NUMBER_OF["string_val"]
            values = decode_texts(self.source, attribute.begin[text], attribute.value[text])
            for row, value in zip(attribute.row[text].tolist(), values, strict=True):
                out[row] = value
        return pl.Series(name, out, dtype=pl.String)

    def lists(self, name: str, member: str) -> RaggedColumn:
        """Returns the lists of integers of the nodes that have one; lists of another type count as
        absent.
        """
        attribute = self.attributes.get(name)
        if attribute is None:
            return RaggedColumn(*(np.zeros(0, np.int64) for _ in range(3)))
        matches = attribute.member == _NUMBER_OF[member]
        rows, start, length = (
            attribute.row[matches],
            attribute.begin[matches],
            attribute.value[matches],
        )
        runs = decode_fields(self.source, start, start + length).numbered(1, DELIMITED)
        counts, values = decode_packed(self.source, runs.begin, runs.value)
        values = decode_zigzag(values) if member.startswith("sint") else values
        count = np.bincount(runs.row, weights=counts, minlength=len(rows)).astype(np.int64)
        return RaggedColumn(rows, count, values)


@dataclass(frozen=True, slots=True)
class _Attributes:
    """The attributes of one name: node, member of the value (0: none), and the value as in
    `Fields`.
    """

    row: Ints
    member: Ints
    value: Ints
    begin: Ints


class Decoder:
    """Turns blocks into columns.

    Args:
        names: The requested attributes, at most 24 bytes each.
        where: The file, for error messages.
    """

    def __init__(self, names: Iterable[str], where: str) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._finder = NameIndex(self._names)
        self._where = where

    def columns(self, blocks: Iterable[Block]) -> Iterator[NodeColumns]:
        """Yields the columns of each block.

        Raises:
            InputError: `chakra-damaged`.
        """
        for block in blocks:
            try:
                columns = self._columns(block)
            except DamageError as error:
                # The library may refuse one message alone; otherwise the whole block is at fault.
                first, last = block.first, block.first + len(block) - 1
                start, end = block.at + block.starts[0], block.at + block.stops[-1]
                number = 0
                try:
                    for number, message in enumerate(block.messages()):  # noqa: B007  (the error says the number)
                        Node.FromString(message)
                except DecodeError:
                    first = last = block.first + number
                    start, end = block.at + block.starts[number], block.at + block.stops[number]
                subject = (
                    f"message {first}"
                    if first == last
                    else f"one of the messages {first} to {last}"
                )
                raise InputError(
                    f"{subject}, bytes {start} to {end}, is no Chakra node",
                    slug="chakra-damaged",
                    where=self._where,
                    hint="the file is damaged there",
                ) from error
            yield columns

    def _columns(self, block: Block) -> NodeColumns:
        source = build_buffer(block.data)
        count = len(block)
        parsed = decode_fields(
            source, np.array(block.starts, np.int64), np.array(block.stops, np.int64)
        )
        names = [""] * count
        name_fields = parsed.numbered(2, DELIMITED)
        for row, text in zip(
            name_fields.row.tolist(),
            decode_texts(source, name_fields.begin, name_fields.value),
            strict=True,
        ):
            names[row] = text
        # The requested attributes of all nodes.
        messages = parsed.numbered(10, DELIMITED)
        inner = decode_fields(source, messages.begin, messages.begin + messages.value)
        attribute_names = inner.numbered(1, DELIMITED)
        code = np.full(len(messages.row), -1, np.int16)
        code[attribute_names.row] = self._finder.find(
            source, attribute_names.begin, attribute_names.value
        )
        value_fields = inner.where(np.isin(inner.number, list(_MEMBERS)))
        columns = [np.zeros(len(messages.row), np.int64) for _ in range(3)]
        for column, values in zip(
            columns, (value_fields.number, value_fields.value, value_fields.begin), strict=True
        ):
            column[value_fields.row] = values
        order = np.argsort(code, kind="stable")
        edges = np.searchsorted(code[order], np.arange(len(self._names) + 1))
        attributes = {}
        for number, name in enumerate(self._names):
            indices = order[edges[number] : edges[number + 1]]
            if len(indices):
                attributes[name] = _Attributes(
                    messages.row[indices], *(column[indices] for column in columns)
                )
        rest = parsed.where((parsed.kind == DELIMITED) & (parsed.number >= 8))
        rest_code = np.full(len(rest.row), -2, np.int64)
        rest_code[rest.number == 10] = code
        return NodeColumns(
            source=source,
            id=_extract_numbers(parsed, 1, count),
            type=_extract_numbers(parsed, 3, count).astype(np.int32).astype(np.int64),
            start_us=_extract_numbers(parsed, 6, count),
            duration_us=_extract_numbers(parsed, 7, count),
            names=names,
            control=_decode_dependencies(source, parsed, 4),
            data=_decode_dependencies(source, parsed, 5),
            inputs=_decode_tensors(source, parsed.numbered(8, DELIMITED)),
            outputs=_decode_tensors(source, parsed.numbered(9, DELIMITED)),
            attributes=attributes,
            _rest=(rest, rest_code),
        )


def _extract_numbers(parsed: Fields, number: int, count: int) -> Ints:
    column = np.zeros(count, np.int64)
    matches = parsed.numbered(number, VARINT)
    column[matches.row] = matches.value
    return column


def _decode_dependencies(source: Buffer, parsed: Fields, number: int) -> RaggedColumn:
    """Returns the numbers of a repeated field, packed or not, in file order."""
    runs, single = parsed.numbered(number, DELIMITED), parsed.numbered(number, VARINT)
    counts, values = decode_packed(source, runs.begin, runs.value)
    row = np.concatenate([np.repeat(runs.row, counts), single.row])
    values = np.concatenate([values, single.value])
    order = np.argsort(row, kind="stable")
    rows, count = np.unique(row, return_counts=True)
    return RaggedColumn(rows, count, values[order])


def _decode_tensors(source: Buffer, messages: Fields) -> dict[int, tuple[Ints, list[str]]]:
    inner = decode_fields(source, messages.begin, messages.begin + messages.value)
    out = {}
    for number in (1, 2, 3):
        matches = inner.numbered(number, DELIMITED)
        out[number] = messages.row[matches.row], decode_texts(source, matches.begin, matches.value)
    return out
