"""Anonymises PyTorch's execution traces, and the tensors in them.

policy, and most values are dropped.

files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from traceloom.formats.host_trace import HostTraceScanner
from traceloom.formats.kineto_metadata import parse_whole_number
from traceloom.formats.resync import DamageLog
from traceloom.formats.text_stream import open_input, read_text_pieces
from traceloom.trace.trace import GROUP_LIST
from traceloom.workload.anonymize.inputs import open_output
from traceloom.workload.anonymize.kineto import Rules
from traceloom.workload.anonymize.leak_report import InputShapes
from traceloom.workload.anonymize.metadata import MetadataRewriter, check_rank_list, encode_json
from traceloom.workload.anonymize.names import COMMUNICATION, OPERATIONS, Pseudonyms
from traceloom.workload.anonymize.policy import (
    CALLS,
    COLLAPSE,
    DROP,
    KEEP,
    Policy,
    RewriteStats,
    is_schema,
    is_type,
    list_host_names,
)
from traceloom.workload.anonymize.sizes import Shapes, rewrite_argument
from traceloom.workload.replay.schema import SchemaArgument, UnreadableSchemaError, parse_schema
from traceloom.workload.replay.values import Kind, parse_kinds

_DEVICE = re.compile(r"(cpu|cuda|hip|xpu|mtia|hpu|npu|mps|meta|privateuseone)(:\d{1,3})?")
_NULL_VALUES = frozenset(
    f"<{kind}>"
    for kind in ("None", "Object", "Generator", "Capsule", "PyObject", "Storage", "Enum")
)
_NUMBER = re.compile(r"-?inf|nan|-?\d{1,20}(\.\d{1,20})?([eE][+-]?\d{1,3})?")
_MAX_DEPTH = 8
_TENSOR_FIELDS = 5  # without its device
_VALUE_TYPES = {bool: "flags", int: "whole numbers", float: "numbers, replaced", str: "words"}

PLAIN_VALUES, COMMUNICATION_VALUES, GROUP_VALUES = "plain", "communication", "groups"


class Tensors:
    """Rewrites the values, shapes, strides and types of one side of an operator."""

    def __init__(
        self, names: Pseudonyms, shapes: Shapes, policy: Policy, account: RewriteStats
    ) -> None:
        self._names = names
        self._shapes = shapes
        self._policy = policy
        self._account = account
        self._metadata = MetadataRewriter(names, policy, account)

    def values(self, value: Any, kind: str = PLAIN_VALUES) -> Any:
        """Returns a list of tensors and values; dropped ones become null, so that positions stay.

        Args:
            value: The list.
            kind: OF_COMMUNICATION for `record_param_comms`, OF_GROUPS for the list of process
                groups, else PLAIN_VALUES.
        """
        return [self._one(item, kind, 0) for item in value] if isinstance(value, list) else []

    def arguments(self, values: Any, types: str | None, schema: str) -> Any:
        """Returns the inputs of an operator that is to run again; without a schema only tensors are
        kept.

        Args:
            values: As recorded.
            types: Their types, as JSON.
            schema: The operator's public schema; empty if there is none.
        """
        try:
            operator = parse_schema(schema)
        except UnreadableSchemaError:
            return self.values(values)
        kinds = parse_kinds(types)
        if (
            not isinstance(values, list)
            or len(values) != len(kinds)
            or len(values) > len(operator.arguments)
        ):
            return self.values(values)

        def made(value: Any, kind: Kind, argument: SchemaArgument) -> Any:
            if isinstance(kind, tuple) and isinstance(value, list):
                kinds_inside = kind if len(kind) == len(value) else (None,) * len(value)
                return [
                    made(inner, inner_kind, argument)
                    for inner, inner_kind in zip(value, kinds_inside, strict=True)
                ]
            if (
                isinstance(kind, str)
                or value is None
                or (isinstance(value, str) and not self._is_text(value))
            ):
                return self._one(value, PLAIN_VALUES, 0)
            rewritten = rewrite_argument(value, argument, operator, self._shapes.rounded)
            if rewritten is None:
                self._account.drop("values", encode_json(value))
            else:
                self._account.kept_arguments[_VALUE_TYPES[type(rewritten)]] += 1
            return "" if rewritten is None and isinstance(value, str) else rewritten

        rewritten = [
            made(*argument_fields)
            for argument_fields in zip(values, kinds, operator.arguments, strict=False)
        ]
        if (operator.namespace, operator.name) == ("aten", "arange"):
            return self._count_anew(
                [argument.name for argument in operator.arguments], values, rewritten
            )
        return rewritten

    def _count_anew(self, names: list[str], values: list[Any], rewritten: list[Any]) -> list[Any]:
        """Returns arguments of an `arange` that make as many elements as its rounded output has."""
        given = {
            name: value
            for name, value in zip(names, values, strict=False)
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        start, step = given.get("start", 0), given.get("step", 1)
        if "end" not in given or not step or not math.isfinite((given["end"] - start) / step):
            return rewritten
        count = max(math.ceil((given["end"] - start) / step), 0)
        anew = {"start": 0, "end": self._shapes.rounded(count), "step": 1}
        return [
            type(given[name])(anew[name]) if name in given and name in anew else value
            for name, value in zip(names, rewritten, strict=False)
        ]

    @staticmethod
    def _is_text(item: str) -> bool:
        """Returns whether a text is a value, rather than an empty value or a device."""
        return not (item in _NULL_VALUES or _DEVICE.fullmatch(item) or item == "")

    def _one(self, item: Any, kind: str, depth: int) -> Any:
        if isinstance(item, list):
            if depth >= _MAX_DEPTH:
                return None
            # `[tensor, storage, offset, elements, bytes of each, device]`; old files have no
            # device.
            if (
                len(item) not in (_TENSOR_FIELDS, _TENSOR_FIELDS + 1)
                or not all(
                    isinstance(number, int) and not isinstance(number, bool)
                    for number in item[:_TENSOR_FIELDS]
                )
                or not all(isinstance(device, str) for device in item[_TENSOR_FIELDS:])
            ):
                return [self._one(inner, kind, depth + 1) for inner in item]
            identity, storage, offset, count, width = item[:_TENSOR_FIELDS]
            size = self._shapes.size
            devices = [
                device if _DEVICE.fullmatch(device) else "" for device in item[_TENSOR_FIELDS:]
            ]
            return [identity, storage, size(offset) if offset else 0, size(count), width, *devices]
        if isinstance(item, str):
            if kind == GROUP_VALUES:
                return self._groups(item)
            if not self._is_text(item):
                return item
            if kind == COMMUNICATION_VALUES:
                return item if item in OPERATIONS else self._names.description(item)
            if self._policy.scalars == KEEP and _NUMBER.fullmatch(item):
                return item
            self._account.drop("values", encode_json(item))
            return ""
        if item is None or isinstance(item, bool):
            return item if kind == COMMUNICATION_VALUES or self._policy.scalars == KEEP else None
        if kind == COMMUNICATION_VALUES and isinstance(item, int):
            return self._names.pointer(item) if depth == 0 else self._shapes.size(item)
        if self._policy.scalars != KEEP or not isinstance(item, (int, float)):
            self._account.drop("values")
            return None
        if depth == 0 or self._shapes.kept:
            return item
        return (
            None
            if self._policy.shapes == DROP or not isinstance(item, int)
            else self._shapes.rounded(item)
        )

    def _groups(self, item: str) -> str:
        """Rewrites the JSON list of process groups, which PyTorch writes as a text."""
        try:
            group_entries = json.loads(item)
        except (ValueError, RecursionError):
            self._account.refuse("process groups", item.encode("utf-8", "replace"))
            return "[]"
        groups = []
        for group in group_entries if isinstance(group_entries, list) else []:
            if not isinstance(group, dict):
                continue
            out: dict[str, Any] = {}
            if group.get("pg_name") is not None:
                out["pg_name"] = self._names.group(str(group["pg_name"]))
            if isinstance(group.get("pg_desc"), str):
                out["pg_desc"] = self._names.description(group["pg_desc"])
            if isinstance(group.get("backend_id"), int):
                out["backend_id"] = self._names.pointer(group["backend_id"])
            if (backend := self._metadata.backend(group.get("backend_config"))) is not None:
                out["backend_config"] = backend
            if (ranks := check_rank_list(group.get("ranks"))) is not None:
                out["ranks"] = ranks
            out |= {
                key: group[key]
                for key in ("group_size", "group_count")
                if isinstance(group.get(key), int)
            }
            for key in group.keys() - out.keys():
                self._account.drop(
                    f"process groups.{key}", json.dumps(group[key]).encode(), unknown=True
                )
            groups.append(out)
        return json.dumps(groups)

    def shapes(self, value: Any) -> Any:
        """Returns a list of shapes; if they are dropped, an empty shape for each."""
        if not isinstance(value, list):
            return []
        if self._policy.shapes == DROP:
            return [[] for _ in value]
        encoded = self._shapes.dims(json.dumps(value).encode())
        return [[] for _ in value] if encoded is None else json.loads(encoded)

    def strides(self, value: Any, shapes: Any) -> Any:
        if not isinstance(value, list):
            return []
        encoded = self._shapes.strides(json.dumps(value).encode(), json.dumps(shapes).encode())
        return [[] for _ in value] if encoded is None else json.loads(encoded)

    @staticmethod
    def types(value: Any) -> Any:
        """Returns a list of types, keeping public ones only."""
        if not isinstance(value, list):
            return []
        return [item if isinstance(item, str) and is_type(item) else "" for item in value]

    def splits(self, text: str) -> str:
        """Returns the sizes of the parts of an uneven exchange."""
        encoded = self._shapes.splits(json.dumps(text).encode())
        return "[]" if encoded is None else str(json.loads(encoded))


T = TypeVar("T", list[Any], dict[str, Any])
_SCHEMA = re.compile(r"\d{1,2}\.\d{1,2}\.\d{1,2}(-chakra\.\d{1,2}\.\d{1,2}\.\d{1,2})?")
_NEWEST_SCHEMA = "1.1.1-chakra.0.0.4"
_NO_TIME = "1970-01-01 00:00:00"
_USER_SCOPE = 7
_BACKENDS = ("triton", "cpp", "cutlass", "")
# Attribute: (type in the file, column, default value).
_ATTRIBUTES = (
    ("rf_id", "uint64", "record_function_id", 0),
    ("fw_parent", "uint64", "forward_parent", 0),
    ("seq_id", "int64", "sequence", -1),
    ("scope", "uint64", "scope", 0),
    ("tid", "uint64", "thread", 0),
    ("fw_tid", "uint64", "forward_thread", 0),
)
_SIZES = ("in_msg_nelems", "out_msg_nelems")
_NUMBERS = ("global_rank_start", "global_rank_stride", "pg_size")


class HostRewriter:
    """Rewrites one host trace; nodes are written as in schema 1.0.2 and later."""

    def __init__(
        self, path: Path, rules: Rules, account: RewriteStats, hidden: InputShapes
    ) -> None:
        self._path = path
        self._rules = rules
        self._account = account
        self._hidden = hidden
        self._tensors = Tensors(rules.names, rules.shapes, rules.policy, account)
        self._above: dict[int, int] = {}  # with `collapse`: user annotation -> its parent
        self.envelope: dict[str, Any] = {}

    def frames(self) -> Iterator[pl.DataFrame]:
        """Yields the nodes as the reader returns them."""
        damage = DamageLog(entry="node", list_key="nodes")
        with open_input(self._path) as stream:
            text = HostTraceScanner(read_text_pieces(stream, damage), damage, str(self._path))
            yield from text.frames()
            self.envelope = text.envelope

    def write(self, target: Path) -> None:
        """Rewrite the trace into a new file.

        Raises:
            InputError: The file is not a host trace.
            OSError: The new file cannot be written.
        """
        if self._rules.policy.structure == COLLAPSE:
            for frame in self.frames():
                for identity, name, parent, scope in frame.select(
                    "id", "name", "parent", "scope"
                ).iter_rows():
                    if (
                        scope == _USER_SCOPE
                        and name not in list_host_names()
                        and not COMMUNICATION.match(name)
                    ):
                        self._above[identity] = parent or 0
        with open_output(target) as out:
            out.write(b'{"nodes":[\n')
            first = True
            for frame in self.frames():
                lines = [
                    json.dumps(self._node(row), ensure_ascii=False).encode("utf-8", "replace")
                    for row in frame.iter_rows(named=True)
                    if row["id"] not in self._above
                ]
                self._account.entries_in += frame.height
                self._account.entries_out += len(lines)
                if len(lines) < frame.height:
                    self._account.dropped_entries["collapsed"] += frame.height - len(lines)
                chunk = b",\n".join(lines)
                self._account.scan(chunk)
                if lines:
                    out.write(chunk if first else b",\n" + chunk)
                    first = False
            # The fields besides the nodes; readers ignore the order of keys.
            old = self.envelope
            start, finish, process = (
                parse_whole_number(old.get(key)) for key in ("start_ts", "finish_ts", "pid")
            )
            schema = str(old.get("schema", ""))
            new: dict[str, Any] = {
                "schema": schema if _SCHEMA.fullmatch(schema) else _NEWEST_SCHEMA
            }
            if process is not None:
                new["pid"] = self._rules.names.process(process)
            keeps_times = self._rules.policy.times == KEEP
            new["time"] = str(old.get("time", ""))[:19] if keeps_times else _NO_TIME
            if not re.fullmatch(r"[\d :-]*", new["time"]):
                new["time"] = _NO_TIME
            if start is not None:
                new["start_ts"] = start if keeps_times else 0
                if finish is not None:
                    new["finish_ts"] = finish if keeps_times else finish - start
            for key in old.keys() - {*new, "time"}:
                self._account.drop(key, json.dumps(old[key]).encode(), unknown=True)
            text = json.dumps(new).encode()
            self._account.scan(text)
            out.write(b"\n]," + text[1:-1] + b"}\n")

    def _node(self, row: dict[str, Any]) -> dict[str, Any]:
        name = row["name"] or ""
        kind = (
            GROUP_VALUES
            if name == GROUP_LIST
            else COMMUNICATION_VALUES
            if name == "record_param_comms"
            else PLAIN_VALUES
        )
        extra_attributes = _parse_json(row["attributes"], dict)
        attributes = [
            {
                "name": key,
                "type": kind_of,
                "value": row[column] if row[column] is not None else nothing,
            }
            for key, kind_of, column, nothing in _ATTRIBUTES
        ]
        schema = row["schema"] or ""
        if schema and not is_schema(schema):
            self._account.drop("op_schema", schema.encode("utf-8", "replace"))
            schema = ""
        attributes.append({"name": "op_schema", "type": "string", "value": schema})
        sides = {}
        for side, word in (("inputs", "input"), ("outputs", "output")):
            values, shapes, types = (
                _parse_json(row[column], list)
                for column in (side, f"{word}_shapes", f"{word}_types")
            )
            self._hidden.add(shapes, types)
            called = (
                side == "inputs" and kind == PLAIN_VALUES and self._rules.policy.scalars == CALLS
            )
            sides[side] = {
                "values": self._tensors.arguments(values, row["input_types"], schema)
                if called
                else self._tensors.values(values, kind),
                "shapes": self._tensors.shapes(shapes),
                "types": self._tensors.types(types),
            }
            strides = extra_attributes.pop(f"{word}_strides", None)
            if strides is not None:
                sides[side]["strides"] = self._tensors.strides(strides, shapes)
        attributes += [
            rewritten
            for key, value in extra_attributes.items()
            if (rewritten := self._attribute(key, value)) is not None
        ]
        parent, steps = row["parent"], 0
        while parent in self._above and steps < 10_000:
            parent, steps = self._above[parent], steps + 1
        return {
            "id": row["id"],
            "name": self._rules.names.host(name),
            "ctrl_deps": row["id"] if parent is None else parent,
            **sides,
            "attrs": attributes,
        }

    def _attribute(self, key: str, value: Any) -> dict[str, Any] | None:
        """Rewrites an attribute that only some versions have; None drops it."""
        names = self._rules.names
        new_value: Any = None
        kind = "string"
        if key in _SIZES and isinstance(value, int):
            new_value, kind = self._rules.shapes.size(value), "uint64"
        elif key in _NUMBERS and isinstance(value, int):
            new_value, kind = value, "uint64"
        elif not isinstance(value, str):
            new_value = None
        elif key in ("in_split_size", "out_split_size"):
            new_value = self._tensors.splits(value)
        elif key == "pg_name":
            new_value = names.group(value)
        elif key == "pg_desc":
            new_value = names.description(value)
        elif key == "collective_name":
            new_value = names.operation(value)
        elif key == "dtype":
            new_value = value if is_type(value) else ""
        elif key == "kernel_backend":
            new_value = value if value in _BACKENDS else ""
        elif key in ("kernel_file", "tensor_range") and value == "":
            new_value = ""
        if new_value is None:
            expected = key in ("kernel_file", "tensor_range")
            self._account.drop(key, json.dumps(value).encode(), unknown=not expected)
            return None
        return {"name": key, "type": kind, "value": new_value}


def _parse_json(text: str | None, kind: type[T]) -> T:
    """Returns a JSON list or object; an empty one if the text is not of that type."""
    try:
        value = json.loads(text) if text else None
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, kind) else kind()
