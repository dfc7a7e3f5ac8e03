"""The nodes of a block of a `.et` file as columns: their own fields, and the attributes that a reader asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from traceloom.array_types import Ints
from traceloom.chakra.framing import Block
from traceloom.chakra.schema import AttributeProto, Node
from traceloom.chakra.wire import DELIMITED, VARINT
from traceloom.chakra.wire_in import Buffer, DamageError, Fields, NameFinder, buffer, fields, packed, texts, unzigzag
from traceloom.errors import InputError

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
        counts, values = packed(self.source, runs.begin, runs.value)
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
    counts, values = packed(source, runs.begin, runs.value)
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
