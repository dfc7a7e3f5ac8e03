"""Any trace that can be written is read whole; any damage costs only what it hits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from support import damage
from support.strategies import builders
from traceloom.errors import InputError
from traceloom.formats import read_kineto
from traceloom.trace.trace import Trace

RELAXED = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def read(tmp_path: Path, content: str | bytes) -> Trace:
    path = tmp_path / "trace.json"
    path.write_bytes(
        content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    )
    trace = read_kineto(path)
    trace.check()
    return trace


def complete(events: list[str]) -> int:
    return sum(json.loads(event)["ph"] == "X" for event in events)


@RELAXED
@given(builder=builders())
def test_every_complete_event_is_kept_with_its_exact_times(tmp_path, builder):
    trace = read(tmp_path, builder.text())
    spans = [json.loads(e, parse_float=str, parse_int=str) for e in builder.events()]
    spans = [e for e in spans if e["ph"] == "X"]

    def ns(us: str) -> int:
        whole, _, fraction = us.partition(".")
        return int(whole) * 1000 + int((fraction + "000")[:3])

    expected = sorted((ns(e["ts"]), ns(e["dur"]), e["name"]) for e in spans)
    assert sorted(trace.events.select("start_ns", "duration_ns", "name").rows()) == expected
    assert trace.meta.event_count == len(builder.events())
    assert not [
        n for n in trace.notices if n.slug in ("lost-events", "repaired-events", "cut-file")
    ]


@RELAXED
@given(builder=builders())
def test_self_times_of_host_lanes_add_up_to_their_union(tmp_path, builder):
    trace = read(tmp_path, builder.text())
    for lane in trace.lanes.filter(pl.col("kind") == "host").iter_rows(named=True):
        mine = trace.events.filter(pl.col("lane") == lane["lane"])
        inside = np.zeros(500_000, dtype=bool)
        for start, end in mine.select("start_ns", "nested_end_ns").rows():
            inside[start:end] = True
        assert lane["busy_ns"] == inside.sum()
        assert lane["events"] == mine.height


@RELAXED
@given(builder=builders(), data=st.data())
def test_a_file_cut_at_any_byte_keeps_every_whole_event_before_the_cut(tmp_path, builder, data):
    text = builder.text().encode()
    cut = data.draw(st.integers(0, len(text)))
    start = text.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    ends, at = [], start
    for event in builder.events():
        at = text.index(event.encode(), at) + len(event.encode())
        ends.append(at)
    whole = [e for e, end in zip(builder.events(), ends, strict=True) if end <= cut]
    if cut < start:
        with pytest.raises(InputError):
            read(tmp_path, text[:cut])
        return
    trace = read(tmp_path, text[:cut])
    assert trace.meta.event_count == len(whole)
    assert trace.events.height == complete(whole)
    end_of_list = text.index(b"]", max(ends, default=start))
    assert ("cut-file" in {n.slug for n in trace.notices}) == (cut < len(text.rstrip()))
    assert end_of_list < len(text)


@RELAXED
@given(builder=builders(), data=st.data())
def test_the_layout_of_the_file_does_not_matter(tmp_path, builder, data):
    plain = read(tmp_path, builder.text())
    layouts = {
        "list": damage.as_list(builder) if builder.events() else builder.text(),
        "after": damage.metadata_after(builder),
        "compact": json.dumps(json.loads(builder.text()), separators=(",", ":")),
        "indented": json.dumps(json.loads(builder.text()), indent=data.draw(st.integers(0, 4))),
    }
    for layout in layouts.values():
        trace = read(tmp_path, layout)
        columns = ["start_ns", "duration_ns", "name", "category", "op", "launch", "step"]
        if plain.meta.base_ns == 0:
            assert trace.events.select(columns).equals(plain.events.select(columns))


@RELAXED
@given(builder=builders(), data=st.data())
def test_every_event_is_found_again_in_the_text(tmp_path, builder, data):
    text = builder.text()
    trace = read(tmp_path, text)
    raw = text.encode()
    for event, offset, length in trace.sources.rows():
        found = json.loads(raw[offset : offset + length])
        assert found["name"] == trace.events["name"][event]


@RELAXED
@given(
    builder=builders(),
    data=st.data(),
    raw=st.sampled_from(
        [
            'a "quoted" word',
            "C:\\qath\\x",
            "a\x01b",
            "tab\there",
            "new\nline",
            'foo("a", "b")',
            "\\",
        ]
    ),
)
def test_malformed_names_cost_no_event(tmp_path, builder, data, raw):
    builder.op("aten::mm", 1, 1)
    event = data.draw(st.sampled_from(range(len(builder.events()))))
    trace = read(tmp_path, damage.in_name(builder, event, raw))
    assert trace.meta.event_count == len(builder.events())
    assert trace.events.height == complete(builder.events())


@RELAXED
@given(
    builder=builders(),
    data=st.data(),
    raw=st.sampled_from(["NaN", "N/A", "Infinity", "-Infinity", "nan", "inf", ""]),
)
def test_values_that_are_no_json_cost_no_event(tmp_path, builder, data, raw):
    builder.op("aten::mm", 1, 1)
    events = builder.events()
    event = data.draw(st.sampled_from([at for at, e in enumerate(events) if '"args": {' in e]))
    trace = read(tmp_path, damage.with_argument(builder, event, raw))
    assert trace.meta.event_count == len(events)
    assert trace.events.height == complete(events)


@given(content=st.binary(max_size=400))
def test_bytes_of_any_kind_are_read_or_refused_with_a_sentence(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "any.json"
    path.write_bytes(content)
    refusal = None
    try:
        read_kineto(path).check()
    except InputError as error:
        refusal = error
    assert refusal is None or (refusal.slug and str(path) in str(refusal))
