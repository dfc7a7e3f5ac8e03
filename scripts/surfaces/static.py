"""The surfaces that can be read without running anything: help, schemas, columns, metrics, slugs,
keys, public names.

Each function gives the text of one file of the snapshot. Where a module lies is in none of them but
`public_names`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import inspect
import json
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

import traceloom
from traceloom.agent.config import Config
from traceloom.agent.handlers.telemetry import ROUTES as AGENT_ROUTES
from traceloom.agent.metrics import METRICS, PREFIX
from traceloom.cli import build_parser, render_overview
from traceloom.fleet.portal.app import PAGES
from traceloom.fleet.rules import FleetRules, OwnerRule, Prices
from traceloom.fleet.service.service import FLEET_METRICS, ROUTES as FLEET_ROUTES
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.schema import SCHEMAS as FLEET_SCHEMAS
from traceloom.graph.graph import GRAPH_SCHEMAS
from traceloom.server.routing import build_openapi_document
from traceloom.trace.columns import COLUMNS
from traceloom.trace.trace import SCHEMAS as TRACE_SCHEMAS
from traceloom.workload.replay.plan import PLAN_SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(traceloom.__file__).parent
PACKAGES = (
    "traceloom",
    "traceloom.analyze",
    "traceloom.analyze.gate",
    "traceloom.trace",
    "traceloom.graph",
    "traceloom.changes",
    "traceloom.workload.simulate",
    "traceloom.testing",
)
_VARIABLE = re.compile(r"TRACELOOM_[A-Z][A-Z_]*[A-Z]")


# The command line.


def parsers(
    whole: argparse.ArgumentParser, names: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """The words that lead to each parser that takes options, and the parser."""
    inner = [action for action in whole._actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    if names:
        yield " ".join(names), whole
    for action in inner:
        for name, own in action.choices.items():
            yield from parsers(own, (*names, name))


def every_parser() -> dict[str, argparse.ArgumentParser]:
    """Of all verbs and of their actions."""
    return dict(parsers(build_parser()))


def options(own: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Its arguments, without the actions below it and without `--help`."""
    for action in own._actions:  # noqa: SLF001  (argparse has no other way)
        if not isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)):  # noqa: SLF001
            yield action


def help_texts() -> str:
    """What `--help` of each verb says, laid out alike under every version of Python."""
    parts = [render_overview()]
    for words, own in every_parser().items():
        lines = [f"== traceloom {words} --help", own.usage or "", own.description or "", ""]
        for action in own._actions:  # noqa: SLF001
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
                lines += [f"  {of.dest}\n      {of.help}" for of in action._choices_actions]  # noqa: SLF001
                continue
            hidden = " (hidden)" if action.help == argparse.SUPPRESS else ""
            names = ", ".join(action.option_strings) or action.metavar or action.dest
            facts = {
                "takes": action.metavar if action.option_strings and action.nargs != 0 else None,
                "nargs": action.nargs,
                "choices": action.choices and ",".join(map(str, action.choices)),
                "default": action.default
                if action.default not in (None, False, argparse.SUPPRESS, "", [])
                else None,
                "required": (action.required and bool(action.option_strings)) or None,
            }
            notes = "; ".join(
                f"{name} {value}" for name, value in facts.items() if value is not None
            )
            text = "" if hidden else (action.help or "") % {"default": action.default}
            lines.append(
                f"  {names}{hidden}"
                + (f"  [{notes}]" if notes else "")
                + (f"\n      {text}" if text else "")
            )
        parts.append("\n".join([*lines, "", (own.epilog or "").strip()]))
    return "\n\n".join(parts) + "\n"


# Documents and answers.


def flat(
    schema: Mapping[str, Any],
    known: Mapping[str, Any],
    path: str = "",
    inside: tuple[str, ...] = (),
) -> Iterator[str]:
    """A line for each value that a JSON schema has: path, types, what it must be.

    Names of structures do not count.
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in inside:
            yield f"{path or '.'}\tas above it"
            return
        schema, inside = (
            {**known[name], **{k: v for k, v in schema.items() if k != "$ref"}},
            (*inside, name),
        )
    branches = [branch for key in ("anyOf", "oneOf") for branch in schema.get(key, ())]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    skipped = (
        "$ref",
        "$defs",
        "anyOf",
        "oneOf",
        "type",
        "items",
        "properties",
        "required",
        "description",
        "title",
        "additionalProperties",
        "$schema",
        "$id",
        "discriminator",
    )
    facts = " ".join(
        f"{key}={json.dumps(value)}" for key, value in sorted(schema.items()) if key not in skipped
    )
    if not branches:
        yield "\t".join(filter(None, (path or ".", "|".join(sorted(kinds)) or "any", facts)))
    elif facts:
        yield f"{path or '.'}\t{facts}"
    for branch in branches:
        yield from flat(branch, known, path, inside)
    if isinstance(schema.get("items"), Mapping):
        yield from flat(schema["items"], known, f"{path}[]", inside)
    for place, item in enumerate(schema.get("prefixItems", ())):
        yield from flat(item, known, f"{path}[{place}]", inside)
    needed = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield from flat(field, known, f"{path}.{name}{'' if name in needed else '?'}", inside)
    more = schema.get("additionalProperties")
    if isinstance(more, Mapping) and more:
        yield from flat(more, known, f"{path}{{}}", inside)
    elif more is False and schema.get("properties"):
        yield f"{path or '.'}\tno other keys"


def unique(lines: Iterator[str]) -> list[str]:
    """Each line once, where it comes first."""
    return list(dict.fromkeys(lines))


def schemas() -> str:
    """The published JSON schemas."""
    parts = []
    for path in sorted((ROOT / "docs" / "reference").glob("*.schema.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        parts += [f"== {path.name}", *unique(flat(schema, schema.get("$defs", {}))), ""]
    return "\n".join(parts)


def _operations(described: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path, methods in sorted(described["paths"].items()):
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def _described() -> dict[str, Any]:
    documents = {
        "agent": build_openapi_document(AGENT_ROUTES),
        "fleet": build_openapi_document(FLEET_ROUTES),
    }
    return {name: msgspec.json.decode(msgspec.json.encode(of)) for name, of in documents.items()}


def openapi() -> str:
    """The routes of the agent and of the fleet's service: parameters, bodies, codes and answers,
    and the pages.
    """
    parts = []
    for service, described in _described().items():
        known = described["components"]["schemas"]
        parts.append(f"== {service}, OpenAPI {described['openapi']}")
        for name, operation in _operations(described):
            parts.append(f"\n-- {name}")
            for each in operation.get("parameters", ()):
                needed = "" if each.get("required") else "?"
                parts += [
                    f"{each['in']} {line}"
                    for line in unique(flat(each["schema"], known, each["name"] + needed))
                ]
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                parts += [
                    f"body {kind} {line}" for line in unique(flat(content.get("schema", {}), known))
                ]
            answers: dict[tuple[str, ...], list[str]] = {}
            for code, of in sorted(operation["responses"].items()):
                lines = [
                    f"{kind} {line}"
                    for kind, content in of.get("content", {"no content": {}}).items()
                    for line in unique(flat(content.get("schema", {}), known))
                ]
                answers.setdefault(tuple(lines), []).append(code)
            parts += [
                f"{','.join(codes)} {line}" for lines, codes in answers.items() for line in lines
            ]
        parts.append("")
    roles = [f"{route.method} {route.path}\t{route.role or 'everybody'}" for route in FLEET_ROUTES]
    acting = [
        f"{route.method} {route.path}\t{'acts' if route.acts else 'sees'}" for route in AGENT_ROUTES
    ]
    pages = [f"{page.path}\t{page.role}\t{page.title}" for page in PAGES]
    parts += [
        "== who may ask the fleet's service",
        *roles,
        "",
        "== who may ask the agent",
        *acting,
        "",
    ]
    return "\n".join([*parts, "== pages of the fleet's service", *pages, ""])


def openapi_words() -> str:
    """The texts and the names of structures in those documents, which may change without a change
    of the answers.
    """
    parts = []
    for service, described in _described().items():
        parts.append(f"== {service}")
        for name, operation in _operations(described):
            parts.append(
                f"{name}\t{operation.get('operationId', '')}\t{operation.get('summary', '')}"
            )
        for name, of in sorted(described["components"]["schemas"].items()):
            parts.append(f"{name}\t{' '.join(of.get('description', '').split())}")
            fields = of.get("properties", {})
            parts += [
                f"  {key}\t{field['description']}"
                for key, field in fields.items()
                if "description" in field
            ]
        parts.append("")
    return "\n".join(parts)


# Names of values.


def metrics() -> str:
    """The metrics of the agent and of the fleet's service, under all their names."""
    lines = ["== agent: name, kind, unit, labels, sharing, OpenTelemetry, dcgm-exporter, bounds"]
    for metric in METRICS.values():
        fields = msgspec.to_builtins(metric)
        others = {
            key: value
            for key, value in fields.items()
            if key not in {"name", "kind", "unit", "labels", "help"}
        }
        facts = " ".join(
            f"{key}={json.dumps(value)}"
            for key, value in others.items()
            if value not in ("", [], (), None)
        )
        labels = ",".join(metric.labels)
        lines.append(
            "\t".join((PREFIX + metric.name, metric.kind, metric.unit, labels, facts, metric.help))
        )
    lines += ["", "== fleet's service: name, kind, labels, help"]
    lines += [
        "\t".join((of.name, of.kind, ",".join(of.labels), of.help)) for of in FLEET_METRICS.values()
    ]
    return "\n".join(lines) + "\n"


def _types(schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for table, columns in schemas.items():
        yield from (f"{table}.{name}\t{kind}" for name, kind in columns.items())


def columns() -> str:
    """Columns of documents, traces, graphs and plans, of the fleet's tables and of its database."""
    lines = ["== columns of documents: name, unit, heading, meaning, null where"]
    lines += ["\t".join((name, *astuple(of))) for name, of in sorted(COLUMNS.items())]
    for what, kinds in (
        ("traces", TRACE_SCHEMAS),
        ("graphs", GRAPH_SCHEMAS),
        ("plans", PLAN_SCHEMAS),
    ):
        lines += ["", f"== frames of {what}", *_types(kinds)]
    lines += ["", "== tables of the fleet"]
    for table in FLEET_SCHEMAS.values():
        lines.append(f"{table.name}\t{table.keep_days or 'for ever'}\t{table.meaning}")
        lines += [
            "\t".join((f"{table.name}.{name}", str(table.types[name]), *astuple(of)))
            for name, of in table.columns.items()
        ]
    lines += ["", "== database of the fleet's state, SQLite"]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "state.db")
        ServiceState(path).close()
        lines += sql(path)
    return "\n".join(lines) + "\n"


def sql(path: str) -> list[str]:
    """Tables and indices of a database of SQLite."""
    with sqlite3.connect(path) as database:
        rows = database.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type, name"
        )
        found = [" ".join(str(text).split()) for _, _, text in rows]
    database.close()
    return found


def slugs() -> str:
    """The names of messages in the code, and all that `traceloom explain` knows: errors, notices,
    findings, rules.
    """
    path = ROOT / "tests" / "docs" / "test_messages.py"
    spec = importlib.util.spec_from_file_location("messages_in_code", path)
    assert spec is not None
    assert spec.loader is not None
    messages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(messages)
    code, page = set(messages.slugs_in_code()), set(messages.slugs_in_page())
    note = {True: "", False: "\tnot explained"}
    lines = ["== errors and notices", *(f"{slug}{note[slug in page]}" for slug in sorted(code))]
    lines += [f"{slug}\tnot in the code" for slug in sorted(page - code)]
    findings = sorted(
        page.stem for page in (ROOT / "docs" / "findings").glob("*.md") if page.stem != "index"
    )
    rules = re.findall(
        r"^### ([\w-]+)$",
        (ROOT / "docs/reference/validation-rules.md").read_text("utf-8"),
        re.MULTILINE,
    )
    lines += ["", "== findings", *findings, "", "== rules of validation", *sorted(rules)]
    return "\n".join(lines) + "\n"


def configuration() -> str:
    """Keys of configuration, variables of the environment, entry points and extras."""
    documents = {
        "agent.toml": Config,
        "triggers of the fleet": FleetRules,
        "a rule of owners": OwnerRule,
        "prices": Prices,
    }
    parts = []
    for name, kind in documents.items():
        whole = msgspec.json.schema(kind)
        parts += [f"== {name}", *unique(flat(whole, whole.get("$defs", {}))), ""]
    parts += ["== variables of the environment", *sorted(_variables()), ""]
    about = importlib.metadata.distribution("traceloom")
    points = sorted(f"{point.group}\t{point.name}" for point in about.entry_points)
    parts += [
        "== entry points",
        *points,
        "",
        "== extras",
        *sorted(about.metadata.get_all("Provides-Extra") or ()),
        "",
    ]
    return "\n".join(parts)


def _variables() -> set[str]:
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "TRACELOOM_" in text:
            texts = (
                node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)
            )
            found.update(
                name
                for value in texts
                if isinstance(value, str)
                for name in _VARIABLE.findall(value)
            )
    return found


def public_names() -> str:
    """What the public packages offer, with signatures; the only part that names modules."""
    parts = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        parts.append(f"== {package}")
        for name in sorted(module.__all__):
            parts += _public(name, getattr(module, name))
        parts.append("")
    points = importlib.metadata.distribution("traceloom").entry_points
    targets = sorted(f"{point.group}\t{point.name}\t{point.value}" for point in points)
    return "\n".join([*parts, "== entry points", *targets, ""])


def _public(name: str, value: object) -> Iterator[str]:
    if not callable(value):
        plain = isinstance(value, (str, int, float, tuple))
        kind = "module" if isinstance(value, ModuleType) else type(value).__name__
        yield f"{name}: {kind} = {value!r}" if plain else f"{name}: {kind}"
        return
    yield f"{name}{_signature(value)}"
    if not inspect.isclass(value):
        return
    for member in sorted(
        set(dir(value)) - set(dir(Exception if issubclass(value, Exception) else object))
    ):
        if member.startswith("_"):
            continue
        found = inspect.getattr_static(value, member)
        inner = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
        if isinstance(inner, property):
            yield f"  .{member}: {inspect.signature(inner.fget).return_annotation if inner.fget else ''}"
        else:
            yield f"  .{member}{_signature(inner) if callable(inner) else ''}"


def _signature(value: Any) -> str:
    try:
        return re.sub(
            r" at 0x[0-9a-f]+|<factory>|<object object[^>]*>",
            "",
            re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(value))),
        )
    except (TypeError, ValueError):
        return ""


PARTS: dict[str, Callable[[], str]] = {
    "help.txt": help_texts,
    "schemas.tsv": schemas,
    "openapi.tsv": openapi,
    "openapi-words.tsv": openapi_words,
    "metrics.tsv": metrics,
    "columns.tsv": columns,
    "slugs.txt": slugs,
    "configuration.tsv": configuration,
    "public-names.txt": public_names,
}
"""File of the snapshot -> what gives its text."""
