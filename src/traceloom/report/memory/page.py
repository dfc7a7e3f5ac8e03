"""Whose memory it is, as a page of its own in the frame of the report's page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from traceloom.analyze.allocations.growth import LEAST_STEPS
from traceloom.model import units
from traceloom.report.memory.chains import joined
from traceloom.report.memory.facts import growth_unknown
from traceloom.report.memory.page_more import activations, ran_out
from traceloom.report.memory.page_more import allocator as state_of_allocator
from traceloom.report.memory.picture import figure
from traceloom.report.names import allocator, rank_name
from traceloom.report.table import Col
from traceloom.report.views.html import inputs
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.frame import framed, one_after_the_other
from traceloom.report.views.html.table import table
from traceloom.report.views.html.text import text

Row = dict[str, Any]
MOST_RANKS = 8  # that are shown one by one: those with the highest peaks
_SMALLEST = 1000  # a memory with less than this part of the largest has no picture
Body = tuple[str, str, str, str]


def render(document: Row) -> str:
    """The document as one HTML page that needs nothing but itself."""
    reasons = Reasons(document)
    ranks = document["ranks"]
    named = [(rank_name(entry, k), entry) for k, entry in enumerate(ranks)]
    highest = sorted(range(len(ranks)), key=lambda k: -max((m["peak_bytes"] for m in ranks[k]["memories"]), default=0))
    shown = [named[k] for k in sorted(highest[:MOST_RANKS])]  # one by one, in their own order
    choice = ""
    if len(shown) > 1:
        options = "".join(f'<option value="{k}">{text(rank)}</option>' for k, (rank, _) in enumerate(shown))
        choice = f'<label class="rank">Show <select id="rank" aria-label="Rank">{options}</select></label>'
    name = str(document["name"])
    return framed(
        title=f"{document['sentence']} – {name}",
        name=name,
        ranks=choice,
        headline=f"<h1>{text(document['sentence'])}</h1>",
        numbers=_numbers(document),
        footer=(
            f"<p>Traceloom {text(document['traceloom'])} · times count from {text(document['epoch_ns'])} ns</p>"
            "<p>Every allocation by name: <code>traceloom memory … -o allocations.csv --all</code>; the same numbers "
            "for programs: <code>-o memory.json</code></p>"
        ),
        **one_after_the_other(_sections(document, shown, reasons)),
    )


def _numbers(document: Row) -> str:
    memories = [(entry, memory) for entry in document["ranks"] for memory in entry["memories"]]
    if not memories:
        return ""
    entry, most = max(memories, key=lambda pair: int(pair[1]["peak_bytes"]))
    attributed = sum(
        row["bytes"] for row in most["categories"] if row["category"] not in ("unknown", "before_recording")
    )
    whole = max(sum(row["bytes"] for row in most["categories"]), 1)
    where = "outside all steps" if most["peak_step"] is None else f"in step {most['peak_step']}"
    grows = sum(row["bytes_per_step"] for row in most["growth"])
    growth = (units.size(round(grows)), "per step") if grows else ("nothing", "from step to step")
    if growth_unknown(entry) is not None:
        growth = ("unknown", f"without {LEAST_STEPS + 1} steps")
    shown = [
        ("Peak", units.size(most["peak_bytes"]), f"{allocator(most)}, {where}"),
        ("At the end", units.size(most["end_bytes"]), f"after {units.count(most['allocation_count'])} allocations"),
        ("Told what it is for", units.share(attributed, whole), "of the bytes at the instant shown"),
        ("Grows", *growth),
    ]
    items = "".join(
        f"<div><dt>{text(label)}</dt><dd><b>{text(value)}</b><span>{text(more)}</span></dd></div>"
        for label, value, more in shown
    )
    return f'<dl class="key">{items}</dl>'


def _sections(document: Row, shown: list[tuple[str, Row]], reasons: Reasons) -> Iterator[Body]:
    if document["out_of_memory"]:
        yield "out-of-memory", "Out of memory", "Who held it when it ran out, and what to try.", ran_out(document)
    if not shown:
        yield "memory", "Memory", "", reasons.line("ranks", "Memory")
    else:
        at = str(document["at"])
        at = "the peak" if at == "peak" else units.duration(int(at)) if at.isdigit() else at
        every = [
            ("over-time", "Over time", "Click the curve, or use the arrow keys on it.", _curves),
            ("scopes", "Scopes", f"Who holds what at {text(at)}; each row holds the indented ones below it.", _scopes),
            ("modules", "Modules", "The part of the model: parameters with their gradients and states too.", _modules),
            ("categories", "Categories", "What it is for, and how that is known.", _categories),
            ("largest", "Largest allocations", f"The largest blocks alive at {text(at)}.", _largest),
            ("growth", "Growth", "Made in a step and never freed, step after step: a leak, or a cache.", _growth),
            ("activations", "Activations", "What checkpointing a module would free, and cost.", _activations),
        ]  # fmt: skip
        for key, title, note, make in every:
            parts = []
            for position, (name, entry) in enumerate(shown):
                only = "" if len(shown) == 1 else f' data-of-rank="{position}"'
                memories = _worth(entry["memories"])
                drawn = (
                    (f"<h3>{text(allocator(m))}</h3>" if len(memories) > 1 else "")
                    + make(m, entry, f"{key}-{position}-{k}", document, reasons)
                    for k, m in enumerate(memories)
                )
                parts.append(f'<div{only} data-rank-name="{text(name)}">{"".join(drawn)}</div>')
            yield key, title, note, "".join(parts)
        yield "lifetimes", "Lifetimes", "How long blocks live, of those made and freed here.", _lifetimes(shown)
    if len(document["ranks"]) > 1:
        yield "ranks", "Ranks", "The peak of every memory.", _ranks(document)
    yield "data", "Data", "What to know about the data.", inputs.notices(document, reasons)


def _worth(memories: list[Row]) -> list[Row]:
    ordered = sorted(memories, key=lambda memory: -memory["peak_bytes"])
    return [memory for memory in ordered if memory["peak_bytes"] * _SMALLEST >= ordered[0]["peak_bytes"]]


def _curves(memory: Row, entry: Row, _key: str, document: Row, _reasons: Reasons) -> str:
    picture = figure(memory, entry["steps"], label=f"{allocator(memory)} over time", at=document["at"])
    return picture + state_of_allocator(memory)


_HELD = (
    Col("bytes", "Bytes", "bytes"),
    Col("fraction", "Share", "share"),
    Col("block_count", "Blocks", "count"),
)


def _scopes(memory: Row, _entry: Row, key: str, _document: Row, _reasons: Reasons) -> str:
    rows = joined(memory["tree"])
    columns = [
        *_HELD,
        Col("self_bytes", "Its own", "bytes", "held by no row below it"),
        Col("name", "Scope and operator", "name"),
    ]
    return table(key, columns, rows, {}, "Memory by scope")


def _modules(memory: Row, _entry: Row, key: str, _document: Row, _reasons: Reasons) -> str:
    return table(key, [*_HELD, Col("name", "Module", "name")], memory["modules"], {}, "Memory by module")


def _categories(memory: Row, _entry: Row, key: str, _document: Row, _reasons: Reasons) -> str:
    rows = [{**row, "name": row["category"].replace("_", " ")} for row in memory["categories"]]
    hint = "census: the owner was asked; inferred: from the part of the step that made and freed it"
    columns = [Col("name", "Category"), *_HELD, Col("evidence", "Known by", "text", hint)]
    return table(key, columns, rows, {}, "Memory by category")


def _largest(memory: Row, _entry: Row, key: str, _document: Row, reasons: Reasons) -> str:
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
        Col("time_ns", "From", "time", "after the start of the recording"),
        Col("lifetime_ns", "Lives", "time"),
        *([Col("owner", "Owner", "name")] if any(row["owner"] for row in rows) else []),
        Col("name", "Name", "name"),
    ]
    why = {**reasons.columns("memories[*].largest"), "lifetime_ns": "it was not made and freed in the recording"}
    return table(key, columns, rows, why, "Largest allocations")


def _growth(memory: Row, entry: Row, key: str, _document: Row, reasons: Reasons) -> str:
    if (why := growth_unknown(entry)) is not None:
        return f'<p class="quiet">What grows from step to step cannot be told: {text(why)}.</p>'
    if not memory["growth"]:
        return '<p class="quiet">Nothing grows from step to step.</p>'
    columns = [
        Col("bytes_per_step", "Per step", "bytes"),
        Col("step_count", "Steps", "count", "that left something"),
        Col("bytes", "So far", "bytes"),
        Col("block_count", "Blocks", "count"),
        *([Col("full_at_step", "Full at step", "count")] if "full_at_step" in memory["growth"][0] else []),
        Col("site", "Allocated by", "name"),
        *([Col("stack", "Stack", "name")] if "stack" in memory["growth"][0] else []),
    ]
    return table(key, columns, memory["growth"], reasons.columns("memories[*].growth"), "Growth")


def _activations(memory: Row, _entry: Row, key: str, _document: Row, _reasons: Reasons) -> str:
    return activations(memory, key)


def _lifetimes(shown: list[tuple[str, Row]]) -> str:
    columns = [
        Col("life", "Lifetime"),
        Col("block_count", "Blocks", "count"),
        Col("bytes", "Bytes", "bytes", "summed over all of them"),
    ]
    out = []
    for position, (_, entry) in enumerate(shown):
        rows = [
            {**row, "life": f"{units.duration(row['from_ns'])} to {units.duration(row['to_ns'])}"}
            for row in entry["lifetimes"]
        ]
        drawn = table(f"lifetimes-{position}", columns, rows, {}, "Lifetimes")
        out.append(drawn if len(shown) == 1 else f'<div data-of-rank="{position}">{drawn}</div>')
    return "".join(out)


def _ranks(document: Row) -> str:
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
    job = "".join(
        f'<p class="quiet">{row["count"]} × {text(row["device_type"])}: {units.size(row["sum_of_peaks_bytes"])} '
        f"in all; the largest peak is {row['imbalance']:.2f} × the mean.</p>"
        for row in document["job"]
        if row["count"] > 1
    )
    return job + table("rank-table", columns, rows, {"peak_step": "the peak is outside all steps"}, "Peaks by rank")
