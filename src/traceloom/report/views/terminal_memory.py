"""Renders the memory document on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text

from traceloom.report import memory as tables
from traceloom.report.document import ReportOptions
from traceloom.report.labels import fit_name, format_rank
from traceloom.report.memory_sources import MemoryOptions
from traceloom.report.views.terminal import render_declared_table
from traceloom.report.views.terminal_findings import render_notice_lines
from traceloom.report.views.terminal_table import (
    DIM_STYLE,
    TextColumn,
    draw_bar,
    draw_sparkline,
    render_heading,
    render_paragraph,
    render_table,
    truncate_lines,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize

if TYPE_CHECKING:
    from traceloom.report.documents import MemoryDocument
    from traceloom.report.documents.memory import (
        MemoryMemoryRow,
        MemoryNodeRow,
        MemoryPartRow,
        MemoryRankRow,
    )

_BAR_WIDTH = 12
_COLOR = "#3b82d6"
_MAX_DEPTH = 3  # of the tree of memory that was alive at an out-of-memory event
_MAX_OUT_OF_MEMORY = 3  # out-of-memory events that are shown; further ranks are mostly alike
_MIN_BRANCH_SHARE = 0.01  # of the memory at the instant; smaller branches stay closed


def render_memory(document: MemoryDocument, options: MemoryOptions, width: int) -> Iterator[Text]:
    """Yields the lines, none wider than `width`."""
    yield from truncate_lines(_render_memory_report(document, options, width), width)


def _render_memory_report(
    document: MemoryDocument, options: MemoryOptions, width: int
) -> Iterator[Text]:
    yield Text(fit_name(document["name"], width), "bold")
    yield Text("")
    yield from render_paragraph(document["sentence"], width, "bold")
    # Where memory ran out, what was alive then, and suggestions, the most useful first
    out_of_memory_rows = document["out_of_memory"]
    for end in out_of_memory_rows[:_MAX_OUT_OF_MEMORY]:
        name = (
            "Out of memory" if end["rank"] is None else f"Out of memory, {format_rank(end['rank'])}"
        )
        facts = []
        if end["asked_bytes"] is not None:
            facts.append(f"{units.format_size(end['asked_bytes'])} were asked for")
        facts.append(f"{units.format_size(end['bytes'])} were alive")
        if end["step"] is not None:
            facts.append(f"step {end['step']}")
        yield from render_heading(name, " · ".join(facts), width)
        if end["where"]:
            yield from render_paragraph(f"at {end['where']}", width)
        for device in end["devices"]:
            index = (
                "" if device["device"] is None or device["device"] < 0 else f":{device['device']}"
            )
            retries = (
                f", {units.format_quantity(device['retries'], 'retry')} of the allocator before"
                if device["retries"]
                else ""
            )
            text = (
                f"{device['device_type']}{index}: {units.format_size(device['allocated_bytes'])} allocated of "
                f"{units.format_size(device['reserved_bytes'])} reserved, {units.format_size(device['free_bytes'])} of "
                f"{units.format_size(device['total_bytes'])} free, {units.format_size(device['outside_bytes'])} outside this "
                f"allocator{retries}"
            )
            yield from render_paragraph(text, width)
        # What was alive when memory ran out: the largest branches, down to modules.
        table = tables.build_out_of_memory_table(end, "alive")
        rows = [row for row in table.rows if 0 < row["depth"] <= (options.depth or _MAX_DEPTH)]
        yield from render_declared_table(
            replace(table, rows=rows, weight="bytes"), ReportOptions(top=options.top), width
        )
        if end["advice"]:
            yield Text("")
            yield Text(" What to try first", "bold")
        for number, row in enumerate(end["advice"], start=1):
            frees = (
                "" if row["bytes"] is None else f" – frees up to {units.format_size(row['bytes'])}"
            )
            first, *remaining_lines = textwrap.wrap(
                sanitize(f"{number}. {row['text']}{frees} ({row['why']})"),
                width - 5,
                break_on_hyphens=False,
            )
            yield Text("  " + first)
            for line in remaining_lines:
                yield Text("     " + line)
    if len(out_of_memory_rows) > _MAX_OUT_OF_MEMORY:
        yield from render_paragraph(
            f"... and {len(out_of_memory_rows) - _MAX_OUT_OF_MEMORY} more times; --rank shows each, --json all",
            width,
        )
    if not document["ranks"] and not document["out_of_memory"]:
        reasons = {row["path"]: row["reason"] for row in document["absent"]}
        yield from render_paragraph(
            f"{reasons.get('ranks', 'nothing was recorded')}.".capitalize(), width
        )
    for text in tables.describe_job(document):
        yield from render_paragraph(text, width)
    for entry in document["ranks"]:
        for memory in tables.select_memories(entry["memories"]):
            yield from _render_memory(entry, memory, document, options, width)
    untold = [
        reason
        for entry in document["ranks"]
        if (reason := tables.explain_unknown_growth(entry)) is not None
    ]
    if untold:  # unknown growth does not mean that nothing grows
        yield Text("")
        yield from render_paragraph(
            f"What grows from step to step cannot be determined: {untold[0]}.", width
        )
    yield from render_notice_lines(
        [(row["severity"], f"{row['message']} [{row['slug']}]") for row in document["notices"]],
        width,
    )


def _render_memory(
    entry: MemoryRankRow,
    memory: MemoryMemoryRow,
    document: MemoryDocument,
    options: MemoryOptions,
    width: int,
) -> Iterator[Text]:
    kind = memory["device_type"] + (f":{memory['device']}" if memory["device"] >= 0 else "")
    memory_label = f"{format_rank(entry['rank'])}, {kind}" if len(document["ranks"]) > 1 else kind
    instant = memory["instant"]
    instant_name = document["at"]
    if instant_name == "peak":
        when = (
            "the peak"
            if memory["peak_step"] is None
            else f"the peak, in step {memory['peak_step']}"
        )
        when = when if memory["peak_recorded"] else "the moment of the snapshot"
    else:
        when = units.format_duration(int(instant_name)) if instant_name.isdigit() else instant_name
    facts = [f"{units.format_size(instant['bytes'])}{tables.describe_sizes(memory)} at {when}"]
    if instant_name != "peak":
        facts.append(f"peak {units.format_size(memory['peak_bytes'])}")
    if memory["reserved_at_peak_bytes"]:
        reserved = units.format_size(memory["reserved_at_peak_bytes"])
        facts.append(f"{reserved} reserved" + (" at the peak" if memory["peak_recorded"] else ""))
    yield from render_heading(memory_label, " · ".join(facts), width)
    levels = [
        sum(values)
        for values in zip(*(kind["bytes"] for kind in memory["curve"]["categories"]), strict=True)
    ]
    if levels:
        yield Text.assemble(" ", (draw_sparkline(levels, width - 2), _COLOR))
    categories = [
        f"{row['category'].replace('_', ' ')} {units.format_size(row['bytes'])} ({units.format_share(row['fraction'], 1)}"
        + (", inferred)" if row["evidence"] == "inferred" else ")")
        for row in memory["categories"]
    ]
    yield from render_paragraph(" · ".join(categories), width)
    yield from render_paragraph(tables.describe_allocator(memory), width)
    is_scope_tree = document["by"] == "scope"
    visible_rows: Sequence[tuple[int, str, MemoryNodeRow | MemoryPartRow]]
    if is_scope_tree:
        title, visible_rows = "scope and operator", _expand_tree(memory["tree"], options)
    else:
        title, visible_rows = (
            document["by"],
            [(0, row["name"], row) for row in memory["parts"][: options.top]],
        )

    def name(i: int, width_left: int) -> str | Text:
        depth, label, _ = visible_rows[i]
        indent = "  " * min(depth, 10)
        return (
            Text.assemble((indent, DIM_STYLE), fit_name(label, max(width_left - len(indent), 8)))
            if is_scope_tree
            else fit_name(label, width_left)
        )

    cells: list[list[str | Text]] = [
        [
            units.format_size(row["bytes"]),
            units.format_share(row["fraction"], 1),
            draw_bar(row["fraction"], _BAR_WIDTH, _COLOR),
            units.format_count(row["block_count"] or None),
        ]
        for _, _, row in visible_rows
    ]
    columns = (
        TextColumn("bytes"),
        TextColumn("share"),
        TextColumn("", right=False),
        TextColumn("blocks"),
    )
    yield from render_table(columns, cells, (title, name), width)
    yield from render_declared_table(
        tables.build_growth_table(memory, "growth"), ReportOptions(top=options.top), width
    )
    fewer = ReportOptions(top=max(options.top // 2, 1))
    yield from render_declared_table(
        tables.build_activations_table(memory, "activations"), fewer, width
    )
    yield from render_declared_table(tables.build_largest_table(memory, "largest"), fewer, width)


def _expand_tree(
    rows: list[MemoryNodeRow], options: MemoryOptions
) -> list[tuple[int, str, MemoryNodeRow]]:
    """Opens the tree at large branches: the largest first, chains of single children as one line.

    Returns:
        Indentation, label, row.
    """
    total_bytes = max(rows[0]["bytes"], 1)
    open_nodes = {0}
    for row in sorted(rows[1:], key=lambda row: (-row["bytes"], row["depth"])):
        deep = options.depth is None or row["depth"] <= options.depth
        if (
            row["parent"] in open_nodes
            and deep
            and row["bytes"] >= _MIN_BRANCH_SHARE * total_bytes
            and len(open_nodes) <= 2 * options.top
        ):
            open_nodes.add(row["node"])
    visible = [row for row in rows[1:] if row["node"] in open_nodes]
    children: dict[int | None, list[MemoryNodeRow]] = {}
    for row in visible:
        children.setdefault(row["parent"], []).append(row)
    output_rows: list[tuple[int, str, MemoryNodeRow]] = []
    labels: dict[int | None, tuple[int, str]] = {0: (0, "")}
    for row in visible:
        depth, parent_label = labels[row["parent"]]
        label = f"{parent_label}.{row['name']}" if parent_label else row["name"]
        child_rows = children.get(row["node"], [])
        if len(child_rows) == 1 and child_rows[0]["bytes"] == row["bytes"]:
            labels[row["node"]] = (depth, label)
        else:
            labels[row["node"]] = (depth + 1, "")
            output_rows.append((depth, label, row))
    return output_rows
