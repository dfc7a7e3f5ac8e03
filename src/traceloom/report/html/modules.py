"""The module tree: an icicle to look into and a table to read."""

from __future__ import annotations

import json
from typing import Any

from traceloom.report.html.absence import Reasons
from traceloom.report.html.cells import Column
from traceloom.report.html.table import table
from traceloom.report.names import harmless

Row = dict[str, Any]
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


def island(value: Any) -> str:
    """JSON that is safe inside a script element, whatever names it holds."""
    dumped = json.dumps(value, separators=(",", ":"))  # ASCII, so U+2028 and U+2029 are escaped already
    return dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _tree(tree: list[Row], position: int, reasons: Reasons) -> str:
    device = any(row.get("device_ns") for row in tree)
    place = {row["node"]: k for k, row in enumerate(tree)}
    nodes = [
        [
            place.get(row["parent"], -1),
            harmless(row["name"]),
            row["count"],
            row["host_ns"],
            row.get("device_ns") if device else None,
        ]
        for row in tree
    ]
    measure = "device" if device else "host"
    switch = "".join(
        f'<button type="button" data-measure-as="{key}" aria-pressed="{str(key == measure).lower()}">{name}</button>'
        for key, name in (("device", "GPU time"), ("host", "Host time"))
        if key != "device" or device
    )
    picture = (
        f'<figure class="modules" data-measure="{measure}"><div class="switch" role="group" '
        f'aria-label="Width of the boxes">{switch if device else ""}</div>'
        '<div class="icicle"></div><p class="icicle-says quiet" role="status">'
        "Hover or use the arrow keys to read a box; click or Enter to zoom, Escape to go back.</p>"
        f'<script type="application/json">{island({"nodes": nodes})}</script></figure>'
    )
    return picture + _table(tree, position, reasons, device=device)


def _table(tree: list[Row], position: int, reasons: Reasons, *, device: bool) -> str:
    rows = [{**row, "name": "\u2003" * row["depth"] + row["name"]} for row in tree]
    columns = [
        Column("name", "Module", "name"),
        Column("kind", "Kind"),
        Column("count", "Calls", "count"),
        Column("host_ns", "Host", "time", "time of the calls on their threads", scale="host"),
        Column("self_host_ns", "Host, self", "time", "outside child rows", scale="host"),
        *(
            (
                Column("device_ns", "GPU", "time", "GPU work launched in it", scale="gpu"),
                Column("self_device_ns", "GPU, self", "time", "launched outside child rows", scale="gpu"),
                Column("kernel_count", "GPU work", "count", "kernels, copies and fills"),
            )
            if device
            else ()
        ),
    ]
    return table(f"module-table-{position}", columns, rows, reasons.columns("modules"), "Modules")
