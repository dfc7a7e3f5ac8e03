"""Many messages decoded at once into columns.

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
from traceloom.formats.chakra.encode import DELIMITED, FIXED32, FIXED64, VARINT, Bytes
from traceloom.formats.chakra.et_pb2 import AttributeProto, Node
from traceloom.formats.chakra.files import Block
from traceloom.trace.array_types import Ints

_PADDING = 32  # reading a little past the last message must find bytes
_FEW = 24  # so few messages are faster one by one
_MOST_SHIFT = 63


class DamageError(ValueError):
    """A message is not what the protobuf encoding allows; `row` is which."""

    def __init__(self, row: int) -> None:
        super().__init__("a value breaks the encoding")
        self.row = row


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that can be looked at from any place in steps of 1, 4 and 8."""

    data: bytes
    bytes: Bytes
    halves: NDArray[np.uint32]
    words: NDArray[np.uint64]


def buffer(data: bytes) -> Buffer:
    """A buffer of `data`."""
    whole = data + bytes(_PADDING)
    length = len(data) + _PADDING // 2
    return Buffer(
        whole,
        np.frombuffer(whole, np.uint8),
        np.ndarray(length, "<u4", whole, strides=(1,)),
        np.ndarray(length, "<u8", whole, strides=(1,)),
    )


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of messages, those of a message together and in their order.

    Attributes:
        row: Which message.
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
        """Some of the fields."""
        at = np.flatnonzero(flags)
        return Fields(self.row[at], self.number[at], self.kind[at], self.value[at], self.begin[at])

    def numbered(self, number: int, kind: int) -> Fields:
        """The fields of a number, as far as they have the wire type that it should have."""
        return self.where((self.number == number) & (self.kind == kind))


def fields(source: Buffer, starts: Ints, stops: Ints) -> Fields:
    """The fields of all messages.

    Args:
        source: The bytes.
        starts: Where each message begins.
        stops: Where it ends.

    Raises:
        DamageError: A message breaks the encoding, or a field goes past its end.
    """
    steps: list[Fields] = []
    rows = np.flatnonzero(starts < stops)
    at, stop = starts[rows], stops[rows]
    while len(rows) > _FEW:
        step, at = _step(source, rows, at, stop)
        steps.append(step)
        more = at < stop
        rows, at, stop = rows[more], at[more], stop[more]
    last = _one_by_one(source, rows, at, stop)
    counts = np.bincount(np.concatenate([last.row, *(step.row for step in steps)]), minlength=len(starts))
    first = np.cumsum(counts) - counts
    # The n-th step holds the n-th field of its messages; what was left is in order already.
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


def _step(source: Buffer, rows: Ints, at: Ints, stop: Ints) -> tuple[Fields, Ints]:
    """The next field of each message, and where the one after it begins."""
    key, at = _varint(source, rows, at)
    kind, number = key & 7, key >> 3
    value, begin = np.zeros(len(rows), np.int64), at.copy()
    for wire_type, indices in ((t, np.flatnonzero(kind == t)) for t in (VARINT, DELIMITED, FIXED64, FIXED32)):
        if not len(indices):
            continue
        if wire_type in {VARINT, DELIMITED}:
            value[indices], begin[indices] = _varint(source, rows[indices], at[indices])
        elif wire_type == FIXED64:
            value[indices], begin[indices] = source.words[at[indices]].view(np.int64), at[indices] + 8
        else:
            value[indices], begin[indices] = source.halves[at[indices]], at[indices] + 4
    after = begin + np.where(kind == DELIMITED, value, 0)
    wrong = (after > stop) | ((kind == DELIMITED) & (value < 0)) | (number == 0) | (kind > FIXED32)
    wrong |= (kind > DELIMITED) & (kind < FIXED32)  # groups, which no version of the schema has
    if wrong.any():
        raise DamageError(int(rows[np.flatnonzero(wrong)[0]]))
    return Fields(rows, number, kind, value, begin), after


def _varint(source: Buffer, rows: Ints, at: Ints) -> tuple[Ints, Ints]:
    """The varint at each position, and where it ends."""
    last = len(source.bytes) - 1
    byte = source.bytes[np.minimum(at, last)]
    value = (byte & 127).astype(np.uint64)
    after = at + 1
    unfinished = np.flatnonzero(byte > 127)
    shift = 7
    while len(unfinished):
        if shift > _MOST_SHIFT:
            raise DamageError(int(rows[unfinished[0]]))
        byte = source.bytes[np.minimum(after[unfinished], last)]
        value[unfinished] |= (byte & 127).astype(np.uint64) << np.uint64(shift)
        after[unfinished] += 1
        unfinished = unfinished[byte > 127]
        shift += 7
    return value.view(np.int64), after


def _one_by_one(source: Buffer, rows: Ints, at: Ints, stop: Ints) -> Fields:
    parsed: list[tuple[int, int, int, int, int]] = []
    for row, begin, end in zip(rows.tolist(), at.tolist(), stop.tolist(), strict=True):
        position = begin
        while position < end:
            key, position = _one_varint(source.data, position, row)
            number, kind = key >> 3, key & 7
            value = 0
            if kind in {VARINT, DELIMITED}:
                value, position = _one_varint(source.data, position, row)
            elif kind in {FIXED64, FIXED32}:
                size = 8 if kind == FIXED64 else 4
                value = int.from_bytes(source.data[position : position + size], "little")
                position += size
            else:
                raise DamageError(row)
            after = position + value if kind == DELIMITED else position
            if after > end or not number:
                raise DamageError(row)
            parsed.append((row, number, kind, value if value < 1 << 63 else value - (1 << 64), position))
            position = after
    return Fields(*(np.array([f[n] for f in parsed], np.int64) for n in range(5)))


def _one_varint(data: bytes, at: int, row: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, _MOST_SHIFT + 1, 7):
        byte = data[at] if at < len(data) else 128
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise DamageError(row)


def to_array(source: Buffer, begin: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Packed varints: how many each run of bytes holds, and all of them.

    Raises:
        DamageError: A run does not end with the end of a number, or has one of more than ten bytes.
    """
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    data = source.bytes[np.repeat(begin - (ends - length), length) + np.arange(total)]
    last = np.flatnonzero(data < 128)
    counts = np.searchsorted(last, ends) - np.searchsorted(last, ends - length)
    whole = (length == 0) | np.isin(ends - 1, last)
    first = np.concatenate([[0], last[:-1] + 1]) if len(last) else last
    sizes = last - first + 1
    if not whole.all() or (sizes > 10).any():
        raise DamageError(int(np.flatnonzero(~whole)[0]) if not whole.all() else 0)
    value = np.zeros(len(first), np.uint64)
    unfinished = np.arange(len(first))
    for number in range(int(sizes.max(initial=0))):
        value[unfinished] |= (data[first[unfinished] + number] & 127).astype(np.uint64) << np.uint64(7 * number)
        unfinished = unfinished[sizes[unfinished] > number + 1]
    return counts, value.view(np.int64)


def unzigzag(values: Ints) -> Ints:
    """Numbers from the form that `sint64` has on the wire."""
    bits = values.view(np.uint64)
    return (bits >> np.uint64(1)).view(np.int64) ^ -(values & 1)


class NameFinder:
    """Finds which of some known names (of at most 24 bytes) stands at a place.

    Args:
        known: The names; their positions are the answers.
    """

    _FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)

    def __init__(self, names: tuple[str, ...]) -> None:
        source = buffer("".join(names).encode())
        length = np.array([len(name.encode()) for name in names])
        if length.max() > 24:
            raise ValueError("a name is too long to be found")
        hashes = self._hashes(source, np.cumsum(length) - length, length)
        self._order = np.argsort(hashes)
        self._hashed = hashes[self._order]
        if (self._hashed[1:] == self._hashed[:-1]).any():
            raise ValueError("two names cannot be distinguished")

    def find(self, source: Buffer, begin: Ints, length: Ints) -> Ints:
        """The number of the name at each place, or -1; by 64 bits of hash, so that no other name is taken for it."""
        hashes = self._hashes(source, begin, np.minimum(length, 25))
        at = np.minimum(np.searchsorted(self._hashed, hashes), len(self._hashed) - 1)
        return np.where((self._hashed[at] == hashes) & (length <= 24), self._order[at], -1)

    def _hashes(self, source: Buffer, begin: Ints, length: Ints) -> NDArray[np.uint64]:
        total = length.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
        for number, factor in enumerate(self._FACTORS):
            inside = np.clip(length - 8 * number, 0, 8)
            index = np.minimum(begin + 8 * number, len(source.words) - 1)
            word: Any = source.words[index]
            # A shift by 64 is undefined, so that 8 bytes are kept in two shifts.
            kept = np.uint64(8) * (np.uint64(8) - inside.astype(np.uint64))
            half = kept >> np.uint64(1)
            word = (word << half << (kept - half)) >> half >> (kept - half)
            word[inside == 0] = 0
            total = (total ^ word) * np.uint64(factor)
            total ^= total >> np.uint64(29)
        return total


def texts(source: Buffer, begin: Ints, length: Ints) -> list[str]:
    """The UTF-8 texts at some places; equal ones are one object.

    Raises:
        DamageError: One of them is no UTF-8.
    """
    seen: dict[bytes, str] = {}
    out: list[str] = []
    data = source.data
    for number, (start, stop) in enumerate(zip(begin.tolist(), (begin + length).tolist(), strict=True)):
        raw = data[start:stop]
        text = seen.get(raw)
        if text is None:
            try:
                text = seen[raw] = raw.decode()
            except UnicodeDecodeError as error:
                raise DamageError(number) from error
        out.append(text)
    return out


_MEMBERS = {member.number: member.name for member in AttributeProto.DESCRIPTOR.oneofs_by_name["value"].fields}
_NUMBER_OF = {name: number for number, name in _MEMBERS.items()}
_ZIGZAG = [_NUMBER_OF[name] for name in ("sint32_val", "sint64_val")]
_SIGNED_HALF = _NUMBER_OF["sfixed32_val"]
_WHOLE = [
    number
    for number, name in _MEMBERS.items()
    if name.endswith("_val") and any(part in name for part in ("int", "fixed", "bool"))
]


@dataclass(frozen=True)
class Lists:
    """Numbers of some nodes: node `row[i]` has `count[i]` of the values."""

    row: Ints
    count: Ints
    values: Ints


@dataclass(frozen=True)
class NodeColumns:
    """The nodes of one block.

    Attributes:
        source: The bytes.
        id: As bits: ids beyond 2**63 look negative.
        type: As written, known or not.
        start_us: As bits.
        duration_us: As bits.
        names: Name of each node.
        control: Control dependencies, as bits.
        data: Data dependencies, as bits.
        inputs: IOInfo fields 1, 2 and 3 (row and text).
        outputs: As `inputs`.
    """

    source: Buffer
    id: Ints
    type: Ints
    start_us: Ints
    duration_us: Ints
    names: list[str]
    control: Lists
    data: Lists
    inputs: dict[int, tuple[Ints, list[str]]]
    outputs: dict[int, tuple[Ints, list[str]]]
    attributes: dict[str, _Attributes] = field(repr=False)

    def __len__(self) -> int:
        return len(self.id)

    def has(self, name: str) -> NDArray[np.bool_]:
        """Which nodes have the attribute, with or without a value."""
        flags = np.zeros(len(self), np.bool_)
        if name in self.attributes:
            flags[self.attributes[name].row] = True
        return flags

    def numbers(self, name: str) -> pl.Series:
        """A whole number per node, whichever whole type it is written as; null where it is absent or another type."""
        values, present = np.zeros(len(self), np.int64), np.zeros(len(self), np.bool_)
        if (attribute := self.attributes.get(name)) is not None:
            member, value = attribute.member, attribute.value
            value = np.where(np.isin(member, _ZIGZAG), unzigzag(value), value)
            value = np.where(member == _SIGNED_HALF, value.astype(np.int32).astype(np.int64), value)
            whole = np.isin(member, _WHOLE)
            values[attribute.row[whole]], present[attribute.row[whole]] = value[whole], True
        return pl.Series(name, values).set(pl.Series(~present), None)

    def strings(self, name: str) -> pl.Series:
        """A text per node; null where it is absent or no text."""
        attribute = self.attributes.get(name)
        out: list[str | None] = [None] * len(self)
        if attribute is not None:
            text = attribute.member == _NUMBER_OF["string_val"]
            values = texts(self.source, attribute.begin[text], attribute.value[text])
            for row, value in zip(attribute.row[text].tolist(), values, strict=True):
                out[row] = value
        return pl.Series(name, out, dtype=pl.String)

    def lists(self, name: str, member: str) -> Lists:
        """A list of whole numbers of the nodes that have it; lists of another type are absent."""
        attribute = self.attributes.get(name)
        if attribute is None:
            return Lists(*(np.zeros(0, np.int64) for _ in range(3)))
        matches = attribute.member == _NUMBER_OF[member]
        rows, begin, length = attribute.row[matches], attribute.begin[matches], attribute.value[matches]
        inner = fields(self.source, begin, begin + length)
        runs = inner.numbered(1, DELIMITED)
        counts, values = to_array(self.source, runs.begin, runs.value)
        values = unzigzag(values) if member.startswith("sint") else values
        count = np.bincount(runs.row, weights=counts, minlength=len(rows)).astype(np.int64)
        return Lists(rows, count, values)


@dataclass(frozen=True, slots=True)
class _Attributes:
    """The attributes of one name: node, member of the value (0: none), and the value as in `Fields`."""

    row: Ints
    member: Ints
    value: Ints
    begin: Ints


class Decoder:
    """Turns blocks into columns.

    Args:
        names: The attributes that are asked for, at most 24 bytes each.
        where: The file, for errors.
    """

    def __init__(self, names: Iterable[str], where: str) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._finder = NameFinder(self._names)
        self._where = where

    def columns(self, blocks: Iterable[Block]) -> Iterator[NodeColumns]:
        """The columns of each block.

        Raises:
            InputError: `chakra-damaged`.
        """
        for block in blocks:
            try:
                columns = self._columns(block)
            except DamageError as error:
                # The library may refuse one message alone; else it is one of the block.
                first, last = block.first, block.first + len(block) - 1
                begin, end = block.at + block.starts[0], block.at + block.stops[-1]
                number = 0
                try:
                    for number, message in enumerate(block.messages()):  # noqa: B007  (the error says the number)
                        Node.FromString(message)
                except DecodeError:
                    first = last = block.first + number
                    begin, end = block.at + block.starts[number], block.at + block.stops[number]
                subject = f"message {first}" if first == last else f"one of the messages {first} to {last}"
                raise InputError(
                    f"{subject}, bytes {begin} to {end}, is no Chakra node",
                    slug="chakra-damaged",
                    where=self._where,
                    hint="the file is damaged there",
                ) from error
            yield columns

    def _columns(self, block: Block) -> NodeColumns:
        source = buffer(block.data)
        count = len(block)
        parsed = fields(source, np.array(block.starts, np.int64), np.array(block.stops, np.int64))
        names = [""] * count
        named = parsed.numbered(2, DELIMITED)
        for row, text in zip(named.row.tolist(), texts(source, named.begin, named.value), strict=True):
            names[row] = text
        # The attributes that are asked for, of all nodes.
        messages = parsed.numbered(10, DELIMITED)
        inner = fields(source, messages.begin, messages.begin + messages.value)
        attribute_names = inner.numbered(1, DELIMITED)
        code = np.full(len(messages.row), -1, np.int16)
        code[attribute_names.row] = self._finder.find(source, attribute_names.begin, attribute_names.value)
        held = inner.where(np.isin(inner.number, list(_MEMBERS)))
        columns = [np.zeros(len(messages.row), np.int64) for _ in range(3)]
        for column, values in zip(columns, (held.number, held.value, held.begin), strict=True):
            column[held.row] = values
        order = np.argsort(code, kind="stable")
        edges = np.searchsorted(code[order], np.arange(len(self._names) + 1))
        attributes = {}
        for number, name in enumerate(self._names):
            indices = order[edges[number] : edges[number + 1]]
            if len(indices):
                attributes[name] = _Attributes(messages.row[indices], *(column[indices] for column in columns))
        return NodeColumns(
            source=source,
            id=_numbers(parsed, 1, count),
            type=_numbers(parsed, 3, count).astype(np.int32).astype(np.int64),
            start_us=_numbers(parsed, 6, count),
            duration_us=_numbers(parsed, 7, count),
            names=names,
            control=_dependencies(source, parsed, 4),
            data=_dependencies(source, parsed, 5),
            inputs=_tensors(source, parsed.numbered(8, DELIMITED)),
            outputs=_tensors(source, parsed.numbered(9, DELIMITED)),
            attributes=attributes,
        )


def _numbers(parsed: Fields, number: int, count: int) -> Ints:
    column = np.zeros(count, np.int64)
    matches = parsed.numbered(number, VARINT)
    column[matches.row] = matches.value
    return column


def _dependencies(source: Buffer, parsed: Fields, number: int) -> Lists:
    """Numbers of a repeated field, packed or one by one, in the order of the file."""
    runs, single = parsed.numbered(number, DELIMITED), parsed.numbered(number, VARINT)
    counts, values = to_array(source, runs.begin, runs.value)
    row = np.concatenate([np.repeat(runs.row, counts), single.row])
    values = np.concatenate([values, single.value])
    order = np.argsort(row, kind="stable")
    rows, count = np.unique(row, return_counts=True)
    return Lists(rows, count, values[order])


def _tensors(source: Buffer, messages: Fields) -> dict[int, tuple[Ints, list[str]]]:
    inner = fields(source, messages.begin, messages.begin + messages.value)
    out = {}
    for number in (1, 2, 3):
        matches = inner.numbered(number, DELIMITED)
        out[number] = messages.row[matches.row], texts(source, matches.begin, matches.value)
    return out
