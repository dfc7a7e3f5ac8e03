"""Parts of the terminal's view: memory that ran out, the state of the allocator, activations by module."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.memory.options import MemoryOptions
from traceloom.report.names import rank_label, short
from traceloom.report.views.terminal.bars import plain
from traceloom.report.views.terminal.columns import Column, heading, lines

Row = dict[str, Any]
_BAR = 12
_COLOR = "#c8452d"
_DEEPEST = 3
_MOST = 3  # ends that are shown; more ranks mostly say the same


def ran_out(document: Row, options: MemoryOptions, width: int) -> Iterator[Text]:
    """Where memory ran out, what was alive then and what to try first, the most useful first."""
    entries = document["out_of_memory"]
    for entry in entries[:_MOST]:
        name = "Out of memory" if entry["rank"] is None else f"Out of memory, {rank_label(entry['rank'])}"
        facts = []
        if entry["asked_bytes"] is not None:
            facts.append(f"{units.size(entry['asked_bytes'])} were asked for")
        facts.append(f"{units.size(entry['bytes'])} were alive")
        if entry["step"] is not None:
            facts.append(f"step {entry['step']}")
        yield from heading(name, " · ".join(facts), width)
        if entry["where"]:
            yield from wrapped(f"at {entry['where']}", width)
        for device in entry["devices"]:
            yield from wrapped(_device(device), width)
        yield from _tree(entry["tree"], options, width)
        yield from _advice(entry["advice"], width)
    if len(entries) > _MOST:
        yield from wrapped(f"... and {len(entries) - _MOST} more times; --rank shows each, --json all", width)


def _device(row: Row) -> str:
    number = "" if row["device"] is None or row["device"] < 0 else f":{row['device']}"
    retries = f", {units.count(row['retries'])} retries of the allocator before" if row["retries"] else ""
    return (
        f"{row['device_type']}{number}: {units.size(row['allocated_bytes'])} allocated of "
        f"{units.size(row['reserved_bytes'])} reserved, {units.size(row['free_bytes'])} of "
        f"{units.size(row['total_bytes'])} free, {units.size(row['outside_bytes'])} outside this allocator{retries}"
    )


def _tree(rows: list[Row], options: MemoryOptions, width: int) -> Iterator[Text]:
    """The heaviest branches, down to modules."""
    shown = [row for row in rows[1:] if row["depth"] <= (options.depth or _DEEPEST)]
    kept = {row["node"] for row in sorted(shown, key=lambda row: -row["bytes"])[: options.top]}
    shown = [row for row in shown if row["node"] in kept]
    cells: list[list[str | Text]] = [
        [units.size(row["bytes"]), units.share(row["fraction"], 1), plain(row["fraction"], _BAR, _COLOR)]
        for row in shown
    ]
    columns = [Column("bytes"), Column("share"), Column("", right=False)]

    def name(i: int, room: int) -> str:
        indent = "  " * int(shown[i]["depth"] - 1)
        return indent + short(shown[i]["name"], max(room - len(indent), 8))

    yield from lines(columns, cells, ("alive then", name), width)


def _advice(rows: list[Row], width: int) -> Iterator[Text]:
    if not rows:
        return
    yield Text("")
    yield Text(" What to try first", "bold")
    for number, row in enumerate(rows, start=1):
        frees = "" if row["bytes"] is None else f" – frees up to {units.size(row['bytes'])}"
        sentence = f"{number}. {row['text']}{frees} ({row['why']})"
        first, *rest = textwrap.wrap(harmless(sentence), width - 5, break_on_hyphens=False)
        yield Text("  " + first)
        for line in rest:
            yield Text("     " + line)


def allocator(memory: Row, width: int) -> Iterator[Text]:
    """What the allocator holds at the end and cannot use."""
    row = memory["allocator"]
    if row is None:
        return
    size = {key: units.size(row[key]) for key in row if key.endswith("_bytes")}
    facts = [f"at the end {size['allocated_bytes']} allocated of {size['reserved_bytes']} reserved"]
    if row["largest_free_bytes"] is not None:
        facts.append(f"largest free block {size['largest_free_bytes']} of {size['free_bytes']} free")
    if row["split_bytes"]:
        facts.append(f"{size['split_bytes']} free in split segments")
    if row["retries"]:
        facts.append(f"{units.count(row['retries'])} retries")
    if row["outside_bytes"] is not None:
        facts.append(f"{size['outside_bytes']} in use outside this allocator")
    yield from wrapped("Allocator: " + " · ".join(facts), width)


def activations(memory: Row, options: MemoryOptions, width: int) -> Iterator[Text]:
    """What checkpointing modules would save and cost."""
    rows = memory["activations"][: max(options.top // 2, 1)]
    if not rows:
        return
    yield from heading("Activations by module", "checkpointing a module frees its own, and computes it again", width)
    device = any(row["device_ns"] for row in rows)
    cells: list[list[str | Text]] = [
        [
            units.size(row["saved_bytes"]),
            units.duration(row["device_ns"] if device else row["host_ns"]),
            units.count(row["call_count"]),
        ]
        for row in rows
    ]
    columns = [Column("would free"), Column("computed again" + (" (GPU)" if device else "")), Column("calls")]
    yield from lines(columns, cells, ("module", lambda i, room: short(rows[i]["module"], room)), width)


def wrapped(words: str, width: int) -> Iterator[Text]:
    """Prose, indented by one."""
    for part in textwrap.wrap(harmless(words), width - 2, break_on_hyphens=False):
        yield Text(" " + part)
