"""The fast reader keeps what a slow, simple one finds whole in damaged files, and its counts are true."""

from __future__ import annotations

import json
import random
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from support import damage
from support.tolerant import damaged, is_node, whole_objects
from traceloom.errors import InputError
from traceloom.formats import read_kineto
from traceloom.formats.host_trace import read_host_trace
from traceloom.testing import TraceBuilder
from traceloom.testing.host_trace_builder import HOST_SCHEMAS, HostTraceBuilder
from traceloom.trace.trace import Trace

HOST_DAMAGES = 30
Key = tuple[str, int, int]
DAMAGES = {1: 100, 2: 60, 5: 40}  # so many files, by the number of damages in each

SEEDS = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 10))]
)


def builder(count: int = 8) -> TraceBuilder:
    made = TraceBuilder(rank=1, world_size=2)
    made.metadata(pg_config=[{"pg_name": "0", "ranks": [0, 1]}, {"pg_name": "1", "ranks": [1]}])
    for number in range(count):
        made.op(
            f"aten::op{number}",
            number * 10,
            5.5,
            shapes=[[number, 3]],
            nested=[{"id": 1}, {"id": 2}],
        )
        made.launch("cudaLaunchKernel", number * 10 + 1, 1, correlation=number + 1)
        made.kernel(f"gemm{number}", number * 10 + 2, 3.25, correlation=number + 1)
    return made


def layouts() -> list[bytes]:
    made = builder()
    compact = json.dumps(json.loads(made.text()), separators=(",", ":"))
    return [
        text.encode()
        for text in (made.text(), damage.metadata_after(made), damage.as_list(made), compact)
    ]


def key(event: dict[str, Any]) -> Key | None:
    try:
        return (
            str(event["name"]),
            int(Decimal(str(event["ts"])) * 1000),
            int(Decimal(str(event["dur"])) * 1000),
        )
    except (KeyError, ArithmeticError, ValueError):
        return None


def keys(events: list[dict[str, Any]]) -> set[Key]:
    return {
        found for event in events if event.get("ph") == "X" and (found := key(event)) is not None
    }


def read(path: Path, text: bytes) -> Trace | None:
    path.write_bytes(text)
    try:
        return read_kineto(path, processes=1)
    except InputError:
        return None


def kept(trace: Trace | None) -> set[Key]:
    if trace is None:
        return set()
    base = trace.meta.base_ns  # damage may have hit it
    rows = trace.events.select("name", "start_ns", "duration_ns").rows()
    return {(name, start - base, duration) for name, start, duration in rows}


@pytest.mark.sampled(1)
@SEEDS
@pytest.mark.parametrize("times", [1, 2, 5])
def test_no_whole_event_is_lost_by_any_damage(tmp_path, times, seed):
    texts, chance = layouts(), random.Random(f"{seed} {times}")
    originals = [keys(whole_objects(text)) for text in texts]
    for number in range(DAMAGES[times]):
        original = originals[number % len(texts)]
        what, text = damaged(texts[number % len(texts)], chance, times)
        trace = read(tmp_path / "trace.json", text)
        held = kept(trace)
        lost = (keys(whole_objects(text)) & original) - held
        assert not lost, (number, what, sorted(lost))
        if times == 1 and trace is not None and not what.startswith(("cut", "overwritten")):
            check_counts(trace, held, original, what)


@SEEDS
@pytest.mark.parametrize("schema", ["1.0.1", HOST_SCHEMAS[-1]])
def test_no_whole_node_is_lost_by_any_damage(tmp_path, schema, seed):
    made = HostTraceBuilder(schema)
    for number in range(12):
        made.op(
            f"aten::op{number}",
            inputs=[([number, 6, 0, 64, 4, "cpu"], [number, 3], "Tensor(float)")],
        )
    text, chance = made.text().encode(), random.Random(f"{seed} {schema}")
    path = tmp_path / "host.json"
    original = {
        (str(node["id"]), str(node["name"])) for node in whole_objects(text, is_node, "nodes")
    }
    for number in range(HOST_DAMAGES):
        what, broken = damaged(text, chance, 1 + number % 3)
        path.write_bytes(broken)
        try:
            read_nodes = {
                (str(own), name)
                for own, name in read_host_trace(path).ops.select("id", "name").rows()
            }
        except InputError:
            read_nodes = set()
        whole = {
            (str(node["id"]), str(node["name"])) for node in whole_objects(broken, is_node, "nodes")
        }
        assert not (whole & original) - read_nodes, (number, what)


def check_counts(trace: Trace, held: set[Key], original: set[Key], what: str) -> None:
    """What one damage cost is what the notices say."""
    counts = {notice.slug: notice.count for notice in trace.notices}
    gone, changed = original - held, held - original
    said = sum(
        counts.get(slug, 0) for slug in ("lost-events", "missing-time", "unknown-phase", "cut-file")
    )
    assert len(gone) - len(changed) <= said, (what, counts, sorted(gone))
    assert counts.get("lost-events", 0) <= 1 + len(gone), (what, counts)


def test_a_number_with_a_quote_in_the_tenth_event_costs_one_event(tmp_path):
    made = TraceBuilder()
    for number in range(100):
        made.op(f"aten::op{number}", number * 10, 5.5)
    text = (
        made.text()
        .replace('"dur": 5.500', '"dur": 5.5"', 10)
        .replace('"dur": 5.5"', '"dur": 5.500', 9)
    )
    trace = read(tmp_path / "trace.json", text.encode())
    assert trace is not None
    assert trace.events.height == 99
    assert [(n.slug, n.count) for n in trace.notices if n.slug != "no-steps"] == [
        ("lost-events", 1)
    ]


def test_a_stray_bracket_before_a_list_of_metadata_costs_no_neighbour(tmp_path):
    text = damage.metadata_after(builder()).encode()
    end = text.rindex(b"]", 0, text.index(b'"schemaVersion"'))
    for broken in (
        text[:end] + text[end + 1 :],
        text[: end - 4] + b'"' + text[end - 4 :],
        text[:end] + b"]" + text[end:],
    ):
        trace = read(tmp_path / "trace.json", broken)
        assert trace is not None
        assert trace.events.height >= 23
        assert trace.devices.height == 1


@pytest.mark.parametrize("first", [b"", b"x{", b"}", b"{{", b"["])
def test_a_damaged_beginning_loses_nothing(tmp_path, first):
    for text in layouts():
        trace = read(tmp_path / "trace.json", first + text[1:])
        assert trace is not None
        assert trace.events.height == 24


def test_brackets_without_end_take_time_in_line_with_their_number(tmp_path):
    for text in (
        b'{"a":' * 100_000,
        b'{"traceEvents": [' + b'{"a":' * 100_000,
        b'{"traceEvents": [' + b'{"ph":[' * 70_000,
    ):
        before = time.process_time()
        read(tmp_path / "trace.json", text)
        assert time.process_time() - before < 5


def test_a_stray_quote_in_a_large_file_is_no_reason_to_read_it_all_at_once(tmp_path):
    made = TraceBuilder()
    for number in range(20_000):
        made.op(f"aten::op{number}", number, 1)
    text = made.text().encode()
    for share in (0.1, 0.5, 0.9):
        at = text.index(b'"cat"', int(len(text) * share))
        trace = read(tmp_path / "trace.json", text[:at] + b'"' + text[at:])
        assert trace is not None
        assert trace.events.height == 19_999
