"""Whose memory it is, on one screen of a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.memory import tables
from traceloom.report.memory.facts import growth_unknown
from traceloom.report.memory.options import MemoryOptions
from traceloom.report.names import rank_label, short
from traceloom.report.options import ReportOptions
from traceloom.report.views.terminal.bars import plain, sparkline
from traceloom.report.views.terminal.columns import TextColumn, fitted, heading, lines, paragraph
from traceloom.report.views.terminal.look import DIM
from traceloom.report.views.terminal.notices import notice_lines
from traceloom.report.views.terminal.sections import table_lines

if TYPE_CHECKING:
    from traceloom.report.documents import MemoryDocument
    from traceloom.report.documents.memory import MemoryMemoryRow, MemoryNodeRow, MemoryPartRow, MemoryRankRow

_BAR = 12
_COLOR = "#3b82d6"
_DEEPEST = 3  # of what was alive when memory ran out
_MOST = 3  # ends that are shown; more ranks mostly say the same
_SMALL = 0.01  # of the instant; smaller branches are not opened


def render(document: MemoryDocument, options: MemoryOptions, width: int) -> Iterator[Text]:
    """The lines, none wider than `width`."""
    yield from fitted(_lines(document, options, width), width)


def _lines(document: MemoryDocument, options: MemoryOptions, width: int) -> Iterator[Text]:
    yield Text(short(document["name"], width), "bold")
    yield Text("")
    yield from paragraph(document["sentence"], width, "bold")
    # Where memory ran out, what was alive then and what to try first, the most useful first
    ends = document["out_of_memory"]
    for end in ends[:_MOST]:
        name = "Out of memory" if end["rank"] is None else f"Out of memory, {rank_label(end['rank'])}"
        facts = []
        if end["asked_bytes"] is not None:
            facts.append(f"{units.size(end['asked_bytes'])} were asked for")
        facts.append(f"{units.size(end['bytes'])} were alive")
        if end["step"] is not None:
            facts.append(f"step {end['step']}")
        yield from heading(name, " · ".join(facts), width)
        if end["where"]:
            yield from paragraph(f"at {end['where']}", width)
        for device in end["devices"]:
            index = "" if device["device"] is None or device["device"] < 0 else f":{device['device']}"
            retries = (
                f", {units.counted(device['retries'], 'retry')} of the allocator before" if device["retries"] else ""
            )
            sentence = (
                f"{device['device_type']}{index}: {units.size(device['allocated_bytes'])} allocated of "
                f"{units.size(device['reserved_bytes'])} reserved, {units.size(device['free_bytes'])} of "
                f"{units.size(device['total_bytes'])} free, {units.size(device['outside_bytes'])} outside this "
                f"allocator{retries}"
            )
            yield from paragraph(sentence, width)
        # What was alive when memory ran out: the heaviest branches, down to modules.
        table = tables.alive(end, "alive")
        rows = [row for row in table.rows if 0 < row["depth"] <= (options.depth or _DEEPEST)]
        yield from table_lines(replace(table, rows=rows, weight="bytes"), ReportOptions(top=options.top), width)
        if end["advice"]:
            yield Text("")
            yield Text(" What to try first", "bold")
        for number, row in enumerate(end["advice"], start=1):
            frees = "" if row["bytes"] is None else f" – frees up to {units.size(row['bytes'])}"
            first, *rest = textwrap.wrap(
                harmless(f"{number}. {row['text']}{frees} ({row['why']})"), width - 5, break_on_hyphens=False
            )
            yield Text("  " + first)
            for line in rest:
                yield Text("     " + line)
    if len(ends) > _MOST:
        yield from paragraph(f"... and {len(ends) - _MOST} more times; --rank shows each, --json all", width)
    if not document["ranks"] and not document["out_of_memory"]:
        reasons = {row["path"]: row["reason"] for row in document["absent"]}
        yield from paragraph(f"{reasons.get('ranks', 'nothing was recorded')}.".capitalize(), width)
    for sentence in tables.job(document):
        yield from paragraph(sentence, width)
    for entry in document["ranks"]:
        for memory in tables.worth_showing(entry["memories"]):
            yield from _memory(entry, memory, document, options, width)
    untold = [why for entry in document["ranks"] if (why := growth_unknown(entry)) is not None]
    if untold:  # that nothing is said of growth does not mean that nothing grows
        yield Text("")
        yield from paragraph(f"What grows from step to step cannot be determined: {untold[0]}.", width)
    messages = [(row["severity"], f"{row['message']} [{row['slug']}]") for row in document["notices"]]
    yield from notice_lines(messages, width)


def _memory(
    entry: MemoryRankRow, memory: MemoryMemoryRow, document: MemoryDocument, options: MemoryOptions, width: int
) -> Iterator[Text]:
    kind = memory["device_type"] + (f":{memory['device']}" if memory["device"] >= 0 else "")
    whose = f"{rank_label(entry['rank'])}, {kind}" if len(document["ranks"]) > 1 else kind
    instant = memory["instant"]
    at = document["at"]
    if at == "peak":
        when = "the peak" if memory["peak_step"] is None else f"the peak, in step {memory['peak_step']}"
    else:
        when = units.duration(int(at)) if at.isdigit() else at
    facts = [f"{units.size(instant['bytes'])} at {when}"]
    if at != "peak":
        facts.append(f"peak {units.size(memory['peak_bytes'])}")
    if memory["reserved_at_peak_bytes"]:
        facts.append(f"{units.size(memory['reserved_at_peak_bytes'])} reserved at the peak")
    yield from heading(whose, " · ".join(facts), width)
    levels = [sum(values) for values in zip(*(kind["bytes"] for kind in memory["curve"]["categories"]), strict=True)]
    if levels:
        yield Text.assemble(" ", (sparkline(levels, width - 2), _COLOR))
    categories = [
        f"{row['category'].replace('_', ' ')} {units.size(row['bytes'])} ({units.share(row['fraction'], 1)}"
        + (", inferred)" if row["evidence"] == "inferred" else ")")
        for row in memory["categories"]
    ]
    yield from paragraph(" · ".join(categories), width)
    yield from paragraph(tables.state_of_allocator(memory), width)
    by_scope = document["by"] == "scope"
    drawn: Sequence[tuple[int, str, MemoryNodeRow | MemoryPartRow]]
    if by_scope:
        title, drawn = "scope and operator", _opened(memory["tree"], options)
    else:
        title, drawn = document["by"], [(0, row["name"], row) for row in memory["parts"][: options.top]]

    def name(i: int, room: int) -> str | Text:
        depth, label, _ = drawn[i]
        indent = "  " * min(depth, 10)
        return (
            Text.assemble((indent, DIM), short(label, max(room - len(indent), 8))) if by_scope else short(label, room)
        )

    cells: list[list[str | Text]] = [
        [
            units.size(row["bytes"]),
            units.share(row["fraction"], 1),
            plain(row["fraction"], _BAR, _COLOR),
            units.count(row["block_count"] or None),
        ]
        for _, _, row in drawn
    ]
    columns = (TextColumn("bytes"), TextColumn("share"), TextColumn("", right=False), TextColumn("blocks"))
    yield from lines(columns, cells, (title, name), width)
    yield from table_lines(tables.growth(memory, "growth"), ReportOptions(top=options.top), width)
    fewer = ReportOptions(top=max(options.top // 2, 1))
    yield from table_lines(tables.activations(memory, "activations"), fewer, width)
    yield from table_lines(tables.largest(memory, "largest"), fewer, width)


def _opened(rows: list[MemoryNodeRow], options: MemoryOptions) -> list[tuple[int, str, MemoryNodeRow]]:
    """The tree opened where it is heavy: the largest branches first, chains of one as one line.

    Returns:
        Indentation, label, row.
    """
    whole = max(rows[0]["bytes"], 1)
    chosen = {0}
    for row in sorted(rows[1:], key=lambda row: (-row["bytes"], row["depth"])):
        deep = options.depth is None or row["depth"] <= options.depth
        if row["parent"] in chosen and deep and row["bytes"] >= _SMALL * whole and len(chosen) <= 2 * options.top:
            chosen.add(row["node"])
    shown = [row for row in rows[1:] if row["node"] in chosen]
    children: dict[int | None, list[MemoryNodeRow]] = {}
    for row in shown:
        children.setdefault(row["parent"], []).append(row)
    drawn: list[tuple[int, str, MemoryNodeRow]] = []
    labels: dict[int | None, tuple[int, str]] = {0: (0, "")}
    for row in shown:
        depth, above = labels[row["parent"]]
        label = f"{above}.{row['name']}" if above else row["name"]
        inside = children.get(row["node"], [])
        if len(inside) == 1 and inside[0]["bytes"] == row["bytes"]:
            labels[row["node"]] = (depth, label)
        else:
            labels[row["node"]] = (depth + 1, "")
            drawn.append((depth, label, row))
    return drawn
