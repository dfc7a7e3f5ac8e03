"""Reads and writes Chakra messages as JSON and JSON lines, driven by the protobuf descriptor.

Fields have the names of the schema. Absent fields are absent. Integers beyond 2**53, which many
JSON readers would round, are strings; so are NaN and the infinities; bytes are base64; types are
named, unknown ones are numbers. Fields that the schema does not have are kept as wire bytes, in
base64, under `unknown_fields`. Reading also accepts the camelCase of protobuf's own JSON.

Written: one object with `metadata` and `nodes`, or JSON lines (the metadata, then a node per line).
Read: those, the concatenated objects that the `jsonizer` of the Chakra tools writes, and the JSON
of its feeder (`workload_graph`).
"""

from __future__ import annotations

import base64
import codecs
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from traceloom.errors import InputError
from traceloom.formats.chakra.encode import DELIMITED, FIXED32, FIXED64, VARINT
from traceloom.formats.chakra.et_pb2 import (
    AttributeProto,
    CollectiveCommType,
    GlobalMetadata,
    Node,
    NodeType,
)
from traceloom.formats.chakra.files import encode_length
from traceloom.system.gzip_stream import GzipStream, open_file
from traceloom.trace.notice import Notice

UNKNOWN = "unknown_fields"
_MAX_EXACT = 2**53
_Message = TypeVar("_Message", GlobalMetadata, Node)
_Kind = TypeVar("_Kind", str, bool)
_TYPES = {number: name for name, number in NodeType.items()}
_NUMBERS = dict(NodeType.items())
_VALUES: dict[str, Any] = {
    member.name: member for member in AttributeProto.DESCRIPTOR.oneofs_by_name["value"].fields
}
_INT64_TYPES = {
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_SINT64,
}
_INT64_TYPES |= {FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64}
_FLOAT_TYPES = {FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT}
_NAN = "7ff8000000000000"  # the NaN that every program writes; others keep their bits
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _map_spellings(*names: str) -> dict[str, str]:
    """Returns the field of each spelling: as in the schema, and in camelCase."""
    spellings: dict[str, str] = {}
    for name in (*names, UNKNOWN):
        head, *tail = name.split("_")
        spellings[name] = spellings[head + "".join(part.capitalize() for part in tail)] = name
    return spellings


_METADATA_SPELLINGS = _map_spellings("version", "attr")
_NODE_SPELLINGS = _map_spellings(*(field.name for field in Node.DESCRIPTOR.fields))
_TENSOR_SPELLINGS = _map_spellings("values", "shapes", "types")
_ATTRIBUTE_SPELLINGS = _map_spellings(*(field.name for field in AttributeProto.DESCRIPTOR.fields))


def convert_to_object(message: GlobalMetadata | Node) -> dict[str, Any]:
    data = message.SerializeToString()
    known_fields = type(message).FromString(data)
    known_fields.DiscardUnknownFields()
    exact = known_fields.ByteSize() == len(data)
    out: dict[str, Any] = {}
    if isinstance(message, Node):
        if message.id:
            out["id"] = _convert_integer(message.id)
        if message.name:
            out["name"] = message.name
        if message.type:
            out["type"] = _TYPES.get(message.type, message.type)
        if message.ctrl_deps:
            out["ctrl_deps"] = list(map(_convert_integer, message.ctrl_deps))
        if message.data_deps:
            out["data_deps"] = list(map(_convert_integer, message.data_deps))
        if message.start_time_micros:
            out["start_time_micros"] = _convert_integer(message.start_time_micros)
        if message.duration_micros:
            out["duration_micros"] = _convert_integer(message.duration_micros)
        for name in ("inputs", "outputs"):
            if message.HasField(name):
                info = getattr(message, name)
                out[name] = {
                    key: text
                    for key in ("values", "shapes", "types")
                    if (text := getattr(info, key))
                }
                if not exact:
                    _add_unknown(out[name], info)
    elif message.version:
        out["version"] = message.version
    if message.attr:
        out["attr"] = [_convert_attribute(attribute, exact) for attribute in message.attr]
    if not exact:
        _add_unknown(out, message)
    return out


def _convert_attribute(attribute: AttributeProto, exact: bool) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if name := attribute.name:
        out["name"] = name
    if doc := attribute.doc_string:
        out["doc_string"] = doc
    kind = attribute.WhichOneof("value")
    if kind is not None:
        value = getattr(attribute, kind)
        convert = _TO_JSON[kind]
        if kind.endswith("_list"):
            out[kind] = [convert(item) for item in value.values]
            if not exact:
                _add_unknown(out, value, UNKNOWN + "_of_value")
        else:
            out[kind] = convert(value)
    if not exact:
        _add_unknown(out, attribute)
    return out


def _convert_integer(number: int) -> int | str:
    return number if -_MAX_EXACT <= number <= _MAX_EXACT else str(number)


def _convert_float(number: float) -> float | str:
    if math.isfinite(number):
        return number
    if math.isnan(number):
        hex_digits = struct.pack(">d", number).hex()
        return "NaN" if hex_digits == _NAN else f"NaN:{hex_digits}"
    return "Infinity" if number > 0 else "-Infinity"


def _encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# The field that holds each kind of value, or each of its elements.
_ELEMENTS: dict[str, int] = {
    name: (member.message_type.fields_by_name["values"] if name.endswith("_list") else member).type
    for name, member in _VALUES.items()
}
_TYPE_TO_JSON: dict[int, Callable[[Any], Any]] = {
    **dict.fromkeys(_INT64_TYPES, _convert_integer),
    **dict.fromkeys(_FLOAT_TYPES, _convert_float),
    FieldDescriptor.TYPE_BYTES: _encode_base64,
}
_TO_JSON: dict[str, Callable[[Any], Any]] = {
    name: _TYPE_TO_JSON.get(element, lambda value: value) for name, element in _ELEMENTS.items()
}


def _add_unknown(out: dict[str, Any], message: Message, key: str = UNKNOWN) -> None:
    """Adds the wire bytes of the fields that the schema does not have, in base64."""
    unknown_fields: Any = UnknownFieldSet(message)
    if data := b"".join(map(_encode_unknown_field, unknown_fields)):
        out[key] = _encode_base64(data)


def _encode_unknown_field(field: Any) -> bytes:
    key = encode_length(field.field_number << 3 | field.wire_type)
    if field.wire_type == VARINT:
        return key + encode_length(field.data)
    if field.wire_type == DELIMITED:
        return key + encode_length(len(field.data)) + bytes(field.data)
    if field.wire_type in {FIXED64, FIXED32}:
        return key + int(field.data).to_bytes(8 if field.wire_type == FIXED64 else 4, "little")
    inner = b"".join(
        _encode_unknown_field(part) for part in field.data
    )  # a group, which ends with its own marker
    return key + inner + encode_length(field.field_number << 3 | 4)


class _JsonValueError(Exception):
    """Describes the problem of a value."""


def build_message(value: Any, kind: type[_Message], location: str) -> _Message:
    """Builds a message from a JSON object.

    Args:
        value: The decoded JSON value.
        kind: `Node` or `GlobalMetadata`.
        location: The place, for error messages.

    Raises:
        InputError: `chakra-json`: it is no such message.
    """
    try:
        message = kind()
        for name, field_value in _resolve_fields(
            value, _NODE_SPELLINGS if kind is Node else _METADATA_SPELLINGS
        ).items():
            _set(message, name, field_value)
    except _JsonValueError as error:
        raise InputError(str(error), slug="chakra-json", where=location) from error
    except (TypeError, ValueError, OverflowError) as error:
        reason = f"a value does not fit the schema: {str(error).splitlines()[0]}"
        raise InputError(reason, slug="chakra-json", where=location) from error
    return message


def _resolve_fields(value: Any, spellings: dict[str, str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _JsonValueError(f"expected an object, got {type(value).__name__}")
    out: dict[str, Any] = {}
    for key, field_value in value.items():
        name = spellings.get(key)
        if name is None:
            raise _JsonValueError(f"`{key}` is no field of the schema")
        if name in out:
            raise _JsonValueError(f"`{key}` is there twice")
        out[name] = field_value
    return out


def _set(message: Any, name: str, value: Any) -> None:
    if name == "attr":
        for item in _check_list(value, name):
            attribute = message.attr.add()
            extra = item.pop(UNKNOWN + "_of_value", None) if isinstance(item, dict) else None
            for key, part in _resolve_fields(item, _ATTRIBUTE_SPELLINGS).items():
                if key in {"name", "doc_string"}:
                    setattr(attribute, key, _check_text(part))
                elif key == UNKNOWN:
                    attribute.MergeFromString(_parse_base64(part))
                elif key.endswith("_list"):
                    list_field = getattr(attribute, key)
                    list_field.SetInParent()
                    inner = part["values"] if isinstance(part, dict) and "values" in part else part
                    list_field.values.extend(
                        _FROM_JSON[key](entry)
                        for entry in _check_list([] if inner == {} else inner, key)
                    )
                    if extra is not None:
                        list_field.MergeFromString(_parse_base64(extra))
                else:
                    setattr(attribute, key, _FROM_JSON[key](part))
    elif name in {"ctrl_deps", "data_deps"}:
        getattr(message, name).extend(_parse_integer(item) for item in _check_list(value, name))
    elif name in {"inputs", "outputs"}:
        info = getattr(message, name)
        info.SetInParent()
        for key, text in _resolve_fields(value, _TENSOR_SPELLINGS).items():
            _set(info, key, text)
    elif name == UNKNOWN:
        message.MergeFromString(_parse_base64(value))
    elif name == "type":
        message.type = _NUMBERS[value] if value in _NUMBERS else _parse_integer(value)
    elif name in {"version", "name", "values", "shapes", "types"}:
        setattr(message, name, _check_text(value))
    else:
        setattr(message, name, _parse_integer(value))


def _check_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _JsonValueError(f"`{name}` is no list")
    return value


def _check_type(value: Any, kind: type[_Kind], words: str) -> _Kind:
    if not isinstance(value, kind):
        raise _JsonValueError(f"expected {words}, got {_truncate_repr(value)}")
    return value


def _truncate_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else text[:37] + "..."


_check_text = partial(_check_type, kind=str, words="a text")


def _parse_integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and value.isascii():
        return int(value)
    raise _JsonValueError(f"expected a whole number, got {_truncate_repr(value)}")


def _parse_float(value: Any) -> float:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if isinstance(value, str) and re.fullmatch("NaN:[0-9a-fA-F]{16}", value):
        (number,) = struct.unpack(">d", bytes.fromhex(value[4:]))
        if math.isnan(number):
            return float(number)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise _JsonValueError(f"expected a number, got {_truncate_repr(value)}")


def _parse_base64(value: Any) -> bytes:
    try:
        return base64.b64decode(_check_text(value), validate=True)
    except ValueError as error:
        raise _JsonValueError(f"expected base64, got {_truncate_repr(value)}") from error


_TYPE_FROM_JSON: dict[int, Callable[[Any], Any]] = {
    **dict.fromkeys(_FLOAT_TYPES, _parse_float),
    FieldDescriptor.TYPE_BYTES: _parse_base64,
    FieldDescriptor.TYPE_STRING: _check_text,
    FieldDescriptor.TYPE_BOOL: partial(_check_type, kind=bool, words="true or false"),
}
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    name: _TYPE_FROM_JSON.get(element, _parse_integer) for name, element in _ELEMENTS.items()
}

# Keys of the JSON that the feeder of the Chakra tools reads, and the attribute of each.
_FEEDER_ATTRIBUTES = {
    "comm_type": "int64_val",
    "comm_size": "int64_val",
    "comm_priority": "int32_val",
    "tensor_size": "uint64_val",
}
_FEEDER_ATTRIBUTES |= {
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "is_cpu_op": "bool_val",
}
_FEEDER_FIELDS = {
    "Id": "id",
    "Name": "name",
    "NodeType": "type",
    "runtime": "duration_micros",
    "ctrlDeps": "ctrl_deps",
}
_FEEDER_FIELDS |= {"data_deps": "data_deps"}
_FEEDER_TYPES = dict(CollectiveCommType.items())


def build_feeder_node(value: Any, location: str) -> Node:
    """Builds a node from an entry of a feeder's `workload_graph`; unknown keys become text
    attributes.

    Raises:
        InputError: `chakra-json`.
    """
    if not isinstance(value, dict):
        raise InputError(
            f"expected an object, got {type(value).__name__}", slug="chakra-json", where=location
        )
    node: dict[str, Any] = {}
    attributes: list[dict[str, Any]] = []
    for key, field_value in value.items():
        if key in _FEEDER_FIELDS:
            node[_FEEDER_FIELDS[key]] = field_value
        elif key in _FEEDER_ATTRIBUTES:
            fed_value = field_value
            if key == "is_cpu_op" and isinstance(field_value, int):
                fed_value = bool(field_value)
            elif key == "comm_type" and isinstance(field_value, str):
                fed_value = _FEEDER_TYPES.get(field_value, field_value)
            attributes.append({"name": key, _FEEDER_ATTRIBUTES[key]: fed_value})
        else:
            text = field_value if isinstance(field_value, str) else repr(field_value)
            attributes.append({"name": key, "string_val": text})
    return build_message({**node, "attr": attributes}, Node, location)


_MAX_VALUE_CHARS = 1 << 28  # characters of one value
_WHITESPACE = " \t\r\n"
_LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_ESCAPE = len("\\uD834\\uDD1E")
_FEEDER_KEY = "workload_graph"


class JsonReader:
    """Reads one JSON file of Chakra messages, once; used as
    `traceloom.formats.chakra.files.EtReader`.

    Attributes:
        metadata: The file's metadata; empty where it has none.
        notices: Problems of the file, complete after the last node.

    Raises:
        InputError: `unreadable`, `empty-file`, `not-chakra`; `chakra-json`: invalid JSON, or an
            object that is not a message; `chakra-cut`.
    """

    def __init__(self, path: str | Path, *, strict: bool = False) -> None:
        self.path = Path(path)
        self.notices: list[Notice] = []
        self._strict = strict
        self._handle = open_file(self.path)
        try:
            self._text = _JsonText(self._handle, str(self.path))
            self._next, self.metadata = self._open()
        except BaseException:
            self._handle.close()
            raise

    def __enter__(self) -> JsonReader:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    def __iter__(self) -> Iterator[Node]:
        number = 0
        try:
            for number, node in enumerate(self._next, 1):  # noqa: B007  (the notice says the number)
                yield node
        except _TruncatedError as error:
            message = f"{error}; {number:,} nodes before that are whole"
            if self._strict:
                raise self._refused(str(error), "chakra-cut") from error
            self.notices.append(Notice("chakra-cut", "error", message, where=str(self.path)))

    def _refused(self, message: str, slug: str) -> InputError:
        return InputError(message, slug=slug, where=str(self.path))

    def _no_chakra(self, members: dict[str, Any]) -> InputError:
        return InputError(
            f"this is JSON with `{next(iter(members))}`, but no Chakra trace",
            slug="not-chakra",
            where=str(self.path),
            hint="traces of a profiler become a graph with `traceloom link`",
        )

    def _open(self) -> tuple[Iterator[Node], GlobalMetadata]:
        """Returns the nodes and the metadata; the first object determines which kind of
        JSON it is.
        """
        text, location = self._text, f"{self.path}, metadata"
        first = text.peek()
        if not first:
            raise self._refused("the file is empty", "empty-file")
        if first not in "[{":
            raise self._refused("this is neither JSON nor a Chakra trace", "not-chakra")
        text.take()
        if first == "[":
            return self._nodes(text.items("]")), GlobalMetadata()
        members: dict[str, Any] = {}
        try:
            while (key := text.key()) is not None:
                if key in {"nodes", _FEEDER_KEY} and text.peek() == "[":
                    text.take()
                    return self._listed(key, members)
                members[key] = text.value()
        except _TruncatedError as error:
            raise self._refused(str(error), "chakra-cut") from error
        # Concatenated objects; the first is the metadata, unless it is a node.
        if members.keys() & {"id", "name", "type", "dataDeps", "data_deps"}:
            message = "the file begins with a node, not with metadata"
            self.notices.append(
                Notice("chakra-no-metadata", "warning", message, where=str(self.path))
            )
            return self._nodes(chain([members], text.values())), GlobalMetadata()
        if "metadata" in members:
            return iter(()), build_message(members["metadata"], GlobalMetadata, location)
        if members and not members.keys() <= {"version", "attr", "unknown_fields", "unknownFields"}:
            raise self._no_chakra(members)
        return self._nodes(text.values()), build_message(members, GlobalMetadata, location)

    def _listed(self, key: str, members: dict[str, Any]) -> tuple[Iterator[Node], GlobalMetadata]:
        """Reads one object that holds the nodes in a list; entries after the list are read when
        they are reached.
        """
        values = self._text.items("]")
        if key == _FEEDER_KEY:
            metadata = GlobalMetadata()
            metadata.attr.add(name="schema", string_val="feeder JSON")
            for name, value in members.items():
                metadata.attr.add(
                    name=name, string_val=value if isinstance(value, str) else json.dumps(value)
                )
            return (
                build_feeder_node(value, f"{self.path}, node {n}") for n, value in enumerate(values)
            ), metadata
        metadata_object = members.pop("metadata", None)
        if "schema" in members:  # a host trace of PyTorch
            raise self._no_chakra(members)
        if members:
            raise self._refused(
                f"`{next(iter(members))}` beside the nodes is not known", "chakra-json"
            )
        if metadata_object is None:
            self.notices.append(
                Notice(
                    "chakra-no-metadata",
                    "warning",
                    "no metadata stands before the nodes",
                    where=str(self.path),
                )
            )
        metadata = build_message(metadata_object or {}, GlobalMetadata, f"{self.path}, metadata")
        return self._nodes(values, nested=True), metadata

    def _nodes(self, values: Iterable[Any], *, nested: bool = False) -> Iterator[Node]:
        """Converts values to nodes; with `nested` nothing may follow in the object that holds their
        list.
        """
        for number, value in enumerate(values):
            yield build_message(value, Node, f"{self.path}, node {number}")
        if nested and (key := self._text.key()) is not None:
            raise self._refused(
                f"`{key}` behind the nodes is not known; metadata stands before them", "chakra-json"
            )


class _TruncatedError(Exception):
    """The text ends inside a value."""


class _JsonText:
    """JSON text, read value by value; holds the current value and a piece of the following text."""

    def __init__(self, handle: BinaryIO, where: str) -> None:
        self._pieces = GzipStream(handle)
        self._source = iter(self._pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="strict")
        self._scan = json.JSONDecoder().raw_decode
        self._where = where
        self._text = ""
        self._at = 0
        self._done = False

    def peek(self) -> str:
        """Returns the next character that is not white space; empty at the end."""
        while True:
            length = len(self._text)
            while self._at < length and self._text[self._at] in _WHITESPACE:
                self._at += 1
            if self._at < length:
                return self._text[self._at]
            if not self.more():
                return ""

    def take(self) -> str:
        """Consumes and returns the character that `peek` returned."""
        self._at += 1
        return self._text[self._at - 1]

    def value(self) -> Any:
        """Returns the next whole value.

        Raises:
            InputError: `chakra-json`.
            _TruncatedError: The text ends inside it.
        """
        if not self.peek():
            raise self.cut()
        while True:
            try:
                decoded, end = self._scan(self._text, self._at)
            except RecursionError as error:
                raise self.wrong("a value is nested too deeply") from error
            except ValueError as error:
                offset = error.pos - self._at if isinstance(error, json.JSONDecodeError) else 0
                if self.more():
                    continue
                # At the end of the text: cut, or invalid JSON (`offset` into the value).
                remainder = self._text[self._at + offset :].rstrip()
                in_text = isinstance(error, json.JSONDecodeError) and (
                    error.msg.startswith("Unterminated string")
                    or (error.msg.startswith("Invalid") and len(remainder) < _ESCAPE)
                )
                # An empty remainder is a prefix of each literal.
                unfinished = in_text or any(word.startswith(remainder) for word in _LITERALS)
                raise (
                    self.cut() if unfinished else self.wrong(f"the text is no JSON: {error}")
                ) from error
            # A number at the end of the piece may continue in the next one.
            if end == len(self._text) and self._text[end - 1] not in '}]"' and self.more():
                continue
            self._at = end
            return decoded

    def key(self) -> str | None:
        """Returns the next key of an object; None at its end."""
        mark = self.peek()
        if mark == ",":
            self.take()
            mark = self.peek()
        if mark == "}":
            self.take()
            return None
        name = self.value()
        if not isinstance(name, str):
            raise self.wrong("a key is no text")
        if not self.peek():
            raise self.cut()
        if self.take() != ":":
            raise self.wrong(f"no value follows the key `{name}`")
        self.peek()
        return name

    def items(self, end: str) -> Iterator[Any]:
        """Yields the values of a list whose bracket was consumed, up to its end."""
        while True:
            mark = self.peek()
            if not mark:
                raise self.cut()
            if mark == ",":
                self.take()
            elif mark == end:
                self.take()
                return
            else:
                yield self.value()

    def values(self) -> Iterator[Any]:
        while self.peek():
            yield self.value()

    def more(self) -> bool:
        """Reads another piece of text; False at the end."""
        if self._done:
            return False
        if len(self._text) - self._at > _MAX_VALUE_CHARS:
            raise self.wrong(f"a value is longer than {_MAX_VALUE_CHARS:,} characters")
        chunk = next(self._source, None)
        self._done = chunk is None
        try:
            fresh = self._decoder.decode(chunk or b"", final=self._done)
        except UnicodeDecodeError as error:
            raise self.wrong("the text is not UTF-8") from error
        self._text, self._at = self._text[self._at :] + fresh, 0
        return bool(fresh) or not self._done

    def cut(self) -> _TruncatedError:
        return _TruncatedError(self._pieces.fault or "the JSON text ends inside a value")

    def wrong(self, message: str) -> InputError:
        return InputError(message, slug="chakra-json", where=self._where)


def write_json(handle: BinaryIO, metadata: GlobalMetadata, nodes: Iterable[Node]) -> None:
    """Writes one JSON object: `metadata`, and `nodes`, one per line."""
    encode = msgspec.json.Encoder().encode
    handle.write(b'{"metadata": ' + encode(convert_to_object(metadata)) + b',\n"nodes": [')
    separator = b"\n"
    for node in nodes:
        handle.write(separator + encode(convert_to_object(node)))
        separator = b",\n"
    handle.write(b"\n]}\n")


def write_lines(handle: BinaryIO, metadata: GlobalMetadata, nodes: Iterable[Node]) -> None:
    """Writes JSON lines: the metadata, then one node per line."""
    encode = msgspec.json.Encoder().encode
    handle.write(encode(convert_to_object(metadata)) + b"\n")
    handle.writelines(encode(convert_to_object(node)) + b"\n" for node in nodes)
