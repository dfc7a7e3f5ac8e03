"""A linked graph as Chrome JSON: a process per rank, its lanes as tracks, and an arrow for each edge between lanes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import polars as pl

from traceloom.harmless import harmless
from traceloom.model.graph import Graph
from traceloom.report.exports.perfetto.texts import encoded, microseconds, with_arrows
from traceloom.report.exports.perfetto.tracks import levels

_SLICE = 32_768  # nodes encoded at a time
_TRACKS_PER_PROCESS = 1_000_000  # Perfetto knows threads by their number alone, so numbers never repeat in a file


def write_graph(graph: Graph, handle: BinaryIO, counters: pl.DataFrame | None = None) -> None:
    """Write every node that belongs to a lane, and the edges between nodes of different lanes.

    Times are microseconds after the earliest node with their nanoseconds as decimals. Nodes that overlap on one lane
    (kernels of one stream) stand on tracks of their own, `stream 7 (2)`.

    Args:
        graph: What to write.
        handle: Where to write; uncompressed JSON.
        counters: Values that hold from a time on, drawn as curves of a process of their own: name, time_ns (from the
            earliest node), value.
    """
    earliest = graph.nodes["start_ns"].min()
    first = earliest if isinstance(earliest, int) else 0
    nodes = graph.nodes.filter(pl.col("lane").is_not_null()).sort("lane", "start_ns", maintain_order=True)
    start = nodes["start_ns"].to_numpy()
    end = start + nodes["duration_ns"].to_numpy()
    lane = nodes["lane"].to_numpy()
    bounds = np.flatnonzero(np.diff(lane, prepend=-1, append=-1)) if len(lane) else np.zeros(0, np.int64)
    level = np.zeros(len(lane), np.int64)
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        level[low:high] = levels(start[low:high], end[low:high])
    nodes = nodes.with_columns(level=pl.Series(level))
    tracks = (
        nodes.select("rank", "lane", "level")
        .unique()
        .join(graph.lanes.select("lane", "kind", "device", "name"), on="lane", how="left")
        .sort("rank", pl.col("kind") == "device", "lane", "level")
        .with_columns(place=pl.int_range(pl.len()).over("rank"))
        .with_columns(tid=(pl.col("rank").cast(pl.Int64) + 1) * _TRACKS_PER_PROCESS + pl.col("place"))
    )
    nodes = nodes.join(tracks.select("lane", "level", "tid"), on=["lane", "level"], how="left", maintain_order="left")
    nodes = nodes.with_columns(
        pid=pl.col("rank").cast(pl.Int64) + 1,
        ts=microseconds(nodes["start_ns"] - first),
        dur=microseconds(nodes["duration_ns"]),
    )
    lanes = graph.nodes["lane"]
    edges = graph.edges.with_columns(of=lanes.gather(graph.edges["source"]), to=lanes.gather(graph.edges["target"]))
    between = edges.filter(pl.col("of") != pl.col("to"))
    arrows = between.select("source", "target", arrow=pl.col("kind").cast(pl.String), id=pl.int_range(1, pl.len() + 1))
    handle.write(b'{"displayTimeUnit":"ns","otherData":{"epoch_ns":"%d"},"traceEvents":[\n' % (graph.epoch_ns + first))
    separator = ""
    hosts = dict(graph.ranks.select("rank", "host").iter_rows())
    rows = []
    for rank in tracks["rank"].unique(maintain_order=True).to_list():
        name = f"rank {rank}" + (f" on {harmless(hosts[rank])}" if hosts.get(rank) else "")
        rows.append({"ph": "M", "pid": rank + 1, "name": "process_name", "args": {"name": name}})
        rows.append({"ph": "M", "pid": rank + 1, "name": "process_sort_index", "args": {"sort_index": rank}})
    for track in tracks.iter_rows(named=True):
        name = harmless(track["name"] or "")
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
            {"ph": "C", "pid": number, "name": harmless(name), "ts": time / 1000, "args": {"share": value}}
            for name, time, value in counters.select("name", "time_ns", "value").iter_rows()
        ]
    for text in (
        ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        *_slices(nodes, encoded(nodes["name"]), arrows),
    ):
        if text:
            handle.write((separator + text).encode("utf-8", "replace"))
            separator = ",\n"
    handle.write(b"\n]}\n")


def _slices(nodes: pl.DataFrame, quoted: pl.DataFrame, arrows: pl.DataFrame) -> Iterator[str]:
    """The slices, each followed by the arrows that begin and end in it, so that Perfetto binds them to it."""
    for low in range(0, nodes.height, _SLICE):
        part = nodes.slice(low, _SLICE).join(quoted, on="name", how="left", maintain_order="left")
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
                pl.lit('{"ph":"X",'), prefix, "ts", pl.lit(',"dur":'), "dur", pl.lit(',"name":'), "quoted",
                pl.lit(',"cat":"'), pl.col("kind").cast(pl.String), pl.lit('","args":{"node":'), "node",
                *optional, pl.lit("}}"),
            ),
        )  # fmt: skip
        yield with_arrows(rows, arrows)
