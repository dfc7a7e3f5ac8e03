"""Messages as JSON: every type of attribute at its limits, in both directions and in every spelling."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from traceloom.errors import InputError
from traceloom.formats.chakra.et_pb2 import (
    AttributeProto,
    CollectiveCommType,
    GlobalMetadata,
    Node,
    NodeType,
)
from traceloom.formats.chakra.json import build_feeder_node, build_message, convert_to_object

WIDE = 2**53  # beyond it, a number is a text
# kind -> (value, how it stands in JSON), at the limits of each
VALUES: dict[str, list[tuple[Any, Any]]] = {
    "double": [
        (0.0, 0.0),
        (-1.5, -1.5),
        (5e-324, 5e-324),
        (1.7976931348623157e308, 1.7976931348623157e308),
        (0.1, 0.1),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
    ],
    "float": [
        (0.25, 0.25),
        (-(2.0**-149), -(2.0**-149)),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
    ],
    "int32": [(0, 0), (2**31 - 1, 2**31 - 1), (-(2**31), -(2**31))],
    "int64": [
        (0, 0),
        (WIDE, WIDE),
        (-WIDE, -WIDE),
        (WIDE + 1, str(WIDE + 1)),
        (-WIDE - 1, str(-WIDE - 1)),
        (2**63 - 1, "9223372036854775807"),
        (-(2**63), "-9223372036854775808"),
    ],
    "uint32": [(0, 0), (2**32 - 1, 2**32 - 1)],
    "uint64": [
        (0, 0),
        (WIDE, WIDE),
        (WIDE + 1, str(WIDE + 1)),
        (2**64 - 1, "18446744073709551615"),
    ],
    "sint32": [(-1, -1), (2**31 - 1, 2**31 - 1), (-(2**31), -(2**31))],
    "sint64": [(-1, -1), (2**63 - 1, "9223372036854775807"), (-(2**63), "-9223372036854775808")],
    "fixed32": [(0, 0), (2**32 - 1, 2**32 - 1)],
    "fixed64": [(1, 1), (2**64 - 1, "18446744073709551615")],
    "sfixed32": [(-1, -1), (-(2**31), -(2**31))],
    "sfixed64": [(-1, -1), (-(2**63), "-9223372036854775808")],
    "bool": [(False, False), (True, True)],
    "string": [
        ("", ""),
        ('ü 漢 \u202e\x00\x1b[31m"\\', 'ü 漢 \u202e\x00\x1b[31m"\\'),
        ("18446744073709551616", "18446744073709551616"),
    ],
    "bytes": [(b"", ""), (b"\x00\xff\xfe", "AP/+"), (bytes(range(4)), "AAECAw==")],
}
EACH = [(kind, value, shown) for kind, cases in VALUES.items() for value, shown in cases]
TOO_LARGE = {
    "int32": (2**31, -(2**31) - 1),
    "sint32": (2**31,),
    "sfixed32": (-(2**31) - 1,),
    "uint32": (2**32, -1),
    "fixed32": (-1,),
    "int64": (2**63, -(2**63) - 1),
    "sint64": (2**63,),
    "sfixed64": (2**63,),
    "uint64": (2**64, -1),
    "fixed64": (2**64,),
}
NO_NUMBER: tuple[Any, ...] = (
    True,
    1.0,
    1.5,
    None,
    "",
    "1.0",
    "0x10",
    "+1",
    " 1",
    "--1",
    "1e3",
    "²",
    "١",
    [],
    {},
)


def with_value(member: str, value: Any) -> Node:
    node = Node(id=1)
    attribute = node.attr.add(name="a")
    if member.endswith("_list"):
        held = getattr(attribute, member)
        held.SetInParent()
        held.values.extend(value)
    else:
        setattr(attribute, member, value)
    return node


def back(value: Any, kind: type = Node) -> Any:
    """The message of what a JSON reader makes of the text that a JSON writer makes."""
    return build_message(json.loads(json.dumps(value)), kind, "here")


def refused(value: Any, kind: type = Node) -> str:
    with pytest.raises(InputError) as caught:
        build_message(value, kind, "file, node 3")
    assert (caught.value.slug, caught.value.where) == ("chakra-json", "file, node 3")
    return caught.value.message


def attributed(**members: Any) -> dict[str, Any]:
    return {"id": 1, "attr": [{"name": "a", **members}]}


def test_every_type_of_the_schema_is_here() -> None:
    members = {member.name for member in AttributeProto.DESCRIPTOR.oneofs_by_name["value"].fields}
    assert members == {f"{kind}_{form}" for kind in VALUES for form in ("val", "list")}


@pytest.mark.parametrize(("kind", "value", "shown"), EACH)
def test_a_value_stands_as_it_is_read(kind: str, value: Any, shown: Any) -> None:
    node = with_value(f"{kind}_val", value)
    made = convert_to_object(node)
    assert made == attributed(**{f"{kind}_val": shown})
    assert type(made["attr"][0][f"{kind}_val"]) is type(shown)
    assert back(made).SerializeToString() == node.SerializeToString()


@pytest.mark.parametrize("kind", VALUES)
def test_lists_hold_their_values_in_order(kind: str) -> None:
    values, shown = zip(*VALUES[kind], strict=True)
    node = with_value(f"{kind}_list", [*values, *values[::-1]])
    assert convert_to_object(node) == attributed(**{f"{kind}_list": [*shown, *shown[::-1]]})
    assert back(convert_to_object(node)) == node


@pytest.mark.parametrize("kind", VALUES)
def test_an_empty_list_is_a_value_and_no_value_is_none(kind: str) -> None:
    node = with_value(f"{kind}_list", [])
    assert convert_to_object(node) == attributed(**{f"{kind}_list": []})
    assert back(convert_to_object(node)).attr[0].WhichOneof("value") == f"{kind}_list"
    assert back(attributed()).attr[0].WhichOneof("value") is None


@pytest.mark.parametrize("kind", VALUES)
def test_what_protobuf_writes_itself_is_read(kind: str) -> None:
    for member, values in (
        (f"{kind}_val", VALUES[kind][-1][0]),
        (f"{kind}_list", [value for value, _ in VALUES[kind]]),
    ):
        node = with_value(member, values)
        for spelled in (MessageToDict(node), MessageToDict(node, preserving_proto_field_name=True)):
            assert back(spelled) == node


@pytest.mark.parametrize(
    ("kind", "number"),
    [(kind, number) for kind, numbers in TOO_LARGE.items() for number in numbers],
)
def test_a_number_beyond_its_type_is_refused(kind: str, number: int) -> None:
    for value in (number, str(number)):
        assert "does not fit" in refused(attributed(**{f"{kind}_val": value}))
        assert "does not fit" in refused(attributed(**{f"{kind}_list": [0, value]}))


@pytest.mark.parametrize("kind", [kind for kind in VALUES if "int" in kind or "fixed" in kind])
def test_a_whole_number_is_a_number_or_its_digits(kind: str) -> None:
    assert back(attributed(**{f"{kind}_val": "007"})) == back(attributed(**{f"{kind}_val": 7}))
    for value in NO_NUMBER:
        assert "expected a whole number" in refused(attributed(**{f"{kind}_val": value}))


@pytest.mark.parametrize("kind", ["double", "float"])
def test_a_real_number_is_a_number_or_the_name_of_an_odd_one(kind: str) -> None:
    assert back(attributed(**{f"{kind}_val": 3})) == with_value(f"{kind}_val", 3.0)
    assert math.isnan(getattr(back(attributed(**{f"{kind}_val": "NaN"})).attr[0], f"{kind}_val"))
    for value in (True, None, "", "1.5", "nan", "inf", "infinity", [1.0], {}):
        assert "expected a number" in refused(attributed(**{f"{kind}_val": value}))


@pytest.mark.parametrize(
    "bits", ["7ff8000000000001", "fff8000000000000", "7ff8000000000000", "fff800000000beef"]
)
def test_a_nan_keeps_its_bits(bits: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    node = with_value("double_val", number)
    shown = "NaN" if bits == "7ff8000000000000" else f"NaN:{bits}"
    assert convert_to_object(node) == attributed(double_val=shown)
    assert struct.pack(">d", back(convert_to_object(node)).attr[0].double_val).hex() == bits


@pytest.mark.parametrize(
    "bits", ["", "zz", "00" * 9, "7ff8", "7ff80000000000 1", "3ff0000000000000", "7ff0000000000000"]
)
def test_bits_that_are_those_of_no_nan_are_refused(bits: str) -> None:
    assert "expected a number" in refused(attributed(double_val=f"NaN:{bits}"))


@pytest.mark.parametrize(
    ("member", "value", "words"),
    [
        ("bool_val", 1, "expected true or false, got 1"),
        ("bool_val", "true", "expected true or false, got 'true'"),
        ("bool_list", [True, 0], "expected true or false, got 0"),
        ("string_val", 5, "expected a text, got 5"),
        ("string_val", None, "expected a text, got None"),
        ("string_list", ["a", ["b"]], "expected a text, got ['b']"),
        ("string_list", "abc", "`string_list` is no list"),
        ("int64_list", {"items": [1]}, "`int64_list` is no list"),
        ("int64_list", 3, "`int64_list` is no list"),
        ("bytes_val", "AP/", "expected base64, got 'AP/'"),
        ("bytes_val", "A P/+", "expected base64"),
        ("bytes_val", 7, "expected a text, got 7"),
        ("doc_string", 7, "expected a text, got 7"),
        ("name", False, "expected a text, got False"),
        ("int_val", 7, "`int_val` is no field of the schema"),
        ("string_val", ["x" * 100], "expected a text, got ['" + "x" * 35 + "..."),
    ],
)
def test_what_does_not_belong_there_is_named(member: str, value: Any, words: str) -> None:
    assert words in refused({"attr": [{member: value}]})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "expected an object, got NoneType"),
        ([1], "expected an object, got list"),
        (3, "expected an object, got int"),
        ({"attr": {}}, "`attr` is no list"),
        ({"attr": [[]]}, "expected an object, got list"),
        ({"attr": [None]}, "expected an object, got NoneType"),
        ({"data_deps": 3}, "`data_deps` is no list"),
        ({"ctrlDeps": "12"}, "`ctrl_deps` is no list"),
        ({"data_deps": [1, 1.5]}, "expected a whole number, got 1.5"),
        ({"data_deps": [-1]}, "does not fit"),
        ({"id": 2**64}, "does not fit"),
        ({"id": None}, "expected a whole number, got None"),
        ({"start_time_micros": -1}, "does not fit"),
        ({"durationMicros": "x"}, "expected a whole number, got 'x'"),
        ({"name": 3}, "expected a text, got 3"),
        ({"name": "\udc80"}, "does not fit"),
        ({"inputs": []}, "expected an object, got list"),
        ({"outputs": {"values": 1}}, "expected a text, got 1"),
        ({"inputs": {"strides": ""}}, "`strides` is no field"),
        ({"type": "COMP"}, "expected a whole number, got 'COMP'"),
        ({"type": 2**31}, "does not fit"),
        ({"type": 4.0}, "expected a whole number, got 4.0"),
        ({"version": "1"}, "`version` is no field"),
        ({"unknown_fields": "%"}, "expected base64"),
        ({"duration_micros": 1, "durationMicros": 1}, "`durationMicros` is there twice"),
        ({"unknownFields": "", "unknown_fields": ""}, "there twice"),
    ],
)
def test_an_object_that_is_no_node_is_refused_in_a_sentence(value: Any, words: str) -> None:
    assert words in refused(value)


@pytest.mark.parametrize(
    "value", [{"id": 1}, {"schema": "1"}, {"version": 1}, {"version": None}, [], {"attr": 3}]
)
def test_an_object_that_is_no_metadata_is_refused(value: Any) -> None:
    refused(value, GlobalMetadata)


def test_what_is_absent_stays_absent() -> None:
    assert convert_to_object(Node()) == convert_to_object(GlobalMetadata()) == {}
    assert back({}) == Node()
    assert back({}, GlobalMetadata) == GlobalMetadata()
    node = Node()
    node.inputs.SetInParent()
    assert convert_to_object(node) == {"inputs": {}}
    assert back({"inputs": {}}) == node != Node()
    node = Node()
    node.attr.add()
    assert convert_to_object(node) == {"attr": [{}]}
    assert back({"attr": [{}]}) == node


@pytest.mark.parametrize("number", range(10))
def test_a_type_is_named_where_it_has_a_name(number: int) -> None:
    name = {value: name for name, value in NodeType.items()}.get(number)
    assert convert_to_object(Node(type=number)) == ({"type": name or number} if number else {})
    for spelled in (number, str(number), *([name] if name else [])):
        assert back({"type": spelled}).type == number


def test_every_field_of_a_node_in_both_spellings() -> None:
    node = Node(
        id=2**64 - 1,
        name="n",
        type=NodeType.COMM_SEND_NODE,
        ctrl_deps=[0, WIDE + 1],
        data_deps=[5],
        start_time_micros=WIDE + 2,
        duration_micros=9,
    )
    node.inputs.values, node.inputs.shapes, node.outputs.types = "[1]", "[[2]]", "['f']"
    node.attr.add(name="x", doc_string="why", int32_val=-3)
    made = convert_to_object(node)
    assert made == {
        "id": "18446744073709551615",
        "name": "n",
        "type": "COMM_SEND_NODE",
        "ctrl_deps": [0, str(WIDE + 1)],
        "data_deps": [5],
        "start_time_micros": str(WIDE + 2),
        "duration_micros": 9,
        "inputs": {"values": "[1]", "shapes": "[[2]]"},
        "outputs": {"types": "['f']"},
        "attr": [{"name": "x", "doc_string": "why", "int32_val": -3}],
    }
    camel = {"ctrl_deps": "ctrlDeps", "data_deps": "dataDeps"}
    camel |= {"start_time_micros": "startTimeMicros", "duration_micros": "durationMicros"}
    spelled = {camel.get(key, key): value for key, value in made.items()}
    spelled["attr"] = [{"name": "x", "docString": "why", "int32Val": -3}]
    assert back(made) == back(spelled) == node


def test_the_last_value_of_an_attribute_with_two_counts_as_on_the_wire() -> None:
    (attribute,) = back(attributed(int64_val=3, string_val="x")).attr
    assert attribute.WhichOneof("value") == "string_val"


class TestFieldsThatTheSchemaDoesNotHave:
    VARINT, FIXED64, TEXT, FIXED32 = (
        b"\xf8\x3f\x96\x01",
        b"\xf9\x3f" + b"12345678",
        b"\xfa\x3f\x02hi",
        b"\xfd\x3f1234",
    )
    GROUP = b"\xfb\x3f\x08\x05\xfc\x3f"

    @pytest.mark.parametrize(
        "field", [VARINT, FIXED64, TEXT, FIXED32, GROUP, VARINT + TEXT + VARINT]
    )
    def test_they_stand_as_their_bytes(self, field: bytes) -> None:
        node = Node(id=4)
        node.MergeFromString(field)
        assert convert_to_object(node) == {
            "id": 4,
            "unknown_fields": base64.b64encode(field).decode(),
        }
        assert back(convert_to_object(node)).SerializeToString() == node.SerializeToString()

    def test_they_stay_where_they_were(self) -> None:
        node = with_value("int64_list", [1])
        node.outputs.MergeFromString(self.TEXT)
        node.attr[0].MergeFromString(self.VARINT)
        node.attr[0].int64_list.MergeFromString(self.FIXED32)
        node.attr.add(name="plain", bool_val=True)
        made = convert_to_object(node)
        shown = {
            name: base64.b64encode(data).decode()
            for name, data in vars(type(self)).items()
            if isinstance(data, bytes)
        }
        assert made["outputs"] == {"unknown_fields": shown["TEXT"]}
        assert made["attr"] == [
            {
                "name": "a",
                "int64_list": [1],
                "unknown_fields": shown["VARINT"],
                "unknown_fields_of_value": shown["FIXED32"],
            },
            {"name": "plain", "bool_val": True},
        ]
        assert back(made).SerializeToString() == node.SerializeToString()

    def test_metadata_keep_theirs(self) -> None:
        metadata = GlobalMetadata(version="9")
        metadata.MergeFromString(self.TEXT)
        metadata.attr.add(name="k", uint64_val=1).MergeFromString(self.VARINT)
        assert (
            back(convert_to_object(metadata), GlobalMetadata).SerializeToString()
            == metadata.SerializeToString()
        )


class TestFeeder:
    def test_known_keys_become_what_readers_look_for(self) -> None:
        fed = {
            "Id": 3,
            "Name": "r",
            "NodeType": 7,
            "runtime": 12,
            "ctrlDeps": [1],
            "data_deps": [1, 2],
            "comm_type": "REDUCE_SCATTER",
            "comm_size": 2**40,
            "comm_priority": 1,
            "tensor_size": 8,
            "comm_src": 0,
            "comm_dst": 1,
            "comm_tag": 5,
            "is_cpu_op": 0,
        }
        node = build_feeder_node(fed, "here")
        assert (node.id, node.name, node.type, node.duration_micros) == (
            3,
            "r",
            NodeType.COMM_COLL_NODE,
            12,
        )
        assert (list(node.ctrl_deps), list(node.data_deps)) == ([1], [1, 2])
        held = {
            a.name: (a.WhichOneof("value"), getattr(a, a.WhichOneof("value"))) for a in node.attr
        }
        assert held == {
            "comm_type": ("int64_val", CollectiveCommType.Value("REDUCE_SCATTER")),
            "comm_size": ("int64_val", 2**40),
            "comm_priority": ("int32_val", 1),
            "tensor_size": ("uint64_val", 8),
            "comm_src": ("int32_val", 0),
            "comm_dst": ("int32_val", 1),
            "comm_tag": ("int32_val", 5),
            "is_cpu_op": ("bool_val", False),
        }

    @pytest.mark.parametrize(
        ("value", "expected"), [(0, False), (1, True), (2, True), (True, True), (False, False)]
    )
    def test_a_flag_is_a_number_or_a_truth_value(self, value: Any, expected: bool) -> None:
        assert build_feeder_node({"is_cpu_op": value}, "here").attr[0].bool_val is expected

    @pytest.mark.parametrize("name", sorted(dict(CollectiveCommType.items())))
    def test_a_collective_is_named_or_numbered(self, name: str) -> None:
        number = CollectiveCommType.Value(name)
        assert [
            build_feeder_node({"comm_type": kind}, "here").attr[0].int64_val
            for kind in (name, number)
        ] == [number] * 2

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            ("text", "text"),
            (3, "3"),
            (1.5, "1.5"),
            (None, "None"),
            ([1, "a"], "[1, 'a']"),
            ({}, "{}"),
        ],
    )
    def test_other_keys_become_texts(self, value: Any, shown: str) -> None:
        (attribute,) = build_feeder_node({"other": value}, "here").attr
        assert (attribute.name, attribute.string_val) == ("other", shown)

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (3, "expected an object, got int"),
            (None, "expected an object"),
            ({"Id": "x"}, "expected a whole number"),
            ({"comm_type": "NOTHING"}, "expected a whole number, got 'NOTHING'"),
            ({"comm_src": 2**31}, "does not fit"),
            ({"is_cpu_op": "yes"}, "expected true or false"),
            ({"tensor_size": -1}, "does not fit"),
            ({"data_deps": 1}, "`data_deps` is no list"),
            ({"Name": 1}, "expected a text"),
            ({"runtime": 1.5}, "whole number"),
        ],
    )
    def test_what_does_not_fit_is_refused_with_its_place(self, value: Any, words: str) -> None:
        with pytest.raises(InputError) as caught:
            build_feeder_node(value, "file, node 3")
        assert (caught.value.slug, caught.value.where) == ("chakra-json", "file, node 3")
        assert words in caught.value.message
