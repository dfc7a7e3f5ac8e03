"""Any message survives every form; bytes made from columns are those that the protobuf library makes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from hypothesis import example, given, strategies as st

from traceloom.formats.chakra import decode, encode
from traceloom.formats.chakra.decode import DamageError
from traceloom.formats.chakra.et_pb2 import AttributeProto, GlobalMetadata, IOInfo, Node
from traceloom.formats.chakra.files import IncompleteTail, read_blocks
from traceloom.workload.chakra.convert import open_messages, write_messages

INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
FLOAT32 = st.floats(width=32)
SCALARS = {
    "double": st.floats(),
    "float": FLOAT32,
    "int32": INT32,
    "int64": INT64,
    "uint32": UINT32,
    "uint64": UINT64,
    "sint32": INT32,
    "sint64": INT64,
    "fixed32": UINT32,
    "fixed64": UINT64,
    "sfixed32": INT32,
    "sfixed64": INT64,
    "bool": st.booleans(),
    "string": TEXT,
    "bytes": st.binary(max_size=12),
}
# A field that no version of the schema has, on any wire type.
UNKNOWN = st.one_of(
    st.just(b""),
    UINT64.map(
        lambda n: b"\xf8\x3f" + encode.encode_varints(np.array([n], np.uint64)).data.tobytes()
    ),
    st.binary(max_size=5).map(lambda data: b"\xfa\x3f" + bytes((len(data),)) + data),
    st.binary(min_size=8, max_size=8).map(lambda data: b"\xf9\x3f" + data),
    st.binary(min_size=4, max_size=4).map(lambda data: b"\xfd\x3f" + data),
)


@st.composite
def attributes(draw: Callable[[Any], Any]) -> AttributeProto:
    message = AttributeProto(name=draw(TEXT), doc_string=draw(st.sampled_from(["", "doc"])))
    kind = draw(st.sampled_from([None, *SCALARS]))
    if kind is not None and draw(st.booleans()):
        held = getattr(message, f"{kind}_list")
        held.SetInParent()
        held.values.extend(draw(st.lists(SCALARS[kind], max_size=3)))
        held.MergeFromString(draw(UNKNOWN))
    elif kind is not None:
        setattr(message, f"{kind}_val", draw(SCALARS[kind]))
    message.MergeFromString(draw(UNKNOWN))
    return message


@st.composite
def nodes(draw: Callable[[Any], Any]) -> Node:
    node = Node(id=draw(UINT64), name=draw(TEXT), type=draw(st.integers(0, 12)))
    node.ctrl_deps.extend(draw(st.lists(UINT64, max_size=3)))
    node.data_deps.extend(draw(st.lists(UINT64, max_size=5)))
    node.start_time_micros, node.duration_micros = draw(UINT64), draw(UINT64)
    for name in ("inputs", "outputs"):
        if draw(st.booleans()):
            held: IOInfo = getattr(node, name)
            held.SetInParent()
            held.values, held.shapes, held.types = draw(TEXT), draw(TEXT), draw(TEXT)
            held.MergeFromString(draw(UNKNOWN))
    node.attr.extend(draw(st.lists(attributes(), max_size=4)))
    node.MergeFromString(draw(UNKNOWN))
    return node


@st.composite
def metadata(draw: Callable[[Any], Any]) -> GlobalMetadata:
    message = GlobalMetadata(version=draw(TEXT))
    message.attr.extend(draw(st.lists(attributes(), max_size=3)))
    if (
        message.version or message.attr
    ):  # a first message of unknown fields alone would be no metadata
        message.MergeFromString(draw(UNKNOWN))
    return message


@given(
    metadata(),
    st.lists(nodes(), max_size=4),
    st.sampled_from([".et", ".et.gz", ".json", ".jsonl", ".jsonl.gz"]),
)
@example(GlobalMetadata(), [Node()], ".jsonl")
@example(GlobalMetadata(version="1"), [Node(id=2**64 - 1)], ".json")
def test_any_message_survives_every_form(
    head: GlobalMetadata, body: list[Node], ending: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{ending}"
        write_messages(path, head, body)
        with open_messages(path) as reader:
            found = [reader.metadata, *reader]
    # Compared as bytes: a NaN is not equal to itself.
    assert [m.SerializeToString() for m in found] == [m.SerializeToString() for m in [head, *body]]
    assert reader.notices == []


@given(st.lists(INT64 | st.sampled_from([0, 127, 128, 2**63 - 1, -1, -(2**63)]), max_size=40))
def test_varints_are_those_of_the_library(numbers: list[int]) -> None:
    made = encode.encode_varints(np.array(numbers, np.int64))
    node = Node(data_deps=[number % 2**64 for number in numbers])
    key_and_length = len(node.SerializeToString()) - int(made.lengths.sum())
    assert node.SerializeToString()[key_and_length:] == made.data.tobytes()
    counts, back = decode.decode_packed(
        decode.build_buffer(made.data.tobytes()), np.array([0]), np.array([len(made.data)])
    )
    assert back.tolist() == numbers
    assert counts.tolist() == [len(numbers)]


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=5), st.data())
def test_rows_of_a_table_are_laid_end_to_end_by_their_numbers(
    table: list[bytes], data: st.DataObject
) -> None:
    numbers = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=20))
    rows = encode.ByteRows(
        np.frombuffer(b"".join(table), np.uint8), np.array([len(row) for row in table])
    )
    found = encode.pick_rows(rows, np.array(numbers, np.int64))
    assert found.data.tobytes() == b"".join(table[number] for number in numbers)
    assert found.lengths.tolist() == [len(table[number]) for number in numbers]


@given(
    st.lists(
        st.tuples(
            UINT32,
            TEXT,
            st.lists(UINT32, max_size=3),
            st.none() | INT64,
            st.none() | TEXT,
            st.none() | st.lists(INT64, max_size=3),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_messages_from_columns_are_those_of_the_library(rows: list[Any]) -> None:
    ids, names, deps, numbers, texts, lists = zip(*rows, strict=True)
    expected = []
    for number, name, needed, value, text, many in rows:
        node = Node(id=number, name=name, data_deps=needed)
        if value is not None:
            node.attr.add(name="a", sint64_val=value)
        if text is not None:
            node.attr.add(name="b", string_val=text)
        if many is not None:
            held = node.attr.add(name="c").int64_list
            held.SetInParent()
            held.values.extend(many)
        expected.append(node)
    values = np.array([0 if n is None else n for n in numbers], np.int64)
    flat = np.array([d for needed in deps for d in needed], np.int64)
    made = encode.encode_messages(
        [
            encode.encode_number_field(b"\x08", np.array(ids, np.int64)),
            encode.encode_delimited(
                b"\x12", encode.encode_texts(pl.Series(names, dtype=pl.String))
            ),
            encode.encode_packed_field(b"\x2a", np.array([len(d) for d in deps], np.int64), flat),
            *encode.encode_number_attribute(
                "a", "sint64_val", values, np.array([n is not None for n in numbers])
            ),
            *encode.encode_text_attribute("b", pl.Series(texts, dtype=pl.String)),
            *encode.encode_list_attribute(
                "c", "int64_list", pl.Series(lists, dtype=pl.List(pl.Int64))
            ),
        ]
    )
    found = [
        message for block in read_blocks([made], IncompleteTail()) for message in block.messages()
    ]
    assert found == [node.SerializeToString() for node in expected]


@given(st.lists(nodes(), min_size=1, max_size=60))
def test_columns_are_what_the_library_reads(body: list[Node]) -> None:
    from traceloom.formats.chakra.decode import Decoder
    from traceloom.formats.chakra.files import Block

    messages = [node.SerializeToString() for node in body]
    stops = np.cumsum([len(m) for m in messages]).tolist()
    names = ("is_cpu_op", *{a.name for n in body for a in n.attr if 0 < len(a.name.encode()) <= 24})
    (columns,) = Decoder(names, "made").columns(
        [Block(b"".join(messages), [0, *stops[:-1]], stops, 0, 0)]
    )
    assert columns.id.view(np.uint64).tolist() == [n.id for n in body]
    assert columns.type.tolist() == [n.type for n in body]
    assert columns.names == [n.name for n in body]
    assert columns.duration_us.view(np.uint64).tolist() == [n.duration_micros for n in body]
    for lists, field in ((columns.data, "data_deps"), (columns.control, "ctrl_deps")):
        ends = np.cumsum(lists.count)
        there = dict(
            zip(
                lists.row.tolist(),
                zip((ends - lists.count).tolist(), ends.tolist(), strict=True),
                strict=True,
            )
        )
        for row, node in enumerate(body):
            low, high = there.get(row, (0, 0))
            assert lists.values[low:high].view(np.uint64).tolist() == list(getattr(node, field))
    for name in names:
        last = [[a for a in n.attr if a.name == name][-1:] for n in body]
        texts, numbers = columns.strings(name).to_list(), columns.numbers(name).to_list()
        for row, found in enumerate(last):
            kind = found[0].WhichOneof("value") if found else None
            if found and len([a for a in body[row].attr if a.name == name]) == 1:
                assert texts[row] == (found[0].string_val if kind == "string_val" else None)
            if kind in {
                "int64_val",
                "sint64_val",
                "sint32_val",
                "sfixed32_val",
                "int32_val",
                "bool_val",
                "fixed32_val",
            }:
                assert numbers[row] == int(getattr(found[0], kind))
        assert columns.has(name).tolist() == [bool(found) for found in last]


@given(st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=50))
def test_garbage_is_damage_and_nothing_else(messages: list[bytes]) -> None:
    stops = np.cumsum([len(m) for m in messages])
    starts = stops - [len(m) for m in messages]
    damaged, rows = -1, list(range(len(messages)))
    try:
        rows = decode.decode_fields(
            decode.build_buffer(b"".join(messages)), starts, stops
        ).row.tolist()
    except DamageError as error:
        damaged = error.row
    assert damaged < len(messages)
    assert rows == sorted(rows)
    assert set(rows) == set(range(len(messages)))


def test_nan_and_infinity_are_texts_in_json(tmp_path: Path) -> None:
    node = Node(id=1)
    node.attr.add(name="x").double_list.values.extend([math.nan, math.inf, -math.inf, 0.1, 1e300])
    write_messages(tmp_path / "a.json", GlobalMetadata(version="1"), [node])
    assert (
        '[{"name":"x","double_list":["NaN","Infinity","-Infinity",0.1,1e300]}]'
        in (tmp_path / "a.json").read_text()
    )
