"""The session as Chrome JSON that Perfetto opens without losing a slice.

One process per trace, its lanes as named, ordered tracks, the steps on top; launch and forward-backward arrows;
counters. Written in slices of events, so that memory does not grow with the trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO

import polars as pl

from traceloom.harmless import harmless
from traceloom.model import Session, Trace
from traceloom.report.exports.perfetto.counters import counters
from traceloom.report.exports.perfetto.path import path_arrows, path_track
from traceloom.report.exports.perfetto.times import microseconds
from traceloom.report.exports.perfetto.tracks import Tracks, lay_out

_SLICE = 32_768  # events encoded at a time
# Perfetto knows threads by their number alone, so numbers never repeat in a file, nor equal a process's.
_TRACKS_PER_PROCESS = 1_000_000
_STEPS_TRACK = 0

__all__ = ["microseconds", "write"]


def write(session: Session, epoch_ns: int, handle: BinaryIO, path: dict[str, Any] | None = None) -> None:
    """Write the whole session.

    Every event stands in it exactly once. Times are microseconds after `epoch_ns` with their nanoseconds as decimals.
    Host events end where their parent ends, where they would outlive it.

    Args:
        session: What to write.
        epoch_ns: Time zero of the written trace.
        handle: Where to write; uncompressed JSON.
        path: `critical_path` of the report document, whose times count from `epoch_ns`; None for none.
    """
    first = min([epoch_ns, *(_first_time(trace) for trace in session.traces)])
    handle.write(b'{"displayTimeUnit":"ns","otherData":' + _quoted({"epoch_ns": str(first)}) + b',"traceEvents":[\n')
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


def _first_time(trace: Trace) -> int:
    times = [frame["time_ns"].min() for frame in (trace.allocations, trace.counters, trace.marks) if frame.height]
    return min([trace.start_ns, *(time for time in times if isinstance(time, int))]) if trace.events.height else 0


def _quoted(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _trace(trace: Trace, process: int, epoch_ns: int, more: pl.DataFrame | None = None) -> Iterator[str]:
    """The parts of one trace, each some rows of JSON."""
    tracks = lay_out(trace)
    first_thread = process * _TRACKS_PER_PROCESS
    yield _metadata(trace, tracks, process, first_thread)
    yield _steps(trace, process, first_thread + _STEPS_TRACK, epoch_ns)
    start = trace.events["start_ns"]
    events = trace.events.with_columns(
        (start - epoch_ns).alias("ts"),
        (pl.Series(tracks.end_ns) - start).clip(0).alias("dur"),
        pl.Series("tid", tracks.track + first_thread + 1),
    )
    arrows = _arrows(trace, process)
    if more is not None:
        arrows = pl.concat([arrows, more.cast(arrows.schema)])
    names = _encoded(events["name"])
    for low in range(0, events.height, _SLICE):
        yield _slices(events.slice(low, _SLICE), names, arrows, _arguments(trace, low), process)
    yield _counters(counters(trace), process, epoch_ns)
    yield _marks(trace, process, epoch_ns)


def _metadata(trace: Trace, tracks: Tracks, process: int, first_thread: int) -> str:
    rank = "?" if trace.rank is None else trace.rank
    name = f"rank {rank}" + (f" on {harmless(trace.meta.host)}" if trace.meta.host else "")
    rows = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
    ]
    for index, track in enumerate(["steps", *tracks.names]):
        thread = {"ph": "M", "pid": process, "tid": first_thread + index}
        rows.append({**thread, "name": "thread_name", "args": {"name": track}})
        rows.append({**thread, "name": "thread_sort_index", "args": {"sort_index": index}})
    return ",\n".join(_quoted(row).decode() for row in rows)


def _encoded(names: pl.Series) -> pl.DataFrame:
    """Every different name with its JSON text."""
    unique = names.unique()
    texts = [json.dumps(harmless(name), ensure_ascii=False) for name in unique.to_list()]
    return pl.DataFrame({"name": unique, "quoted": texts}, schema={"name": pl.String, "quoted": pl.String})


def _arrows(trace: Trace, process: int) -> pl.DataFrame:
    """From every launch to its GPU work, from forward to backward, and the file's own others; `id` is unique."""
    launches = trace.gpu_work().drop_nulls("launch").select(source="launch", target="event", arrow=pl.lit("launch"))
    others = (
        trace.flows.filter(pl.col("kind") != "launch").drop_nulls(["source", "target"])
        .select("source", "target", arrow=pl.col("kind").cast(pl.String))
    )  # fmt: skip
    arrows = pl.concat([launches, others.cast(launches.schema)])
    return arrows.with_columns(id=pl.int_range(pl.len(), dtype=pl.Int64) + process * 10**10)


def _arguments(trace: Trace, low: int) -> dict[str, pl.DataFrame]:
    """What the side frames say about the events of one slice; one row per event."""
    inside = pl.col("event").is_between(low, low + _SLICE, closed="left")

    def of(frame: pl.DataFrame, *columns: str | pl.Expr) -> pl.DataFrame:
        return frame.filter(inside).unique("event", keep="first").select("event", *columns)

    return {
        "tensors": of(trace.tensors, "shapes", "types"),
        "copies": of(trace.copies, pl.col("bytes").alias("copy_bytes")),
        "collectives": of(trace.collectives, pl.col("kind").alias("collective"), "group", "in_bytes", "out_bytes"),
    }


def _slices(
    events: pl.DataFrame, names: pl.DataFrame, arrows: pl.DataFrame, facts: dict[str, pl.DataFrame], process: int
) -> str:
    """The slices, each followed by the arrows that begin and end in it, so that Perfetto binds them to it."""
    for frame in facts.values():
        events = events.join(frame, on="event", how="left", maintain_order="left")
    events = events.join(names, on="name", how="left", maintain_order="left")
    events = events.with_columns(microseconds(events["ts"]), microseconds(events["dur"]))
    position = pl.concat_str(pl.lit(f'"pid":{process},"tid":'), "tid", pl.lit(',"ts":'), "ts")
    rows = events.select(
        "event",
        position.alias("place"),
        pl.concat_str(
            pl.lit('{"ph":"X",'), position, pl.lit(',"dur":'), "dur", pl.lit(',"name":'), "quoted",
            pl.lit(',"cat":"'), pl.col("category").cast(pl.String), pl.lit('","args":{"event":'), "event",
            *_args(), pl.lit("}}"),
        ).alias("text"),
    )  # fmt: skip
    begins = _ends(rows, arrows, "source", '{"ph":"s",')
    ends = _ends(rows, arrows, "target", '{"ph":"f","bp":"e",')
    joined = rows.join(begins, on="event", how="left", maintain_order="left").join(
        ends, on="event", how="left", maintain_order="left", suffix="_in"
    )
    whole = joined.select(pl.concat_str("text", "arrows", "arrows_in", separator=",\n", ignore_nulls=True))
    return str(whole.to_series().str.join(",\n").item())


def _args() -> list[pl.Expr]:
    numbers = ("step", "correlation", "external_id", "sequence", "in_bytes", "out_bytes", "stream")
    texts = ("shapes", "types", "collective", "group")
    pieces = [_piece(name, pl.col(name).cast(pl.String)) for name in numbers]
    pieces.append(_piece("bytes", pl.col("copy_bytes").cast(pl.String)))
    for name in texts:
        inside = pl.col(name).str.replace_all("\\", "\\\\", literal=True).str.replace_all('"', '\\"', literal=True)
        inside = inside.str.replace_all(r"[\x00-\x1f]", "?")  # control characters become question marks
        pieces.append(_piece(name, pl.concat_str(pl.lit('"'), inside, pl.lit('"'))))
    return pieces


def _piece(name: str, value: pl.Expr) -> pl.Expr:
    return pl.when(value.is_not_null()).then(pl.concat_str(pl.lit(f',"{name}":'), value)).otherwise(pl.lit(""))


def _ends(rows: pl.DataFrame, arrows: pl.DataFrame, end: str, opening: str) -> pl.DataFrame:
    """The rows of the arrows that begin or end in these events, joined per event."""
    arrow_ends = arrows.select(pl.col(end).alias("event"), "arrow", "id").join(
        rows.select("event", "place"), on="event"
    )
    text = pl.concat_str(
        pl.lit(opening), "place", pl.lit(',"name":"'), "arrow", pl.lit('","cat":"'), "arrow", pl.lit('","id":'), "id",
        pl.lit("}"),
    )  # fmt: skip
    return (
        arrow_ends.select("event", text.alias("arrows"))
        .group_by("event", maintain_order=True)
        .agg(pl.col("arrows").str.join(",\n"))
    )


def _steps(trace: Trace, process: int, thread: int, epoch_ns: int) -> str:
    steps = trace.steps
    rows = pl.concat_str(
        pl.lit(f'{{"ph":"X","pid":{process},"tid":{thread},"ts":'), microseconds(steps["start_ns"] - epoch_ns),
        pl.lit(',"dur":'), microseconds((steps["end_ns"] - steps["start_ns"]).clip(0)),
        pl.lit(',"name":"step '), "step", pl.lit('","cat":"step","args":{"step":'), "step", pl.lit("}}"),
    )  # fmt: skip
    return _joined(steps, rows)


def _counters(curves: pl.DataFrame, process: int, epoch_ns: int) -> str:
    named = curves.filter(pl.col("value").is_finite())
    named = named.join(_encoded(named["name"]), on="name", how="left", maintain_order="left")
    rows = pl.concat_str(
        pl.lit(f'{{"ph":"C","pid":{process},"ts":'), microseconds(named["time_ns"] - epoch_ns), pl.lit(',"name":'),
        "quoted", pl.lit(',"args":{"value":'), pl.col("value").round(6).cast(pl.String), pl.lit("}}"),
    )  # fmt: skip
    return _joined(named, rows)


def _marks(trace: Trace, process: int, epoch_ns: int) -> str:
    named = trace.marks.join(_encoded(trace.marks["name"]), on="name", how="left", maintain_order="left")
    rows = pl.concat_str(
        pl.lit(f'{{"ph":"i","s":"p","pid":{process},"ts":'), microseconds(named["time_ns"] - epoch_ns),
        pl.lit(',"name":'), "quoted", pl.lit("}"),
    )  # fmt: skip
    return _joined(named, rows)


def _joined(frame: pl.DataFrame, rows: pl.Expr) -> str:
    return str(frame.select(rows).to_series().str.join(",\n").item()) if frame.height else ""
