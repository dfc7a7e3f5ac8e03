"""What is given to Python is a fixed text with values in it, whatever the values are."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as some

from traceloom.agent.attach import injection

SOURCE = Path(injection.__file__).with_name("payload.py").read_text(encoding="utf-8")
HOSTILE = [
    '"}))\nimport os; os.abort()\n',
    "'''",
    '"""',
    "\\",
    "\\x27",
    "\0",
    "{source}",
    "\u2028",
    "\ud800",
    "日本",
]


def _given(order: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text and the names that Python would start the thread with, taken apart by Python's own parser."""
    text = injection._build_payload_text(SOURCE, order, 4096, 8192)
    assert b"\0" not in text  # which would end it
    (statement,) = ast.parse(text.decode("ascii")).body
    assert isinstance(statement, ast.Try)
    (call,) = statement.body
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    source, names = ast.literal_eval(call.value.args[1])
    return source, names


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_no_value_becomes_code(value: str) -> None:
    source, names = _given({"folder": value, "name": value})
    assert source == SOURCE
    assert json.loads(names.pop("ORDER")) == {
        "folder": value,
        "name": value,
        "text_at": 4096,
        "text_bytes": 8192,
    }
    assert names == {"__name__": "traceloom_attached"}


@given(
    some.dictionaries(
        some.text(max_size=20),
        some.text() | some.integers() | some.none() | some.booleans(),
        max_size=5,
    )
)
def test_every_order_arrives_as_it_was(order: dict[str, Any]) -> None:
    source, names = _given(order)
    assert source == SOURCE
    assert json.loads(names["ORDER"]) == order | {"text_at": 4096, "text_bytes": 8192}


def test_the_text_is_one_of_python_3_8() -> None:
    ast.parse(SOURCE, feature_version=(3, 8))
