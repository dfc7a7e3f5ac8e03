"""Rewriting a host trace from the columns that the reader returns, which also repairs damaged
files.
"""

import json
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
from traceloom.workload.anonymize.names import COMMUNICATION
from traceloom.workload.anonymize.policy import (
    CALLS,
    COLLAPSE,
    KEEP,
    RewriteStats,
    is_schema,
    is_type,
    list_host_names,
)
from traceloom.workload.anonymize.tensors import (
    COMMUNICATION_VALUES,
    GROUP_VALUES,
    PLAIN_VALUES,
    Tensors,
)

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
