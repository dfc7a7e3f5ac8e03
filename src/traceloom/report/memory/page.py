"""Whose memory it is, as a page of its own in the frame of the report's page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from traceloom.analyze.allocations.growth import LEAST_STEPS
from traceloom.model import units
from traceloom.report.memory import tables
from traceloom.report.memory.facts import growth_unknown
from traceloom.report.memory.picture import figure
from traceloom.report.names import allocator, rank_name
from traceloom.report.table import Col, Table
from traceloom.report.views.html import inputs
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.frame import framed, key_numbers, one_after_the_other, rank_choice
from traceloom.report.views.html.sections import drawn
from traceloom.report.views.html.text import text

if TYPE_CHECKING:
    from traceloom.report.documents import MemoryDocument
    from traceloom.report.documents.memory import MemoryMemoryRow, MemoryRankRow

MOST_RANKS = 8  # that are shown one by one: those with the highest peaks
_MOST_ENDS = 8  # times that memory ran out, which are shown one by one
Body = tuple[str, str, str, str]


def render(document: MemoryDocument) -> str:
    """The document as one HTML page that needs nothing but itself."""
    reasons = Reasons(document["absent"])
    ranks = document["ranks"]
    named = [(rank_name(entry, k), entry) for k, entry in enumerate(ranks)]
    highest = sorted(range(len(ranks)), key=lambda k: -max((m["peak_bytes"] for m in ranks[k]["memories"]), default=0))
    shown = [named[k] for k in sorted(highest[:MOST_RANKS])]  # one by one, in their own order
    numbers = ""
    if memories := [(entry, memory) for entry in ranks for memory in entry["memories"]]:
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
        allocations = f"after {units.counted(most['allocation_count'], 'allocation')}"
        shown_numbers = (
            ("Peak", units.size(most["peak_bytes"]), f"{allocator(most)}, {where}"),
            ("At the end", units.size(most["end_bytes"]), allocations),
            ("Told what it is for", units.share(attributed, whole), "of the bytes at the instant shown"),
            ("Grows", *growth),
        )
        numbers = key_numbers((label, value, "", more) for label, value, more in shown_numbers)
    name = str(document["name"])
    return framed(
        title=f"{document['sentence']} – {name}",
        name=name,
        ranks=rank_choice([rank for rank, _ in shown]),
        headline=f"<h1>{text(document['sentence'])}</h1>",
        numbers=numbers,
        footer=(
            f"<p>Traceloom {text(document['traceloom'])} · times count from {text(document['epoch_ns'])} ns</p>"
            "<p>Every allocation by name: <code>traceloom memory … -o allocations.csv --all</code>; the same numbers "
            "for programs: <code>-o memory.json</code></p>"
        ),
        **one_after_the_other(_sections(document, shown, reasons)),
    )


def _sections(document: MemoryDocument, shown: list[tuple[str, MemoryRankRow]], reasons: Reasons) -> Iterator[Body]:
    if document["out_of_memory"]:
        body = "".join(_ran_out(document, reasons))
        yield "out-of-memory", "Out of memory", "Who held it when it ran out, and what to try.", body
    if not shown:
        yield "memory", "Memory", "", reasons.line("ranks", "Memory")
    else:
        at = str(document["at"])
        at = "the peak" if at == "peak" else units.duration(int(at)) if at.isdigit() else at
        why = reasons.columns("memories[*].largest")
        every: list[tuple[str, str, str, Callable[[MemoryMemoryRow, MemoryRankRow, str], str]]] = [
            ("over-time", "Over time", "Click the curve, or use the arrow keys on it.",
             lambda memory, entry, _key: figure(
                 memory["curve"], entry["steps"], label=f"{allocator(memory)} over time",
                 chosen_ns=None if document["at"] == "peak" else memory["instant"]["time_ns"],
             )
             + (f'<p class="quiet">{text(state)}.</p>' if (state := tables.state_of_allocator(memory)) else "")),
            ("scopes", "Scopes", f"Who holds what at {text(at)}; each row holds the indented ones below it.",
             lambda memory, _entry, key: drawn(tables.scopes(memory, key), reasons)),
            ("modules", "Modules", "The part of the model: parameters with their gradients and states too.",
             lambda memory, _entry, key: drawn(tables.modules(memory, key), reasons)),
            ("categories", "Categories", "What it is for, and how that is known.",
             lambda memory, _entry, key: drawn(tables.categories(memory, key), reasons)),
            ("largest", "Largest allocations", f"The largest blocks alive at {text(at)}.",
             lambda memory, _entry, key: drawn(tables.largest(memory, key, why), reasons)),
            ("growth", "Growth", "Made in a step and never freed, step after step: a leak, or a cache.",
             lambda memory, entry, key: _growth(memory, entry, key, reasons)),
            ("activations", "Activations", "What checkpointing a module would free, and cost.",
             lambda memory, _entry, key: drawn(replace(tables.activations(memory, key), note=""), reasons)
             if memory["activations"] else '<p class="quiet">No activations are alive at this instant.</p>'),
        ]  # fmt: skip
        for key, title, note, make in every:
            parts = []
            for position, (name, entry) in enumerate(shown):
                only = "" if len(shown) == 1 else f' data-of-rank="{position}"'
                memories = tables.worth_showing(entry["memories"])
                bodies = (
                    (f"<h3>{text(allocator(m))}</h3>" if len(memories) > 1 else "")
                    + make(m, entry, f"{key}-{position}-{k}")
                    for k, m in enumerate(memories)
                )
                parts.append(f'<div{only} data-rank-name="{text(name)}">{"".join(bodies)}</div>')
            yield key, title, note, "".join(parts)
        lives = [drawn(tables.lifetimes(entry, f"lifetimes-{k}"), reasons) for k, (_, entry) in enumerate(shown)]
        if len(lives) > 1:
            lives = [f'<div data-of-rank="{k}">{body}</div>' for k, body in enumerate(lives)]
        yield "lifetimes", "Lifetimes", "How long blocks live, of those made and freed here.", "".join(lives)
    if len(document["ranks"]) > 1:
        job = "".join(f'<p class="quiet">{text(sentence)}</p>' for sentence in tables.job(document))
        yield "ranks", "Ranks", "The peak of every memory.", job + drawn(tables.ranks(document), reasons)
    yield "data", "Data", "What to know about the data.", inputs.notices(document["notices"], reasons)


def _growth(memory: MemoryMemoryRow, entry: MemoryRankRow, key: str, reasons: Reasons) -> str:
    if (why := growth_unknown(entry)) is not None:
        return f'<p class="quiet">What grows from step to step cannot be determined: {text(why)}.</p>'
    grown = tables.growth(memory, key, reasons.columns("memories[*].growth"))
    if not grown.rows:
        return '<p class="quiet">Nothing grows from step to step.</p>'
    return drawn(replace(grown, note=""), reasons)


def _ran_out(document: MemoryDocument, reasons: Reasons) -> Iterator[str]:
    """Where memory ran out, what was alive then, and what to try first."""
    entries = document["out_of_memory"]
    for number, entry in enumerate(entries[:_MOST_ENDS]):
        rank = "" if entry["rank"] is None else f"rank {entry['rank']}: "
        request = "" if entry["asked_bytes"] is None else f"{units.size(entry['asked_bytes'])} were asked for, "
        step = "" if entry["step"] is None else f", in step {entry['step']}"
        yield f"<h3>{text(rank)}{text(request)}{units.size(entry['bytes'])} were alive{text(step)}</h3>"
        if entry["where"]:
            yield f'<p class="quiet">at <code>{text(entry["where"])}</code></p>'
        if entry["advice"]:
            columns = [Col("bytes", "Frees up to", "bytes"), Col("text", "What to try first"), Col("why", "Because")]
            unknown = {"bytes": "how much it frees is not known"}
            advice = Table(f"advice-{number}", "What to try first", columns, entry["advice"], unknown=unknown)
            yield drawn(advice, reasons)
        yield drawn(tables.alive(entry, f"alive-{number}"), reasons)
        if entry["stack"]:
            frames = [{"frame": frame} for frame in reversed(entry["stack"])]
            columns = [Col("frame", "Stack, the innermost frame first", "name")]
            yield drawn(Table(f"stack-{number}", "Stack", columns, frames), reasons)
    if len(entries) > _MOST_ENDS:
        yield f'<p class="quiet">{len(entries) - _MOST_ENDS} more stand in <code>-o memory.json</code>.</p>'
