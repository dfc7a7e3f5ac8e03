"""Write the published schemas and the page of all columns; a test looks that it was done.

docs/reference/report.schema.json gets the shapes of the report's sections; it and
memory.schema.json the description of every value from `traceloom.trace.columns`;
docs/reference/report-columns.md the same as tables. Lists and objects, and what is not of a
section, are written in the schemas by hand. src/traceloom/report/documents/ has the same shapes as
types.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import document_types

from traceloom.report.document import UNKNOWN_REASONS
from traceloom.report.sections import collect_reasons, load_extra_sections
from traceloom.trace.columns import find_column

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
ROOTS = {
    "report.schema.json": "",
    "memory.schema.json": "memory_json",
    "simulation.schema.json": "simulation_json",
    "replay.schema.json": "replay_json",
}  # file -> path of its document in the registry
HEAD = """\
# Columns of the report

Every value in [report.json](report-json.md), list by list; times are in nanoseconds, shares from 0 to 1. This page is
written by `scripts/report_schema.py`.
"""
Shape = dict[str, Any]


def with_sections(schema: Shape) -> Shape:
    """The schema with a property for each section; null where `--only` leaves it out."""
    kept = {key: shape for key, shape in schema["properties"].items() if "x-section" not in shape}
    added = {
        s.key: {"x-section": s.title, "description": s.note, "anyOf": [s.schema, {"type": "null"}]}
        for s in load_extra_sections()
    }
    properties = {**kept, **added}
    return {**schema, "properties": properties, "required": list(properties)}


def objects(schema: Shape, root: str = "") -> Iterator[tuple[str, Shape]]:
    """Path in the document and `properties` of every object; what several lists share stands where
    it is first.

    The path is that of the rows (`copies.kinds`), below `root`.
    """
    definitions = dict(schema.get("$defs", {}))

    def walk(shape: Shape, path: str) -> Iterator[tuple[str, Shape]]:
        for branch in shape.get("anyOf", ()):
            yield from walk(branch, path)
        if "items" in shape:
            yield from walk(shape["items"], path)
        if "$ref" in shape and (
            definition := definitions.pop(shape["$ref"].rpartition("/")[2], None)
        ):
            yield from walk(definition, path)
        if "properties" in shape:
            yield path, shape["properties"]
            for name, inner in shape["properties"].items():
                yield from walk(inner, f"{path}.{name}".strip("."))

    return walk(schema, root)


def is_value(shape: Shape) -> bool:
    """Whether it is one value, or a list of plain ones: a column."""
    if any(key in shape for key in ("$ref", "properties")) or shape.get("type") in (
        "object",
        ["object", "null"],
    ):
        return False
    return all(
        is_value(inner) for inner in [*shape.get("anyOf", ()), shape.get("items", {})] if inner
    )


def described(schema: Shape, root: str = "") -> Shape:
    """The schema with the description of every value from the registry of columns."""
    schema = json.loads(json.dumps(schema))
    for path, properties in objects(schema, root):
        for name, shape in properties.items():
            if is_value(shape):
                properties[name] = {**shape, "description": find_column(name, path).meaning}
    return schema


def compact(schema: Shape) -> str:
    """The schema as JSON text with a line for each property and each definition."""
    lines = []
    for key, shape in schema.items():
        text = json.dumps(shape)
        if key in {"properties", "$defs"}:
            text = (
                "{\n"
                + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in shape.items())
                + "\n  }"
            )
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def page(schema: Shape) -> str:
    """The page of all columns of the report."""
    why = {
        path.replace("[*]", ""): reason
        for path, reason in {**UNKNOWN_REASONS, **collect_reasons(load_extra_sections())}.items()
    }
    parts = [HEAD]
    for path, properties in objects(schema):
        values = {name: shape for name, shape in properties.items() if is_value(shape)}
        if not values:
            continue
        parts.append(f"## `{path}`\n" if path else "## The document\n")
        rows = ["| column | unit | meaning | null where |", "|---|---|---|---|"]
        for name, shape in values.items():
            declared = find_column(name, path)
            nullable = "null" in json.dumps(shape.get("type", shape.get("anyOf")))
            unit = "yes or no" if "boolean" in shape.get("type", "") else declared.unit
            reason = why.get(f"{path}.{name}".strip("."), declared.unknown) if nullable else ""
            rows.append(f"| `{name}` | {unit} | {declared.meaning} | {reason} |")
        parts.append("\n".join(rows).replace("$", "\\$") + "\n")
    return "\n".join(parts)


def files() -> dict[Path, str]:
    """The files as they should be."""
    schemas = {name: json.loads((REFERENCE / name).read_text(encoding="utf-8")) for name in ROOTS}
    schemas["report.schema.json"] = with_sections(schemas["report.schema.json"])
    schemas = {name: described(schema, ROOTS[name]) for name, schema in schemas.items()}
    written = {REFERENCE / name: compact(schema) for name, schema in schemas.items()}
    return {
        **written,
        REFERENCE / "report-columns.md": page(schemas["report.schema.json"]),
        **document_types.files(schemas),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
