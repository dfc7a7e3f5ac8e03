"""Host traces of any spelling: every node is read for what it means, and what cannot be meant is null and counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from support.spelled_events import Token, names, whole_numbers
from traceloom.formats.host_trace import read_host_trace
from traceloom.trace.trace import HOST_OPS, HostTrace

QUICK = settings(deadline=None)
NUMBERS = {
    "fw_parent": "forward_parent",
    "rf_id": "record_function_id",
    "seq_id": "sequence",
    "scope": "scope",
    "tid": "thread",
    "fw_tid": "forward_thread",
}
NOTHING = {
    "forward_parent": 0,
    "record_function_id": 0,
    "sequence": -1,
    "thread": 0,
    "forward_thread": 0,
    "scope": -1,
}


@st.composite
def spelled_nodes(draw: st.DrawFn, nested: bool) -> tuple[str, dict[str, Any]]:
    """A node as JSON text, and the columns that it means."""
    number = draw(st.integers(1, 2**62))
    name, shown = draw(names().filter(lambda token: token[0].startswith('"')))
    parent, above = draw(whole_numbers(0, 2**62, doubles=False))
    if nested and parent == "[1]":  # a list of dependencies: the first one is the caller
        above = 1
    row: dict[str, Any] = {
        "id": number,
        "name": shown,
        "parent": None if above in (0, number) else above,
    }
    values: dict[str, Token] = {}
    for key, column in NUMBERS.items():
        if draw(st.booleans()):
            limit = 2**31 - 1 if column == "scope" else 2**62
            values[key] = draw(whole_numbers(-1, limit, doubles=False))
            value = values[key][1]
            row[column] = None if value == NOTHING[column] else value
        else:
            row[column] = None
    head = f'"id": {number}, "name": {name}'
    if nested:
        attributes = ", ".join(
            f'{{"name": "{key}", "type": "int64", "value": {text}}}'
            for key, (text, _) in values.items()
        )
        side = '{"values": [], "shapes": [], "types": []}'
        return (
            f'{{{head}, "ctrl_deps": {parent}, "inputs": {side}, "outputs": {side}, "attrs": [{attributes}]}}',
            row,
        )
    more = "".join(f', "{key}": {text}' for key, (text, _) in values.items())
    return f'{{{head}, "parent": {parent}{more}}}', row


@st.composite
def spelled_host_traces(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    nested = draw(st.booleans())
    nodes = draw(
        st.lists(
            spelled_nodes(nested), min_size=1, max_size=6, unique_by=lambda node: node[1]["id"]
        )
    )
    schema = "1.1.1-chakra.0.0.4" if nested else "1.0.1"
    text = f'{{"schema": "{schema}", "pid": 5, "nodes": [{", ".join(text for text, _ in nodes)}], "finish_ts": 9}}'
    return text, sorted((row for _, row in nodes), key=lambda row: row["id"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes") / "host.json"


def read(place: Path, content: bytes) -> HostTrace:
    place.write_bytes(content)
    host = read_host_trace(place)
    assert host.ops.schema == HOST_OPS
    return host


@QUICK
@given(made=spelled_host_traces())
def test_every_node_is_read_for_what_it_means(
    place: Path, made: tuple[str, list[dict[str, Any]]]
) -> None:
    text, rows = made
    host = read(place, text.encode())
    columns = list(rows[0])
    assert host.ops.select(columns).to_dicts() == rows
    assert (host.process, host.finish_ms) == (5, 9)


@QUICK
@given(made=spelled_host_traces())
def test_layout_and_packing_change_nothing(
    place: Path, made: tuple[str, list[dict[str, Any]]]
) -> None:
    text = made[0]
    plain = read(place, text.encode())
    ways = [
        gzip.compress(text.encode()),
        text.encode("utf-16"),
        b"\xef\xbb\xbf" + text.encode(),
        b"\n " + text.encode() + b"\n",
    ]
    if "1e400" not in text:  # Python writes it as a bare word
        ways += [json.dumps(json.loads(text), indent=indent).encode() for indent in (0, 3)]
    for content in ways:
        host = read(place, content)
        assert host.ops.drop("attributes").equals(plain.ops.drop("attributes"))
        assert [notice.slug for notice in host.notices] == [notice.slug for notice in plain.notices]


NODE = '{"id": %d, "name": "n%d", "ctrl_deps": 1, "inputs": {}, "outputs": {}, "attrs": []}'


@pytest.mark.parametrize(
    ("entry", "kept"),
    [
        ('{"id": "7", "name": "x"}', True),
        ('{"id": 7.0, "name": "x"}', True),
        ('{"id": 7, "name": null}', True),
        ('{"id": null, "name": "x"}', False),
        ('{"name": "x"}', False),
        ('{"id": [7], "name": "x"}', False),
        ('{"id": 1e30, "name": "x"}', False),
        ("5", False),
        ("null", False),
        ("[]", False),
        ("{}", False),
        ('"x"', False),
        ('{"id": 7, "name": "x", "attrs": {"tid": 3}}', True),
        ('{"id": 7, "name": "x", "attrs": 5}', True),
        ('{"id": 7, "name": "x", "attrs": [5, null, {"name": 3}]}', True),
        ('{"id": 7, "name": "x", "inputs": "text"}', True),
        ('{"id": 7, "name": "x", "ctrl_deps": [3, 4]}', True),
        ('{"id": 7, "name": "x", "ctrl_deps": []}', True),
        ('{"id": 7, "name": "x", "ctrl_deps": {"a": 1}}', True),
    ],
)
def test_an_entry_with_an_id_is_a_node_and_its_neighbours_stay(
    place: Path, entry: str, kept: bool
) -> None:
    text = f'{{"schema": "1.1.1", "nodes": [{NODE % (2, 2)}, {entry}, {NODE % (9, 9)}]}}'
    host = read(place, text.encode())
    assert host.ops["id"].to_list() == ([2, 7, 9] if kept else [2, 9])
    told = {notice.slug: notice.count for notice in host.notices}
    assert told.get("lost-events", 0) == (not kept)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("pid", "7", 7),
        ("pid", '"7"', 7),
        ("pid", "7.5", 7),
        ("pid", "null", None),
        ("pid", "[]", None),
        ("pid", "1e30", None),
        ("start_ts", '"x"', None),
        ("finish_ts", str(2**64), None),
        ("schema", "1.1", "1.1"),
        ("schema", "null", None),
        ("schema", "[1]", None),
        ("time", '"12:00"', "12:00"),
        ("time", "5", None),
        ("time", '"\\ud800"', "\ufffd"),
    ],
)
def test_what_stands_around_the_nodes_is_what_it_should_be_or_nothing(
    place: Path, key: str, text: str, value: Any
) -> None:
    attribute = {
        "pid": "process",
        "start_ts": "start_ms",
        "finish_ts": "finish_ms",
        "time": "recorded_at",
    }.get(key, key)
    envelope = {"schema": '"1.1.1"'} | {key: text}
    for before in (True, False):
        around = ", ".join(f'"{name}": {content}' for name, content in envelope.items())
        nodes = f'"nodes": [{NODE % (2, 2)}]'
        host = read(
            place,
            f"{{{around}, {nodes}}}".encode() if before else f"{{{nodes}, {around}}}".encode(),
        )
        assert getattr(host, attribute) == value
        assert host.ops["name"].to_list() == ["n2"]
