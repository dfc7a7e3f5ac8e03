"""The tables about one memory, which the page and the terminal draw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from traceloom.model import units
from traceloom.report.memory.chains import joined
from traceloom.report.names import allocator, rank_name
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents import MemoryDocument
    from traceloom.report.documents.memory import MemoryEndRow, MemoryMemoryRow, MemoryRankRow

HELD = (Col("bytes", "Bytes", "bytes"), Col("fraction", "Share", "share"), Col("block_count", "Blocks", "count"))
_SMALLEST = 1000  # a memory with less than this part of the largest is not worth a picture


def worth_showing(memories: list[MemoryMemoryRow]) -> list[MemoryMemoryRow]:
    """The memories of a rank that are worth a screen, the one with the highest peak first."""
    ordered = sorted(memories, key=lambda memory: -memory["peak_bytes"])
    return [memory for memory in ordered if memory["peak_bytes"] * _SMALLEST >= ordered[0]["peak_bytes"]]


def scopes(memory: MemoryMemoryRow, key: str) -> Table:
    """Who holds what, each row with the indented ones below it."""
    own = Col("self_bytes", "Its own", "bytes", "held by no row below it")
    columns = [*HELD, own, Col("name", "Scope and operator", "name")]
    return Table(key, "Memory by scope", columns, joined(memory["tree"]))


def modules(memory: MemoryMemoryRow, key: str) -> Table:
    """The part of the model."""
    return Table(key, "Memory by module", [*HELD, Col("name", "Module", "name")], memory["modules"])


def categories(memory: MemoryMemoryRow, key: str) -> Table:
    """What it is for, and how that is known."""
    hint = "census: the owner was asked; inferred: from the part of the step that made and freed it"
    columns = [Col("name", "Category"), *HELD, Col("evidence", "Evidence", "text", hint)]
    rows = [{**row, "name": row["category"].replace("_", " ")} for row in memory["categories"]]
    return Table(key, "Memory by category", columns, rows)


def largest(memory: MemoryMemoryRow, key: str, why: Mapping[str, str] | None = None) -> Table:
    """The largest blocks alive at the instant."""
    rows = [
        {
            **row,
            "lifetime_ns": None if row["time_ns"] is None or row["end_ns"] is None else row["end_ns"] - row["time_ns"],
            "what": row["category"].replace("_", " "),
        }
        for row in memory["largest"]
    ]
    columns = [
        Col("bytes", "Bytes", "bytes"),
        Col("what", "Category"),
        Col("step", "Step", "count"),
        Col("time_ns", "From", "time", "after the start of the recording", narrow=False),
        Col("lifetime_ns", "Lives", "time", narrow=False),
        *([Col("owner", "Owner", "name", narrow=False)] if any(row["owner"] for row in rows) else []),
        Col("name", "Name", "name"),
    ]
    unknown = {**(why or {}), "lifetime_ns": "it was not made and freed in the recording"}
    return Table(key, "Largest allocations", columns, rows, unknown=unknown)


def growth(memory: MemoryMemoryRow, key: str, why: Mapping[str, str] | None = None) -> Table:
    """What is made in a step and never freed, step after step."""
    columns = [
        Col("bytes_per_step", "Per step", "bytes"),
        Col("step_count", "Steps", "count", "that left something"),
        Col("bytes", "So far", "bytes"),
        Col("block_count", "Blocks", "count", narrow=False),
        Col("full_at_step", "Full at step", "count"),
        Col("site", "Allocated by", "name"),
        Col("stack", "Stack", "name", narrow=False),
    ]
    note = "made in a step and never freed: a leak, or a cache"
    return Table(key, "Grows with every step", columns, memory["growth"], note=note, unknown=why)


def activations(memory: MemoryMemoryRow, key: str) -> Table:
    """What checkpointing each module would free, and what computing it again costs."""
    rows = memory["activations"]
    device = any(row["device_ns"] for row in rows)
    columns = [
        Col("saved_bytes", "Would free", "bytes", "by checkpointing this module"),
        Col("bytes", "Holds", "bytes"),
        Col("device_ns" if device else "host_ns", "Computed again", "time", "its forward pass, once more"),
        Col("call_count", "Calls", "count"),
        Col("module", "Module", "name"),
    ]
    note = "checkpointing a module frees its own, and computes it again"
    return Table(key, "Activations by module", columns, rows, note=note)


def lifetimes(entry: MemoryRankRow, key: str) -> Table:
    """How long the blocks of one rank live, of those made and freed in the recording."""
    columns = [
        Col("life", "Lifetime"),
        Col("block_count", "Blocks", "count"),
        Col("bytes", "Bytes", "bytes", "summed over all of them"),
    ]
    rows = [
        {**row, "life": f"{units.duration(row['from_ns'])} to {units.duration(row['to_ns'])}"}
        for row in entry["lifetimes"]
    ]
    return Table(key, "Lifetimes", columns, rows)


def ranks(document: MemoryDocument) -> Table:
    """The peak of every memory of every rank."""
    rows = [
        {**memory, "rank": rank_name(entry, k), "where": allocator(memory)}
        for k, entry in enumerate(document["ranks"])
        for memory in entry["memories"]
    ]
    columns = [
        Col("rank", "Rank"),
        Col("where", "Memory"),
        Col("peak_bytes", "Peak", "bytes"),
        Col("peak_step", "In step", "count"),
        Col("end_bytes", "At the end", "bytes"),
        Col("allocation_count", "Allocations", "count"),
        Col("free_count", "Frees", "count"),
    ]
    return Table("rank-table", "Peaks by rank", columns, rows, unknown={"peak_step": "the peak is outside all steps"})


def alive(entry: MemoryEndRow, key: str) -> Table:
    """What was alive when memory ran out."""
    columns = [Col("bytes", "Bytes", "bytes"), Col("fraction", "Share", "share"), Col("name", "Alive then", "name")]
    return Table(key, "Alive when memory ran out", columns, joined(entry["tree"]))


def job(document: MemoryDocument) -> Iterator[str]:
    """A sentence for each kind of memory that several ranks have."""
    for row in document["job"]:
        if row["count"] > 1:
            least, most = units.size(row["smallest_peak_bytes"]), units.size(row["largest_peak_bytes"])
            yield (
                f"{row['count']} × {row['device_type']}: peaks from {least} to {most}, "
                f"{units.size(row['sum_of_peaks_bytes'])} in all; the largest is {row['imbalance']:.2f} × the mean."
            )


def state_of_allocator(memory: MemoryMemoryRow) -> str:
    """What the allocator holds at the end and cannot use; empty where that is not known."""
    row = memory["allocator"]
    if not row:
        return ""
    size = units.size
    facts = [f"at the end {size(row['allocated_bytes'])} allocated of {size(row['reserved_bytes'])} reserved"]
    if row["largest_free_bytes"] is not None:
        facts.append(f"largest free block {size(row['largest_free_bytes'])} of {size(row['free_bytes'])} free")
    if row["split_bytes"]:
        facts.append(f"{size(row['split_bytes'])} free in split segments")
    if row["retries"]:
        facts.append(f"{units.counted(row['retries'], 'retry')}")
    if row["outside_bytes"] is not None:
        facts.append(f"{size(row['outside_bytes'])} in use outside this allocator")
    return "Allocator: " + " · ".join(facts)
