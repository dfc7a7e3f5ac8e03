"""JSON Schema of sections, from the schemas of the frames they are made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import polars as pl

Row = dict[str, Any]


def rows(columns: Mapping[str, Any], *, nullable: Collection[str] = (), what: str = "") -> Row:
    """A list with one object per row of a frame; only the columns in `nullable` may be null."""
    properties = {name: of_type(kind, nullable=name in nullable) for name, kind in columns.items()}
    shape: Row = {"type": "array", "items": record(properties)}
    return {"description": what, **shape} if what else shape


def ranked(columns: Mapping[str, Any], *, nullable: Collection[str] = (), what: str = "") -> Row:
    """`rows` with the column `rank` before the others, as `Study.concat` makes them."""
    return rows({"rank": pl.Int32, **columns}, nullable={"rank", *nullable}, what=what)


def record(properties: Mapping[str, Row], *, what: str = "") -> Row:
    """An object with all these keys."""
    shape: Row = {"type": "object", "properties": dict(properties), "required": list(properties)}
    return {"description": what, **shape} if what else shape


def or_null(shape: Row, *, what: str = "") -> Row:
    """The same, or null."""
    either: Row = {"anyOf": [shape, {"type": "null"}]}
    return {"description": what, **either} if what else either


def of_type(kind: Any, *, nullable: bool = False) -> Row:
    """One value of a Polars type."""
    kind = kind() if isinstance(kind, type) else kind
    if isinstance(kind, (pl.List, pl.Array)):
        shape: Row = {"type": "array", "items": of_type(kind.inner)}
        return or_null(shape) if nullable else shape
    name = (
        "integer"
        if kind.is_integer()
        else "number"
        if kind.is_numeric()
        else "boolean"
        if kind == pl.Boolean
        else "string"
    )
    return {"type": [name, "null"] if nullable else name}
