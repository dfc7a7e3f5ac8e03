"""Rows of bytes made from columns, and files taken apart into messages, against Python's bytes, row by row."""

from __future__ import annotations

import random

import numpy as np
import polars as pl
import pytest

from traceloom.errors import InputError
from traceloom.formats.chakra import encode
from traceloom.formats.chakra.et_pb2 import AttributeProto, Node
from traceloom.formats.chakra.files import IncompleteTail, encode_length, read_blocks


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = bytearray()
    while True:
        out.append(number & 127 | (128 if number > 127 else 0))
        number >>= 7
        if not number:
            return bytes(out)


def rows(values: list[bytes]) -> encode.ByteRows:
    return encode.ByteRows(
        np.frombuffer(b"".join(values), np.uint8),
        np.array([len(value) for value in values], np.int64),
    )


def bytes_of(table: encode.ByteRows) -> list[bytes]:
    ends = np.cumsum(table.lengths).tolist()
    assert (ends[-1] if ends else 0) == len(table.data)
    data = table.data.tobytes()
    return [
        data[end - length : end] for end, length in zip(ends, table.lengths.tolist(), strict=True)
    ]


def pieces(chance: random.Random, count: int, most: int) -> list[bytes]:
    return [chance.randbytes(chance.choice([0, 1, chance.randint(0, most)])) for _ in range(count)]


NUMBERS = sorted(
    {sign * (1 << bit) + off for bit in range(63) for off in (-1, 0, 1) for sign in (1, -1)}
    | {-(2**63)}
)


def test_varints_of_every_length() -> None:
    values = np.array(NUMBERS, np.int64)
    assert bytes_of(encode.encode_varints(values)) == [varint(number) for number in NUMBERS]
    assert encode.count_varint_bytes(values.view(np.uint64)).tolist() == [
        len(varint(number)) for number in NUMBERS
    ]
    assert bytes_of(encode.encode_varints(np.array([2**64 - 1, 2**63], np.uint64))) == [
        varint(2**64 - 1),
        varint(2**63),
    ]
    assert len(encode.encode_varints(np.zeros(0, np.int64))) == 0
    assert encode.encode_zigzag(values).view(np.uint64).tolist() == [
        2 * number if number >= 0 else -2 * number - 1 for number in NUMBERS
    ]


# Short pieces, pieces of one size, many sizes, and pieces of more than 64 KiB are put in ways of their own.
@pytest.mark.parametrize(
    ("count", "most"), [(0, 5), (1, 5), (50, 3), (50, 40), (900, 700), (6, 200_000)]
)
def test_parts_are_joined_row_by_row(count: int, most: int) -> None:
    chance = random.Random(count + most)
    parts = [pieces(chance, count, most) for _ in range(4)] + [[b"ab"] * count, [b""] * count]
    expected = [b"".join(row) for row in zip(*parts, strict=True)]
    assert bytes_of(encode.join_columns([rows(part) for part in parts])) == expected
    assert encode.encode_messages([rows(part) for part in parts]) == b"".join(
        varint(len(row)) + row for row in expected
    )
    assert (
        bytes_of(
            encode.join_columns([encode.build_empty_rows(count), encode.build_empty_rows(count)])
        )
        == [b""] * count
    )


@pytest.mark.parametrize("seed", range(15))
def test_rows_are_picked_gathered_and_spread(seed: int) -> None:
    chance = random.Random(seed)
    table = pieces(chance, chance.randint(1, 9), 20)
    number = [chance.randrange(len(table)) for _ in range(chance.choice([0, 1, 40]))]
    assert bytes_of(encode.pick_rows(rows(table), np.array(number, np.int64))) == [
        table[at] for at in number
    ]
    counts = [chance.randint(0, 3) for _ in range(7)]
    many = pieces(chance, sum(counts), 9)
    ends = np.cumsum(counts).tolist()
    expected = [b"".join(many[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    assert bytes_of(encode.concatenate_rows(rows(many), np.array(counts))) == expected
    at = sorted(chance.sample(range(20), len(table)))
    spread = bytes_of(encode.expand_rows(rows(table), np.array(at), 20))
    assert spread == [table[at.index(row)] if row in at else b"" for row in range(20)]
    flags = np.array([chance.random() < 0.5 for _ in range(9)])
    assert bytes_of(encode.repeat_bytes(b"xyz", flags)) == [
        b"xyz" if flag else b"" for flag in flags
    ]
    assert bytes_of(encode.repeat_bytes(b"xyz", 3)) == [b"xyz"] * 3


@pytest.mark.parametrize("seed", range(15))
def test_fields_are_there_where_they_hold_something(seed: int) -> None:
    chance = random.Random(seed)
    values = pieces(chance, 12, 300)
    field = encode.encode_delimited(b"\x12", rows(values))
    assert bytes_of(field) == [
        b"\x12" + varint(len(value)) + value if value else b"" for value in values
    ]
    there = np.array([bool(value) or chance.random() < 0.5 for value in values])
    assert bytes_of(encode.encode_delimited(b"\x12", rows(values), there)) == [
        b"\x12" + varint(len(value)) + value if flag else b""
        for value, flag in zip(values, there, strict=True)
    ]
    numbers = [chance.choice([0, 0, chance.choice(NUMBERS)]) for _ in range(12)]
    assert bytes_of(encode.encode_number_field(b"\x18", np.array(numbers, np.int64))) == [
        b"\x18" + varint(number) if number else b"" for number in numbers
    ]
    texts = [chance.choice([None, "", "é", "long " * 50]) for _ in range(12)]
    assert bytes_of(encode.encode_texts(pl.Series(texts, dtype=pl.String))) == [
        (text or "").encode() for text in texts
    ]
    assert len(encode.encode_texts(pl.Series([], dtype=pl.String))) == 0


@pytest.mark.parametrize("seed", range(20))
def test_attributes_are_what_the_protobuf_library_reads(seed: int) -> None:
    chance = random.Random(seed)
    count = 9
    there = np.array([chance.random() < 0.7 for _ in range(count)])
    member = chance.choice(["int64_val", "sint64_val", "int32_val", "uint64_val", "bool_val"])
    most = {
        "int64_val": 2**63,
        "sint64_val": 2**63,
        "int32_val": 2**31,
        "uint64_val": 2**63,
        "bool_val": 2,
    }[member]
    signed = member in {"int64_val", "sint64_val", "int32_val"}
    numbers = [chance.randrange(-most if signed else 0, most) for _ in range(count)]
    words = [chance.choice([None, "", "word", "é" * 100]) for _ in range(count)]
    lists = [chance.choice([None, [], [1], [2**40, 0, 7]]) for _ in range(count)]
    name = chance.choice(["a", "a_name_of_an_attribute" * 4])
    fields = [
        *encode.encode_number_attribute(name, member, np.array(numbers, np.int64), there),
        *encode.encode_text_attribute("words", pl.Series(words, dtype=pl.String)),
        *encode.encode_list_attribute(
            "list", "int64_list", pl.Series(lists, dtype=pl.List(pl.Int64))
        ),
        *encode.encode_bare_attribute("bare", ~there),
    ]
    for row, data in enumerate(bytes_of(encode.join_columns(fields))):
        expected = []
        if there[row]:
            expected.append(AttributeProto(name=name, **{member: numbers[row]}))
        if words[row] is not None:
            expected.append(AttributeProto(name="words", string_val=words[row]))
        if lists[row] is not None:
            held = AttributeProto(name="list")
            held.int64_list.SetInParent()
            held.int64_list.values.extend(lists[row] or [])
            expected.append(held)
        if not there[row]:
            expected.append(AttributeProto(name="bare"))
        assert list(Node.FromString(data).attr) == expected


# -- a file as messages -------------------------------------------------------------------------------------------


def split(chance: random.Random, data: bytes) -> list[bytes]:
    out = []
    while data:
        size = chance.choice([1, 2, 3, chance.randint(1, max(len(data), 1))])
        out.append(data[:size])
        data = data[size:]
    return out


@pytest.mark.parametrize("seed", range(25))
def test_messages_are_the_same_however_the_file_arrives(seed: int) -> None:
    chance = random.Random(seed)
    messages = pieces(chance, chance.randint(0, 12), chance.choice([10, 127, 128, 20_000]))
    prefixes = [encode_length(len(message)) for message in messages]
    assert prefixes == [varint(len(message)) for message in messages]
    data = b"".join(prefix + message for prefix, message in zip(prefixes, messages, strict=True))
    cut = IncompleteTail()
    parts = list(read_blocks(iter(split(chance, data)), cut))
    assert [message for part in parts for message in part.messages()] == messages
    assert cut == IncompleteTail()
    number = 0
    for part in parts:
        assert part.first == number
        number += len(part)
        for start, stop in zip(part.starts, part.stops, strict=True):
            assert data[part.at + start : part.at + stop] == part.data[start:stop]


@pytest.mark.parametrize("seed", range(6))
def test_a_file_that_is_cut_anywhere_says_where(seed: int) -> None:
    chance = random.Random(seed)
    messages = [chance.randbytes(size) for size in (5, 0, 127, 128, 9)]
    begins, data = [], b""
    for message in messages:
        begins.append(len(data))
        data += varint(len(message)) + message
    ends = [*begins[1:], len(data)]
    for size in range(len(data) + 1):
        cut = IncompleteTail()
        parts = list(read_blocks(iter(split(chance, data[:size])), cut))
        whole = sum(end <= size for end in ends)
        assert [message for part in parts for message in part.messages()] == messages[:whole]
        if size in {0, *ends}:
            assert cut == IncompleteTail()
            continue
        there = size - begins[whole]
        prefix = len(varint(len(messages[whole])))
        assert (cut.message, cut.at) == (whole, begins[whole])
        if there < prefix:
            assert (
                cut.sentence()
                == f"the file ends at byte {size}, inside the length of message {whole}"
            )
        else:
            assert cut.sentence().endswith(
                f"and has {there - prefix:,} of its {len(messages[whole]):,} bytes"
            )


@pytest.mark.parametrize(
    "data", [b"\xff" * 6, b"\x80\x80\x80\x80\x80\x01", varint(2**28 + 1) + b"x" * 9]
)
def test_a_length_that_no_message_has_is_damage(data: bytes) -> None:
    good = varint(3) + b"abc"
    seen = []
    with pytest.raises(InputError, match="message 2 at byte 8 claims") as refused:
        seen += [
            message
            for part in read_blocks(iter([good * 2 + data]), IncompleteTail())
            for message in part.messages()
        ]
    assert refused.value.slug == "chakra-damaged"
