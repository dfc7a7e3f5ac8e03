"""The session as Chrome JSON that Perfetto opens without losing a slice.

One process per trace, its lanes as named, ordered tracks, the steps on top; launch and forward-backward arrows;
counters. Written in slices of events, so that memory does not grow with the trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, BinaryIO

import polars as pl

from traceloom.harmless import UNSAFE, harmless
from traceloom.model import Session, Trace
from traceloom.report.beside import with_beside
from traceloom.report.exports.perfetto.counters import counters
from traceloom.report.exports.perfetto.path import path_arrows, path_track
from traceloom.report.exports.perfetto.texts import encoded, microseconds, with_arrows
from traceloom.report.exports.perfetto.tracks import lay_out

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CriticalPathValue

_SLICE = 32_768  # events encoded at a time
# Perfetto knows threads by their number alone, so numbers never repeat in a file, nor equal a process's.
_TRACKS_PER_PROCESS = 1_000_000

__all__ = ["microseconds", "write"]


def write(session: Session, epoch_ns: int, handle: BinaryIO, path: CriticalPathValue | None = None) -> None:
    """Write the whole session, and what was recorded beside it.

    Every event stands in it exactly once. Times are microseconds after `epoch_ns` with their nanoseconds as decimals.
    Host events end where their parent ends, where they would outlive it.

    Args:
        session: What to write.
        epoch_ns: Time zero of the written trace.
        handle: Where to write; uncompressed JSON.
        path: `critical_path` of the report document, whose times count from `epoch_ns`; None for none.
    """
    session = with_beside(session)
    times = [epoch_ns]
    for trace in session.traces:
        frames = (trace.allocations, trace.counters, trace.marks)
        others = [frame["time_ns"].min() for frame in frames if frame.height]
        times += [trace.start_ns, *(time for time in others if isinstance(time, int))] if trace.events.height else [0]
    first = min(times)
    handle.write(b'{"displayTimeUnit":"ns","otherData":{"epoch_ns":"%d"},"traceEvents":[\n' % first)
    separator = b""
    own = len(session.traces) + 1
    arrows = path_arrows(session, path)
    parts = [_trace(trace, number + 1, first, arrows.get(number)) for number, trace in enumerate(session.traces)]
    parts.append(path_track(path, own, own * _TRACKS_PER_PROCESS, epoch_ns - first))
    for text in chain.from_iterable(parts):
        if text:
            handle.write(separator + text.encode("utf-8", "replace"))
            separator = b",\n"
    handle.write(b"\n]}\n")


def _trace(trace: Trace, process: int, epoch_ns: int, more: pl.DataFrame | None = None) -> Iterator[str]:
    """The parts of one trace, each some rows of JSON."""
    tracks = lay_out(trace)
    first_thread = process * _TRACKS_PER_PROCESS
    rank = "?" if trace.rank is None else trace.rank
    name = f"rank {rank}" + (f" on {harmless(trace.meta.host)}" if trace.meta.host else "")
    rows = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
    ]
    for index, track in enumerate(["steps", *tracks.names]):  # the first track is that of the steps
        thread = {"ph": "M", "pid": process, "tid": first_thread + index}
        rows.append({**thread, "name": "thread_name", "args": {"name": track}})
        rows.append({**thread, "name": "thread_sort_index", "args": {"sort_index": index}})
    texts = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    yield ",\n".join(texts).encode("utf-8", "replace").decode()

    steps = trace.steps
    step_rows = pl.concat_str(
        pl.lit(f'{{"ph":"X","pid":{process},"tid":{first_thread},"ts":'), microseconds(steps["start_ns"] - epoch_ns),
        pl.lit(',"dur":'), microseconds((steps["end_ns"] - steps["start_ns"]).clip(0)),
        pl.lit(',"name":"step '), "step", pl.lit('","cat":"step","args":{"step":'), "step", pl.lit("}}"),
    )  # fmt: skip
    yield _joined(steps, step_rows)

    start = trace.events["start_ns"]
    events = trace.events.with_columns(
        (start - epoch_ns).alias("ts"),
        (pl.Series(tracks.end_ns) - start).clip(0).alias("dur"),
        pl.Series("tid", tracks.track + first_thread + 1),
    )
    # From every launch to its GPU work, from forward to backward, and the file's own others; `id` is unique.
    launches = trace.gpu_work().drop_nulls("launch").select(source="launch", target="event", arrow=pl.lit("launch"))
    flows = (
        trace.flows.filter(pl.col("kind") != "launch").drop_nulls(["source", "target"])
        .select("source", "target", arrow=pl.col("kind").cast(pl.String))
    )  # fmt: skip
    arrows = pl.concat([launches, flows.cast(launches.schema)])
    arrows = arrows.with_columns(id=pl.int_range(pl.len(), dtype=pl.Int64) + process * 10**10)
    if more is not None:
        arrows = pl.concat([arrows, more.cast(arrows.schema)])
    names = encoded(events["name"])
    for low in range(0, events.height, _SLICE):
        yield _slices(trace, events.slice(low, _SLICE), names, arrows, process)

    curves = counters(trace).filter(pl.col("value").is_finite())
    curves = curves.join(encoded(curves["name"]), on="name", how="left", maintain_order="left")
    curve_rows = pl.concat_str(
        pl.lit(f'{{"ph":"C","pid":{process},"ts":'), microseconds(curves["time_ns"] - epoch_ns), pl.lit(',"name":'),
        "quoted", pl.lit(',"args":{"value":'), pl.col("value").round(6).cast(pl.String), pl.lit("}}"),
    )  # fmt: skip
    yield _joined(curves, curve_rows)

    marks = trace.marks.join(encoded(trace.marks["name"]), on="name", how="left", maintain_order="left")
    mark_rows = pl.concat_str(
        pl.lit(f'{{"ph":"i","s":"p","pid":{process},"ts":'), microseconds(marks["time_ns"] - epoch_ns),
        pl.lit(',"name":'), "quoted", pl.lit("}"),
    )  # fmt: skip
    yield _joined(marks, mark_rows)


def _slices(trace: Trace, events: pl.DataFrame, names: pl.DataFrame, arrows: pl.DataFrame, process: int) -> str:
    """The slices, each followed by its arrows, so that Perfetto binds them to it."""
    # What the side frames say about these events, one row per event.
    inside = pl.col("event").is_between(events["event"][0], events["event"][-1])
    for frame in (
        trace.tensors.select("event", "shapes", "types"),
        trace.copies.select("event", copy_bytes="bytes"),
        trace.collectives.select("event", "group", "in_bytes", "out_bytes", collective="kind"),
    ):
        own = frame.filter(inside).unique("event", keep="first")
        events = events.join(own, on="event", how="left", maintain_order="left")
    events = events.join(names, on="name", how="left", maintain_order="left")
    events = events.with_columns(microseconds(events["ts"]), microseconds(events["dur"]))
    numbers = {
        name: pl.col("copy_bytes" if name == "bytes" else name).cast(pl.String)
        for name in ("step", "correlation", "external_id", "sequence", "in_bytes", "out_bytes", "stream", "bytes")
    }
    texts = {
        name: pl.concat_str(
            pl.lit('"'),
            pl.col(name).str.replace_all("\\", "\\\\", literal=True).str.replace_all('"', '\\"', literal=True)
            .str.replace_all(UNSAFE.pattern, "?"),
            pl.lit('"'),
        )
        for name in ("shapes", "types", "collective", "group")
    }  # fmt: skip
    args = [
        pl.when(value.is_not_null()).then(pl.concat_str(pl.lit(f',"{name}":'), value)).otherwise(pl.lit(""))
        for name, value in (numbers | texts).items()
    ]
    position = pl.concat_str(pl.lit(f'"pid":{process},"tid":'), "tid", pl.lit(',"ts":'), "ts")
    rows = events.select(
        number="event",
        place=position,
        text=pl.concat_str(
            pl.lit('{"ph":"X",'), position, pl.lit(',"dur":'), "dur", pl.lit(',"name":'), "quoted",
            pl.lit(',"cat":"'), pl.col("category").cast(pl.String), pl.lit('","args":{"event":'), "event",
            *args, pl.lit("}}"),
        )
    )  # fmt: skip
    return with_arrows(rows, arrows)


def _joined(frame: pl.DataFrame, rows: pl.Expr) -> str:
    return str(frame.select(rows).to_series().str.join(",\n").item()) if frame.height else ""
