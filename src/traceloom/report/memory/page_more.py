"""Parts of the page: memory that ran out, activations by module, the state of the allocator."""

from __future__ import annotations

from typing import Any

from traceloom.model import units
from traceloom.report.memory.chains import joined
from traceloom.report.names import allocator as called
from traceloom.report.table import Col
from traceloom.report.views.html.table import table
from traceloom.report.views.html.text import text

Row = dict[str, Any]
_MOST = 8  # times that are shown one by one


def ran_out(document: Row) -> str:
    """Where memory ran out, what was alive then, and what to try first."""
    entries = document["out_of_memory"]
    out = [_end(entry, k) for k, entry in enumerate(entries[:_MOST])]
    if len(entries) > _MOST:
        out.append(f'<p class="quiet">{len(entries) - _MOST} more stand in <code>-o memory.json</code>.</p>')
    return "".join(out)


def _end(entry: Row, number: int) -> str:
    rank = "" if entry["rank"] is None else f"rank {entry['rank']}: "
    request = "" if entry["asked_bytes"] is None else f"{units.size(entry['asked_bytes'])} were asked for, "
    step = "" if entry["step"] is None else f", in step {entry['step']}"
    parts = [f"<h3>{text(rank)}{text(request)}{units.size(entry['bytes'])} were alive{text(step)}</h3>"]
    if entry["where"]:
        parts.append(f'<p class="quiet">at <code>{text(entry["where"])}</code></p>')
    if entry["advice"]:
        columns = [
            Col("bytes", "Frees up to", "bytes"),
            Col("text", "What to try first"),
            Col("why", "Because"),
        ]
        why = {"bytes": "how much it frees is not known"}
        parts.append(table(f"advice-{number}", columns, entry["advice"], why, "What to try first"))
    columns = [
        Col("bytes", "Bytes", "bytes"),
        Col("fraction", "Share", "share"),
        Col("name", "Alive then", "name"),
    ]
    parts.append(table(f"alive-{number}", columns, joined(entry["tree"]), {}, "Alive when memory ran out"))
    if entry["stack"]:
        frames = [{"frame": frame} for frame in reversed(entry["stack"])]
        columns = [Col("frame", "Stack, the innermost frame first", "name")]
        parts.append(table(f"stack-{number}", columns, frames, {}, "Stack"))
    return "".join(parts)


def activations(memory: Row, key: str) -> str:
    """What checkpointing each module would free, and what computing it again costs."""
    rows = memory["activations"]
    if not rows:
        return '<p class="quiet">No activations are alive at this instant.</p>'
    device = any(row["device_ns"] for row in rows)
    columns = [
        Col("saved_bytes", "Would free", "bytes", "by checkpointing this module"),
        Col("bytes", "Holds", "bytes"),
        Col("device_ns" if device else "host_ns", "Computed again", "time", "its forward pass, once more"),
        Col("call_count", "Calls", "count"),
        Col("module", "Module", "name"),
    ]
    return table(key, columns, rows, {}, "Activations by module")


def allocator(memory: Row) -> str:
    """One line about what the allocator holds at the end and cannot use."""
    row = memory.get("allocator")
    if not row:
        return ""
    facts = [f"{units.size(row['allocated_bytes'])} allocated of {units.size(row['reserved_bytes'])} reserved"]
    if row["largest_free_bytes"] is not None:
        facts.append(
            f"largest free block {units.size(row['largest_free_bytes'])} of {units.size(row['free_bytes'])} free"
        )
    if row["split_bytes"]:
        facts.append(f"{units.size(row['split_bytes'])} free in split segments")
    if row["retries"]:
        facts.append(f"{units.count(row['retries'])} retries")
    if row["outside_bytes"] is not None:
        facts.append(f"{units.size(row['outside_bytes'])} in use outside this allocator")
    return f'<p class="quiet">Allocator of {text(called(memory))} at the end: {text(" · ".join(facts))}.</p>'
