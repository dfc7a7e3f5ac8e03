"""Writes Chrome JSON for Perfetto.

Perfetto draws the slices of one track as a stack and drops those that cross. Host events end at
`nested_end_ns`, so they nest; overlapping device work on one stream is spread over overflow tracks,
`stream 7 (2)`.

There is one process per trace, with its lanes as named, ordered tracks, the steps on top; launch
and forward-backward arrows; counters. Events are written in slices, so that memory does not grow
with the trace.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import polars as pl

from traceloom.errors import UsageError
from traceloom.graph.graph import Graph
from traceloom.report.views.timeline import add_overlay, build_counters
from traceloom.system.sanitize import UNSAFE, sanitize
from traceloom.trace.array_types import Ints
from traceloom.trace.frames import build_schema
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace
from traceloom.workload.simulate.result import Simulation

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CriticalPathStretchesRow, CriticalPathValue


def format_microseconds(ns: pl.Series) -> pl.Series:
    """Formats nanoseconds >= 0 as microseconds with three decimals.

    Perfetto multiplies the number by 1000 as a double and truncates the result, which can lose one
    nanosecond; such a number gets a fourth decimal, so that it is right there and also for readers
    that round.
    """
    exact = ns.to_numpy()
    short = pl.Series(
        (exact / 1000.0 * 1000.0).astype(np.int64) != exact
    )  # NumPy's division is correctly rounded, like a parser
    text = pl.concat_str(
        pl.lit(ns // 1000),
        pl.lit("."),
        pl.lit(ns % 1000).cast(pl.String).str.zfill(3),
        pl.when(pl.lit(short)).then(pl.lit("2")).otherwise(pl.lit("")),
    )
    return (
        pl.select(text.alias(ns.name)).to_series()
        if ns.len()
        else pl.Series(ns.name, [], pl.String)
    )


def encode_names(names: pl.Series) -> pl.DataFrame:
    """Returns every distinct name with its JSON text."""
    unique = names.unique()
    texts = [json.dumps(sanitize(name), ensure_ascii=False) for name in unique.to_list()]
    return pl.DataFrame(
        {"name": unique, "quoted": texts}, schema={"name": pl.String, "quoted": pl.String}
    )


def encode_slices_with_arrows(slices: pl.DataFrame, arrows: pl.DataFrame) -> str:
    """Returns the slices, each followed by its arrows, so that Perfetto binds them to it.

    Args:
        slices: number, place (process, track and start as JSON text), text.
        arrows: source and target (numbers of slices), arrow (its name), id.
    """
    for end, opening in (("source", '{"ph":"s",'), ("target", '{"ph":"f","bp":"e",')):
        arrow = pl.concat_str(
            pl.lit(opening),
            "place",
            pl.lit(',"name":"'),
            "arrow",
            pl.lit('","cat":"'),
            "arrow",
            pl.lit('","id":'),
            "id",
            pl.lit("}"),
        )
        arrow_texts = (
            arrows.select(pl.col(end).alias("number"), "arrow", "id")
            .join(slices.select("number", "place"), on="number")
            .select("number", arrow.alias(end))
            .group_by("number", maintain_order=True)
            .agg(pl.col(end).str.join(",\n"))
        )
        slices = slices.join(arrow_texts, on="number", how="left", maintain_order="left")
    texts = slices.select(
        pl.concat_str("text", "source", "target", separator=",\n", ignore_nulls=True)
    )
    return str(texts.to_series().str.join(",\n").item())


_ARROW_NAME = "critical_path"
_FIRST_ARROW_ID = 9 * 10**15  # ids of these arrows: above those of all others, and exact as doubles
_ARROW_SCHEMA = build_schema("source target arrow id", {"source": pl.UInt32, "target": pl.UInt32})


def find_path_arrows(session: Session, path: CriticalPathValue | None) -> dict[int, pl.DataFrame]:
    """Returns, by trace, the events at which the path leaves a lane and enters the next one.

    Args:
        session: The traces; the result is keyed by their positions.
        path: `critical_path` of the report document; None if there is none.

    Returns:
        Frames of `source`, `target` (events; null where that end is in another trace), `arrow`,
        `id`.
    """
    number_of: dict[int | None, int] = {}
    for number, trace in enumerate(session.traces):
        number_of.setdefault(0 if trace.rank is None else trace.rank, number)
    rows: dict[int, list[tuple[int | None, int | None, str, int]]] = defaultdict(list)
    before: CriticalPathStretchesRow | None = None
    for index, row in enumerate(path["stretches"] if path is not None else ()):
        if row["first_event"] is None or row["rank"] not in number_of:
            continue
        if before is not None and before["start_ns"] + before["duration_ns"] == row["start_ns"]:
            arrow_ends = (before["last_event"], row["first_event"])
            source_trace, to = number_of[before["rank"]], number_of[row["rank"]]
            if source_trace == to:
                rows[source_trace].append((*arrow_ends, _ARROW_NAME, _FIRST_ARROW_ID + index))
            else:
                rows[source_trace].append(
                    (arrow_ends[0], None, _ARROW_NAME, _FIRST_ARROW_ID + index)
                )
                rows[to].append((None, arrow_ends[1], _ARROW_NAME, _FIRST_ARROW_ID + index))
        before = row
    return {
        number: pl.DataFrame(arrows, schema=_ARROW_SCHEMA, orient="row")
        for number, arrows in rows.items()
    }


def encode_path_track(
    path: CriticalPathValue | None, process: int, thread: int, shift_ns: int
) -> Iterator[str]:
    """Yields the path as a process with one track of consecutive slices; nothing without a path.

    Args:
        path: `critical_path` of the report document.
        process: Its number.
        thread: Number of its track.
        shift_ns: Added to the document's times.
    """
    if path is None or not path["stretches"]:
        return
    segments = path["stretches"]
    subject = "the window" if path["step"] is None else f"step {path['step']}"
    rows: list[dict[str, object]] = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": "critical path"}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": 0}},
        {
            "ph": "M",
            "pid": process,
            "tid": thread,
            "name": "thread_name",
            "args": {"name": f"critical path of {subject}"},
        },
    ]
    yield ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    start = format_microseconds(pl.Series("ts", [row["start_ns"] + shift_ns for row in segments]))
    length = format_microseconds(pl.Series("dur", [row["duration_ns"] for row in segments]))
    opening = f'{{"ph":"X","pid":{process},"tid":{thread},'
    slices = []
    for ts, dur, row in zip(start, length, segments, strict=True):
        location = sanitize(row["where"]) if row["where"] else "nothing recorded"
        rank = "" if row["rank"] is None else f"rank {row['rank']} "
        texts = {"class": row["class"], "edge": row["edge"], "evidence": row["evidence"]}
        arguments = {key: value for key, value in texts.items() if value}
        if row["name"]:
            arguments["longest"] = sanitize(row["name"])
        name = {"name": f"{rank}{location}", "cat": _ARROW_NAME, "args": arguments}
        text = json.dumps(name, ensure_ascii=False, separators=(",", ":"))
        slices.append(f'{opening}"ts":{ts},"dur":{dur},{text[1:]}')
    yield ",\n".join(slices)


_LANE_KINDS = ["host", "device_annotation", "device", "device_sync", "other"]
# Kineto draws a GPU annotation one nanosecond around its kernels: neighbours overlap by up to two.
_ANNOTATION_MARGIN_NS = 2


@dataclass(frozen=True)
class Tracks:
    """The tracks of one trace, in display order.

    Attributes:
        names: Name of each track.
        track: Track of each event, an index into `names`.
        end_ns: End of each event on its track.
    """

    names: list[str]
    track: Ints
    end_ns: Ints


def assign_tracks(trace: Trace) -> Tracks:
    events = trace.events
    # Host threads first, the busiest on top; then the devices, each with its annotations, streams
    # and waits.
    kind = pl.col("kind").cast(pl.String)
    lanes = trace.lanes.filter(pl.col("events") > 0).sort(
        pl.when(kind.str.starts_with("device")).then(1).when(kind == "other").then(2).otherwise(0),
        pl.col("device").fill_null(-1),
        pl.col("stream").fill_null(-1),
        kind.replace_strict(_LANE_KINDS, range(len(_LANE_KINDS)), return_dtype=pl.Int8),
        -pl.col("events").cast(pl.Int64),
        maintain_order=True,
    )
    lane = events["lane"].to_numpy().astype(np.int64)
    start, end = events["start_ns"].to_numpy(), events["nested_end_ns"].to_numpy().copy()
    names: list[str] = []
    track = np.zeros(events.height, dtype=np.int64)
    order = np.argsort(lane, kind="stable")
    numbers, first = np.unique(lane[order], return_index=True)
    rows_of = (
        dict(zip(numbers.tolist(), np.split(order, first[1:]), strict=True)) if lane.size else {}
    )
    for row in lanes.iter_rows(named=True):
        rows = rows_of[row["lane"]]
        name = sanitize(str(row["name"]))
        if row["kind"].startswith("device"):
            suffix = {"device_annotation": " annotations", "device_sync": " waits"}.get(
                row["kind"], ""
            )
            name = f"GPU {row['device']} {name}{suffix}"
        level = np.zeros(rows.size, dtype=np.int64)
        if row["kind"] not in {"host", "other"}:
            if row["kind"] == "device_annotation":
                following = np.append(start[rows][1:], np.iinfo(np.int64).max)
                overlap_ns = end[rows] - following
                rim = (overlap_ns > 0) & (overlap_ns <= _ANNOTATION_MARGIN_NS)
                end[rows] = np.where(rim, np.maximum(following, start[rows]), end[rows])
            level = assign_levels(start[rows], end[rows])
        track[rows] = len(names) + level
        names += [
            name if i == 0 else f"{name} ({i + 1})" for i in range(int(level.max(initial=0)) + 1)
        ]
    return Tracks(names, track, end)


def assign_levels(start: Ints, end: Ints) -> Ints:
    """Returns the lowest level of each span (sorted by start) on which it overlaps none; 0 where
    nothing overlaps.

    Only clusters of overlapping spans are processed one by one.
    """
    level = np.zeros(start.size, dtype=np.int64)
    if start.size < 2:
        return level
    reach = np.maximum.accumulate(end)
    cluster_starts = np.append(
        True, start[1:] >= reach[:-1]
    )  # a new cluster: all previous spans have ended
    for low, high in pairwise(np.append(np.flatnonzero(cluster_starts), start.size).tolist()):
        if high - low > 1:
            level[low:high] = _assign_cluster_levels(
                start[low:high].tolist(), end[low:high].tolist()
            )
    return level


def _assign_cluster_levels(start: list[int], end: list[int]) -> list[int]:
    busy: list[tuple[int, int]] = []  # (end, level)
    free: list[int] = []
    out: list[int] = []
    for span_start, stop in zip(start, end, strict=True):
        while busy and busy[0][0] <= span_start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        level = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (stop, level))
        out.append(level)
    return out


_BATCH_EVENTS = 32_768  # events encoded at a time
# Perfetto identifies threads by their number alone, so numbers never repeat in a file, nor equal
# that of a process.
_TRACKS_PER_PROCESS = 1_000_000


def write(
    session: Session, epoch_ns: int, handle: BinaryIO, path: CriticalPathValue | None = None
) -> None:
    """Writes the whole session, including stack samples, telemetry and allocations.

    Every event is written exactly once. Times are microseconds after `epoch_ns` with their
    nanoseconds as decimals. Host events end where their parent ends, where they would outlive it.

    Args:
        session: The session to write.
        epoch_ns: Time zero of the written trace.
        handle: The output; uncompressed JSON.
        path: `critical_path` of the report document, whose times count from `epoch_ns`; None if
            there is none.
    """
    session = add_overlay(session)
    times = [epoch_ns]
    for trace in session.traces:
        frames = (trace.allocations, trace.counters, trace.marks)
        first_times = [frame["time_ns"].min() for frame in frames if frame.height]
        times += (
            [trace.start_ns, *(time for time in first_times if isinstance(time, int))]
            if trace.events.height
            else [0]
        )
    first = min(times)
    handle.write(b'{"displayTimeUnit":"ns","otherData":{"epoch_ns":"%d"},"traceEvents":[\n' % first)
    separator = b""
    path_process = len(session.traces) + 1
    arrows = find_path_arrows(session, path)
    parts = [
        _encode_trace(trace, number + 1, first, arrows.get(number))
        for number, trace in enumerate(session.traces)
    ]
    parts.append(
        encode_path_track(path, path_process, path_process * _TRACKS_PER_PROCESS, epoch_ns - first)
    )
    for text in chain.from_iterable(parts):
        if text:
            handle.write(separator + text.encode("utf-8", "replace"))
            separator = b",\n"
    handle.write(b"\n]}\n")


def _encode_trace(
    trace: Trace, process: int, epoch_ns: int, extra_arrows: pl.DataFrame | None = None
) -> Iterator[str]:
    """Yields the parts of one trace, each some rows of JSON."""
    tracks = assign_tracks(trace)
    first_thread = process * _TRACKS_PER_PROCESS
    rank = "?" if trace.rank is None else trace.rank
    name = f"rank {rank}" + (f" on {sanitize(trace.meta.host)}" if trace.meta.host else "")
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
        pl.lit(f'{{"ph":"X","pid":{process},"tid":{first_thread},"ts":'),
        format_microseconds(steps["start_ns"] - epoch_ns),
        pl.lit(',"dur":'),
        format_microseconds((steps["end_ns"] - steps["start_ns"]).clip(0)),
        pl.lit(',"name":"step '),
        "step",
        pl.lit('","cat":"step","args":{"step":'),
        "step",
        pl.lit("}}"),
    )
    yield _join_rows(steps, step_rows)

    start = trace.events["start_ns"]
    events = trace.events.with_columns(
        (start - epoch_ns).alias("ts"),
        (pl.Series(tracks.end_ns) - start).clip(0).alias("dur"),
        pl.Series("tid", tracks.track + first_thread + 1),
    )
    # From every launch to its GPU work, from forward to backward, and the other flows of the file;
    # `id` is unique.
    launches = (
        trace.gpu_work()
        .drop_nulls("launch")
        .select(source="launch", target="event", arrow=pl.lit("launch"))
    )
    flows = (
        trace.flows.filter(pl.col("kind") != "launch")
        .drop_nulls(["source", "target"])
        .select("source", "target", arrow=pl.col("kind").cast(pl.String))
    )
    arrows = pl.concat([launches, flows.cast(launches.schema)])
    arrows = arrows.with_columns(id=pl.int_range(pl.len(), dtype=pl.Int64) + process * 10**10)
    if extra_arrows is not None:
        arrows = pl.concat([arrows, extra_arrows.cast(arrows.schema)])
    names = encode_names(events["name"])
    for low in range(0, events.height, _BATCH_EVENTS):
        yield _encode_slices(trace, events.slice(low, _BATCH_EVENTS), names, arrows, process)

    curves = build_counters(trace).filter(pl.col("value").is_finite())
    curves = curves.join(encode_names(curves["name"]), on="name", how="left", maintain_order="left")
    curve_rows = pl.concat_str(
        pl.lit(f'{{"ph":"C","pid":{process},"ts":'),
        format_microseconds(curves["time_ns"] - epoch_ns),
        pl.lit(',"name":'),
        "quoted",
        pl.lit(',"args":{"value":'),
        pl.col("value").round(6).cast(pl.String),
        pl.lit("}}"),
    )
    yield _join_rows(curves, curve_rows)

    marks = trace.marks.join(
        encode_names(trace.marks["name"]), on="name", how="left", maintain_order="left"
    )
    mark_rows = pl.concat_str(
        pl.lit(f'{{"ph":"i","s":"p","pid":{process},"ts":'),
        format_microseconds(marks["time_ns"] - epoch_ns),
        pl.lit(',"name":'),
        "quoted",
        pl.lit("}"),
    )
    yield _join_rows(marks, mark_rows)


def _encode_slices(
    trace: Trace, events: pl.DataFrame, names: pl.DataFrame, arrows: pl.DataFrame, process: int
) -> str:
    """Returns the slices, each followed by its arrows, so that Perfetto binds them to it."""
    # Details of these events from the side frames, one row per event.
    in_batch = pl.col("event").is_between(events["event"][0], events["event"][-1])
    for frame in (
        trace.tensors.select("event", "shapes", "types"),
        trace.copies.select("event", copy_bytes="bytes"),
        trace.collectives.select("event", "group", "in_bytes", "out_bytes", collective="kind"),
    ):
        batch_rows = frame.filter(in_batch).unique("event", keep="first")
        events = events.join(batch_rows, on="event", how="left", maintain_order="left")
    events = events.join(names, on="name", how="left", maintain_order="left")
    events = events.with_columns(
        format_microseconds(events["ts"]), format_microseconds(events["dur"])
    )
    numbers = {
        name: pl.col("copy_bytes" if name == "bytes" else name).cast(pl.String)
        for name in (
            "step",
            "correlation",
            "external_id",
            "sequence",
            "in_bytes",
            "out_bytes",
            "stream",
            "bytes",
        )
    }
    texts = {
        name: pl.concat_str(
            pl.lit('"'),
            pl.col(name)
            .str.replace_all("\\", "\\\\", literal=True)
            .str.replace_all('"', '\\"', literal=True)
            .str.replace_all(UNSAFE.pattern, "?"),
            pl.lit('"'),
        )
        for name in ("shapes", "types", "collective", "group")
    }
    args = [
        pl.when(value.is_not_null())
        .then(pl.concat_str(pl.lit(f',"{name}":'), value))
        .otherwise(pl.lit(""))
        for name, value in (numbers | texts).items()
    ]
    position = pl.concat_str(pl.lit(f'"pid":{process},"tid":'), "tid", pl.lit(',"ts":'), "ts")
    rows = events.select(
        number="event",
        place=position,
        text=pl.concat_str(
            pl.lit('{"ph":"X",'),
            position,
            pl.lit(',"dur":'),
            "dur",
            pl.lit(',"name":'),
            "quoted",
            pl.lit(',"cat":"'),
            pl.col("category").cast(pl.String),
            pl.lit('","args":{"event":'),
            "event",
            *args,
            pl.lit("}}"),
        ),
    )
    return encode_slices_with_arrows(rows, arrows)


def _join_rows(frame: pl.DataFrame, rows: pl.Expr) -> str:
    return str(frame.select(rows).to_series().str.join(",\n").item()) if frame.height else ""


def write_graph(graph: Graph, handle: BinaryIO, counters: pl.DataFrame | None = None) -> None:
    """Writes every node that belongs to a lane, and the edges between nodes of different lanes.

    Times are microseconds after the earliest node with their nanoseconds as decimals. Nodes that
    overlap on one lane (kernels of one stream) are on separate tracks, `stream 7 (2)`.

    Args:
        graph: The graph to write.
        handle: The output; uncompressed JSON.
        counters: Values that hold from a time on, drawn as curves of a separate process: name,
            time_ns (from the earliest node), value.
    """
    earliest = graph.nodes["start_ns"].min()
    first = earliest if isinstance(earliest, int) else 0
    nodes = graph.nodes.filter(pl.col("lane").is_not_null()).sort(
        "lane", "start_ns", maintain_order=True
    )
    start = nodes["start_ns"].to_numpy()
    end = start + nodes["duration_ns"].to_numpy()
    lane = nodes["lane"].to_numpy()
    bounds = (
        np.flatnonzero(np.diff(lane, prepend=-1, append=-1)) if len(lane) else np.zeros(0, np.int64)
    )
    level = np.zeros(len(lane), np.int64)
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        level[low:high] = assign_levels(start[low:high], end[low:high])
    nodes = nodes.with_columns(level=pl.Series(level))
    tracks = (
        nodes.select("rank", "lane", "level")
        .unique()
        .join(graph.lanes.select("lane", "kind", "device", "name"), on="lane", how="left")
        .sort("rank", pl.col("kind") == "device", "lane", "level")
        .with_columns(place=pl.int_range(pl.len()).over("rank"))
        .with_columns(
            tid=(pl.col("rank").cast(pl.Int64) + 1) * _TRACKS_PER_PROCESS + pl.col("place")
        )
    )
    nodes = nodes.join(
        tracks.select("lane", "level", "tid"),
        on=["lane", "level"],
        how="left",
        maintain_order="left",
    )
    nodes = nodes.with_columns(
        pid=pl.col("rank").cast(pl.Int64) + 1,
        ts=format_microseconds(nodes["start_ns"] - first),
        dur=format_microseconds(nodes["duration_ns"]),
    )
    lanes = graph.nodes["lane"]
    between = graph.edges.with_columns(
        of=lanes.gather(graph.edges["source"]), to=lanes.gather(graph.edges["target"])
    ).filter(pl.col("of") != pl.col("to"))
    arrows = between.select(
        "source", "target", arrow=pl.col("kind").cast(pl.String), id=pl.int_range(1, pl.len() + 1)
    )
    handle.write(
        b'{"displayTimeUnit":"ns","otherData":{"epoch_ns":"%d"},"traceEvents":[\n'
        % (graph.epoch_ns + first)
    )
    separator = ""
    hosts = dict(graph.ranks.select("rank", "host").iter_rows())
    rows = []
    for rank in tracks["rank"].unique(maintain_order=True).to_list():
        name = f"rank {rank}" + (f" on {sanitize(hosts[rank])}" if hosts.get(rank) else "")
        rows.append({"ph": "M", "pid": rank + 1, "name": "process_name", "args": {"name": name}})
        rows.append(
            {"ph": "M", "pid": rank + 1, "name": "process_sort_index", "args": {"sort_index": rank}}
        )
    for track in tracks.iter_rows(named=True):
        name = sanitize(track["name"] or "")
        if track["kind"] == "device" and track["device"] is not None:
            name = f"GPU {track['device']} {name}"
        name += f" ({track['level'] + 1})" if track["level"] else ""
        thread = {"ph": "M", "pid": track["rank"] + 1, "tid": track["tid"]}
        rows.append({**thread, "name": "thread_name", "args": {"name": name}})
        rows.append({**thread, "name": "thread_sort_index", "args": {"sort_index": track["place"]}})
    if counters is not None and counters.height:
        number = int(tracks["rank"].cast(pl.Int64).max() or 0) + 2  # type: ignore[arg-type]
        rows.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": "links"}})
        rows += [
            {
                "ph": "C",
                "pid": number,
                "name": sanitize(name),
                "ts": time / 1000,
                "args": {"share": value},
            }
            for name, time, value in counters.select("name", "time_ns", "value").iter_rows()
        ]
    for text in (
        ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        *_encode_graph_slices(nodes, encode_names(nodes["name"]), arrows),
    ):
        if text:
            handle.write((separator + text).encode("utf-8", "replace"))
            separator = ",\n"
    handle.write(b"\n]}\n")


def _encode_graph_slices(
    nodes: pl.DataFrame, quoted: pl.DataFrame, arrows: pl.DataFrame
) -> Iterator[str]:
    """Yields the slices, each followed by the arrows that begin and end in it, so that Perfetto
    binds them to it.
    """
    for low in range(0, nodes.height, _BATCH_EVENTS):
        part = nodes.slice(low, _BATCH_EVENTS).join(
            quoted, on="name", how="left", maintain_order="left"
        )
        prefix = pl.concat_str(pl.lit('"pid":'), "pid", pl.lit(',"tid":'), "tid", pl.lit(',"ts":'))
        optional = [
            pl.when(pl.col(name).is_not_null())
            .then(pl.concat_str(pl.lit(f',"{name}":'), pl.col(name).cast(pl.String)))
            .otherwise(pl.lit(""))
            for name in ("step", "correlation", "bytes", "event")
        ]
        rows = part.select(
            number="node",
            place=pl.concat_str(prefix, "ts"),
            text=pl.concat_str(
                pl.lit('{"ph":"X",'),
                prefix,
                "ts",
                pl.lit(',"dur":'),
                "dur",
                pl.lit(',"name":'),
                "quoted",
                pl.lit(',"cat":"'),
                pl.col("kind").cast(pl.String),
                pl.lit('","args":{"node":'),
                "node",
                *optional,
                pl.lit("}}"),
            ),
        )
        yield encode_slices_with_arrows(rows, arrows)


def write_simulation(answer: Simulation, handle: BinaryIO) -> None:
    """Writes the workload as it would have been recorded on the machine, and counters of its
    busiest links.

    Args:
        answer: The simulation.
        handle: The output; uncompressed JSON.

    Raises:
        UsageError: `no-timeline`: the mode has none.
    """
    if answer.graph is None:
        raise UsageError(
            f"the mode {answer.mode} has no timeline to write",
            slug="no-timeline",
            hint="write .json, or simulate in the mode native",
        )
    loads = answer.load.join(answer.links.select("link", "name"), on="link", maintain_order="left")
    write_graph(answer.graph, handle, loads.select("name", "time_ns", value="share"))
