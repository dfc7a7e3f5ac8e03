"""JSON Schema of sections, from the schemas of the frames they are made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

Shape = dict[str, Any]
"""A JSON Schema."""


@dataclass(frozen=True)
class Part:
    """A list in the document, with an object for each row of a frame.

    Attributes:
        columns: Name -> Polars type.
        what: What the list holds.
        unknown: Column -> why it can be null.
        nullable: Columns that can be null for the reason that `traceloom.model.columns` gives.
        empty: Why the list may be empty; empty where that needs no reason.
        ranked: Whether the column `rank` stands before the others, as `Study.concat` makes it.
    """

    columns: Mapping[str, Any]
    what: str
    unknown: Mapping[str, str] = field(default_factory=dict)
    nullable: Collection[str] = ()
    empty: str = ""
    ranked: bool = True

    def schema(self) -> Shape:
        """Its JSON Schema."""
        columns = {"rank": pl.Int32, **self.columns} if self.ranked else self.columns
        nullable = {*self.unknown, *self.nullable, *(("rank",) if self.ranked else ())}
        properties = {name: of_type(kind, nullable=name in nullable) for name, kind in columns.items()}
        return {"description": self.what, "type": "array", "items": record(properties)}

    def reasons(self, path: str) -> dict[str, str]:
        """Path in the document -> why a value there can be unknown, where its column does not say."""
        rows = {f"{path}[*].{name}": why for name, why in self.unknown.items()}
        return {path: self.empty, **rows} if self.empty else rows


def record(properties: Mapping[str, Shape], *, what: str = "") -> Shape:
    """An object with all these keys."""
    shape: Shape = {"type": "object", "properties": dict(properties), "required": list(properties)}
    return {"description": what, **shape} if what else shape


def or_null(shape: Shape, *, what: str = "") -> Shape:
    """The same, or null."""
    either: Shape = {"anyOf": [shape, {"type": "null"}]}
    return {"description": what, **either} if what else either


def of_type(kind: Any, *, nullable: bool = False) -> Shape:
    """One value of a Polars type."""
    kind = kind() if isinstance(kind, type) else kind
    if isinstance(kind, (pl.List, pl.Array)):
        shape: Shape = {"type": "array", "items": of_type(kind.inner)}
        return or_null(shape) if nullable else shape
    name = "integer" if kind.is_integer() else "number" if kind.is_numeric() else "string"
    name = "boolean" if kind == pl.Boolean else name
    return {"type": [name, "null"] if nullable else name}
