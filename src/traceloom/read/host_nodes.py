"""Nodes of a host trace, of any schema, to columns: by key, never by position."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

import msgspec
import polars as pl

from traceloom.model.host_trace import HOST_OPS
from traceloom.read.columns import number
from traceloom.read.fields import NULL

_RAW = msgspec.Raw()
# Column: key in the file. In nested schemas the first is `ctrl_deps`, the rest are attributes.
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
_SIDES = {side: (side, f"{side[:-1]}_shapes", f"{side[:-1]}_types") for side in ("inputs", "outputs")}
# What a number says when there is nothing to say; those are null in the columns.
_NOTHING = {"forward_parent": 0, "record_function_id": 0, "sequence": -1, "thread": 0, "forward_thread": 0}
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


class Nested(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A node since schema 1.0.2."""

    id: int
    name: str
    ctrl_deps: int = NULL
    inputs: _Side = _NO_SIDE
    outputs: _Side = _NO_SIDE
    attrs: list[_Attribute] = []


class Flat(msgspec.Struct, gc=False, forbid_unknown_fields=True):
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


_NESTED = msgspec.json.Decoder(list[Nested])
_FLAT = msgspec.json.Decoder(list[Flat])


def decode(text: bytes, *, nested: bool) -> tuple[pl.DataFrame, int, int]:
    """Nodes separated by commas: (frame, how many hold values of unexpected types, how many are no nodes at all).

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: It is malformed.
    """
    whole = b"".join((b"[", text, b"]"))
    try:
        if not nested:
            nodes = _FLAT.decode(whole)
            columns: dict[str, Any] = {"id": [node.id for node in nodes], "name": [node.name for node in nodes]}
            for column, key in NUMBERS.items():
                columns[column] = [getattr(node, key) for node in nodes]
            columns["schema"] = [node.op_schema for node in nodes]
            for key in LISTS:
                columns[key] = _texts(getattr(node, key) for node in nodes)
            return _frame(columns), 0, 0
        # Groups of nodes whose attributes have the same names in the same order, of which a file has few.
        groups: dict[tuple[str, ...], list[Nested]] = {}
        for nested_node in _NESTED.decode(whole):
            names = tuple([attribute.name for attribute in nested_node.attrs])
            groups.setdefault(names, []).append(nested_node)
        frames = [_group_frame(names, members) for names, members in groups.items()]
        return pl.concat(frames) if frames else pl.DataFrame(schema=HOST_OPS), 0, 0
    except (msgspec.ValidationError, _Unfit):
        return loose_frame(msgspec.json.decode(whole))


class _Unfit(Exception):  # noqa: N818  (never seen outside)
    """A value does not fit its column; the careful way finds out which."""


def _group_frame(names: tuple[str, ...], nodes: list[Nested]) -> pl.DataFrame:
    columns: dict[str, Any] = {
        "id": [node.id for node in nodes],
        "name": [node.name for node in nodes],
        "parent": [node.ctrl_deps for node in nodes],
    }
    for side, (values, shapes, types) in _SIDES.items():
        sides = [getattr(node, side) for node in nodes]
        columns[values] = _texts(entry.values for entry in sides)
        columns[shapes] = _texts(entry.shapes for entry in sides)
        columns[types] = _texts(entry.types for entry in sides)
    others: dict[str, list[bytes]] = {}
    for at, name in enumerate(names):
        attribute_values = [node.attrs[at].value for node in nodes]
        if name in _ATTRIBUTES:
            columns[_ATTRIBUTES[name]] = attribute_values
        elif name == "op_schema":
            columns["schema"] = attribute_values
        else:
            others[name] = [_encode(value) for value in attribute_values]
    for side in _SIDES:
        strides = [bytes(getattr(node, side).strides) for node in nodes]
        if any(strides):
            others[f"{side[:-1]}_strides"] = [text or b"null" for text in strides]
    if others:
        # One JSON object per row from columns of JSON text.
        keys = [_encode(name) for name in others]
        pattern = b"{" + b",".join(key.replace(b"%", b"%%") + b":%b" for key in keys) + b"}"
        columns["attributes"] = _texts(pattern % row for row in zip(*others.values(), strict=True))
    return _frame(columns)


def _texts(raws: Iterable[msgspec.Raw | bytes]) -> pl.Series:
    """JSON text of each; null where the file has none."""
    texts = [bytes(raw) or None for raw in raws]
    try:
        return pl.Series(texts, dtype=pl.Binary).cast(pl.String)
    except pl.exceptions.ComputeError:
        return pl.Series([None if text is None else text.decode("utf-8", "replace") for text in texts], dtype=pl.String)


def _frame(columns: dict[str, Any]) -> pl.DataFrame:
    height = len(columns["id"])
    try:
        series = [
            pl.Series(name, columns[name], dtype=kind, strict=True)
            if name in columns
            else pl.Series(name, [None], dtype=kind).new_from_index(0, height)
            for name, kind in HOST_OPS.items()
        ]
    except (TypeError, OverflowError, pl.exceptions.PolarsError) as error:
        raise _Unfit from error
    return pl.DataFrame(series)


# -- the careful way ------------------------------------------------------------------------------------------------


def loose_frame(nodes: list[Any]) -> tuple[pl.DataFrame, int, int]:
    """Decoded nodes of any make: (frame, how many hold values of unexpected types, how many are no nodes at all)."""
    rows, odd, lost = [], 0, 0
    for node in nodes:
        row = _row(node) if isinstance(node, dict) else None
        if row is None:
            lost += 1
            continue
        odd += row.pop("odd")
        rows.append(row)
    columns = {name: [row.get(name) for row in rows] for name in HOST_OPS}
    return pl.DataFrame(columns, schema=HOST_OPS), odd, lost


def _row(node: dict[str, Any]) -> dict[str, Any] | None:
    """The columns of one node; None without an id. `odd` says that a value was of no expected type."""
    own = number(node.get("id"))
    if own == NULL:
        return None
    values = dict(node)
    # Attributes and the parts of inputs and outputs move up to the other keys.
    odd = False
    sides = {side: values.pop(side, None) for side in _SIDES}
    for side, content in sides.items():
        if isinstance(content, dict):
            parts = dict(zip(("values", "shapes", "types"), _SIDES[side], strict=True))
            for key, value in content.items():
                values[parts.get(key, f"{side[:-1]}_{key}")] = value
        elif content is not None:
            values[side] = content
            odd |= not isinstance(content, list)
    listed = values.pop("attrs", None)
    if isinstance(listed, dict):
        listed = [{"name": name, "value": value} for name, value in listed.items()]
    odd |= listed is not None and not isinstance(listed, list)
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, dict) and isinstance(item.get("name"), str):
            values.setdefault(item["name"], item.get("value"))
        else:
            odd = True
    row: dict[str, Any] = {"id": own, "name": _name(values.pop("name", None))}
    odd |= not isinstance(node.get("id"), int) or not isinstance(node.get("name"), str)
    values.pop("id")
    for column, key in NUMBERS.items():
        value = values.pop(key, None)
        if column == "parent" and "ctrl_deps" in values:
            value = values.pop("ctrl_deps")
            value = value[0] if isinstance(value, list) and value else value
        parsed = number(value)
        row[column] = None if parsed == NULL else parsed
        if parsed == NULL and isinstance(value, int) and 2**63 <= value < 2**64:
            row[column] = value - 2**64  # -1 written as unsigned
        odd |= value is not None and (row[column] is None or isinstance(value, str))
    if row["scope"] is not None and not -(2**31) <= row["scope"] < 2**31:
        row["scope"], odd = None, True
    schema = values.pop("op_schema", None)
    row["schema"] = _name(schema) if isinstance(schema, str) else None
    for key in LISTS:
        if values.get(key) is not None:
            row[key] = _text(values.pop(key))
    row["attributes"] = _text(values) if values else None
    row["odd"] = odd
    return row


def _name(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair cannot stand in UTF-8


def _text(value: Any) -> str:
    try:
        return _encode(value).decode()
    except UnicodeEncodeError:
        return json.dumps(value)


def joined(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """Frames of stretches as one, ascending by id.

    Numbers and texts that say nothing become null; a root is nobody's child.
    """
    whole = pl.concat(list(chain([pl.DataFrame(schema=HOST_OPS)], frames)))
    return whole.sort("id", maintain_order=True).with_columns(
        *(
            pl.col(column).replace([NULL, _NOTHING.get(column, NULL)], None)
            for column in NUMBERS
            if column not in {"parent", "scope"}
        ),
        pl.col("scope").replace(-1, None),
        pl.when(~pl.col("parent").is_in([NULL, 0]) & (pl.col("parent") != pl.col("id"))).then(pl.col("parent")),
        pl.when(pl.col("schema") != "").then(pl.col("schema")),
    )
