"""Messages as JSON objects and back, without loss.

Fields have the names of the schema. Absent fields are absent. Whole numbers beyond 2**53, which many readers of JSON
would round, are texts; so are NaN and the infinities; bytes are base64; types are named, unknown ones are numbers.
Fields that the schema does not have stand as wire bytes, in base64, under `unknown_fields`. Reading also takes the
camelCase of protobuf's own JSON.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from traceloom.chakra.framing import length_prefix
from traceloom.chakra.schema import AttributeProto, CollectiveCommType, GlobalMetadata, Node, NodeType
from traceloom.chakra.wire import DELIMITED, FIXED32, FIXED64, VARINT
from traceloom.errors import InputError

UNKNOWN = "unknown_fields"
_EXACT = 2**53
_Message = TypeVar("_Message", GlobalMetadata, Node)
_Kind = TypeVar("_Kind", str, bool)
_TYPES = {number: name for name, number in NodeType.items()}
_NUMBERS = dict(NodeType.items())
_VALUES: dict[str, Any] = {member.name: member for member in AttributeProto.DESCRIPTOR.oneofs_by_name["value"].fields}
_WIDE = {FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_SINT64}
_WIDE |= {FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64}
_REAL = {FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT}
_NAN = "7ff8000000000000"  # the one that every program writes; others keep their bits
_ODD = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _spellings(*names: str) -> dict[str, str]:
    """The field that each spelling names: as in the schema, and in camelCase."""
    spellings: dict[str, str] = {}
    for name in (*names, UNKNOWN):
        head, *rest = name.split("_")
        spellings[name] = spellings[head + "".join(part.capitalize() for part in rest)] = name
    return spellings


_OF_METADATA = _spellings("version", "attr")
_OF_NODE = _spellings(*(field.name for field in Node.DESCRIPTOR.fields))
_OF_TENSORS = _spellings("values", "shapes", "types")
_OF_ATTRIBUTE = _spellings(*(field.name for field in AttributeProto.DESCRIPTOR.fields))


def to_object(message: GlobalMetadata | Node) -> dict[str, Any]:
    """A message as a JSON object."""
    data = message.SerializeToString()
    plain = type(message).FromString(data)
    plain.DiscardUnknownFields()
    exact = plain.ByteSize() == len(data)
    out: dict[str, Any] = {}
    if isinstance(message, Node):
        if message.id:
            out["id"] = _whole(message.id)
        if message.name:
            out["name"] = message.name
        if message.type:
            out["type"] = _TYPES.get(message.type, message.type)
        if message.ctrl_deps:
            out["ctrl_deps"] = list(map(_whole, message.ctrl_deps))
        if message.data_deps:
            out["data_deps"] = list(map(_whole, message.data_deps))
        if message.start_time_micros:
            out["start_time_micros"] = _whole(message.start_time_micros)
        if message.duration_micros:
            out["duration_micros"] = _whole(message.duration_micros)
        for name in ("inputs", "outputs"):
            if message.HasField(name):
                info = getattr(message, name)
                out[name] = {key: text for key in ("values", "shapes", "types") if (text := getattr(info, key))}
                if not exact:
                    _add_unknown(out[name], info)
    elif message.version:
        out["version"] = message.version
    if message.attr:
        out["attr"] = [_attribute(attribute, exact) for attribute in message.attr]
    if not exact:
        _add_unknown(out, message)
    return out


def _attribute(attribute: AttributeProto, exact: bool) -> dict[str, Any]:
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


def _whole(number: int) -> int | str:
    return number if -_EXACT <= number <= _EXACT else str(number)


def _real(number: float) -> float | str:
    if math.isfinite(number):
        return number
    if math.isnan(number):
        bits = struct.pack(">d", number).hex()
        return "NaN" if bits == _NAN else f"NaN:{bits}"
    return "Infinity" if number > 0 else "-Infinity"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# The field that holds each kind of value, or each of its elements.
_ELEMENTS: dict[str, int] = {
    name: (member.message_type.fields_by_name["values"] if name.endswith("_list") else member).type
    for name, member in _VALUES.items()
}
_TYPE_TO_JSON: dict[int, Callable[[Any], Any]] = {
    **dict.fromkeys(_WIDE, _whole),
    **dict.fromkeys(_REAL, _real),
    FieldDescriptor.TYPE_BYTES: _base64,
}
_TO_JSON: dict[str, Callable[[Any], Any]] = {
    name: _TYPE_TO_JSON.get(element, lambda value: value) for name, element in _ELEMENTS.items()
}


def _add_unknown(out: dict[str, Any], message: Message, key: str = UNKNOWN) -> None:
    """The wire bytes of the fields that the schema does not have, in base64."""
    unknown_fields: Any = UnknownFieldSet(message)
    if data := b"".join(map(_unknown_field, unknown_fields)):
        out[key] = _base64(data)


def _unknown_field(field: Any) -> bytes:
    key = length_prefix(field.field_number << 3 | field.wire_type)
    if field.wire_type == VARINT:
        return key + length_prefix(field.data)
    if field.wire_type == DELIMITED:
        return key + length_prefix(len(field.data)) + bytes(field.data)
    if field.wire_type in {FIXED64, FIXED32}:
        return key + int(field.data).to_bytes(8 if field.wire_type == FIXED64 else 4, "little")
    inner = b"".join(_unknown_field(part) for part in field.data)  # a group, which ends with its own mark
    return key + inner + length_prefix(field.field_number << 3 | 4)


class _OddError(Exception):
    """What is wrong with a value, in words."""


def from_object(value: Any, kind: type[_Message], where: str) -> _Message:
    """The message of a JSON object.

    Args:
        value: What JSON holds.
        kind: `Node` or `GlobalMetadata`.
        where: The place, for the error.

    Raises:
        InputError: `chakra-json`: it is no such message.
    """
    try:
        message = kind()
        for name, field_value in _fields(value, _OF_NODE if kind is Node else _OF_METADATA).items():
            _set(message, name, field_value)
    except _OddError as error:
        raise InputError(str(error), slug="chakra-json", where=where) from error
    except (TypeError, ValueError, OverflowError) as error:
        reason = f"a value does not fit the schema: {str(error).splitlines()[0]}"
        raise InputError(reason, slug="chakra-json", where=where) from error
    return message


def _fields(value: Any, spellings: dict[str, str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _OddError(f"expected an object, got {type(value).__name__}")
    out: dict[str, Any] = {}
    for key, field_value in value.items():
        name = spellings.get(key)
        if name is None:
            raise _OddError(f"`{key}` is no field of the schema")
        if name in out:
            raise _OddError(f"`{key}` is there twice")
        out[name] = field_value
    return out


def _set(message: Any, name: str, value: Any) -> None:
    if name == "attr":
        for item in _list(value, name):
            attribute = message.attr.add()
            extra = item.pop(UNKNOWN + "_of_value", None) if isinstance(item, dict) else None
            for key, part in _fields(item, _OF_ATTRIBUTE).items():
                if key in {"name", "doc_string"}:
                    setattr(attribute, key, _text(part))
                elif key == UNKNOWN:
                    attribute.MergeFromString(_bytes(part))
                elif key.endswith("_list"):
                    held = getattr(attribute, key)
                    held.SetInParent()
                    inner = part["values"] if isinstance(part, dict) and "values" in part else part
                    held.values.extend(_FROM_JSON[key](each) for each in _list([] if inner == {} else inner, key))
                    if extra is not None:
                        held.MergeFromString(_bytes(extra))
                else:
                    setattr(attribute, key, _FROM_JSON[key](part))
    elif name in {"ctrl_deps", "data_deps"}:
        getattr(message, name).extend(_number(item) for item in _list(value, name))
    elif name in {"inputs", "outputs"}:
        info = getattr(message, name)
        info.SetInParent()
        for key, text in _fields(value, _OF_TENSORS).items():
            _set(info, key, text)
    elif name == UNKNOWN:
        message.MergeFromString(_bytes(value))
    elif name == "type":
        message.type = _NUMBERS[value] if value in _NUMBERS else _number(value)
    elif name in {"version", "name", "values", "shapes", "types"}:
        setattr(message, name, _text(value))
    else:
        setattr(message, name, _number(value))


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _OddError(f"`{name}` is no list")
    return value


def _of_kind(value: Any, kind: type[_Kind], words: str) -> _Kind:
    if not isinstance(value, kind):
        raise _OddError(f"expected {words}, got {_shown(value)}")
    return value


_text = partial(_of_kind, kind=str, words="a text")


def _number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and value.isascii():
        return int(value)
    raise _OddError(f"expected a whole number, got {_shown(value)}")


def _float(value: Any) -> float:
    if isinstance(value, str) and value in _ODD:
        return _ODD[value]
    if isinstance(value, str) and re.fullmatch("NaN:[0-9a-fA-F]{16}", value):
        (number,) = struct.unpack(">d", bytes.fromhex(value[4:]))
        if math.isnan(number):
            return float(number)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise _OddError(f"expected a number, got {_shown(value)}")


def _bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(_text(value), validate=True)
    except ValueError as error:
        raise _OddError(f"expected base64, got {_shown(value)}") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else text[:37] + "..."


_TYPE_FROM_JSON: dict[int, Callable[[Any], Any]] = {
    **dict.fromkeys(_REAL, _float),
    FieldDescriptor.TYPE_BYTES: _bytes,
    FieldDescriptor.TYPE_STRING: _text,
    FieldDescriptor.TYPE_BOOL: partial(_of_kind, kind=bool, words="true or false"),
}
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    name: _TYPE_FROM_JSON.get(element, _number) for name, element in _ELEMENTS.items()
}

# Keys of the JSON that the feeder of the Chakra tools reads, and the attribute that each becomes.
_FED = {"comm_type": "int64_val", "comm_size": "int64_val", "comm_priority": "int32_val", "tensor_size": "uint64_val"}
_FED |= {"comm_src": "int32_val", "comm_dst": "int32_val", "comm_tag": "int32_val", "is_cpu_op": "bool_val"}
_FED_FIELDS = {"Id": "id", "Name": "name", "NodeType": "type", "runtime": "duration_micros", "ctrlDeps": "ctrl_deps"}
_FED_FIELDS |= {"data_deps": "data_deps"}
_FED_TYPES = dict(CollectiveCommType.items())


def from_feeder(value: Any, where: str) -> Node:
    """A node of a feeder's `workload_graph`; keys that it does not know become text attributes.

    Raises:
        InputError: `chakra-json`.
    """
    if not isinstance(value, dict):
        raise InputError(f"expected an object, got {type(value).__name__}", slug="chakra-json", where=where)
    node: dict[str, Any] = {}
    attributes: list[dict[str, Any]] = []
    for key, field_value in value.items():
        if key in _FED_FIELDS:
            node[_FED_FIELDS[key]] = field_value
        elif key in _FED:
            fed_value = field_value
            if key == "is_cpu_op" and isinstance(field_value, int):
                fed_value = bool(field_value)
            elif key == "comm_type" and isinstance(field_value, str):
                fed_value = _FED_TYPES.get(field_value, field_value)
            attributes.append({"name": key, _FED[key]: fed_value})
        else:
            text = field_value if isinstance(field_value, str) else repr(field_value)
            attributes.append({"name": key, "string_val": text})
    return from_object({**node, "attr": attributes}, Node, where)
