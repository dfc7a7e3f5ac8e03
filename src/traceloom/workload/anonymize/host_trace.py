"""A host trace, rewritten from the columns that the reader makes: damaged files come out whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from traceloom.formats.host_trace import HostTraceScanner
from traceloom.formats.kineto_metadata import whole
from traceloom.formats.resync import DamageLog
from traceloom.formats.text_stream import open_input, text_pieces
from traceloom.trace.trace import GROUP_LIST
from traceloom.workload.anonymize.inputs import opened
from traceloom.workload.anonymize.kineto import Rules
from traceloom.workload.anonymize.leak_report import HiddenShapes
from traceloom.workload.anonymize.names import COMMUNICATION
from traceloom.workload.anonymize.policy import CALLS, COLLAPSE, KEEP, Account, host_names, is_schema, is_type
from traceloom.workload.anonymize.tensors import OF_COMMUNICATION, OF_GROUPS, PLAIN, Tensors

T = TypeVar("T", list[Any], dict[str, Any])
_SCHEMA = re.compile(r"\d{1,2}\.\d{1,2}\.\d{1,2}(-chakra\.\d{1,2}\.\d{1,2}\.\d{1,2})?")
_NEWEST = "1.1.1-chakra.0.0.4"
_NO_TIME = "1970-01-01 00:00:00"
_USER_SCOPE = 7
_BACKENDS = ("triton", "cpp", "cutlass", "")
# Attribute: (type in the file, column, value where there is none).
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
    """Rewrites one host trace; nodes are written as schema 1.0.2 and later have them."""

    def __init__(self, path: Path, rules: Rules, account: Account, hidden: HiddenShapes) -> None:
        self._path = path
        self._rules = rules
        self._account = account
        self._hidden = hidden
        self._tensors = Tensors(rules.names, rules.shapes, rules.policy, account)
        self._above: dict[int, int] = {}  # with `collapse`: region of the user -> what stands above it
        self.envelope: dict[str, Any] = {}

    def frames(self) -> Iterator[pl.DataFrame]:
        """The nodes as the reader sees them."""
        damage = DamageLog(entry="node", list_key="nodes")
        with open_input(self._path) as stream:
            text = HostTraceScanner(text_pieces(stream, damage), damage, str(self._path))
            yield from text.frames()
            self.envelope = text.envelope

    def write(self, target: Path) -> None:
        """Rewrite the trace into a new file.

        Raises:
            InputError: The file is no host trace.
            OSError: The new file cannot be written.
        """
        if self._rules.policy.structure == COLLAPSE:
            for frame in self.frames():
                for identity, name, parent, scope in frame.select("id", "name", "parent", "scope").iter_rows():
                    if scope == _USER_SCOPE and name not in host_names() and not COMMUNICATION.match(name):
                        self._above[identity] = parent or 0
        with opened(target) as out:
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
                piece = b",\n".join(lines)
                self._account.scan(piece)
                if lines:
                    out.write(piece if first else b",\n" + piece)
                    first = False
            # What stands beside the nodes: the order of keys means nothing to readers.
            old = self.envelope
            start, finish, process = (whole(old.get(key)) for key in ("start_ts", "finish_ts", "pid"))
            schema = str(old.get("schema", ""))
            new: dict[str, Any] = {"schema": schema if _SCHEMA.fullmatch(schema) else _NEWEST}
            if process is not None:
                new["pid"] = self._rules.names.process(process)
            kept = self._rules.policy.times == KEEP
            new["time"] = str(old.get("time", ""))[:19] if kept else _NO_TIME
            if not re.fullmatch(r"[\d :-]*", new["time"]):
                new["time"] = _NO_TIME
            if start is not None:
                new["start_ts"] = start if kept else 0
                if finish is not None:
                    new["finish_ts"] = finish if kept else finish - start
            for key in old.keys() - {*new, "time"}:
                self._account.drop(key, json.dumps(old[key]).encode(), unknown=True)
            text = json.dumps(new).encode()
            self._account.scan(text)
            out.write(b"\n]," + text[1:-1] + b"}\n")

    def _node(self, row: dict[str, Any]) -> dict[str, Any]:
        name = row["name"] or ""
        kind = OF_GROUPS if name == GROUP_LIST else OF_COMMUNICATION if name == "record_param_comms" else PLAIN
        more = _decoded(row["attributes"], dict)
        attributes = [
            {"name": key, "type": kind_of, "value": row[column] if row[column] is not None else nothing}
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
                _decoded(row[column], list) for column in (side, f"{word}_shapes", f"{word}_types")
            )
            self._hidden.add(shapes, types)
            called = side == "inputs" and kind == PLAIN and self._rules.policy.scalars == CALLS
            sides[side] = {
                "values": self._tensors.arguments(values, row["input_types"], schema)
                if called
                else self._tensors.values(values, kind),
                "shapes": self._tensors.shapes(shapes),
                "types": self._tensors.types(types),
            }
            strides = more.pop(f"{word}_strides", None)
            if strides is not None:
                sides[side]["strides"] = self._tensors.strides(strides, shapes)
        attributes += [made for key, value in more.items() if (made := self._attribute(key, value)) is not None]
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
        """An attribute beyond those of every version; None leaves it out."""
        names = self._rules.names
        made: Any = None
        kind = "string"
        if key in _SIZES and isinstance(value, int):
            made, kind = self._rules.shapes.size(value), "uint64"
        elif key in _NUMBERS and isinstance(value, int):
            made, kind = value, "uint64"
        elif not isinstance(value, str):
            made = None
        elif key in ("in_split_size", "out_split_size"):
            made = self._tensors.splits(value)
        elif key == "pg_name":
            made = names.group(value)
        elif key == "pg_desc":
            made = names.description(value)
        elif key == "collective_name":
            made = names.operation(value)
        elif key == "dtype":
            made = value if is_type(value) else ""
        elif key == "kernel_backend":
            made = value if value in _BACKENDS else ""
        elif key in ("kernel_file", "tensor_range") and value == "":
            made = ""
        if made is None:
            expected = key in ("kernel_file", "tensor_range")
            self._account.drop(key, json.dumps(value).encode(), unknown=not expected)
            return None
        return {"name": key, "type": kind, "value": made}


def _decoded(text: str | None, kind: type[T]) -> T:
    """A list or object of JSON; an empty one where the text is no such thing."""
    try:
        value = json.loads(text) if text else None
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, kind) else kind()
