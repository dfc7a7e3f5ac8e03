"""The declarations of columns: each is used, its unit is what its name says, and the right one is taken."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.sessions import Document, made, several_devices, with_memory
from traceloom.report.sections import load_extra_sections
from traceloom.trace.columns import COLUMNS, find_column
from traceloom.trace.columns.declare import UNITS, Column, declare_per_step, declare_times

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference"
SORTS = [several_devices, with_memory]


def properties(shape: Any, path: str, definitions: Document) -> Iterator[tuple[str, str]]:
    """Path of the rows and name of every property of a schema; references are followed once on each way down."""
    if isinstance(shape, list):
        for branch in shape:
            yield from properties(branch, path, definitions)
        return
    if not isinstance(shape, dict):
        return
    for key in ("anyOf", "oneOf", "allOf", "items", "additionalProperties"):
        yield from properties(shape.get(key), path, definitions)
    if reference := shape.get("$ref"):
        name = reference.rpartition("/")[2]
        rest = {key: value for key, value in definitions.items() if key != name}
        yield from properties(definitions.get(name), path, rest)
    for name, inner in shape.get("properties", {}).items():
        yield path, name
        yield from properties(inner, f"{path}.{name}".strip("."), definitions)


def schemas() -> Iterator[tuple[str, Document]]:
    """The published schemas and those of the sections, with the path of their rows."""
    for name, root in (
        ("report.schema.json", ""),
        ("memory.schema.json", "memory_json"),
        ("simulation.schema.json", "simulation_json"),
        ("replay.schema.json", "replay_json"),
    ):
        yield root, json.loads((REFERENCE / name).read_text(encoding="utf-8"))
    for section in load_extra_sections():
        yield section.key, section.schema


def test_every_declaration_is_of_a_column_of_a_document() -> None:
    used: set[int] = set()
    for root, schema in schemas():
        for path, name in properties(schema, root, schema.get("$defs", {})):
            with contextlib.suppress(
                KeyError
            ):  # lists and objects are described in the schemas themselves
                used.add(id(find_column(name, path)))
    assert [key for key, declared in COLUMNS.items() if id(declared) not in used] == []


@pytest.mark.parametrize(
    ("ending", "unit"),
    [("_ns", "time"), ("_bytes", "bytes"), ("_fraction", "share"), ("_byte_rate", "byte_rate")],
)
def test_the_end_of_a_name_says_the_unit(ending: str, unit: str) -> None:
    units = {key: declared.unit for key, declared in COLUMNS.items() if key.endswith(ending)}
    units.pop("epoch_ns", None)  # text, since JavaScript's numbers do not hold it
    assert units
    assert {key: other for key, other in units.items() if other != unit} == {}


def test_counts_are_counts_and_their_means_are_numbers() -> None:
    for key, declared in COLUMNS.items():
        if key.endswith("_count"):
            mean = key.rpartition(".")[2].startswith("mean_")
            assert declared.unit == ("number" if mean else "count"), key


@pytest.mark.parametrize("attribute", ["title", "meaning", "unknown"])
def test_words_are_fragments_on_one_line(attribute: str) -> None:
    texts = {key: getattr(declared, attribute) for key, declared in COLUMNS.items()}
    odd = {
        key: text
        for key, text in texts.items()
        if text != " ".join(text.split()) or text.count("`") % 2
    }
    assert odd == {}
    ending = {
        key: text
        for key, text in texts.items()
        if text.endswith((".", ",", ";", ":")) and "..." not in text
    }
    assert ending == {}
    assert all(len(declared.title) <= 32 for declared in COLUMNS.values())


def test_declarations_stay_as_they_were_declared() -> None:
    with pytest.raises(AttributeError):
        COLUMNS["rank"].unit = "bytes"  # type: ignore[misc]
    assert all(isinstance(declared, Column) for declared in COLUMNS.values())
    assert len(set(UNITS)) == len(UNITS)
    assert {declared.unit for declared in COLUMNS.values()} <= set(UNITS)


def test_the_declaration_of_the_nearest_rows_around_counts() -> None:
    for key, declared in COLUMNS.items():
        path, _, name = key.rpartition(".")
        assert find_column(name, path) is declared
        for deeper in ("no_such_rows", "no_such.rows"):
            assert find_column(name, f"{path}.{deeper}".strip(".")) is declared


@pytest.mark.parametrize(
    ("name", "path"), [("no_such", ""), ("no_such", "copies.kinds"), ("", ""), ("kinds.bytes", "")]
)
def test_what_is_not_declared_is_an_error_with_its_name(name: str, path: str) -> None:
    with pytest.raises(KeyError, match=f"no column `{name}` of `{path}`"):
        find_column(name, path)


def test_columns_over_steps_are_three_with_the_mean_of_counts_a_number() -> None:
    assert declare_per_step("rows.call_count", "count", "calls", "Calls", "why") == {
        "rows.mean_call_count": Column(
            "number", "Calls", "calls, mean over the whole steps", "why"
        ),
        "rows.min_call_count": Column("count", "Min", "calls, min over the whole steps", "why"),
        "rows.max_call_count": Column("count", "Max", "calls, max over the whole steps", "why"),
    }
    assert [
        (key, declared.unit) for key, declared in declare_per_step("self_ns", "time", "x").items()
    ] == [
        ("mean_self_ns", "time"),
        ("min_self_ns", "time"),
        ("max_self_ns", "time"),
    ]


def test_columns_of_a_time_are_its_median_its_95th_percentile_and_its_longest() -> None:
    declared = declare_times("gap", "Gap", "between them")
    assert [key for key in declared if key.startswith("gap_")] == [
        "gap_median_ns",
        "gap_p95_ns",
        "gap_max_ns",
    ]
    assert {each.unit for each in declared.values()} == {"time"}
    assert [each.title for each in declared.values()] == ["Gap", "95 %", "Max"]


def values(document: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path of the rows, name and value of every number in a document."""
    if isinstance(document, list):
        for row in document:
            yield from values(row, path)
    elif isinstance(document, dict):
        for name, value in document.items():
            if isinstance(value, (dict, list)):
                yield from values(value, f"{path}.{name}".strip("."))
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                yield path, name, value


@pytest.mark.parametrize("sort", SORTS)
def test_numbers_of_a_report_are_what_their_unit_allows(sort: Any) -> None:
    compared = 0
    for path, name, value in values(made(sort)[1]):
        try:
            unit = find_column(name, path).unit
        except KeyError:  # of an object with keys of the run
            continue
        compared += 1
        where = f"{path}.{name}: {value}"
        if unit == "share":
            assert 0 <= value <= 1, where
        if unit in {"bytes", "count", "flops", "flop_rate", "byte_rate"} and "change" not in name:
            assert value >= 0 or name in {"device", "rank"}, where
        assert unit not in {"text", "name"}, where
        if unit in {"bytes", "count"} and "mean" not in name and "median" not in name:
            assert value == int(value), where
    assert compared > 200
