"""Laws of reading that need no truth: what a change of the file changes of the trace, and what it does not."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings, strategies as st

from support.strategies import builders
from traceloom.formats import read_kineto
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.trace import SCHEMAS, Trace

LAWS = settings(deadline=None)
TIMES = {"start_ns", "end_ns", "nested_end_ns", "time_ns"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("laws") / "trace.json"


def read(path: Path, document: Any) -> Trace:
    path.write_text(json.dumps(document))
    trace = read_kineto(path)
    trace.check()
    return trace


def moved(frame: pl.DataFrame, by_ns: int) -> pl.DataFrame:
    """The frame with its instants later."""
    return frame.with_columns(pl.col(name) + by_ns for name in frame.columns if name in TIMES)


def spans(trace: Trace) -> Counter[tuple[Any, ...]]:
    """What each event is by itself, and how often."""
    columns = ("name", "category", "start_ns", "duration_ns", "correlation", "external_id")
    return Counter(trace.events.select(columns).iter_rows())


def with_lane_names(trace: Trace) -> pl.DataFrame:
    """Events with what their lanes are instead of the numbers of these."""
    lanes = trace.lanes.select("lane", "process", "thread", "device", "stream", "kind").rename(
        {name: f"lane_{name}" for name in ("process", "thread", "device", "stream", "kind")}
    )
    return trace.events.join(lanes, on="lane", how="left", maintain_order="left").drop(
        "lane", "event"
    )


@LAWS
@given(builder=builders(), later_us=st.integers(1, 10**7))
def test_a_clock_that_is_ahead_moves_every_instant_and_nothing_else(
    place: Path, builder: TraceBuilder, later_us: int
) -> None:
    document = json.loads(builder.text())
    before = read(place, document)
    for entry in document["traceEvents"]:
        if "ts" in entry and entry["ph"] != "M":
            entry["ts"] = round(entry["ts"] + later_us, 3)
    after = read(place, document)
    for name in SCHEMAS.keys() - {"sources"}:  # the text itself is another
        frame = getattr(before, name)
        assert moved(frame, later_us * 1000).equals(getattr(after, name)), name
    assert [notice.slug for notice in after.notices] == [notice.slug for notice in before.notices]
    assert after.meta.event_count == before.meta.event_count


@LAWS
@given(builder=builders(), order=st.randoms(use_true_random=False))
def test_the_order_of_entries_is_that_of_the_file_only_where_times_are_equal(
    place: Path, builder: TraceBuilder, order: Any
) -> None:
    document = json.loads(builder.text())
    before = read(place, document)
    order.shuffle(document["traceEvents"])
    after = read(place, document)
    assert spans(after) == spans(before)
    assert after.events["start_ns"].is_sorted()
    assert after.meta.event_count == before.meta.event_count
    if before.events["start_ns"].is_unique().all():
        assert with_lane_names(after).equals(with_lane_names(before))
        assert after.steps.equals(before.steps)


@LAWS
@given(builder=builders(), data=st.data())
def test_what_a_later_writer_adds_changes_nothing(
    place: Path, builder: TraceBuilder, data: st.DataObject
) -> None:
    document = json.loads(builder.text())
    before = read(place, document)
    odd: Any = data.draw(
        st.sampled_from(
            [None, 1.5, "}, {", [[], {"ts": 3, "ph": "X"}], {"name": "aten::mm", "dur": 1}]
        )
    )
    document |= {"aLaterKey": odd}
    for entry in document["traceEvents"]:
        entry["a later key"] = odd
        if isinstance(entry.get("args"), dict) and entry["ph"] == "X":
            entry["args"]["A Later Key"] = odd
    after = read(place, document)
    assert after.events.equals(before.events)
    assert after.steps.equals(before.steps)
    assert after.lanes.equals(before.lanes)
    assert [notice.slug for notice in after.notices] == [notice.slug for notice in before.notices]


@LAWS
@given(
    builder=builders(),
    cuts=st.lists(st.integers(0, 4000), max_size=4),
    level=st.sampled_from([0, 1, 9]),
)
def test_a_file_in_several_gzip_members_is_the_file(
    place: Path, builder: TraceBuilder, cuts: list[int], level: int
) -> None:
    text = builder.text().encode("utf-8", "surrogatepass")
    place.write_bytes(text)
    before = read_kineto(place)
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    members = [text[low:high] for low, high in pairwise(bounds)]
    place.write_bytes(b"".join(gzip.compress(member, level) for member in (*members, b"")))
    after = read_kineto(place)
    assert after.events.equals(before.events)
    assert after.sources.equals(before.sources)
    assert [notice.slug for notice in after.notices] == [notice.slug for notice in before.notices]


@LAWS
@given(builder=builders(max_events=8))
def test_a_file_that_holds_everything_twice_has_everything_twice(
    place: Path, builder: TraceBuilder
) -> None:
    document = json.loads(builder.text())
    before = read(place, document)
    document["traceEvents"] += document["traceEvents"]
    after = read(place, document)
    assert spans(after) == Counter({row: 2 * count for row, count in spans(before).items()})
    assert after.meta.event_count == 2 * before.meta.event_count
    assert after.meta.rank == before.meta.rank


@LAWS
@given(builder=builders(), kept=st.integers(0, 2**12 - 1))
def test_an_event_that_is_taken_out_is_missing_and_no_other(
    place: Path, builder: TraceBuilder, kept: int
) -> None:
    document = json.loads(builder.text())
    entries = document["traceEvents"]
    whole = read(place, document)
    complete = [at for at, entry in enumerate(entries) if entry["ph"] == "X"]
    out = {at for number, at in enumerate(complete) if not kept >> number & 1}
    gone = read(place, {**document, "traceEvents": [entries[at] for at in sorted(out)]})
    document["traceEvents"] = [entry for at, entry in enumerate(entries) if at not in out]
    left = read(place, document)
    assert left.events.height + len(out) == whole.events.height
    # Whether an external id names an operator is told by all of them together.
    columns = ("name", "start_ns", "duration_ns", "category")
    parts = [Counter(trace.events.select(columns).iter_rows()) for trace in (left, gone, whole)]
    assert parts[0] + parts[1] == parts[2]
