"""However a writer spells its values, the reader takes them for what they mean, and says what it could not take."""

from __future__ import annotations

import codecs
import gzip
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, strategies as st

from support.spelled_events import HAVE_CORRELATION, SpelledFile, spelled_files
from traceloom.formats import read_kineto
from traceloom.trace.trace import Trace


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spelled") / "trace.json"


def read(place: Path, content: bytes) -> Trace:
    place.write_bytes(content)
    trace = read_kineto(place, processes=1)
    trace.check()
    return trace


def counts(trace: Trace) -> dict[str, int]:
    return {notice.slug: notice.count for notice in trace.notices}


@given(made=spelled_files())
def test_every_value_is_taken_for_what_it_means(place: Path, made: SpelledFile) -> None:
    trace = read(place, made.text().encode())
    columns = [name for name in made.rows[0] if name != "external_id"] if made.rows else ["name"]
    rows = trace.events.select(columns).cast(
        {"category": pl.String} if "category" in columns else {}
    )
    assert rows.to_dicts() == [{name: row[name] for name in columns} for row in made.rows]


@given(made=spelled_files())
def test_an_external_id_is_kept_unless_it_only_repeats_the_correlations(
    place: Path, made: SpelledFile
) -> None:
    trace = read(place, made.text().encode())
    work = [row for row in made.rows if row["category"] in ("kernel", "copy", "fill")]
    both = [row for row in work if None not in (row["external_id"], row["correlation"])]
    repeats = bool(both) and all(row["external_id"] == row["correlation"] for row in both)
    expected = [None if repeats and row in work else row["external_id"] for row in made.rows]
    assert trace.events["external_id"].to_list() == expected


@given(made=spelled_files())
def test_what_has_no_time_or_no_duration_is_counted(place: Path, made: SpelledFile) -> None:
    trace = read(place, made.text().encode())
    told = counts(trace)
    timed = [event for event in made.events if event.row is not None]
    assert told.get("missing-time", 0) == len(made.events) - len(timed)
    assert told.get("missing-duration", 0) == sum(not event.lasting for event in timed)
    assert told.get("negative-duration", 0) == sum(row["duration_ns"] < 0 for row in made.rows)
    assert told.get("absurd-duration", 0) == sum(
        row["duration_ns"] >= 86_400 * 10**9 for row in made.rows
    )
    assert told.get("unknown-category", 0) == sum(row["category"] == "other" for row in made.rows)
    assert ("no-events" in told) == (not made.rows)
    assert trace.meta.event_count == len(made.events)


@given(made=spelled_files())
def test_work_belongs_to_the_earliest_call_of_its_correlation(
    place: Path, made: SpelledFile
) -> None:
    trace = read(place, made.text().encode())
    calls: dict[int, int] = {}
    for at, row in enumerate(made.rows):
        if row["category"] in ("runtime", "driver") and row["correlation"] is not None:
            calls.setdefault(row["correlation"], at)
    works = [row["category"] in ("kernel", "copy", "fill") for row in made.rows]
    expected = [
        calls.get(row["correlation"]) if work else None
        for row, work in zip(made.rows, works, strict=True)
    ]
    assert trace.events["launch"].to_list() == expected
    orphans = sum(launch is None and work for launch, work in zip(expected, works, strict=True))
    assert counts(trace).get("orphan-work", 0) == orphans


@given(made=spelled_files())
def test_lanes_are_threads_of_the_host_and_streams_of_devices(
    place: Path, made: SpelledFile
) -> None:
    trace = read(place, made.text().encode())
    assert trace.lanes["events"].sum() == len(made.rows)
    lanes = trace.lanes.to_dicts()
    on_device = {
        "kernel": "device",
        "copy": "device",
        "fill": "device",
        "gpu_annotation": "device_annotation",
    }
    on_device |= {"sync": "device_sync", "gpu_event": "device_sync"}
    on_host = dict.fromkeys(("op", "annotation", "runtime", "driver", "python"), "host")
    for lane, row in zip(trace.events["lane"].to_list(), made.rows, strict=True):
        assert lanes[lane]["kind"] == (on_device | on_host).get(row["category"], "other")
        assert (lanes[lane]["device"], lanes[lane]["stream"]) == (row["device"], row["stream"])
    of_device = [row for row in made.rows if row["category"] in on_device]
    streams = {(on_device[row["category"]], row["device"], row["stream"]) for row in of_device}
    assert sum(lane["kind"].startswith("device") for lane in lanes) == len(streams)


ENCODINGS = {
    "utf-8 with a mark": lambda text: codecs.BOM_UTF8 + text.encode(),
    "utf-16 little end first": lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
    "utf-16 big end first": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    "gzip": lambda text: gzip.compress(text.encode()),
    "gzip of utf-16": lambda text: gzip.compress(codecs.BOM_UTF16_LE + text.encode("utf-16-le")),
    "gzip in members": lambda text: b"".join(
        gzip.compress(part.encode()) for part in (text[:99], text[99:], "")
    ),
    "blanks around": lambda text: b"\n\t " + text.encode() + b"\n\n\0\0",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("encoding", ENCODINGS)
@given(made=spelled_files(), data=st.data())
def test_every_encoding_gives_the_same_trace(
    place: Path, encoding: str, made: SpelledFile, data: st.DataObject
) -> None:
    text = made.text()
    plain = read(place, text.encode())
    trace = read(place, ENCODINGS[encoding](text))
    assert trace.events.equals(plain.events)
    assert trace.lanes.equals(plain.lanes)
    assert counts(trace) == counts(plain)


def test_categories_with_correlations_are_launches_and_what_runs_on_devices() -> None:
    """The strategy above and the model agree on what a correlation may stand on."""
    from traceloom.trace.vocabulary import GPU_WORK, LAUNCHES

    assert set(LAUNCHES) | set(GPU_WORK) <= set(HAVE_CORRELATION)
