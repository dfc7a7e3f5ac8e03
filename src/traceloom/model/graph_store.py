"""`NAME.graph`: a Graph in one file (see `traceloom.model.frame_archive`)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import msgspec
import polars as pl

from traceloom.model.frame_archive import ArchiveFormat
from traceloom.model.graph import Graph, Stage
from traceloom.model.graph_schema import GRAPH_SCHEMAS
from traceloom.model.notice import Notice

ENDING = ".graph"
_FORMAT = ArchiveFormat(
    "graph",
    another_slug="not-a-graph",
    damaged_slug="graph-damaged",
    version=1,
    schemas=GRAPH_SCHEMAS,
    never_null={
        "nodes": ("node", "kind", "name", "rank", "start_ns", "duration_ns", "work_ns", "residual_ns"),
        "edges": tuple(GRAPH_SCHEMAS["edges"]),
        "lanes": ("lane", "rank", "kind"),
        "communication": ("node",),
        "transfers": ("node",),
        "ranks": ("rank",),
    },
    hint="write it again with `traceloom link`",
)
is_graph = _FORMAT.holds


def save(graph: Graph, path: str | Path, *, force: bool = False) -> int:
    """Write a graph, whole or not at all; returns the size of the file in bytes.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    header = {
        "name": graph.name,
        "epoch_ns": graph.epoch_ns,
        "world_size": graph.world_size,
        "stage": graph.stage,
        "notices": [asdict(notice) for notice in graph.notices],
    }
    return _FORMAT.save(path, header, graph.frames(), force=force)


def load(path: str | Path) -> Graph:
    """Read a graph that `save` wrote. `Graph.check` is not run, but columns, ids and references are right.

    Raises:
        InputError: `unreadable`; `not-a-graph`: another kind of file; `graph-damaged`: cut, or not as its header says;
            `other-version`.
    """
    return _FORMAT.load(path, _graph)


def _graph(header: dict[str, Any], frames: dict[str, pl.DataFrame]) -> Graph:
    name, stage, epoch, world = (header[key] for key in ("name", "stage", "epoch_ns", "world_size"))
    if stage not in get_args(Stage):
        raise ValueError(f"`{stage}` is no stage of a graph")
    if not (world is None or isinstance(world, int)) or not isinstance(epoch, int):
        raise TypeError("its header has no whole numbers where they belong")
    notices = msgspec.convert(header["notices"], tuple[Notice, ...])
    graph = Graph(**frames, name=str(name), epoch_ns=epoch, world_size=world, stage=stage, notices=notices)
    graph.check_columns()
    return graph
