"""The memory document: what `traceloom memory` knows of a run, as one JSON object.

Its keys are described in docs/reference/memory-json.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from traceloom import __version__
from traceloom.analyze.allocations import Explained, answers
from traceloom.analyze.allocations.answers import Allocations
from traceloom.analyze.allocations.blocks import Blocks
from traceloom.analyze.allocations.holders import sums_by
from traceloom.analyze.allocations.lifetimes import lifetimes
from traceloom.analyze.allocations.partitions import BEFORE
from traceloom.errors import UsageError
from traceloom.files import with_addresses
from traceloom.model import Notice, Session, Trace, units
from traceloom.model.notice import worst_first
from traceloom.model.snapshot import Snapshot
from traceloom.report.absent import Absent
from traceloom.report.memory import facts, of_timeline, ran_out
from traceloom.report.memory.curve import curve, steps
from traceloom.report.memory.options import MemoryOptions
from traceloom.report.memory.sources import Sources, of_session

if TYPE_CHECKING:
    from traceloom.report.documents import MemoryDocument
    from traceloom.report.documents.memory import MemoryCurveRow, MemoryEndRow, MemoryMemoryRow, MemoryRankRow

FORMAT = "traceloom-memory"
VERSION = 1
REASONS = {
    "ranks": "allocations were not recorded (record with --memory, or profile with profile_memory=True)",
    "memories[*].reserved_at_peak_bytes": "the allocator does not say what it has reserved",
    "memories[*].capacity_bytes": "the recording does not say how much memory the device has",
    "memories[*].allocator": "neither an allocator's snapshot nor the recorder tells (on a GPU: record with --memory)",
    "memories[*].largest[*].owner": "no census recorded who owned it",
    "memories[*].largest[*].time_ns": "it was there before the recording",
    "memories[*].largest[*].end_ns": "it was alive when the recording ended, or longer",
    "memories[*].largest[*].step": "it was made outside all steps, or before the recording",
    "memories[*].growth[*].full_at_step": "the recording does not say how much memory the device has",
    "memories[*].curve.stacks": "Python stacks were not recorded",
    "memories[*].growth[*].stack": "Python stacks were not recorded (record with --stacks)",
    "out_of_memory": "memory did not run out, or nothing was recorded when it did",
}


class HeldMemory(NamedTuple):
    """One memory at an instant.

    Attributes:
        totals: Of the whole recording.
        tree: Who holds what, `holders.TREE`.
        categories: The same by what it is for: category, evidence, bytes, block_count, fraction.
        modules: The same by module: name, bytes, block_count, fraction.
        growth: What grows from step to step, `growth.GROWTH`.
        curve: Levels over time.
    """

    totals: facts.MemoryTotals
    tree: pl.DataFrame
    categories: pl.DataFrame
    modules: pl.DataFrame
    growth: pl.DataFrame
    curve: MemoryCurveRow


def build(session: Session, options: MemoryOptions | None = None) -> MemoryDocument:
    """The document of one run, with the files about memory that lie beside its traces; see `document_of`."""
    return document_of(of_session(session), options)


def document_of(sources: Sources, options: MemoryOptions | None = None) -> MemoryDocument:
    """The document of everything that tells of memory.

    Raises:
        UsageError: slugs `no-such-rank`, `no-such-step`, `bad-instant`.
    """
    options = options or MemoryOptions()
    sources = sources.of_ranks(options.ranks)
    epoch_ns = sources.epoch_ns
    absent = Absent(epoch_ns, REASONS)
    ranks: list[MemoryRankRow] = []
    ends: list[MemoryEndRow] = []
    notices = sources.all_notices()
    for explained in sources.explained(full_op_names=options.full_op_names):
        entry, rank_notices = rank_entry(explained, options, absent, sources.snapshot_of(explained.trace))
        ranks.append(entry)
        ends += ran_out.of_blocks(explained, sources, epoch_ns)
        notices += [notice.of_rank(explained.trace.rank) for notice in rank_notices]
    ranks += [of_timeline.entry(timeline, options.at, absent) for timeline in sources.timelines]
    ends = ran_out.of_reports(sources, ranks, epoch_ns) + ends
    for name, rows in (("ranks", ranks), ("out_of_memory", ends)):
        if not rows:
            absent.say(name)
    peaks_of_kind: dict[str, list[int]] = {}
    for entry in ranks:
        for memory in entry["memories"]:
            peaks_of_kind.setdefault(memory["device_type"], []).append(memory["peak_bytes"])
    # Where memory ran out, if it did; the peak, and who holds most of it
    shortage = ""
    if ends:
        first = ends[0]
        when = "" if first["step"] is None else f" in step {first['step']}"
        rank = f" on rank {first['rank']}" if first["rank"] is not None and len(ends) > 1 else ""
        request = "" if first["asked_bytes"] is None else f" when {units.size(first['asked_bytes'])} were asked for"
        shortage = f"Memory ran out{when}{rank}{request}, beside {units.size(first['bytes'])} that were alive."
    if not any(entry["memories"] for entry in ranks):
        sentence = shortage or "No allocations were recorded."
    else:
        entry, memory = max(((e, m) for e in ranks for m in e["memories"]), key=lambda pair: pair[1]["peak_bytes"])
        where = {"cpu": "the CPU", "device": "the device"}.get(memory["device_type"], str(memory["device_type"]))
        if memory["device"] is not None and memory["device"] >= 0:
            where += f":{memory['device']}"
        where += f" of rank {entry['rank']}" if len(ranks) > 1 and entry["rank"] is not None else ""
        when = "" if memory["peak_step"] is None else f" in step {memory['peak_step']}"
        kinds = memory["categories"][:2]
        whole = max(sum(kind["bytes"] for kind in memory["categories"]), 1)
        held = " and ".join(
            f"{kind['category'].replace('_', ' ')} {units.share(kind['bytes'], whole)}" for kind in kinds
        )
        growth = memory["growth"][:1]
        leak = (
            f"; {growth[0]['site']} leaves {units.size(round(growth[0]['bytes_per_step']))} per step" if growth else ""
        )
        before = f"{shortage} " if shortage else ""
        where = f"The {where[4:]}" if where.startswith("the ") else where
        sentence = f"{before}{where} holds at most {units.size(memory['peak_bytes'])}{when}: {held}{leak}."
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": sources.name,
        "epoch_ns": str(epoch_ns),
        "sentence": sentence,
        "by": options.by,
        "at": options.at,
        "ranks": ranks,
        "out_of_memory": ends,
        "job": [  # over ranks: the sum and the spread of the peaks, by kind of memory
            {
                "device_type": kind,
                "count": len(peaks),
                "sum_of_peaks_bytes": sum(peaks),
                "largest_peak_bytes": max(peaks),
                "smallest_peak_bytes": min(peaks),
                "imbalance": max(peaks) * len(peaks) / max(sum(peaks), 1),
            }
            for kind, peaks in sorted(peaks_of_kind.items())
        ],
        "notices": [notice.to_dict() for notice in worst_first(tuple(notices))],
        "absent": absent.to_list(),
    }


def rank_entry(
    explained: Explained, options: MemoryOptions, absent: Absent, snapshot: Snapshot | None = None
) -> tuple[MemoryRankRow, tuple[Notice, ...]]:
    """One rank: every memory at its instant, and the notices about the pairing."""
    trace = explained.trace
    blocks = explained.named.blocks
    rows = {pool: row_of(options.at, trace, blocks, pool) for pool in range(len(blocks.pools))}
    allocations = answers(explained, rows)
    names, number = explained.by(options.by, options.depth)
    memories: list[MemoryMemoryRow] = []
    for pool, row in rows.items():
        held = _held(explained, allocations, (pool, row), absent)
        in_pool = pl.col("pool") == pool
        divided = sums_by(
            explained.named, (blocks.pool == pool) & blocks.alive(row), number, pl.Series(names, dtype=pl.String)
        )
        totals = held.totals
        if totals["unseen_bytes"]:
            name = "before_recording" if "before_recording" in names else BEFORE
            divided = _with_unseen(divided, name, totals["unseen_bytes"])
        time_ns = trace.start_ns if row < 0 else int(trace.allocations["time_ns"][row])
        largest = allocations.largest.filter(in_pool).drop("pool").with_columns(pl.col("end_ns") - absent.epoch_ns)
        capacity = facts.capacity(trace, totals)
        memories.append(
            {
                **totals,
                "instant": {"time_ns": time_ns - absent.epoch_ns, "bytes": int(divided["bytes"].sum())},
                "tree": absent.rows(held.tree, "memories[*].tree"),
                "categories": absent.rows(held.categories, "memories[*].categories"),
                "parts": absent.rows(divided, "memories[*].parts"),
                "largest": absent.rows(largest, "memories[*].largest"),
                "modules": absent.rows(held.modules, "memories[*].modules"),
                "curve": held.curve,
                # What is known beyond its blocks
                "capacity_bytes": absent.value(capacity, "memories[*].capacity_bytes"),
                "growth": facts.growing(explained, held.growth, totals, capacity, absent),
                "activations": facts.activations(explained, pool, row, absent),
                "allocator": absent.value(facts.allocator(trace, totals, snapshot), "memories[*].allocator"),
            }
        )
    entry: MemoryRankRow = {
        "rank": absent.value(trace.rank, "ranks[*].rank"),
        "path": with_addresses(trace.meta.path),
        "memories": memories,
        "steps": steps(explained, absent),
        "lifetimes": absent.rows(lifetimes(blocks), "ranks[*].lifetimes"),
    }
    if (why := facts.growth_unknown(entry)) is not None:
        absent.say("memories[*].growth", f"what grows from step to step cannot be determined: {why}")
    return entry, allocations.notices


def holders(explained: Explained, absent: Absent) -> list[HeldMemory]:
    """Every memory of one rank at its peak."""
    allocations = answers(explained, most=0)
    peaks = allocations.pools.select("pool", "peak_row").rows()
    return [_held(explained, allocations, at, absent) for at in peaks]


def _held(explained: Explained, allocations: Allocations, at: tuple[int, int], absent: Absent) -> HeldMemory:
    """One memory at an instant; `at` is its number and the row."""
    pool, row = at
    in_pool = pl.col("pool") == pool
    totals: facts.MemoryTotals
    (totals,) = absent.rows(allocations.pools.filter(in_pool).drop("pool", "peak_row"), "memories")
    unseen = totals["unseen_bytes"]
    names, number = explained.by("module")
    blocks = explained.named.blocks
    alive = (blocks.pool == pool) & blocks.alive(row)
    modules = sums_by(explained.named, alive, number, pl.Series(names, dtype=pl.String))
    if unseen:
        modules = _with_unseen(modules, BEFORE, unseen)
    return HeldMemory(
        totals,
        allocations.peak.filter(in_pool).drop("pool"),
        allocations.categories.filter(in_pool).drop("pool"),
        modules,
        allocations.growth.filter(in_pool),
        curve(explained, pool, unseen, absent),
    )


def _with_unseen(divided: pl.DataFrame, name: str, unseen: int) -> pl.DataFrame:
    """What the allocator held before the recording, beside what is known."""
    more = pl.DataFrame({"name": [name], "bytes": [unseen], "block_count": [0]})
    both = pl.concat([divided.drop("fraction"), more]).group_by("name").agg(pl.col("bytes", "block_count").sum())
    whole = max(int(both["bytes"].sum()), 1)
    return both.with_columns(fraction=pl.col("bytes") / whole).sort("bytes", "name", descending=[True, False])


def row_of(at: str, trace: Trace, blocks: Blocks, pool: int) -> int:
    """The row of `trace.allocations` just after which a memory is looked at; -1 for before the first.

    Raises:
        UsageError: slugs `bad-instant`, `no-such-step`.
    """
    rows = trace.allocations
    levels = blocks.levels(pool, rows.height)
    if at == "peak":
        return int(levels.argmax()) - 1
    if at in ("start", "end"):
        return -1 if at == "start" else rows.height - 1
    word, _, number = at.partition(" ")
    if word == "step" and number.isascii() and number.isdigit():
        inside = np.flatnonzero((rows["step"] == int(number)).fill_null(False).to_numpy())
        if not inside.size:
            steps = trace.steps["step"].to_list()
            have = f"it has {steps[0]} to {steps[-1]}" if steps else "it has no steps"
            raise UsageError(f"nothing was allocated in step {number} of this run; {have}", slug="no-such-step")
        return int(inside[levels[inside + 1].argmax()])
    if at.isascii() and at.isdigit():
        return int(np.searchsorted(rows["time_ns"].to_numpy(), trace.start_ns + int(at), side="right")) - 1
    raise UsageError(
        f"`{at}` is no instant", slug="bad-instant", hint="give peak, start, end, `step 3`, or a time as 12.5ms"
    )
