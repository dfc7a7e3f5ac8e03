"""The types of the documents (src/traceloom/report/documents) from their schemas;
`report_schema.py` writes them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "traceloom.report.documents"
FOLDER = Path(__file__).parents[1].joinpath("src", *PACKAGE.split("."))
HEAD = '''\
"""Types of the {0}. Written by `scripts/report_schema.py` from {1}."""

# fmt: off
# ruff: noqa: UP013 (a line for each key would make it four times as long)
from typing import {2}TypedDict
'''
PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
Shape = dict[str, Any]


class Types:
    """The typed dictionaries of one schema, those that others need first."""

    def __init__(self, schema: Shape, document: str) -> None:
        self.definitions: Shape = schema.get("$defs", {})
        self.prefix = "" if document == "Report" else document
        self.texts: dict[str, str] = {}
        self.sections: dict[str, None] = {}
        self.of(schema, (), f"{document}Document".removeprefix(self.prefix))

    def of(self, shape: Shape, path: tuple[str, ...], kind: str = "Value") -> str:
        """The type of a value; its dictionaries are added.

        `path` names them, `kind` is the end of the name.
        """
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
            return self.either(
                "None" if value is None else type(value).__name__ for value in values
            )
        if "properties" in shape:
            parts = "_".join(path).split("_")
            name = self.prefix + "".join(part.capitalize() for part in parts) + kind
            fields = [
                f'"{key}": {self.of(inner, (*path, key))}'
                for key, inner in shape["properties"].items()
            ]
            lines = textwrap.wrap(
                ", ".join(f.replace(" ", "\0") for f in fields), 116, break_on_hyphens=False
            )
            body = "\n".join(f"    {line}" for line in lines).replace("\0", " ")
            text = f'{name} = TypedDict("{name}", {{\n{body},\n}})\n'
            if self.texts.setdefault(name, text) != text:
                raise ValueError(f"two shapes are called {name}")
            return name
        kinds = shape.get("type", [])
        names = [kinds] if isinstance(kinds, str) else kinds
        return (
            self.either(
                f"list[{self.of(shape.get('items', {}), path, 'Row')}]"
                if name == "array"
                else f"dict[str, {self.of(shape.get('additionalProperties') or {}, path)}]"
                if name == "object"
                else PLAIN[name]
                for name in names
            )
            or "Any"
        )

    @staticmethod
    def either(names: Iterator[str]) -> str:
        """One of these types, each once, `None` last."""
        parts = dict.fromkeys(part for name in names for part in name.split(" | "))
        return " | ".join(sorted(parts, key=lambda part: part == "None"))


def files(schemas: dict[str, Shape]) -> dict[Path, str]:
    """The modules: one for each document, and one for the sections of the report."""
    modules: dict[Path, str] = {}
    names: set[str] = set()

    def add(module: str, what: str, file: str, texts: list[str], imports: str = "") -> None:
        body = "".join(texts)
        head = HEAD.format(what, file, "Any, " if "Any" in body else "")
        modules[FOLDER / f"{module}.py"] = f"{head}\n{imports}{body}"

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
            imports = f"from {PACKAGE}.sections import (\n    {f',{chr(10)}    '.join(sorted(used))},\n)\n\n"
        add(document, f"{document} document", file, rest, imports)
    return modules
