"""The module tree: an icicle to look into and a table to read."""

from __future__ import annotations

from typing import Any

from traceloom.report.icicle import figure, island
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.cells import Column
from traceloom.report.views.html.table import table

Row = dict[str, Any]
__all__ = ["island", "modules"]

MOST_NODES = 4_000  # of one rank's tree


def modules(document: Row, reasons: Reasons) -> str:
    """The tree of every rank that has one; the script shows that of the chosen rank."""
    rows = document.get("modules") or []
    if not rows:
        return reasons.line("modules", "Modules")
    blocks = []
    for position, rank in enumerate(document["ranks"]):
        tree = [row for row in rows if row.get("rank") == rank.get("rank")][:MOST_NODES]
        block = _tree(tree, position, reasons) if tree else reasons.line("modules", "Modules of this rank")
        only = "" if len(document["ranks"]) == 1 else f' data-of-rank="{position}"'
        blocks.append(f"<div{only}>{block}</div>")
    return "".join(blocks)


def _tree(tree: list[Row], position: int, reasons: Reasons) -> str:
    device = any(_all(row, "device_ns") for row in tree)
    index_of_node = {row["node"]: k for k, row in enumerate(tree)}
    nodes = [
        (index_of_node.get(row["parent"]), row["name"], row["count"], _all(row, "host_ns"), _all(row, "device_ns"))
        for row in tree
    ]
    return figure(nodes, label="Module tree by time") + _table(tree, position, reasons, device=device)


def _all(row: Row, name: str) -> int:
    """Forward, backward and repeated time together."""
    return sum(row.get(f"{part}{name}") or 0 for part in ("", "backward_", "recompute_"))


def _table(tree: list[Row], position: int, reasons: Reasons, *, device: bool) -> str:
    rows = [{**row, "name": "\u2003" * row["depth"] + row["name"]} for row in tree]
    backward = any(row.get("backward_host_ns") for row in tree)
    again = any(row.get("recompute_host_ns") for row in tree)
    stepped = any(row.get("mean_all_host_ns") is not None for row in tree)
    columns = [
        Column("name", "Module", "name"),
        Column("kind", "Kind"),
        Column("count", "Calls", "count"),
        Column("host_ns", "Host", "time", "time in it outside the backward pass", scale="host"),
        Column("self_host_ns", "self", "time", "outside child rows", scale="host"),
        *([Column("backward_host_ns", "backward", "time", "of the nodes its operators made", scale="host")] * backward),
        *([Column("recompute_host_ns", "repeated", "time", "forward run again by checkpoints", scale="host")] * again),
        *(
            (
                Column("device_ns", "GPU", "time", "GPU work launched in it", scale="gpu"),
                Column("self_device_ns", "self", "time", "launched outside child rows", scale="gpu"),
                *([Column("backward_device_ns", "backward", "time", "of its backward", scale="gpu")] * backward),
                *([Column("recompute_device_ns", "repeated", "time", "GPU work run again", scale="gpu")] * again),
                Column("kernel_count", "Kernels", "count", "launched in it outside the backward pass"),
            )
            if device
            else ()
        ),
        *(_per_step("device" if device else "host") if stepped else ()),
    ]
    return table(f"module-table-{position}", columns, rows, reasons.columns("modules"), "Modules")


def _per_step(what: str) -> tuple[Column, ...]:
    """Of a usual step: all parts together, with the spread over the steps."""
    name = {"host": "Host", "device": "GPU"}[what]
    hint = "forward, backward and repeated together, mean over the whole steps"
    return (
        Column(f"mean_all_{what}_ns", f"{name} per step", "time", hint, scale="step"),
        Column(f"min_all_{what}_ns", "least", "time", "in the step with the least of it", scale="step"),
        Column(f"max_all_{what}_ns", "most", "time", "in the step with the most of it", scale="step"),
    )
