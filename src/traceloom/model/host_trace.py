"""HostTrace: PyTorch's execution trace of one process: its ops in order, without times."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from traceloom.model.graph_schema import GRAPH_SCHEMAS
from traceloom.model.notice import Notice
from traceloom.model.schema import SCHEMAS

# One row per node, ascending by id, which is the order in which the ops began.
HOST_OPS = pl.Schema({name: kind for name, kind in GRAPH_SCHEMAS["host_ops"].items() if name != "rank"})
# Nodes that stand for a process or a thread; the first word in brackets is always PyTorch's.
_ROOT = r"^\[pytorch\|profiler\|execution_(?:trace|graph)\|(?:process|thread)\]$"
GROUP_LIST = "## process_group:init ##"


@dataclass(frozen=True)
class HostTrace:
    """What PyTorch's execution trace observer wrote of one process.

    Attributes:
        path: The file.
        ops: One row per node, ascending by id; columns as `HOST_OPS`. Process and thread nodes are among them.
        schema: Version of the format as the file says it; None where it does not.
        process: Process id.
        rank: The rank, from the capture or the file name.
        recorded_at: Local time of day at which the observer began, as written.
        start_ms: When it began, ms of a clock that only counts up; no Unix time.
        finish_ms: When it ended; None where the file is cut.
        groups: Process groups known when it began; columns as the trace's `groups`.
        notices: What was repaired or lost.
    """

    path: str
    ops: pl.DataFrame
    schema: str | None = None
    process: int | None = None
    rank: int | None = None
    recorded_at: str | None = None
    start_ms: int | None = None
    finish_ms: int | None = None
    groups: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SCHEMAS["groups"]))
    notices: tuple[Notice, ...] = ()

    def roots(self) -> pl.Series:
        """Which nodes stand for a process or a thread, not for an op; Boolean, one per row of `ops`."""
        return self.ops["name"].str.contains(_ROOT).fill_null(value=False).alias("root")

    def __repr__(self) -> str:
        rank = "?" if self.rank is None else self.rank
        return f"<HostTrace rank {rank}: {self.ops.height:,} nodes, schema {self.schema}, {self.path}>"
