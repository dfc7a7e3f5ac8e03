"""Reads the sources of memory reports: traces, snapshots, timelines, out-of-memory reports; writes
all allocations as CSV.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict

import numpy as np
import polars as pl

from traceloom.analyze import memory_snapshot as why
from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.host_events import find_user_frame
from traceloom.analyze.memory_answers import (
    ExplainedMemory,
    build_allocations,
    explain,
    find_growth,
)
from traceloom.analyze.memory_blocks import choose_instants
from traceloom.analyze.memory_names import find_innermost_events
from traceloom.analyze.memory_owners import (
    LONG_SCHEMA,
    SHORT_COLUMNS,
    build_tree,
    iterate_block_tables,
)
from traceloom.analyze.memory_snapshot import explain_snapshot
from traceloom.errors import InputError, UsageError
from traceloom.formats import load
from traceloom.formats.memory_files import (
    ALLOCATIONS,
    CATEGORIES,
    OUT_OF_MEMORY,
    SNAPSHOT,
    TIMELINE,
    MemoryTimeline,
    detect_kind,
    find_sidecar,
    parse_integer,
    parse_rank,
    read_allocations,
    read_out_of_memory,
    read_snapshot,
    read_timeline,
)
from traceloom.report.document import UnknownValues
from traceloom.system.files import remember_input, restore_addresses
from traceloom.trace.frames import to_rows
from traceloom.trace.notice import Notice
from traceloom.trace.session import MemorySnapshot, Session, format_frame
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents.memory import (
        MemoryAdviceRow,
        MemoryCategoryRow,
        MemoryDeviceRow,
        MemoryEndKindsRow,
        MemoryEndRow,
        MemoryMemoryRow,
        MemoryNodeRow,
        MemoryPartRow,
        MemoryRankRow,
        MemorySeriesRow,
    )


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of `traceloom memory`.

    Attributes:
        ranks: Only these ranks; None for all.
        by: How memory is divided: one of `analyze.allocations.BY`.
        depth: Max number of parts of a scope's or module's path; None for all.
        at: The instant: `peak`, `start`, `end`, `step N` (the highest point of that step) or
            nanoseconds after the start of the recording, as text.
        top: Rows of a table on a terminal.
        full_op_names: Names keep the namespace of the operator.
    """

    ranks: tuple[int, ...] | None = None
    by: str = "scope"
    depth: int | None = None
    at: str = "peak"
    top: int = 10
    full_op_names: bool = False


SNAPSHOT_SUFFIX, OUT_OF_MEMORY_SUFFIX, ALLOCATIONS_SUFFIX = (
    ".memory.pickle",
    ".oom.json",
    ".allocations.json.gz",
)


@dataclass(frozen=True, slots=True)
class OutOfMemoryReport:
    """A report of memory that ran out, with its rank and file."""

    rank: int | None
    path: str
    document: dict[str, Any]  # written by a program that failed: nothing in it is reliable


@dataclass
class MemorySources:
    """All sources about memory.

    Attributes:
        name: What the user gave.
        session: The run; None where only files about memory were given.
        snapshots: Snapshots that were given, and their ranks.
        sidecar_snapshots: Snapshots beside a trace of `session`, by the trace's path.
        timelines: Memory timelines.
        reports: Out-of-memory reports.
        notices: Files beside traces that were refused.
    """

    name: str
    session: Session | None = None
    snapshots: list[tuple[int | None, MemorySnapshot]] = field(default_factory=list)
    sidecar_snapshots: dict[str, MemorySnapshot] = field(default_factory=dict)
    timelines: list[MemoryTimeline] = field(default_factory=list)
    reports: list[OutOfMemoryReport] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    def iterate_explained(self, *, full_op_names: bool = False) -> Iterator[ExplainedMemory]:
        """Yields the blocks of each trace and each snapshot."""
        for trace in self.session.traces if self.session is not None else ():
            snapshot = self.sidecar_snapshots.get(trace.meta.path)
            if trace.allocations.height:
                yield explain(trace, full_op_names=full_op_names, snapshot=snapshot)
            if snapshot is not None and not (trace.allocations["device_type"] != "cpu").any():
                yield explain_snapshot(snapshot, trace.rank)
        for rank, snapshot in self.snapshots:
            yield explain_snapshot(snapshot, rank)

    @property
    def has_multiple(self) -> bool:
        """Whether there is more than one trace or snapshot."""
        traces = 0 if self.session is None else len(self.session.traces)
        return traces + len(self.snapshots) > 1

    def of_ranks(self, ranks: tuple[int, ...] | None) -> MemorySources:
        """Returns only these ranks; raises UsageError where one does not exist."""
        if ranks is None:
            return self
        session = self.session.of_ranks(ranks) if self.session is not None else None
        snapshots = [pair for pair in self.snapshots if pair[0] in ranks]
        reports = [report for report in self.reports if report.rank in ranks]
        return replace(self, session=session, snapshots=snapshots, reports=reports)

    def find_snapshot(self, trace: Trace) -> MemorySnapshot | None:
        """Returns the snapshot beside a trace, or the one from which the trace was built."""
        snapshots = [
            *(snapshot for _, snapshot in self.snapshots),
            *self.sidecar_snapshots.values(),
        ]
        source_snapshot = next(
            (snapshot for snapshot in snapshots if snapshot.path == trace.meta.path), None
        )
        return self.sidecar_snapshots.get(trace.meta.path, source_snapshot)

    def all_notices(self) -> list[Notice]:
        """Returns the notices of the run, of snapshots, and of refused files."""
        session_notices = list(self.session.notices) if self.session is not None else []
        snapshots = [
            *(snapshot for _, snapshot in self.snapshots),
            *self.sidecar_snapshots.values(),
        ]
        return [
            *session_notices,
            *self.notices,
            *(notice for snapshot in snapshots for notice in snapshot.notices),
        ]

    @property
    def epoch_ns(self) -> int:
        """Time zero of the document: the start of the run, else the first known time."""
        if self.session is not None:
            return self.session.epoch_ns
        starts = [int(timeline.time_ns[0]) for timeline in self.timelines if timeline.time_ns.size]
        starts += [explain_snapshot(snapshot).trace.start_ns for _, snapshot in self.snapshots]
        starts += [
            time
            for report in self.reports
            if isinstance(time := report.document.get("time_ns"), int)
        ]
        return min(starts, default=0)


def read_session_memory_sources(session: Session) -> MemorySources:
    """Returns a run, with the memory files that the recorder left beside its traces."""
    sources = MemorySources(session.name, session)
    for trace in session.traces:
        _add_sidecars(trace, sources)
    return sources


def read_memory_sources(paths: list[str], *, cache: bool = True) -> MemorySources:
    """Detects the kind of each file by its content, and reads it.

    Args:
        paths: Runs, traces, snapshots (pickles), timelines, out-of-memory reports, allocations that
            probes recorded; directories are runs.
        cache: Use the cache of read traces.

    Raises:
        InputError: none of the paths can be read.
        UsageError: as for `traceloom.load`.
    """
    sources = MemorySources(restore_addresses(", ".join(paths)))
    session_paths = []
    for text in paths:
        path = Path(text)
        kind = detect_kind(path) if path.is_file() else None
        if kind == SNAPSHOT:
            sources.snapshots.append((parse_rank(path), read_snapshot(path)))
        elif kind == TIMELINE:
            sources.timelines.append(read_timeline(path))
        elif kind == OUT_OF_MEMORY:
            sources.reports.append(
                OutOfMemoryReport(parse_rank(path), text, read_out_of_memory(path))
            )
        elif kind == ALLOCATIONS:
            _add_allocations(path, sources)
        else:
            session_paths.append(text)
    if not session_paths:
        return sources
    try:
        session = load(*session_paths, cache=cache)
    except InputError as error:
        if error.slug not in ("no-traces", "damaged-capture") or not _add_directory_files(
            session_paths, sources
        ):
            raise
        return sources
    sources.session, sources.name = session, session.name
    for trace in session.traces:
        _add_sidecars(trace, sources)
    return sources


def _add_directory_files(paths: list[str], sources: MemorySources) -> bool:
    """Adds the files of a run; one that ended before its window was written may have left only a
    report.
    """
    found_any = False
    for directory in (Path(text) for text in paths):
        if not directory.is_dir():
            continue
        for path in sorted(directory.glob(f"*{OUT_OF_MEMORY_SUFFIX}")):
            remember_input(path)
            sources.reports.append(
                OutOfMemoryReport(parse_rank(path), str(path), read_out_of_memory(path))
            )
            found_any = True
        for path in sorted(directory.glob(f"*{SNAPSHOT_SUFFIX}")):
            remember_input(path)
            sources.snapshots.append((parse_rank(path), read_snapshot(path)))
            found_any = True
        for path in sorted(directory.glob(f"*{ALLOCATIONS_SUFFIX}")):
            remember_input(path)
            _add_allocations(path, sources)
            found_any = True
    return found_any


def _add_allocations(path: Path, sources: MemorySources) -> None:
    rank, snapshots = read_allocations(path)
    sources.snapshots += [(rank, snapshot) for snapshot in snapshots]


def _add_sidecars(trace: Trace, sources: MemorySources) -> None:
    """Adds the files that the recorder left for the process of this trace; unreadable ones become
    notices.
    """
    try:
        snapshot = find_sidecar(trace, SNAPSHOT_SUFFIX)
        if snapshot is not None:
            sources.sidecar_snapshots[trace.meta.path] = read_snapshot(snapshot)
        allocations = find_sidecar(trace, ALLOCATIONS_SUFFIX)
        if allocations is not None:
            _add_allocations(allocations, sources)
        report = find_sidecar(trace, OUT_OF_MEMORY_SUFFIX)
        if report is not None and str(report) not in {other.path for other in sources.reports}:
            sources.reports.append(
                OutOfMemoryReport(trace.rank, str(report), read_out_of_memory(report))
            )
    except InputError as error:
        sources.notices.append(Notice("refused-input", "warning", str(error), rank=trace.rank))


_TIMELINE_UNKNOWN_REASON = "a memory timeline holds levels by category, not single allocations"
_TIMELINE_UNKNOWN_PATHS = (
    "memories[*].largest",
    "memories[*].growth",
    "memories[*].activations",
    "memories[*].allocator",
    "memories[*].capacity_bytes",
    "memories[*].peak_step",
    "memories[*].start_bytes",
    "memories[*].curve.stacks",
    "memories[*].reserved_at_peak_bytes",
    "ranks[*].lifetimes",
    "memories[*].categories[*].block_count",
    "memories[*].curve.scopes",
    "ranks[*].steps",
    "memories[*].modules",
    "ranks[*].rank",
)


def build_timeline_row(
    timeline: MemoryTimeline, instant: str, unknowns: UnknownValues
) -> MemoryRankRow:
    """Returns one entry of `ranks`.

    Raises:
        UsageError: slug `bad-instant`, for an instant that requires a run with steps.
    """
    for path in _TIMELINE_UNKNOWN_PATHS:
        unknowns.explain(path, _TIMELINE_UNKNOWN_REASON)
    total = timeline.levels.sum(axis=0)
    times = timeline.time_ns - unknowns.epoch_ns
    if not total.size or instant == "peak":
        index = int(total.argmax()) if total.size else 0
    elif instant in ("start", "end"):
        index = 0 if instant == "start" else total.size - 1
    elif instant.isascii() and instant.isdigit():
        index = max(int(np.searchsorted(times, int(instant), side="right")) - 1, 0)
    else:
        raise UsageError(
            f"a memory timeline has no instant `{instant}`",
            slug="bad-instant",
            hint="give peak, start, end, or a time as 12.5ms",
        )
    peak = int(total.argmax()) if total.size else 0
    # Indices of the levels themselves: there is no start before them.
    curve_positions = choose_instants(total) + 1
    levels = timeline.levels[:, index] if total.size else np.zeros(len(CATEGORIES), dtype=np.int64)
    bytes_by_category = [
        (name, int(size)) for name, size in zip(CATEGORIES, levels.tolist(), strict=True) if size
    ]
    bytes_by_category.sort(key=lambda pair: (-pair[1], pair[0]))
    held_bytes = max(sum(size for _, size in bytes_by_category), 1)
    parts: list[MemoryPartRow] = [
        {"name": name, "bytes": size, "block_count": None, "fraction": size / held_bytes}
        for name, size in bytes_by_category
    ]
    curve: list[MemorySeriesRow] = [
        {"name": name, "bytes": level.tolist()}
        for name, level in zip(CATEGORIES, timeline.levels[:, curve_positions], strict=True)
        if level.any()
    ]
    categories: list[MemoryCategoryRow] = [
        {
            "category": name,
            "evidence": "none" if name == "unknown" else "recorded",
            "bytes": size,
            "block_count": None,
            "fraction": size / held_bytes,
        }
        for name, size in bytes_by_category
    ]
    tree: list[Any] = build_tree(
        [((name,), size, 0) for name, size in bytes_by_category]
    ).to_dicts()  # as in the document
    memory: MemoryMemoryRow = {
        "device_type": "device",
        "device": -1,
        "peak_bytes": int(total[peak]) if total.size else 0,
        "peak_time_ns": int(times[peak]) if total.size else 0,
        "peak_step": None,
        "unseen_bytes": 0,
        "start_bytes": None,
        "end_bytes": int(total[-1]) if total.size else 0,
        "allocation_count": timeline.created,
        "free_count": timeline.destroyed,
        "reserved_at_peak_bytes": None,
        "sizes": "allocated",
        "peak_recorded": True,
        "capacity_bytes": None,
        "instant": {
            "time_ns": int(times[index]) if total.size else 0,
            "bytes": sum(size for _, size in bytes_by_category),
        },
        "tree": tree,
        "categories": categories,
        "parts": parts,
        "largest": [],
        "growth": [],
        "modules": [],
        "activations": [],
        "allocator": None,
        "curve": {
            "time_ns": times[curve_positions].tolist(),
            "categories": curve,
            "scopes": curve,
            "stacks": None,
        },
    }
    return {"rank": None, "path": timeline.path, "memories": [memory], "steps": [], "lifetimes": []}


OUT_OF_MEMORY_EVENT_NAME = "[OutOfMemory]"
MAX_STACK_FRAMES = 60
_DEVICE_KEYS = ("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes", "retries")
_KIND_BY_CATEGORY = {
    "parameter": why.OWNER_LABELS["parameter"],
    "buffer": why.OWNER_LABELS["buffer"],
    "gradient": why.OWNER_LABELS["gradient"],
    "optimizer_state": why.OWNER_LABELS["optimizer_state"],
    "activation": why.OWNER_LABELS["activation"],
}


class OutOfMemoryBreakdown(TypedDict):
    """The part of an entry with owners, the same as a tree, and suggestions."""

    bytes: int
    kinds: list[MemoryEndKindsRow]
    tree: list[MemoryNodeRow]
    advice: list[MemoryAdviceRow]


def build_reported_out_of_memory_rows(
    sources: MemorySources, ranks: list[MemoryRankRow], epoch_ns: int
) -> list[MemoryEndRow]:
    """Returns one entry for each report that a run left.

    Args:
        sources: The sources.
        ranks: Entries of the document, which include growth.
        epoch_ns: Time zero of the document.
    """
    rows: list[MemoryEndRow] = []
    for report in sources.reports:
        document = report.document
        raw_stack = document.get("stack")
        stack = (
            [str(frame)[:2000] for frame in raw_stack[-MAX_STACK_FRAMES:]]
            if isinstance(raw_stack, list)
            else []
        )
        census = why.parse_report_census(document)
        asked_bytes, time = (
            parse_integer(document.get("asked_bytes")),
            parse_integer(document.get("time_ns")),
        )
        devices = _build_device_rows(document.get("devices"))
        world_size = sources.session.world_size if sources.session is not None else None
        growing = [
            (row["site"], row["bytes_per_step"], row["bytes"])
            for entry in ranks
            if entry["rank"] == report.rank
            for memory in entry["memories"]
            for row in memory["growth"]
        ]
        bytes_by_kind = why.compute_bytes_by_kind(census)
        suggestions = why.list_advice(
            bytes_by_kind,
            census,
            requested_bytes=asked_bytes,
            stack=stack,
            devices=devices,
            ranks=world_size,
            growing=growing,
        )
        rows.append(
            {
                "rank": report.rank,
                "path": report.path,
                "evidence": "census",
                "time_ns": None if time is None else time - epoch_ns,
                "step": parse_integer(document.get("step")),
                "asked_bytes": asked_bytes,
                "message": str(document.get("message", ""))[:4000],
                "where": find_user_frame(stack),
                "stack": stack,
                "devices": devices,
                **_build_breakdown(bytes_by_kind, why.build_live_tree(census), suggestions),
            }
        )
    return rows


def build_recorded_out_of_memory_rows(
    explained: ExplainedMemory, sources: MemorySources, epoch_ns: int
) -> list[MemoryEndRow]:
    """Returns one entry for each out-of-memory event in a trace or a snapshot, unless there is a
    report of it.
    """
    if explained.trace.rank in {report.rank for report in sources.reports}:
        return []
    if explained.stacks is None:
        return _build_marked_out_of_memory_rows(explained, epoch_ns)
    snapshots = [
        *(snapshot for _, snapshot in sources.snapshots),
        *sources.sidecar_snapshots.values(),
    ]
    snapshot = next(
        snapshot for snapshot in snapshots if snapshot.path == explained.trace.meta.path
    )
    out_of_memory_entries = snapshot.entries.with_row_index("order").filter(
        pl.col("action") == "oom"
    )
    times = explained.trace.allocations["time_ns"].to_numpy()
    rows: list[MemoryEndRow] = []
    for asked_bytes, time_us, stack_index, free_bytes in out_of_memory_entries.select(
        "bytes", "time_us", "stack", "address"
    ).rows():
        stack = [format_frame(frame) for frame in reversed(snapshot.stacks[stack_index])][
            -MAX_STACK_FRAMES:
        ]
        python_stack = [frame for frame in stack if ".py(" in frame]
        allocation_row = (
            times.size - 1
            if time_us is None
            else int(np.searchsorted(times, time_us * 1000, side="right")) - 1
        )
        rows.append(
            {
                "rank": explained.trace.rank,
                "path": snapshot.path,
                "evidence": "snapshot",
                "time_ns": None if time_us is None else time_us * 1000 - epoch_ns,
                "step": None,
                "asked_bytes": asked_bytes,
                "message": f"{free_bytes} bytes were free on the device",
                "where": find_user_frame(python_stack or stack),
                "stack": stack,
                "devices": [],
                **_compute_breakdown(explained, allocation_row, asked_bytes, python_stack or stack),
            }
        )
    return rows


def _build_breakdown(
    bytes_by_kind: dict[str, int], tree: pl.DataFrame, suggestions: Iterable[why.Advice]
) -> OutOfMemoryBreakdown:
    total = sum(bytes_by_kind.values())
    return {
        "bytes": total,
        "kinds": [
            {"name": name, "bytes": size, "fraction": size / max(total, 1)}
            for name, size in bytes_by_kind.items()
        ],
        "tree": to_rows(tree),
        "advice": [
            {"action": advice.action, "text": advice.text, "bytes": advice.bytes, "why": advice.why}
            for advice in suggestions
        ],
    }


def _build_device_rows(raw_devices: object) -> list[MemoryDeviceRow]:
    """Returns the state that the allocators reported, with the memory in use outside them."""
    rows: list[MemoryDeviceRow] = []
    for entry in raw_devices if isinstance(raw_devices, list) else []:
        if not isinstance(entry, dict) or any(
            (parse_integer(entry.get(key)) or 0) < 0 for key in _DEVICE_KEYS
        ):
            continue
        allocated, reserved, free, total, retries = (
            parse_integer(entry.get(key)) or 0 for key in _DEVICE_KEYS
        )
        rows.append(
            {
                "device_type": str(entry.get("device_type", ""))[:40],
                "device": parse_integer(entry.get("device")),
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "free_bytes": free,
                "total_bytes": total,
                "retries": retries,
                "outside_bytes": max(total - free - reserved, 0),
            }
        )
    return rows


def _build_marked_out_of_memory_rows(
    explained: ExplainedMemory, epoch_ns: int
) -> list[MemoryEndRow]:
    """Returns PyTorch's out-of-memory marks in a trace: requested bytes and time; the owners follow
    from the blocks.
    """
    trace = explained.trace
    out_of_memory_events = trace.marks.filter(pl.col("name") == OUT_OF_MEMORY_EVENT_NAME)
    if not out_of_memory_events.height:
        return []
    threads = out_of_memory_events.select(
        "time_ns",
        pl.col("process").cast(pl.Int64, strict=False),
        pl.col("thread").cast(pl.Int64, strict=False),
    )
    event_positions = find_innermost_events(trace, build_forest(trace), threads)
    allocation_rows = (
        np.searchsorted(
            trace.allocations["time_ns"].to_numpy(),
            out_of_memory_events["time_ns"].to_numpy(),
            side="right",
        )
        - 1
    )
    rows: list[MemoryEndRow] = []
    for index, (time, asked_bytes) in enumerate(
        out_of_memory_events.select("time_ns", "bytes").rows()
    ):
        event_position, location = int(event_positions[index]), None
        if event_position >= 0:  # scope and op
            scope_places = explained.named.places
            path, label = (
                scope_places.paths[int(scope_places.path[event_position])],
                scope_places.labels[int(scope_places.label[event_position])],
            )
            location = f"{path}.{label}" if path else label
        step = trace.steps.filter((pl.col("start_ns") <= time) & (pl.col("end_ns") > time))["step"]
        rows.append(
            {
                "rank": trace.rank,
                "path": restore_addresses(trace.meta.path),
                "evidence": "trace",
                "time_ns": time - epoch_ns,
                "step": int(step[0]) if step.len() else None,
                "asked_bytes": asked_bytes,
                "message": "",
                "where": location,
                "stack": [],
                "devices": [],
                **_compute_breakdown(explained, int(allocation_rows[index]), asked_bytes, []),
            }
        )
    return rows


def _compute_breakdown(
    explained: ExplainedMemory, allocation_row: int, asked_bytes: int | None, stack: list[str]
) -> OutOfMemoryBreakdown:
    """Returns the owners just after a row of the allocations, in the memory that held most."""
    pools = range(len(explained.named.blocks.pools))
    allocations = build_allocations(explained, dict.fromkeys(pools, allocation_row))
    totals = (
        allocations.categories.group_by("pool")
        .agg(pl.col("bytes").sum())
        .sort("bytes", descending=True)
    )
    pool = int(totals["pool"][0]) if totals.height else 0
    in_pool = pl.col("pool") == pool
    bytes_by_kind: dict[str, int] = {}
    for category, size in allocations.categories.filter(in_pool).select("category", "bytes").rows():
        kind = _KIND_BY_CATEGORY.get(category, category.replace("_", " "))
        bytes_by_kind[kind] = bytes_by_kind.get(kind, 0) + size
    suggestions = why.list_advice(
        bytes_by_kind,
        why.parse_report_census({}),
        requested_bytes=asked_bytes,
        stack=stack,
        devices=[],
        ranks=None,
        growing=find_growth(explained.trace, explained.named)
        .select("site", "bytes_per_step", "bytes")
        .rows(),
    )
    largest_first = dict(sorted(bytes_by_kind.items(), key=lambda pair: -pair[1]))
    return _build_breakdown(
        largest_first, allocations.peak.filter(in_pool).drop("pool"), suggestions
    )


def write_allocations_csv(
    sources: MemorySources, options: MemoryOptions, handle: BinaryIO, *, all_columns: bool
) -> None:
    """Writes all allocations in order: `name,bytes`, and with `all_columns` all known properties.

    With several ranks the first column is `rank`. Times are relative to the start of the run.
    Memory timelines hold no single allocations.
    """
    selected_sources = sources.of_ranks(options.ranks)
    has_ranks = selected_sources.has_multiple
    columns = [*(["rank"] if has_ranks else []), *(LONG_SCHEMA if all_columns else SHORT_COLUMNS)]
    handle.write((",".join(columns) + "\n").encode())
    epoch_ns = selected_sources.epoch_ns
    for explained in selected_sources.iterate_explained(full_op_names=options.full_op_names):
        stacks = explained.stack_reader() if all_columns else None
        for rows in iterate_block_tables(
            explained.trace,
            explained.named,
            explained.kinds,
            explained.whose,
            stacks,
            full_table=all_columns,
        ):
            rank = pl.lit(explained.trace.rank, dtype=pl.Int32)
            frame = rows.with_columns(rank=rank) if has_ranks else rows
            if all_columns:
                frame = frame.with_columns(pl.col("time_ns") - epoch_ns)
            frame.select(columns).write_csv(handle, include_header=False)
