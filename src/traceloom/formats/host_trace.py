"""Reads PyTorch's execution traces (host traces).

Of malformed stretches every whole node is kept, damaged ones are repaired where possible, and the
rest is counted.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import polars as pl
from msgspec import Struct

from traceloom.errors import InputError
from traceloom.formats.detect import describe_format, refuse_start
from traceloom.formats.inputs import FileHead, InputFile, detect_source
from traceloom.formats.kineto_columns import parse_integer
from traceloom.formats.kineto_fields import NULL
from traceloom.formats.kineto_metadata import find_rank, merge_group_row, parse_whole_number
from traceloom.formats.resync import (
    PARSE_ERRORS,
    DamageLog,
    EntryFormat,
    EntryRecovery,
    JsonScanner,
    Span,
    repair_event,
)
from traceloom.formats.text_stream import (
    TextBuffer,
    open_input,
    read_first_pieces,
    read_text_pieces,
)
from traceloom.system.gzip_stream import ProgressCallback
from traceloom.system.text import replace_json_surrogates
from traceloom.trace.notice import Notice
from traceloom.trace.trace import GROUP_LIST, HOST_OPS, SCHEMAS, HostTrace

_RAW = msgspec.Raw()
# Column: key in the file. In nested schemas the first key is `ctrl_deps`, the others are
# attributes.
NUMBERS = {
    "parent": "parent",
    "forward_parent": "fw_parent",
    "record_function_id": "rf_id",
    "sequence": "seq_id",
    "scope": "scope",
    "thread": "tid",
    "forward_thread": "fw_tid",
}
_ATTRIBUTES = {key: column for column, key in NUMBERS.items() if key != "parent"}
LISTS = ("inputs", "input_shapes", "input_types", "outputs", "output_shapes", "output_types")
_SIDES = {
    side: (side, f"{side[:-1]}_shapes", f"{side[:-1]}_types") for side in ("inputs", "outputs")
}
# Numbers that mean "absent"; they are null in the columns.
_ABSENT_VALUES = {
    "forward_parent": 0,
    "record_function_id": 0,
    "sequence": -1,
    "thread": 0,
    "forward_thread": 0,
}
_encode = msgspec.json.Encoder().encode


class _Attribute(msgspec.Struct, gc=False):
    name: str
    value: Any = None


class _Side(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    values: msgspec.Raw = _RAW
    shapes: msgspec.Raw = _RAW
    types: msgspec.Raw = _RAW
    strides: msgspec.Raw = _RAW


_NO_SIDE = _Side()


class NestedNode(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A node since schema 1.0.2."""

    id: int
    name: str
    ctrl_deps: int = NULL
    inputs: _Side = _NO_SIDE
    outputs: _Side = _NO_SIDE
    attrs: list[_Attribute] = []


class FlatNode(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A node up to schema 1.0.1; the oldest lack `rf_id` and `op_schema`."""

    name: str
    id: int
    rf_id: int = NULL
    parent: int = NULL
    fw_parent: int = NULL
    seq_id: int = NULL
    scope: int = -1
    tid: int = NULL
    fw_tid: int = NULL
    op_schema: str = ""
    inputs: msgspec.Raw = _RAW
    input_shapes: msgspec.Raw = _RAW
    input_types: msgspec.Raw = _RAW
    outputs: msgspec.Raw = _RAW
    output_shapes: msgspec.Raw = _RAW
    output_types: msgspec.Raw = _RAW


_NESTED = msgspec.json.Decoder(list[NestedNode])
_FLAT = msgspec.json.Decoder(list[FlatNode])


def decode(text: bytes, *, nested: bool) -> tuple[pl.DataFrame, int, int]:
    """Decodes nodes separated by commas: (frame, nodes with values of unexpected types, entries
    that are not nodes).

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: The text is malformed.
    """
    document = b"".join((b"[", text, b"]"))
    try:
        if not nested:
            nodes = _FLAT.decode(document)
            columns: dict[str, Any] = {
                "id": [node.id for node in nodes],
                "name": [node.name for node in nodes],
            }
            for column, key in NUMBERS.items():
                columns[column] = [getattr(node, key) for node in nodes]
            columns["schema"] = [node.op_schema for node in nodes]
            for key in LISTS:
                columns[key] = _decode_texts(getattr(node, key) for node in nodes)
            return _build_frame(columns), 0, 0
        # Groups of nodes whose attributes have the same names in the same order; a file has few.
        groups: dict[tuple[str, ...], list[NestedNode]] = {}
        for nested_node in _NESTED.decode(document):
            names = tuple([attribute.name for attribute in nested_node.attrs])
            groups.setdefault(names, []).append(nested_node)
        frames = [_build_nested_frame(names, members) for names, members in groups.items()]
        return pl.concat(frames) if frames else pl.DataFrame(schema=HOST_OPS), 0, 0
    except (msgspec.ValidationError, _SchemaMismatch):
        return decode_any_schema(msgspec.json.decode(document))


class _SchemaMismatch(Exception):  # noqa: N818  (never seen outside)
    """A value does not fit its column; `decode_any_schema` determines which."""


def _build_nested_frame(names: tuple[str, ...], nodes: list[NestedNode]) -> pl.DataFrame:
    columns: dict[str, Any] = {
        "id": [node.id for node in nodes],
        "name": [node.name for node in nodes],
        "parent": [node.ctrl_deps for node in nodes],
    }
    for side, (values, shapes, types) in _SIDES.items():
        sides = [getattr(node, side) for node in nodes]
        columns[values] = _decode_texts(entry.values for entry in sides)
        columns[shapes] = _decode_texts(entry.shapes for entry in sides)
        columns[types] = _decode_texts(entry.types for entry in sides)
    extra_attributes: dict[str, list[bytes]] = {}
    for index, name in enumerate(names):
        attribute_values = [node.attrs[index].value for node in nodes]
        if name in _ATTRIBUTES:
            columns[_ATTRIBUTES[name]] = attribute_values
        elif name == "op_schema":
            columns["schema"] = attribute_values
        else:
            extra_attributes[name] = [_encode(value) for value in attribute_values]
    for side in _SIDES:
        strides = [bytes(getattr(node, side).strides) for node in nodes]
        if any(strides):
            extra_attributes[f"{side[:-1]}_strides"] = [text or b"null" for text in strides]
    if extra_attributes:
        # Build one JSON object per row from columns of JSON text.
        keys = [_encode(name) for name in extra_attributes]
        pattern = b"{" + b",".join(key.replace(b"%", b"%%") + b":%b" for key in keys) + b"}"
        columns["attributes"] = _decode_texts(
            pattern % row for row in zip(*extra_attributes.values(), strict=True)
        )
    return _build_frame(columns)


def _decode_texts(raws: Iterable[msgspec.Raw | bytes]) -> pl.Series:
    """Returns the JSON text of each value; null where the file has none."""
    texts = [bytes(raw) or None for raw in raws]
    try:
        return pl.Series(texts, dtype=pl.Binary).cast(pl.String)
    except pl.exceptions.ComputeError:
        return pl.Series(
            [None if text is None else text.decode("utf-8", "replace") for text in texts],
            dtype=pl.String,
        )


def _build_frame(columns: dict[str, Any]) -> pl.DataFrame:
    height = len(columns["id"])
    try:
        series = [
            pl.Series(name, columns[name], dtype=kind, strict=True)
            if name in columns
            else pl.Series(name, [None], dtype=kind).new_from_index(0, height)
            for name, kind in HOST_OPS.items()
        ]
    except (TypeError, OverflowError, pl.exceptions.PolarsError) as error:
        raise _SchemaMismatch from error
    return pl.DataFrame(series)


# -- decoding of any schema ----------------------------------------------------------------------


def decode_any_schema(nodes: list[Any]) -> tuple[pl.DataFrame, int, int]:
    """Decodes nodes of any schema: (frame, nodes with values of unexpected types, entries that are
    not nodes).
    """
    rows, unexpected, lost = [], 0, 0
    for node in nodes:
        row = _build_row(node) if isinstance(node, dict) else None
        if row is None:
            lost += 1
            continue
        unexpected += row.pop("odd")
        rows.append(row)
    columns = {name: [row.get(name) for row in rows] for name in HOST_OPS}
    return pl.DataFrame(columns, schema=HOST_OPS), unexpected, lost


def _build_row(node: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the columns of one node; None without an id.

    `odd` means that a value was of an unexpected type.
    """
    node_id = parse_integer(node.get("id"))
    if node_id == NULL:
        return None
    values = dict(node)
    # Move attributes and the parts of inputs and outputs up to the other keys.
    unexpected = False
    for side, content in {side: values.pop(side, None) for side in _SIDES}.items():
        if isinstance(content, dict):
            parts = dict(zip(("values", "shapes", "types"), _SIDES[side], strict=True))
            for key, value in content.items():
                values[parts.get(key, f"{side[:-1]}_{key}")] = value
        elif content is not None:
            values[side] = content
            unexpected |= not isinstance(content, list)
    attributes = values.pop("attrs", None)
    if isinstance(attributes, dict):
        attributes = [{"name": name, "value": value} for name, value in attributes.items()]
    unexpected |= attributes is not None and not isinstance(attributes, list)
    for item in attributes if isinstance(attributes, list) else []:
        if isinstance(item, dict) and isinstance(item.get("name"), str):
            values.setdefault(item["name"], item.get("value"))
        else:
            unexpected = True
    row: dict[str, Any] = {"id": node_id, "name": _clean_name(values.pop("name", None))}
    unexpected |= not isinstance(node.get("id"), int) or not isinstance(node.get("name"), str)
    values.pop("id")
    for column, key in NUMBERS.items():
        value = values.pop(key, None)
        if column == "parent" and "ctrl_deps" in values:
            value = values.pop("ctrl_deps")
            value = value[0] if isinstance(value, list) and value else value
        parsed = parse_integer(value)
        row[column] = None if parsed == NULL else parsed
        if parsed == NULL and isinstance(value, int) and 2**63 <= value < 2**64:
            row[column] = value - 2**64  # -1 written as unsigned
        unexpected |= value is not None and (row[column] is None or isinstance(value, str))
    if row["scope"] is not None and not -(2**31) <= row["scope"] < 2**31:
        row["scope"], unexpected = None, True
    schema = values.pop("op_schema", None)
    row["schema"] = _clean_name(schema) if isinstance(schema, str) else None
    for key in LISTS:
        if values.get(key) is not None:
            row[key] = _encode_text(values.pop(key))
    row["attributes"] = _encode_text(values) if values else None
    row["odd"] = unexpected
    return row


def _clean_name(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return text.encode("utf-8", "replace").decode()  # UTF-8 cannot encode half of a surrogate pair


def _encode_text(value: Any) -> str:
    try:
        return _encode(value).decode()
    except UnicodeEncodeError:
        return json.dumps(value)


def merge_frames(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """Joins the frames of stretches, ascending by id.

    Numbers and texts that mean "absent" become null; a root has no parent.
    """
    merged = pl.concat(list(chain([pl.DataFrame(schema=HOST_OPS)], frames)))
    return merged.sort("id", maintain_order=True).with_columns(
        *(
            pl.col(column).replace([NULL, _ABSENT_VALUES.get(column, NULL)], None)
            for column in NUMBERS
            if column not in {"parent", "scope"}
        ),
        pl.col("scope").replace(-1, None),
        pl.when(~pl.col("parent").is_in([NULL, 0]) & (pl.col("parent") != pl.col("id"))).then(
            pl.col("parent")
        ),
        pl.when(pl.col("schema") != "").then(pl.col("schema")),
    )


SLICE = 1 << 20
_MAX_NODE_BYTES = 1 << 26  # bytes of one node
_MAX_HEAD_BYTES = 1 << 20  # bytes before the nodes
_NODES = re.compile(rb'"nodes"\s*:\s*\[')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[|^\s*\[\s*\{[^{}]{0,300}"ph"\s*:')
_ENTRY = re.compile(
    rb'"((?:[^"\\\n]|\\.){1,64})"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null)'
)
_ENVELOPE = frozenset({"schema", "pid", "time", "start_ts", "finish_ts"})  # no node has such a key
_MAX_END_CANDIDATES = 64  # max brackets tried when looking for the one that closes the list

# Between two nodes. An attribute begins with its name too, but is followed by a type or a value.
_STARTS = (
    rb'"(?:id|ctrl_deps|data_deps|inputs|rf_id|parent|outputs|attrs|schema)"\s*:'
    rb'|"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"(?!type"|value"|doc_string")[a-z_]+"'
    rb'|"name"\s*:\s*"[^{}]{0,400}?"\s*,\s*"(?:id|rf_id|parent|ctrl_deps)"\s*:\s*-?\d'  # without escaped quotes
)
BETWEEN = re.compile(rb"\}\s*,\s*(?=\{\s*(?:" + _STARTS + rb"))")
# At the end of a cut text the key may be cut.
_BETWEEN_OR_CUT = re.compile(rb"\}\s*,\s*(?=\{\s*(?:" + _STARTS + rb'|(?:"[a-z_]{0,9}"?)?\s*\Z))')
NODES = EntryFormat(
    between=_BETWEEN_OR_CUT,
    start=re.compile(rb'\{\s*"id"\s*:\s*\d+\s*,\s*"name"\s*:'),
    mark=re.compile(rb'"id"\s*:'),
    keys=frozenset(["id", "name", "ctrl_deps", "attrs", "op_schema", *NUMBERS.values(), *LISTS]),
    is_entry=lambda value: (
        "id" in value and "name" in value and ("ctrl_deps" in value or "parent" in value)
    ),
)
_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
# The observer of older versions writes doubles as C++ prints them.
_NON_FINITE = re.compile(
    r"(?<=[:\[,])(\s*)([+-]?(?:nan|inf(?:inity)?))(?=\s*[,}\]])", re.IGNORECASE
)


class _NodeRecovery(EntryRecovery):
    """Recovers nodes as frames.

    Attributes:
        nested: The expected layout.
        frames: The recovered nodes.
    """

    nested: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frames: list[pl.DataFrame] = []

    def take(self, start: int, end: int, spans: list[Span]) -> None:  # noqa: ARG002  (as of EntryRecovery)
        frame, unexpected, lost = decode(self.text[start:end], nested=self.nested)
        for slug, count in (("odd-values", unexpected), ("lost-events", lost)):
            if count:
                self._note(slug, start, count)
        self.frames.append(frame)

    def mend(self, start: int, end: int) -> int:
        # Bare inf and nan become strings, as newer observers write them; strings are left
        # unchanged.
        parts = _STRING.split(self.text[start:end].decode("utf-8", "replace"))
        repaired = "".join(
            part if part.startswith('"') else _NON_FINITE.sub(r'\1"\2"', part) for part in parts
        ).encode()
        frame, _, lost = decode_any_schema(repair_event(repaired, key="id"))
        if lost:
            self._note("lost-events", start, lost)
        if frame.height:
            self.frames.append(frame)
        return frame.height


class HostTraceScanner(TextBuffer):
    """Scans the text of a host trace in one pass.

    Attributes:
        envelope: Top-level entries other than `nodes`, complete after the pass.
    """

    def __init__(self, chunks: Iterator[bytes], damage: DamageLog, path: str) -> None:
        super().__init__(chunks)
        self.envelope: dict[str, Any] = {}
        self._damage = damage
        self._path = path
        self._nested = True

    def frames(self) -> Iterator[pl.DataFrame]:
        """Yields all nodes, a slice at a time.

        Raises:
            InputError: It is another kind of file.
        """
        self.open()
        target_size = SLICE
        while self._fill(target_size):
            cut = self._last_boundary(BETWEEN, 4096)
            if cut is None:
                if target_size > _MAX_NODE_BYTES:
                    raise InputError(
                        f"one node is larger than {_MAX_NODE_BYTES >> 20} MB",
                        slug="oversized-entry",
                        where=self._path,
                    )
                target_size = len(self._text) * 2
                continue
            frames, used, closed = self._decoded(self._text[:cut], last=False)
            yield from frames
            target_size = SLICE if used else len(self._text) * 2
            self._skip(used)
            if closed:
                while self._fill(len(self._text) + SLICE):
                    if len(self._text) > _MAX_HEAD_BYTES:
                        self._skip(len(self._text) - _MAX_HEAD_BYTES)
                tail = self._text
                break
            self._skip_blank()
        else:  # the last stretch: nodes, the end of the list, and what follows it
            self._skip_blank()
            end = self._end_of_list()
            if end is None:
                body = self._text.rstrip(b" \t\r\n,\0")
                frames, used, _ = self._decoded(body, last=True)
                yield from frames
                if used >= len(body):
                    if "cut-file" not in self._damage.cases:
                        self._damage.note("cut-file", f"byte {self.size} of the text", 0)
                    return
                tail = self._text[used:]
            else:
                frames, _, _ = self._decoded(
                    self._text[:end].rstrip(b" \t\r\n,"), last=True, bounded=True
                )
                yield from frames
                tail = self._text[end + 1 :]
        self._keep(tail.strip().rstrip(b"\0").removesuffix(b"}"))

    def open(self) -> None:
        """Reads what precedes the nodes.

        Raises:
            InputError: It is another kind of file.
        """
        self._fill(1 << 14)
        unknown = None
        try:
            refuse_start(self._text, self._path, "host trace")
        except InputError as error:
            if not self._text.strip() or describe_format(self._text):
                raise
            unknown = error
        while (match := _NODES.search(self._text)) is None:
            if _EVENTS.search(self._text):
                self._swapped()
            if (
                not self._fill(min(2 * len(self._text), _MAX_HEAD_BYTES))
                or len(self._text) >= _MAX_HEAD_BYTES
            ):
                break
        if match is None:  # the key of the nodes is damaged
            entry_start = JsonScanner(self._text, NODES).find_next_entry(0)
            if entry_start is None:
                if unknown is not None:
                    raise unknown
                keys = [
                    entry.group(1).decode("utf-8", "replace")
                    for entry in _ENTRY.finditer(self._text[:4096])
                ]
                listed_keys = ", ".join(f"`{key}`" for key in keys[:4])
                raise InputError(
                    f"this is no host trace but JSON without `nodes`{f' (its keys: {listed_keys})' if listed_keys else ''}",
                    slug="not-a-host-trace",
                    where=self._path,
                )
            self._damage.note("damaged-metadata", f"byte {entry_start} of the text")
            head, nodes_start = entry_start, entry_start
        else:
            head, nodes_start = match.span()
        if unknown is not None:
            self._damage.note("damaged-metadata", "byte 0 of the text")
        if _EVENTS.search(self._text[:head]):
            self._swapped()
        self._keep(self._text[:head].lstrip()[1:])
        self._skip(nodes_start)
        self._skip_blank()
        self._nested = b'"ctrl_deps"' in self._text[:SLICE] or b'"attrs"' in self._text[:SLICE]

    # -- text --------------------------------------------------------------------------------------

    def _fill(self, count: int) -> bool:
        """As in `TextBuffer`, but returns False also where the text has ended: the buffer then
        holds the rest.
        """
        return super()._fill(count) and not self._ended

    # -- nodes -------------------------------------------------------------------------------------

    def _decoded(
        self, text: bytes, *, last: bool, bounded: bool = False
    ) -> tuple[list[pl.DataFrame], int, bool]:
        """Decodes a stretch: (frames, bytes consumed, whether the list ended in it)."""
        if not text.strip():
            return [], len(text), last
        try:
            frame, unexpected, lost = decode(text, nested=self._nested)
        except PARSE_ERRORS:
            recovery = _NodeRecovery(
                text, self._base, self._damage, NODES, last=last, bounded=bounded
            )
            recovery.nested = self._nested
            used, closed = recovery.run()
            return recovery.frames, used, closed
        for slug, count in (("odd-values", unexpected), ("lost-events", lost)):
            if count:
                self._damage.note(slug, f"byte {self._base} of the text", count)
        return [frame], len(text), last

    def _end_of_list(self) -> int | None:
        """Returns the position of the bracket that closes the nodes; None where the file is cut
        before it.
        """
        bracket, fallback = len(self._text), None
        for _ in range(_MAX_END_CANDIDATES):
            bracket = self._text.rfind(b"]", 0, bracket)
            if bracket < 0:
                break
            tail = _parse_document(b'{"":0' + self._text[bracket + 1 :].rstrip(b" \t\r\n\0"))
            if tail is None:
                continue
            if tail.keys() & _ENVELOPE:
                return bracket
            try:
                decode(self._text[:bracket].strip(b" \t\r\n,"), nested=self._nested)
            except PARSE_ERRORS:
                # A cut after the last list of a node looks like the end of the nodes.
                fallback = (
                    bracket if fallback is None and "finish_ts" in self.envelope else fallback
                )
            else:
                return bracket
        return fallback

    # -- around them -------------------------------------------------------------------------------

    def _keep(self, text: bytes) -> None:
        """Stores the entries other than nodes; where they are malformed, those that can be read."""
        text = text.strip(b" \t\r\n,")
        if not text:
            return
        entries = _parse_document(b"{" + text + b"}")
        if entries is None:
            self._damage.note("damaged-metadata", f"byte {self._base} of the text")
            entries = {}
            for match in _ENTRY.finditer(text):
                value = _parse_document(b'{"value":' + match.group(2) + b"}")
                if value is not None:
                    entries[match.group(1).decode("utf-8", "replace")] = value["value"]
        cleaned, replaced = replace_json_surrogates(entries)
        if replaced:
            self._damage.note("replaced-text", f"byte {self._base} of the text", replaced)
        self.envelope |= cleaned

    def _swapped(self) -> NoReturn:
        raise InputError(
            "this is a Kineto trace (device trace), where a host trace is expected; perhaps the two are swapped",
            slug="swapped-traces",
            where=self._path,
        )


def _parse_document(text: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(text.decode("utf-8", "replace"), strict=False)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


_SCANNER = json.JSONDecoder(strict=False)


def read_host_trace(
    path: str | Path, *, capture: dict[str, Any] | None = None, step: ProgressCallback | None = None
) -> HostTrace:
    """Reads one host trace: plain or gzip, whole or damaged, schema 1.0.1 to 1.1.1 and older.

    Args:
        path: The file; `-` is standard input.
        capture: This rank's part of capture.json, where there is one.
        step: Called repeatedly with (bytes read from the file, bytes of text).

    Returns:
        The host trace; its notices list what was repaired or lost.

    Raises:
        InputError: `unreadable`, `swapped-traces` (it is a Kineto trace), `not-a-host-trace`,
            `empty-host-trace`.
    """
    damage = DamageLog(entry="node", list_key="nodes")
    with open_input(path) as stream:
        host_text = HostTraceScanner(read_text_pieces(stream, damage, step), damage, str(path))
        ops = merge_frames(list(host_text.frames()))
    envelope = host_text.envelope
    if not ops.height:
        lost = damage.cases.get("lost-events")
        reason = f"none of its {lost.count:,} nodes can be read" if lost else "it holds no node"
        raise InputError(
            f"the host trace is empty: {reason}", slug="empty-host-trace", where=str(path)
        )
    if "schema" not in envelope and not (ops["name"] != "").any():
        text = "this is no host trace but JSON whose `nodes` have no names"
        raise InputError(text, slug="not-a-host-trace", where=str(path))
    rank, _, _ = find_rank({}, None, str(path), capture)
    groups, notices = find_groups(ops, str(path))
    repeated = ops.height - ops["id"].n_unique()
    if repeated:
        text = f"{repeated:,} nodes have the id of another node; the first of each is what others refer to"
        notices.append(Notice("duplicate-host-ids", "warning", text, repeated, where=str(path)))
    schema = envelope.get("schema")
    recorded = envelope.get("time")
    return HostTrace(
        path=str(path),
        ops=ops,
        schema=str(schema) if isinstance(schema, (str, int, float)) else None,
        process=parse_whole_number(envelope.get("pid")),
        rank=rank,
        recorded_at=recorded if isinstance(recorded, str) else None,
        start_ms=parse_whole_number(envelope.get("start_ts")),
        finish_ms=parse_whole_number(envelope.get("finish_ts")),
        groups=groups,
        notices=(*damage.notices(), *notices),
    )


class HostTraceHead(Struct, frozen=True):
    """Identification of a host trace, from its first part.

    Attributes:
        source: The file.
        rank: From capture.json or the file name.
        process: Process id.
    """

    source: InputFile
    rank: int | None
    process: int | None


def peek_either(source: InputFile) -> FileHead | HostTraceHead:
    """Reads the first part of a file that may be a host trace or a device trace.

    Raises:
        InputError: It is neither a host trace nor a Kineto trace, or cannot be read.
    """
    if str(source.path) == "-":
        return detect_source(source.path).peek(source)
    damage = DamageLog(entry="node", list_key="nodes")
    with open_input(source.path) as stream:
        text = HostTraceScanner(read_first_pieces(stream, damage), damage, str(source.path))
        try:
            text.open()
        except InputError:  # the reader of device traces reports what it is instead
            return detect_source(source.path).peek(source)
    rank, _, _ = find_rank({}, None, str(source.path), source.entry)
    return HostTraceHead(source, rank, parse_whole_number(text.envelope.get("pid")))


def find_groups(ops: pl.DataFrame, path: str) -> tuple[pl.DataFrame, list[Notice]]:
    """Returns the groups of all `## process_group:init ##` nodes, where later ones complete earlier
    ones, and notices.

    An empty list of ranks means all ranks of the job; their number is then the size of the group.
    """
    rows: dict[str, dict[str, Any]] = {}
    cut = 0
    for inputs in ops.filter(pl.col("name") == GROUP_LIST)["inputs"].to_list():
        items, complete = _parse_group_list(inputs)
        cut += not complete
        for item in items:
            if not isinstance(item, dict) or item.get("pg_name") is None:
                continue
            size = parse_whole_number(item.get("group_size"))
            size = size if size is not None and 0 < size < 2**31 else None
            ranks = item.get("ranks")
            if isinstance(ranks, dict):  # old observers map global to group ranks
                ranks = [parse_whole_number(rank) for rank in ranks]
            members = None
            if isinstance(ranks, list) and all(
                isinstance(rank, int) and 0 <= rank < 2**31 for rank in ranks
            ):
                members = (
                    sorted(ranks)
                    if ranks
                    else list(range(size))
                    if size is not None and size <= 1 << 20
                    else None
                )
            merge_group_row(
                rows,
                str(item["pg_name"]),
                (item.get("pg_desc"), item.get("backend_config")),
                size,
                members,
            )
    notices = []
    if cut:
        text = f"the list of process groups is cut or malformed {cut} times; the groups before the cut are kept"
        notices.append(Notice("damaged-groups", "warning", text, cut, where=path))
    return pl.DataFrame(list(rows.values()), schema=SCHEMAS["groups"]), notices


def _parse_group_list(inputs: str | None) -> tuple[list[Any], bool]:
    """Returns the groups of one node, and whether the list could be read to its end."""
    try:
        text = json.loads(inputs or "")[0]
    except (ValueError, LookupError, TypeError, RecursionError):
        return [], False
    if not isinstance(text, str):
        return [], False
    try:
        groups = json.loads(text)
    except (ValueError, RecursionError):
        # Whole objects of a list that was cut: old observers cut strings at 8192 characters.
        items = []
        position = text.find("{")
        while position >= 0:
            try:
                item, position = _SCANNER.raw_decode(text, position)
            except (ValueError, RecursionError):
                break
            items.append(item)
            position = text.find("{", position)
        return replace_json_surrogates(items)[0], False
    return (replace_json_surrogates(groups)[0], True) if isinstance(groups, list) else ([], False)
