"""The tables of a terminal report: kernels, operators, modules, communication, memory, data loading, notices."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.loading import loader
from traceloom.report.names import short
from traceloom.report.notices import said_once
from traceloom.report.options import ReportOptions, ordered
from traceloom.report.views.terminal.bars import sparkline
from traceloom.report.views.terminal.columns import Column, lines
from traceloom.report.views.terminal.look import CATEGORY, DEVICE, DIM, SEVERITY
from traceloom.report.views.terminal.time import heading, rank_label

Row = dict[str, Any]
_WIDEST_CURVE = 72


def _covering(shown: list[Row], rows: list[Row], key: str, what: str) -> str:
    whole = sum(row[key] for row in rows)
    if len(shown) == len(rows):
        return f"{units.duration(whole)} {what}"
    covered = units.share(sum(row[key] for row in shown), whole)
    return f"{len(shown)} of {units.count(len(rows))}, {covered} of {units.duration(whole)} {what}"


def kernels(document: Row, options: ReportOptions, width: int) -> Iterator[Text]:
    """GPU work by name."""
    rows = document["kernels"]
    if not rows:
        return
    shown = ordered(rows, options)
    yield from heading("GPU work", _covering(shown, rows, "total_ns", "of kernels, copies and fills"), width)
    cells: list[list[str | Text]] = [
        [
            units.duration(row["total_ns"]),
            units.share(row["fraction"], 1.0),
            units.count(row["count"]),
            units.duration(row["mean_ns"]),
        ]
        for row in shown
    ]

    def name(i: int, room: int) -> Text:
        kind = CATEGORY.get(shown[i]["category"], DEVICE[0])
        return Text.assemble((kind.fill, kind.style), " ", short(shown[i]["name"], room - 2))

    yield from lines([Column("total"), Column("share"), Column("count"), Column("mean")], cells, ("name", name), width)


def operators(document: Row, options: ReportOptions, width: int) -> Iterator[Text]:
    """Operators by name, and by shapes where asked."""
    rows = document["operators"]
    if not rows:
        return
    shown = ordered(rows, options)
    on_device = any(row["device_ns"] for row in rows)
    yield from heading("Operators", _covering(shown, rows, "self_ns", "of host time"), width)
    cells: list[list[str | Text]] = []
    for row in shown:
        cells.append(
            [units.duration(row["self_ns"]), units.share(row["fraction"], 1.0), units.duration(row["total_ns"])]
        )
        cells[-1] += [units.duration(row["device_ns"])] if on_device else []
        cells[-1] += [units.count(row["count"])]
    columns = [
        Column("self"),
        Column("share"),
        Column("total"),
        *([Column("GPU")] if on_device else []),
        Column("count"),
    ]

    def name(i: int, room: int) -> Text:
        return Text(short(shown[i]["name"] + (f" {shown[i]['shapes']}" if shown[i]["shapes"] else ""), room))

    yield from lines(columns, cells, ("name", name), width)


def modules(document: Row, options: ReportOptions, width: int) -> Iterator[Text]:
    """The heaviest part of the module tree of the first rank."""
    rank = document["modules"][0]["rank"] if document["modules"] else None
    tree = [row for row in document["modules"] if row["rank"] == rank]
    if not tree:
        return
    on_device = any(spent(row, "device_ns") for row in tree)
    key = "device_ns" if on_device else "host_ns"
    heaviest = sorted(tree, key=lambda row: -spent(row, key))[: options.top]
    kept = {row["node"] for row in heaviest}
    shown = [row for row in tree if row["node"] in kept]
    note = rank_label(rank) if len(document["ranks"]) > 1 else ""
    what = "module" if any(row["kind"] == "module" for row in tree) else "region"
    yield from heading(f"{what.capitalize()}s", note, width)
    columns = [Column(title) for title in _module_columns(tree, on_device)]
    cells: list[list[str | Text]] = [
        [
            units.count(row[name]) if name == "count" else units.duration(row.get(name))
            for name in _module_columns(tree, on_device).values()
        ]
        for row in shown
    ]

    def name(i: int, room: int) -> Text:
        indent = "  " * min(shown[i]["depth"], 12)
        return Text.assemble((indent, DIM), short(shown[i]["name"], max(room - len(indent), 8)))

    yield from lines(columns, cells, (what, name), width)


def spent(row: Row, name: str) -> int:
    """Forward, backward and repeated time of a region together."""
    return sum(row.get(f"{part}{name}") or 0 for part in ("", "backward_", "recompute_"))


def _module_columns(tree: list[Row], on_device: bool) -> dict[str, str]:
    """Titles and keys: what a device did where there is one; backward and repeated time where there is any."""
    where = "device_ns" if on_device else "host_ns"
    columns = {"GPU": "device_ns"} if on_device else {"host": "host_ns"}
    for title, part in (("backward", "backward_"), ("repeated", "recompute_")):
        if any(row.get(f"{part}{where}") for row in tree):
            columns[title] = f"{part}{where}"
    return columns | ({"host": "host_ns"} if on_device else {}) | {"calls": "count"}


def communication(document: Row, options: ReportOptions, width: int) -> Iterator[Text]:
    """Collectives by kind and group."""
    rows = document["communication"]["collectives"]
    on_device = [row for row in rows if row["where"] == "device"]
    rows = on_device or rows  # the host's calls of what runs on a device only say how long it took to launch
    if not rows:
        return
    shown = ordered(rows, options)
    where = "on devices" if on_device else "on the host"
    yield from heading("Communication", _covering(shown, rows, "total_ns", where), width)
    cells: list[list[str | Text]] = []
    for row in shown:
        cells.append([units.duration(row["total_ns"])])
        cells[-1] += [units.duration(row["exposed_ns"])] if on_device else []
        cells[-1] += [units.count(row["count"]), units.duration(row["mean_ns"]), units.size(row["bytes"])]
    columns = [Column("total"), *([Column("exposed")] if on_device else [])]
    columns += [Column("count"), Column("mean"), Column("sent")]

    def name(i: int, room: int) -> Text:
        # What it does, with what, among whom: `all_reduce Float, 8 ranks, tensor_parallel`.
        row = shown[i]
        what = " ".join(part for part in (row["kind"] or "unknown", row["element_type"]) if part)
        size = row["group_size"]
        ranks = f"{size} rank{'' if size == 1 else 's'}" if size else ""
        group = row["group_description"] or row["group"]
        return Text(short(", ".join(part for part in (what, ranks, group) if part), room))

    yield from lines(columns, cells, ("collective", name), width)


def memory(document: Row, width: int) -> Iterator[Text]:
    """Peak and curve of every device's memory."""
    rows = document["memory"]["devices"]
    if not rows:
        return
    counted = any(row["evidence"] == "running-sum" for row in rows)
    yield from heading("Memory", "of the CPU: more than at the start of the recording" if counted else "", width)
    many = len(document["ranks"]) > 1
    curves = {(c["rank"], c["device_type"], c["device"]): c["allocated_bytes"] for c in document["memory"]["curve"]}
    cells: list[list[str | Text]] = []
    for row in rows:
        number = row["device"]
        name = f"{row['device_type']} {number}" if number is not None and number >= 0 else str(row["device_type"])
        sizes = [units.size(row["peak_bytes"]), units.size(row["end_bytes"])]
        label = (f"{rank_label(row['rank'])} " if many else "") + harmless(name)
        cells.append([label, *sizes, units.count(row["allocation_count"])])
    columns = [Column("", right=False), Column("peak"), Column("at end"), Column("allocations")]

    def curve(i: int, room: int) -> Text:
        values = [value or 0 for value in curves.get((rows[i]["rank"], rows[i]["device_type"], rows[i]["device"]), [])]
        return Text(sparkline(values, min(room, _WIDEST_CURVE)), DEVICE[2].style)

    yield from lines(columns, cells, ("over time", curve), width)


def data_loading(document: Row, width: int) -> Iterator[Text]:
    """How long the main thread waited for data."""
    loading = document["data_loading"]
    if loading is None:
        return
    window = sum(rank["window_ns"] for rank in document["ranks"])
    longest = max(wait["duration_ns"] for wait in loading["waits"])
    batches = len(loading["waits"])
    waits = f"{units.count(batches)} batch{'es' if batches > 1 else ''}"
    yield from heading("Data loading", "", width)
    summary = (
        f"{units.duration(loading['total_ns'])} waited for data in {waits} "
        f"({units.share(loading['total_ns'], window)} of the time); the longest wait took {units.duration(longest)}."
    )
    for line in textwrap.wrap(f"{summary} {loader(loading)}", width - 2):
        yield Text(" " + line)


def notices(document: Row, options: ReportOptions, width: int) -> Iterator[Text]:
    """What the user must know about the data, worst first."""
    distinct = said_once(document["notices"], len(document["ranks"]))
    if not distinct:
        return
    yield from heading("Notices", "what to know about the data", width)
    for notice in distinct[: options.top]:
        sign, style = SEVERITY[notice.severity]
        weakens = f"; weakens {', '.join(notice.weakens)}" if notice.weakens else ""
        message = harmless(f"{notice.sentence}{weakens} [{notice.slug}]")
        first, *rest = textwrap.wrap(message, max(width - 4, 20), break_on_hyphens=False)
        yield Text.assemble(" ", (sign, style), " ", first)
        for line in rest:
            yield Text("   " + line)
    if len(distinct) > options.top:
        yield Text(f" … and {len(distinct) - options.top} more, in the JSON report", DIM)
