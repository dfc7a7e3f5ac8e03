"""The tables of work, summed over ranks: kernels, operators, collectives, loader waits."""

from __future__ import annotations

from html import escape
from typing import Any

from traceloom.model import units
from traceloom.report.loading import loader
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.cells import Column
from traceloom.report.views.html.overview import rank_name
from traceloom.report.views.html.table import table

Row = dict[str, Any]


def _several(document: Row) -> tuple[Column, ...]:
    ranks = Column("ranks", "Ranks", "count", "ranks that ran it")
    return (ranks,) if len(document["ranks"]) > 1 else ()


def kernels(document: Row, reasons: Reasons) -> str:
    """GPU work by name."""
    rows = document.get("kernels") or []
    if not rows:
        return reasons.line("kernels", "Kernels")
    columns = [
        Column("name", "Name", "name"),
        Column("category", "Category", "text", "communication by a table of rules, memory: copies and fills"),
        Column("total_ns", "Total", "time", "sum of the durations over all ranks"),
        Column("fraction", "Share", "share", "of the sum of all GPU work; what overlaps counts twice"),
        Column("count", "Count", "count"),
        Column("mean_ns", "Mean", "time", scale="one"),
        Column("min_ns", "Shortest", "time", scale="one"),
        Column("max_ns", "Longest", "time", scale="one"),
        *_several(document),
    ]
    return table("kernel-table", columns, rows, reasons.columns("kernels"), "Kernels, copies and fills by name")


def operators(document: Row, reasons: Reasons) -> str:
    """Framework operators by self time."""
    rows = document.get("operators") or []
    if not rows:
        return reasons.line("operators", "Operators")
    shapes = any(row.get("shapes") is not None for row in rows)
    device = any(row.get("device_ns") is not None for row in rows)
    columns = [
        Column("name", "Name", "name"),
        *((Column("shapes", "Shapes of inputs", "name"),) if shapes else ()),
        Column(
            "self_ns", "Self", "time", "host time inside the operator but outside the operators it calls", scale="host"
        ),
        Column("fraction", "Share", "share", "of the self time of all operators"),
        Column(
            "total_ns",
            "Total",
            "time",
            "host time with the operators it calls; recursion counts more than once",
            scale="host",
        ),
        Column("count", "Count", "count"),
        Column("mean_ns", "Mean", "time", "total by count"),
        *(_DEVICE_COLUMNS if device else ()),
        *_several(document),
    ]
    return table("operator-table", columns, rows, reasons.columns("operators"), "Operators")


_DEVICE_COLUMNS = (
    Column("self_device_ns", "GPU, self", "time", "GPU work launched directly by the operator", scale="gpu"),
    Column("device_ns", "GPU", "time", "GPU work launched in the operator or in those it calls", scale="gpu"),
    Column("kernel_count", "GPU work", "count", "kernels, copies and fills launched in it"),
)


def communication(document: Row, reasons: Reasons) -> str:
    """Collectives by kind, group and type."""
    rows = (document.get("communication") or {}).get("collectives") or []
    if not rows:
        return reasons.line("communication.collectives", "Communication")
    columns = [
        Column("kind", "Collective"),
        Column("where", "Where", "text", "on a device, or a host operation"),
        Column("group", "Group", "text", "as recorded"),
        Column("group_size", "Ranks of it", "count"),
        Column("element_type", "Type"),
        Column("count", "Count", "count"),
        Column("bytes", "Bytes", "bytes", "sum over all calls and ranks"),
        Column("total_ns", "Total", "time", "sum over all ranks; waiting for other ranks is part of it"),
        Column("mean_ns", "Mean", "time", scale="one"),
        Column("max_ns", "Longest", "time", scale="one"),
        Column("exposed_ns", "Not hidden", "time", "time that no computing hides"),
        *_several(document),
    ]
    return table("collective-table", columns, rows, reasons.columns("communication.collectives"), "Collectives")


def data_loading(document: Row, reasons: Reasons) -> str:
    """Waits of the main thread for the data loader."""
    loading = document.get("data_loading")
    if not loading:
        return reasons.line("data_loading", "Data loading")
    names = {rank.get("rank"): rank_name(rank, k) for k, rank in enumerate(document["ranks"])}
    steps = [
        {**row, "rank": names.get(row.get("rank"), "–"), "holds": {True: "yes", False: "no"}.get(row.get("bottleneck"))}
        for row in loading.get("steps") or []
    ]
    total = loading.get("total_ns")
    waits = len(loading.get("waits") or [])
    line = f"<p>{units.duration(total)} in {units.count(waits)} waits for the data loader, over all ranks. "
    line += f"{escape(loader(loading))}</p>"
    columns = [
        *((Column("rank", "Rank"),) if len(document["ranks"]) > 1 else ()),
        Column("step", "Step", "count"),
        Column("wait_ns", "Wait", "time", "time in the data loader's next batch"),
        Column("fraction", "Of the step", "share"),
        Column("gpu_idle_ns", "GPU idle", "time", "part of the wait in which no device had any work"),
        Column("holds", "Holds up", "text", "at least 5 % of the step, and the GPU had no work in at least half of it"),
    ]
    if not steps:
        return line
    return line + table("loading-table", columns, steps, reasons.columns("data_loading.steps"), "Loader waits by step")
