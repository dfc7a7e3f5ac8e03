"""Write the published schemas and the page of all columns; a test looks that it was done.

docs/reference/report.schema.json gets the shapes of the report's sections; it and memory.schema.json the description of
every value from `traceloom.model.columns`; docs/reference/report-columns.md the same as tables. Lists and objects, and
what is not of a section, are written in the schemas by hand. src/traceloom/report/documents/ has the same shapes as
types.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traceloom.model.columns import column
from traceloom.report.absent import REASONS
from traceloom.report.sections import every, reasons

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
TYPES_PACKAGE = "traceloom.report.documents"
TYPES = ROOT.joinpath("src", *TYPES_PACKAGE.split("."))
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
TYPES_HEAD = '''\
"""Types of the {0}. Written by `scripts/report_schema.py` from {1}."""

# fmt: off
# ruff: noqa: UP013 (a line for each key would make it four times as long)
from typing import {2}TypedDict
'''
PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
Shape = dict[str, Any]


def with_sections(schema: Shape) -> Shape:
    """The schema with a property for each section; null where `--only` leaves it out."""
    kept = {key: shape for key, shape in schema["properties"].items() if "x-section" not in shape}
    added = {
        s.key: {"x-section": s.title, "description": s.note, "anyOf": [s.schema, {"type": "null"}]} for s in every()
    }
    return {**schema, "properties": {**kept, **added}}


def objects(schema: Shape, root: str = "") -> Iterator[tuple[str, Shape]]:
    """Path in the document and `properties` of every object; what several lists share stands where it is first.

    The path is that of the rows (`copies.kinds`), below `root`.
    """
    definitions = dict(schema.get("$defs", {}))

    def walk(shape: Shape, path: str) -> Iterator[tuple[str, Shape]]:
        for branch in shape.get("anyOf", ()):
            yield from walk(branch, path)
        if "items" in shape:
            yield from walk(shape["items"], path)
        if "$ref" in shape and (definition := definitions.pop(shape["$ref"].rpartition("/")[2], None)):
            yield from walk(definition, path)
        if "properties" in shape:
            yield path, shape["properties"]
            for name, inner in shape["properties"].items():
                yield from walk(inner, f"{path}.{name}".strip("."))

    return walk(schema, root)


def is_value(shape: Shape) -> bool:
    """Whether it is one value, or a list of plain ones: a column."""
    if any(key in shape for key in ("$ref", "properties")) or shape.get("type") in ("object", ["object", "null"]):
        return False
    return all(is_value(inner) for inner in [*shape.get("anyOf", ()), shape.get("items", {})] if inner)


def described(schema: Shape, root: str = "") -> Shape:
    """The schema with the description of every value from the registry of columns."""
    schema = json.loads(json.dumps(schema))
    for path, properties in objects(schema, root):
        for name, shape in properties.items():
            if is_value(shape):
                properties[name] = {**shape, "description": column(name, path).meaning}
    return schema


def compact(schema: Shape) -> str:
    """The schema as JSON text with a line for each property and each definition."""
    lines = []
    for key, shape in schema.items():
        text = json.dumps(shape)
        if key in {"properties", "$defs"}:
            text = "{\n" + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in shape.items()) + "\n  }"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def page(schema: Shape) -> str:
    """The page of all columns of the report."""
    why = {path.replace("[*]", ""): reason for path, reason in {**REASONS, **reasons(every())}.items()}
    parts = [HEAD]
    for path, properties in objects(schema):
        values = {name: shape for name, shape in properties.items() if is_value(shape)}
        if not values:
            continue
        parts.append(f"## `{path}`\n" if path else "## The document\n")
        rows = ["| column | unit | meaning | null where |", "|---|---|---|---|"]
        for name, shape in values.items():
            declared = column(name, path)
            nullable = "null" in json.dumps(shape.get("type", shape.get("anyOf")))
            unit = "yes or no" if "boolean" in shape.get("type", "") else declared.unit
            reason = why.get(f"{path}.{name}".strip("."), declared.unknown) if nullable else ""
            rows.append(f"| `{name}` | {unit} | {declared.meaning} | {reason} |")
        parts.append("\n".join(rows).replace("$", "\\$") + "\n")
    return "\n".join(parts)


class Types:
    """The typed dictionaries of one schema, those that others need first."""

    def __init__(self, schema: Shape, document: str) -> None:
        self.definitions: Shape = schema.get("$defs", {})
        self.prefix = "" if document == "Report" else document
        self.texts: dict[str, str] = {}
        self.sections: dict[str, None] = {}
        self.of(schema, (), f"{document}Document".removeprefix(self.prefix))

    def of(self, shape: Shape, path: tuple[str, ...], kind: str = "Value") -> str:
        """The type of a value; its dictionaries are added. `path` names them, `kind` is the end of the name."""
        if "$ref" in shape:
            name = shape["$ref"].rpartition("/")[2]
            return self.of(self.definitions[name], (name,), "Row")
        if "anyOf" in shape:
            before = set(self.texts)
            either = self.either(self.of(branch, path, kind) for branch in shape["anyOf"])
            if "x-section" in shape:
                self.sections |= dict.fromkeys(name for name in self.texts if name not in before)
            return either
        if "enum" in shape or "const" in shape:
            values = shape.get("enum", [shape.get("const")])
            return self.either("None" if value is None else type(value).__name__ for value in values)
        if "properties" in shape:
            parts = "_".join(path).split("_")
            name = self.prefix + "".join(part.capitalize() for part in parts) + kind
            fields = [f'"{key}": {self.of(inner, (*path, key))}' for key, inner in shape["properties"].items()]
            lines = textwrap.wrap(", ".join(f.replace(" ", "\0") for f in fields), 116, break_on_hyphens=False)
            body = "\n".join(f"    {line}" for line in lines).replace("\0", " ")
            text = f'{name} = TypedDict("{name}", {{\n{body},\n}})\n'
            if self.texts.setdefault(name, text) != text:
                raise ValueError(f"two shapes are called {name}")
            return name
        kinds = shape.get("type", [])
        names = [kinds] if isinstance(kinds, str) else kinds
        return self.either(
            f"list[{self.of(shape.get('items', {}), path, 'Row')}]" if name == "array"
            else f"dict[str, {self.of(shape.get('additionalProperties') or {}, path)}]" if name == "object"
            else PLAIN[name]
            for name in names
        ) or "Any"  # fmt: skip

    @staticmethod
    def either(names: Iterator[str]) -> str:
        """One of these types, each once, `None` last."""
        parts = dict.fromkeys(part for name in names for part in name.split(" | "))
        return " | ".join(sorted(parts, key=lambda part: part == "None"))


def types(schemas: dict[str, Shape]) -> dict[Path, str]:
    """The modules of types: one for each document, and one for the sections of the report."""
    modules: dict[Path, str] = {}
    names: set[str] = set()

    def add(module: str, what: str, file: str, texts: list[str], imports: str = "") -> None:
        body = "".join(texts)
        head = TYPES_HEAD.format(what, file, "Any, " if "Any" in body else "")
        modules[TYPES / f"{module}.py"] = f"{head}\n{imports}{body}"

    for file, schema in schemas.items():
        document = file.partition(".")[0]
        own = Types(schema, document.capitalize())
        if double := names & own.texts.keys():
            raise ValueError(f"two documents have {double}")
        names |= own.texts.keys()
        rest = [text for name, text in own.texts.items() if name not in own.sections]
        imports = ""
        if own.sections:
            add("sections", "report's sections", file, [own.texts[name] for name in own.sections])
            used = set(re.findall(r"\w+", rest[-1])) & own.sections.keys()
            imports = f"from {TYPES_PACKAGE}.sections import (\n    {f',{chr(10)}    '.join(sorted(used))},\n)\n\n"
        add(document, f"{document} document", file, rest, imports)
    return modules


def files() -> dict[Path, str]:
    """The files as they should be."""
    schemas = {name: json.loads((REFERENCE / name).read_text(encoding="utf-8")) for name in ROOTS}
    schemas["report.schema.json"] = with_sections(schemas["report.schema.json"])
    schemas = {name: described(schema, ROOTS[name]) for name, schema in schemas.items()}
    written = {REFERENCE / name: compact(schema) for name, schema in schemas.items()}
    return {
        **written,
        REFERENCE / "report-columns.md": page(schemas["report.schema.json"]),
        **types(schemas),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
