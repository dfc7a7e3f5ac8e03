"""Builds the document and tables of `traceloom memory`.

The keys of the document are described in docs/reference/memory-json.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
import polars as pl

from traceloom import __version__
from traceloom.analyze.host_events import fold_stack
from traceloom.analyze.memory import compute_fragmentation
from traceloom.analyze.memory_answers import (
    MIN_STEPS,
    Allocations,
    ExplainedMemory,
    build_allocations,
    summarize_activations,
)
from traceloom.analyze.memory_blocks import (
    MAX_INSTANTS,
    Blocks,
    choose_instants,
    compute_levels,
    count_by_lifetime as memory_blocks_lifetimes,
    select_largest_keys,
)
from traceloom.analyze.memory_owners import (
    BEFORE_RECORDING_LABEL,
    CATEGORIES_BEFORE as OF_BEFORE,
    OWNER_LABELS,
    summarize_blocks,
)
from traceloom.analyze.memory_snapshot import KIND as SNAPSHOT_KIND, describe_sites
from traceloom.errors import UsageError
from traceloom.formats.memory_files import parse_integer
from traceloom.report import memory_sources
from traceloom.report.document import Col, Table, UnknownValues
from traceloom.report.labels import format_memory_name as labels_allocator, format_rank_name
from traceloom.report.memory_sources import (
    MemoryOptions,
    MemorySources,
    read_session_memory_sources,
)
from traceloom.system import units
from traceloom.system.files import restore_addresses
from traceloom.trace.array_types import Ints
from traceloom.trace.frames import to_rows
from traceloom.trace.notice import Notice, sort_by_severity
from traceloom.trace.session import MemorySnapshot, Session
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents import MemoryDocument
    from traceloom.report.documents.memory import (
        MemoryAllocatorRow,
        MemoryCurveRow,
        MemoryEndRow,
        MemoryGrowthRow,
        MemoryMemoryRow,
        MemoryNodeRow,
        MemoryRankRow,
        MemoryRankStepsRow,
        MemorySeriesRow,
    )


MAX_MODULES = 50
_HOST_DEVICE_TYPES = ("cpu", "cpu-shared")
_FRAGMENTATION_COLUMNS = (
    "reserved_bytes",
    "allocated_bytes",
    "requested_bytes",
    "pending_bytes",
    "free_bytes",
    "largest_free_bytes",
    "split_bytes",
    "segment_count",
    "fragmentation",
)

_EMPTY_ALLOCATOR: MemoryAllocatorRow = {
    "reserved_bytes": None,
    "allocated_bytes": None,
    "requested_bytes": None,
    "pending_bytes": None,
    "free_bytes": None,
    "largest_free_bytes": None,
    "split_bytes": None,
    "segment_count": None,
    "fragmentation": None,
    "retries": None,
    "outside_bytes": None,
}


class MemoryTotals(TypedDict):
    """Totals of one memory, as in the document."""

    device_type: str
    device: int
    peak_bytes: int
    peak_time_ns: int
    peak_step: int | None
    unseen_bytes: int
    start_bytes: int | None
    end_bytes: int
    allocation_count: int
    free_count: int
    reserved_at_peak_bytes: int | None


def find_device_capacity(trace: Trace, totals: MemoryTotals) -> int | None:
    """Returns the capacity of the device of one memory, from the capture or the trace; None where
    neither states it.
    """
    if totals["device_type"] in _HOST_DEVICE_TYPES:
        return None
    number = max(totals["device"], 0)
    devices = (trace.meta.capture or {}).get("devices")
    for device in devices if isinstance(devices, list) else []:
        if (
            isinstance(device, dict)
            and device.get("device") == number
            and (size := parse_integer(device.get("memory_bytes")))
        ):
            return size
    sizes = trace.devices.filter(pl.col("device") == number)["memory_bytes"].drop_nulls()
    return int(sizes[0]) if sizes.len() and sizes[0] > 0 else None


def build_growth_rows(
    explained: ExplainedMemory,
    rows: pl.DataFrame,
    totals: MemoryTotals,
    size: int | None,
    absent: UnknownValues,
) -> list[MemoryGrowthRow]:
    """Returns growing allocations with their stacks, and the step at which the device is full if
    all of them keep growing.
    """
    if not rows.height:
        return []
    stacks = explained.stack_reader()(rows["example"].cast(pl.Int64).to_numpy())
    per_step = float(rows["bytes_per_step"].sum())
    full = None
    if size is not None and per_step > 0:
        last = (
            totals["peak_step"]
            if totals["peak_step"] is not None
            else int(rows["last_step"].to_numpy().max())
        )
        full = last + 1 + max(math.floor((size - totals["peak_bytes"]) / per_step), 0)
    grown = rows.drop("pool", "example", "frame").with_columns(
        stacks.map_elements(fold_stack, return_dtype=pl.String).alias("stack"),
        full_at_step=pl.lit(full, pl.Int64),
    )
    return absent.rows(grown, "memories[*].growth")


def explain_unknown_growth(entry: MemoryRankRow) -> str | None:
    """Returns why growth with the steps of one rank cannot be determined; None where it can."""
    steps = len(entry["steps"])
    if steps > MIN_STEPS:
        return None
    had = ("none was", "only one was")[steps] if steps < 2 else f"only {steps} were"
    return f"it takes at least {MIN_STEPS + 1} steps, and {had} recorded"


def build_allocator_row(
    trace: Trace, totals: MemoryTotals, snapshot: MemorySnapshot | None
) -> MemoryAllocatorRow | None:
    """Returns the state of the allocator at the end of the recording; None without a snapshot or
    data of the recorder.

    `outside_bytes` is the memory in use on the device beyond what this allocator has reserved:
    libraries, communication buffers, other processes.
    """
    if totals["device_type"] in _HOST_DEVICE_TYPES:
        return None
    number = max(totals["device"], 0)
    states: list[MemoryAllocatorRow] = []
    if snapshot is not None:
        states = to_rows(
            compute_fragmentation(snapshot)
            .filter(pl.col("device") == number)
            .select(*_FRAGMENTATION_COLUMNS, retries=pl.lit(None), outside_bytes=pl.lit(None))
        )
    has_state = bool(states)
    state: MemoryAllocatorRow = states[0] if states else {**_EMPTY_ALLOCATOR}
    allocators = (trace.meta.capture or {}).get("allocators_at_end")
    for entry in allocators if isinstance(allocators, list) else []:
        if not isinstance(entry, dict) or entry.get("device") != number:
            continue
        recorded = {
            key: parse_integer(entry.get(key))
            for key in ("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes", "retries")
        }
        has_state = True
        if state["reserved_bytes"] is None:
            state["reserved_bytes"] = recorded["reserved_bytes"]
        if state["allocated_bytes"] is None:
            state["allocated_bytes"] = recorded["allocated_bytes"]
        state["retries"] = recorded["retries"]
        total, free, reserved = (
            recorded["total_bytes"],
            recorded["free_bytes"],
            recorded["reserved_bytes"],
        )
        if total is not None and free is not None and reserved is not None:
            state["outside_bytes"] = max(total - free - reserved, 0)
    return state if has_state else None


MAX_LEAVES = 120  # separate scopes of a curve; the others are merged
MAX_STACKS = 60
OTHER = "(other)"


def build_curve(
    explained: ExplainedMemory,
    pool: int,
    unseen: int,
    absent: UnknownValues,
    *,
    max_instants: int = MAX_INSTANTS,
    max_leaves: int = MAX_LEAVES,
) -> MemoryCurveRow:
    """Returns levels over time at a few hundred instants, including the peak; each division adds up
    to the same total.

    Args:
        explained: The blocks.
        pool: Number of the memory.
        unseen: Bytes that the allocator held before the recording, of unknown origin.
        absent: Defines the epoch; records why there are no stacks.
        max_instants: Approximate max number of instants.
        max_leaves: Max number of separate scopes with their op; the others become `(other)`.
    """
    blocks, trace = explained.named.blocks, explained.trace
    rows = choose_instants(blocks.levels(pool, trace.allocations.height), max_instants)
    times = trace.allocations["time_ns"].to_numpy()
    instants = np.where(rows < 0, trace.start_ns, times[np.maximum(rows, 0)]) - absent.epoch_ns
    kinds, kind = explained.by("category")
    kind_levels = compute_levels(blocks, kind, len(kinds), rows, pool)
    kind_levels[OF_BEFORE] += unseen
    names, leaf_numbers = _assign_leaves(explained)
    stacks = None
    if explained.has_stacks:
        stacks = _build_largest_series(
            explained, explained.by("stack"), (pool, rows), unseen, MAX_STACKS
        )
    return {
        "time_ns": instants.tolist(),
        "categories": _build_series(kinds, kind_levels),
        "scopes": _build_largest_series(
            explained, (names, leaf_numbers), (pool, rows), unseen, max_leaves
        ),
        "stacks": absent.value(stacks, "memories[*].curve.stacks"),
    }


def _assign_leaves(explained: ExplainedMemory) -> tuple[list[str], Ints]:
    """Returns scope and op of each block; for blocks from before the recording, their owner."""
    named_blocks, labels = explained.named, explained.named.places.labels
    scopes, scope = explained.by("scope")
    place_keys = scope.astype(np.int64) * len(labels) + named_blocks.label
    owner = explained.whose.table["owner"].to_list()
    kinds = [*dict.fromkeys(owner), "unknown"]
    number = np.append(
        np.array([kinds.index(kind) for kind in owner], dtype=np.int64), len(kinds) - 1
    )
    key = np.where(named_blocks.blocks.made < 0, -1 - number[explained.whose.of], place_keys)
    distinct, leaf_numbers = np.unique(key, return_inverse=True)
    names = []
    for code in distinct.tolist():
        if code < 0:
            kind = kinds[-1 - code]
            names.append(f"{BEFORE_RECORDING_LABEL}.{OWNER_LABELS.get(kind, kind)}")
        else:
            path, label = scopes[code // len(labels)], labels[code % len(labels)]
            names.append(label if path.startswith("(") else f"{path}.{label}")
    return names, leaf_numbers.astype(np.int64)


def _build_largest_series(
    explained: ExplainedMemory,
    parts: tuple[list[str], Ints],
    pool_rows: tuple[int, Ints],
    unseen: int,
    limit: int,
) -> list[MemorySeriesRow]:
    (names, number), (pool, rows) = parts, pool_rows
    levels = compute_levels(explained.named.blocks, number, len(names), rows, pool)
    retained_keys, selected_levels = select_largest_keys(levels, limit)
    series = _build_series([*(names[k] for k in retained_keys.tolist()), OTHER], selected_levels)
    if not unseen:
        return series
    name = f"{BEFORE_RECORDING_LABEL}.unknown"
    before = next((entry for entry in series if entry["name"] == name), None)
    if before is None:
        return [*series, {"name": name, "bytes": [unseen] * rows.size}]
    before["bytes"] = [level + unseen for level in before["bytes"]]
    return series


def _build_series(names: list[str], levels: Ints) -> list[MemorySeriesRow]:
    return [
        {"name": name, "bytes": row.tolist()}
        for name, row in zip(names, levels, strict=True)
        if row.any()
    ]


def build_step_rows(explained: ExplainedMemory, absent: UnknownValues) -> list[MemoryRankStepsRow]:
    """Returns the steps of a trace, to be marked on its curves."""
    rows = explained.trace.steps.select(
        "step", "start_ns", end_ns=pl.col("end_ns") - absent.epoch_ns
    )
    return absent.rows(rows, "ranks[*].steps")


FORMAT = "traceloom-memory"
VERSION = 1
UNKNOWN_REASONS = {
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


class MemoryState(NamedTuple):
    """One memory at an instant.

    Attributes:
        totals: Totals of the whole recording.
        tree: Owners of the memory, `holders.TREE`.
        categories: The same by purpose: category, evidence, bytes, block_count, fraction.
        modules: The same by module: name, bytes, block_count, fraction.
        growth: Growth from step to step, `growth.GROWTH`.
        curve: Levels over time.
    """

    totals: MemoryTotals
    tree: pl.DataFrame
    categories: pl.DataFrame
    modules: pl.DataFrame
    growth: pl.DataFrame
    curve: MemoryCurveRow


def build(session: Session, options: MemoryOptions | None = None) -> MemoryDocument:
    """Builds the document of one run, with the memory files beside its traces; see
    `build_document`.
    """
    return build_document(read_session_memory_sources(session), options)


def build_document(sources: MemorySources, options: MemoryOptions | None = None) -> MemoryDocument:
    """Builds the document from all sources about memory.

    Raises:
        UsageError: slugs `no-such-rank`, `no-such-step`, `bad-instant`.
    """
    options = options or MemoryOptions()
    sources = sources.of_ranks(options.ranks)
    epoch_ns = sources.epoch_ns
    absent = UnknownValues(epoch_ns, UNKNOWN_REASONS)
    ranks: list[MemoryRankRow] = []
    out_of_memory_rows: list[MemoryEndRow] = []
    notices = sources.all_notices()
    for explained in sources.iterate_explained(full_op_names=options.full_op_names):
        entry, rank_notices = build_rank_entry(
            explained, options, absent, sources.find_snapshot(explained.trace)
        )
        ranks.append(entry)
        out_of_memory_rows += memory_sources.build_recorded_out_of_memory_rows(
            explained, sources, epoch_ns
        )
        notices += [notice.of_rank(explained.trace.rank) for notice in rank_notices]
    ranks += [
        memory_sources.build_timeline_row(timeline, options.at, absent)
        for timeline in sources.timelines
    ]
    out_of_memory_rows = (
        memory_sources.build_reported_out_of_memory_rows(sources, ranks, epoch_ns)
        + out_of_memory_rows
    )
    for name, rows in (("ranks", ranks), ("out_of_memory", out_of_memory_rows)):
        if not rows:
            absent.explain(name)
    peaks_of_kind: dict[str, list[int]] = {}
    for entry in ranks:
        for memory in entry["memories"]:
            peaks_of_kind.setdefault(memory["device_type"], []).append(memory["peak_bytes"])
    # Out-of-memory events, if any; the peak, and its largest owner
    shortage = ""
    if out_of_memory_rows:
        first = out_of_memory_rows[0]
        when = "" if first["step"] is None else f" in step {first['step']}"
        rank = (
            f" on rank {first['rank']}"
            if first["rank"] is not None and len(out_of_memory_rows) > 1
            else ""
        )
        request = (
            ""
            if first["asked_bytes"] is None
            else f" when {units.format_size(first['asked_bytes'])} were asked for"
        )
        shortage = f"Memory ran out{when}{rank}{request}, beside {units.format_size(first['bytes'])} that were alive."
    if not any(entry["memories"] for entry in ranks):
        summary = shortage or "No allocations were recorded."
    else:
        entry, memory = max(
            ((e, m) for e in ranks for m in e["memories"]), key=lambda pair: pair[1]["peak_bytes"]
        )
        location = {"cpu": "the CPU", "device": "the device"}.get(
            memory["device_type"], str(memory["device_type"])
        )
        if memory["device"] is not None and memory["device"] >= 0:
            location += f":{memory['device']}"
        location += (
            f" of rank {entry['rank']}" if len(ranks) > 1 and entry["rank"] is not None else ""
        )
        when = "" if memory["peak_step"] is None else f" in step {memory['peak_step']}"
        kinds = memory["categories"][:2]
        total_bytes = max(sum(kind["bytes"] for kind in memory["categories"]), 1)
        holders = " and ".join(
            f"{kind['category'].replace('_', ' ')} {units.format_share(kind['bytes'], total_bytes)}"
            for kind in kinds
        )
        per_step = round(sum(row["bytes_per_step"] for row in memory["growth"]))
        sites = [row["site"] for row in memory["growth"]]
        leak = f"; {describe_sites(sites)} {units.format_size(per_step)} per step" if sites else ""
        before = f"{shortage} " if shortage else ""
        asked = describe_sizes(memory)
        moment = f" at its peak{when}"
        if not memory["peak_recorded"]:
            moment = " at the moment of the snapshot; its peak was not recorded"
        location = f"The {location[4:]}" if location.startswith("the ") else location
        summary = f"{before}{location} holds {units.format_size(memory['peak_bytes'])}{asked}{moment}: {holders}{leak}."
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": sources.name,
        "epoch_ns": str(epoch_ns),
        "sentence": summary,
        "by": options.by,
        "at": options.at,
        "ranks": ranks,
        "out_of_memory": out_of_memory_rows,
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
        "notices": [notice.to_dict() for notice in sort_by_severity(tuple(notices))],
        "absent": absent.to_list(),
    }


def build_rank_entry(
    explained: ExplainedMemory,
    options: MemoryOptions,
    absent: UnknownValues,
    snapshot: MemorySnapshot | None = None,
) -> tuple[MemoryRankRow, tuple[Notice, ...]]:
    """Returns the entry of one rank: every memory at its instant, and the notices about the
    pairing.
    """
    trace = explained.trace
    blocks = explained.named.blocks
    of_snapshot = trace.meta.kind == SNAPSHOT_KIND
    peak_recorded = not (of_snapshot and snapshot is not None) or bool(
        (snapshot.entries["action"] == "alloc").any()
    )
    rows = {
        pool: find_instant_row(options.at, trace, blocks, pool) for pool in range(len(blocks.pools))
    }
    allocations = build_allocations(explained, rows)
    names, number = explained.by(options.by, options.depth)
    memories: list[MemoryMemoryRow] = []
    for pool, row in rows.items():
        memory_state = _build_memory_state(explained, allocations, (pool, row), absent)
        in_pool = pl.col("pool") == pool
        divided = summarize_blocks(
            explained.named,
            (blocks.pool == pool) & blocks.alive(row),
            number,
            pl.Series(names, dtype=pl.String),
        )
        totals = memory_state.totals
        if totals["unseen_bytes"]:
            name = "before_recording" if "before_recording" in names else BEFORE_RECORDING_LABEL
            divided = _add_unseen(divided, name, totals["unseen_bytes"])
        time_ns = trace.start_ns if row < 0 else int(trace.allocations["time_ns"][row])
        largest = (
            allocations.largest.filter(in_pool)
            .drop("pool")
            .with_columns(pl.col("end_ns") - absent.epoch_ns)
        )
        capacity = find_device_capacity(trace, totals)
        memories.append(
            {
                **totals,
                "instant": {
                    "time_ns": time_ns - absent.epoch_ns,
                    "bytes": int(divided["bytes"].sum()),
                },
                "tree": absent.rows(memory_state.tree, "memories[*].tree"),
                "categories": absent.rows(memory_state.categories, "memories[*].categories"),
                "parts": absent.rows(divided, "memories[*].parts"),
                "largest": absent.rows(largest, "memories[*].largest"),
                "modules": absent.rows(memory_state.modules, "memories[*].modules"),
                "curve": memory_state.curve,
                "sizes": "requested" if of_snapshot else "allocated",
                "peak_recorded": peak_recorded,
                # Facts from sources other than its blocks
                "capacity_bytes": absent.value(capacity, "memories[*].capacity_bytes"),
                "growth": build_growth_rows(
                    explained, memory_state.growth, totals, capacity, absent
                ),
                # by module, what checkpointing each would save; the largest savings first
                "activations": absent.rows(
                    summarize_activations(explained, pool, row).head(MAX_MODULES),
                    "memories[*].activations",
                ),
                "allocator": absent.value(
                    build_allocator_row(trace, totals, snapshot), "memories[*].allocator"
                ),
            }
        )
    entry: MemoryRankRow = {
        "rank": absent.value(trace.rank, "ranks[*].rank"),
        "path": restore_addresses(trace.meta.path),
        "memories": memories,
        "steps": build_step_rows(explained, absent),
        "lifetimes": absent.rows(memory_blocks_lifetimes(blocks), "ranks[*].lifetimes"),
    }
    if (reason := explain_unknown_growth(entry)) is not None:
        absent.explain(
            "memories[*].growth", f"what grows from step to step cannot be determined: {reason}"
        )
    return entry, allocations.notices


def build_peak_memories(explained: ExplainedMemory, absent: UnknownValues) -> list[MemoryState]:
    allocations = build_allocations(explained, max_blocks=0)
    peaks = allocations.pools.select("pool", "peak_row").rows()
    return [_build_memory_state(explained, allocations, pool_row, absent) for pool_row in peaks]


def _build_memory_state(
    explained: ExplainedMemory,
    allocations: Allocations,
    pool_row: tuple[int, int],
    absent: UnknownValues,
) -> MemoryState:
    """Returns one memory at an instant; `pool_row` is its number and the row."""
    pool, row = pool_row
    in_pool = pl.col("pool") == pool
    totals: MemoryTotals
    (totals,) = absent.rows(allocations.pools.filter(in_pool).drop("pool", "peak_row"), "memories")
    unseen = totals["unseen_bytes"]
    names, number = explained.by("module")
    blocks = explained.named.blocks
    alive = (blocks.pool == pool) & blocks.alive(row)
    modules = summarize_blocks(explained.named, alive, number, pl.Series(names, dtype=pl.String))
    if unseen:
        modules = _add_unseen(modules, BEFORE_RECORDING_LABEL, unseen)
    return MemoryState(
        totals,
        allocations.peak.filter(in_pool).drop("pool"),
        allocations.categories.filter(in_pool).drop("pool"),
        modules,
        allocations.growth.filter(in_pool),
        build_curve(explained, pool, unseen, absent),
    )


def _add_unseen(divided: pl.DataFrame, name: str, unseen: int) -> pl.DataFrame:
    """Adds the memory that the allocator held before the recording."""
    unseen_row = pl.DataFrame({"name": [name], "bytes": [unseen], "block_count": [0]})
    both = (
        pl.concat([divided.drop("fraction"), unseen_row])
        .group_by("name")
        .agg(pl.col("bytes", "block_count").sum())
    )
    return both.with_columns(fraction=pl.col("bytes") / max(int(both["bytes"].sum()), 1)).sort(
        "bytes", "name", descending=[True, False]
    )


def find_instant_row(instant: str, trace: Trace, blocks: Blocks, pool: int) -> int:
    """Returns the last row of `trace.allocations` that an instant includes; -1 for none.

    Raises:
        UsageError: slugs `bad-instant`, `no-such-step`.
    """
    rows = trace.allocations
    levels = blocks.levels(pool, rows.height)
    if instant == "peak":
        return int(levels.argmax()) - 1
    if instant in ("start", "end"):
        return -1 if instant == "start" else rows.height - 1
    word, _, number = instant.partition(" ")
    if word == "step" and number.isascii() and number.isdigit():
        step_rows = np.flatnonzero((rows["step"] == int(number)).fill_null(False).to_numpy())
        if not step_rows.size:
            steps = trace.steps["step"].to_list()
            have = f"it has {steps[0]} to {steps[-1]}" if steps else "it has no steps"
            raise UsageError(
                f"nothing was allocated in step {number} of this run; {have}", slug="no-such-step"
            )
        return int(step_rows[levels[step_rows + 1].argmax()])
    if instant.isascii() and instant.isdigit():
        return (
            int(
                np.searchsorted(
                    rows["time_ns"].to_numpy(), trace.start_ns + int(instant), side="right"
                )
            )
            - 1
        )
    raise UsageError(
        f"`{instant}` is no instant",
        slug="bad-instant",
        hint="give peak, start, end, `step 3`, or a time as 12.5ms",
    )


INDENT = "\u2003"


def collapse_chains(tree: list[MemoryNodeRow]) -> list[MemoryNodeRow]:
    """Returns the rows to display, parents before children: `name` indented, chains of single
    children as one row.

    Args:
        tree: The rows; the first is the root.
    """
    child_counts: dict[int, int] = {}
    for row in tree:
        if row["parent"] is not None:
            child_counts[row["parent"]] = child_counts.get(row["parent"], 0) + 1
    prefixes: dict[int | None, tuple[int, str]] = {None: (0, "")}
    out: list[MemoryNodeRow] = []
    for row in tree:
        depth, prefix = prefixes[row["parent"]]
        label = f"{prefix}.{row['name']}" if prefix else row["name"]
        chain = (
            child_counts.get(row["node"]) == 1
            and not row["self_bytes"]
            and row["parent"] is not None
        )
        prefixes[row["node"]] = (depth, label) if chain else (depth + 1, "")
        if not chain:
            out.append({**row, "depth": depth, "name": INDENT * depth + label})
    return out


HELD_COLUMNS = (
    Col("bytes", "Bytes", "bytes"),
    Col("fraction", "Share", "share"),
    Col("block_count", "Blocks", "count"),
)
_MIN_MEMORY_RATIO = 1000  # a memory smaller than this fraction of the largest is not drawn


def select_memories(memories: list[MemoryMemoryRow]) -> list[MemoryMemoryRow]:
    """Returns the memories of a rank that are large enough to show, the one with the highest peak
    first.
    """
    ordered = sorted(memories, key=lambda memory: -memory["peak_bytes"])
    return [
        memory
        for memory in ordered
        if memory["peak_bytes"] * _MIN_MEMORY_RATIO >= ordered[0]["peak_bytes"]
    ]


def build_scopes_table(memory: MemoryMemoryRow, key: str) -> Table:
    """Returns memory by owner, each row including the indented ones below it."""
    columns = [
        *HELD_COLUMNS,
        Col("self_bytes", "Its own", "bytes", "held by no row below it"),
        Col("name", "Scope and operator", "name"),
    ]
    return Table(key, "Memory by scope", columns, collapse_chains(memory["tree"]))


def build_modules_table(memory: MemoryMemoryRow, key: str) -> Table:
    return Table(
        key, "Memory by module", [*HELD_COLUMNS, Col("name", "Module", "name")], memory["modules"]
    )


def build_categories_table(memory: MemoryMemoryRow, key: str) -> Table:
    """Returns memory by purpose, with the evidence."""
    hint = "census: the owner was asked; inferred: from the part of the step that made and freed it"
    columns = [Col("name", "Category"), *HELD_COLUMNS, Col("evidence", "Evidence", "text", hint)]
    rows = [{**row, "name": row["category"].replace("_", " ")} for row in memory["categories"]]
    return Table(key, "Memory by category", columns, rows)


def build_largest_table(
    memory: MemoryMemoryRow, key: str, unknown_reasons: Mapping[str, str] | None = None
) -> Table:
    """Returns the largest blocks alive at the instant."""
    rows = [
        {
            **row,
            "lifetime_ns": None
            if row["time_ns"] is None or row["end_ns"] is None
            else row["end_ns"] - row["time_ns"],
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
        *(
            [Col("owner", "Owner", "name", narrow=False)]
            if any(row["owner"] for row in rows)
            else []
        ),
        Col("name", "Name", "name"),
    ]
    unknown = {
        **(unknown_reasons or {}),
        "lifetime_ns": "it was not made and freed in the recording",
    }
    return Table(key, "Largest allocations", columns, rows, unknown=unknown)


def build_growth_table(
    memory: MemoryMemoryRow, key: str, unknown_reasons: Mapping[str, str] | None = None
) -> Table:
    """Returns allocations made in a step and never freed, step after step."""
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
    return Table(
        key, "Grows with every step", columns, memory["growth"], note=note, unknown=unknown_reasons
    )


def build_activations_table(memory: MemoryMemoryRow, key: str) -> Table:
    """Returns what checkpointing each module would free, and the cost of recomputing it."""
    rows = memory["activations"]
    device = any(row["device_ns"] for row in rows)
    columns = [
        Col("saved_bytes", "Would free", "bytes", "by checkpointing this module"),
        Col("bytes", "Holds", "bytes"),
        Col(
            "device_ns" if device else "host_ns",
            "Computed again",
            "time",
            "its forward pass, once more",
        ),
        Col("call_count", "Calls", "count"),
        Col("module", "Module", "name"),
    ]
    note = "checkpointing a module frees its own, and computes it again"
    return Table(key, "Activations by module", columns, rows, note=note)


def build_lifetimes_table(entry: MemoryRankRow, key: str) -> Table:
    """Returns the lifetimes of the blocks of one rank, of those made and freed in the recording."""
    columns = [
        Col("life", "Lifetime"),
        Col("block_count", "Blocks", "count"),
        Col("bytes", "Bytes", "bytes", "summed over all of them"),
    ]
    rows = [
        {
            **row,
            "life": f"{units.format_duration(row['from_ns'])} to {units.format_duration(row['to_ns'])}",
        }
        for row in entry["lifetimes"]
    ]
    return Table(key, "Lifetimes", columns, rows)


def build_ranks_table(document: MemoryDocument) -> Table:
    return Table(
        "rank-table",
        "Peaks by rank",
        [
            Col("rank", "Rank"),
            Col("where", "Memory"),
            Col("peak_bytes", "Peak", "bytes"),
            Col("peak_step", "In step", "count"),
            Col("end_bytes", "At the end", "bytes"),
            Col("allocation_count", "Allocations", "count"),
            Col("free_count", "Frees", "count"),
        ],
        [
            {**memory, "rank": format_rank_name(entry, k), "where": labels_allocator(memory)}
            for k, entry in enumerate(document["ranks"])
            for memory in entry["memories"]
        ],
        unknown={"peak_step": "the peak is outside all steps"},
    )


def build_out_of_memory_table(entry: MemoryEndRow, key: str) -> Table:
    columns = [
        Col("bytes", "Bytes", "bytes"),
        Col("fraction", "Share", "share"),
        Col("name", "Alive then", "name"),
    ]
    return Table(key, "Alive when memory ran out", columns, collapse_chains(entry["tree"]))


def describe_job(document: MemoryDocument) -> Iterator[str]:
    """Yields a sentence for each kind of memory that several ranks have."""
    for row in document["job"]:
        if row["count"] > 1:
            min_peak, max_peak = (
                units.format_size(row["smallest_peak_bytes"]),
                units.format_size(row["largest_peak_bytes"]),
            )
            yield (
                f"{row['count']} × {row['device_type']}: peaks from {min_peak} to {max_peak}, "
                f"{units.format_size(row['sum_of_peaks_bytes'])} in all; the largest is {row['imbalance']:.2f} × the mean."
            )


def describe_sizes(memory: MemoryMemoryRow) -> str:
    """Returns what sizes of a memory are of, to stand behind one; empty for allocated blocks."""
    row = memory["allocator"]
    equal = row is not None and row["requested_bytes"] == row["allocated_bytes"]
    return "" if memory["sizes"] == "allocated" or equal else " asked for"


def describe_allocator(memory: MemoryMemoryRow) -> str:
    """Describes what the allocator holds at the end and cannot use; empty if unknown."""
    row = memory["allocator"]
    if not row:
        return ""
    size = units.format_size
    facts = [
        f"at the end {size(row['allocated_bytes'])} allocated of {size(row['reserved_bytes'])} reserved"
    ]
    if row["requested_bytes"] is not None and row["requested_bytes"] != row["allocated_bytes"]:
        facts.append(f"{size(row['requested_bytes'])} of it asked for")
    if row["largest_free_bytes"] is not None:
        facts.append(
            f"largest free block {size(row['largest_free_bytes'])} of {size(row['free_bytes'])} free"
        )
    if row["split_bytes"]:
        facts.append(f"{size(row['split_bytes'])} free in split segments")
    if row["retries"]:
        facts.append(f"{units.format_quantity(row['retries'], 'retry')}")
    if row["outside_bytes"] is not None:
        facts.append(f"{size(row['outside_bytes'])} in use outside this allocator")
    return "Allocator: " + " · ".join(facts)
