"""Traces, snapshots, timelines and out-of-memory reports as sources; CSV of all allocations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict

import numpy as np
import polars as pl

from traceloom.analyze import memory_snapshot as why
from traceloom.analyze.ancestry import forest
from traceloom.analyze.memory_answers import ExplainedMemory, answers, explain, growth
from traceloom.analyze.memory_blocks import instants
from traceloom.analyze.memory_names import innermost
from traceloom.analyze.memory_owners import LONG, SHORT, slices, tree_of
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
    rank_of,
    read_allocations,
    read_out_of_memory,
    read_timeline,
    whole,
)
from traceloom.formats.memory_snapshot import read_snapshot
from traceloom.report.document import UnknownValues
from traceloom.system.files import note_input, restore_addresses
from traceloom.trace.frames import to_rows
from traceloom.trace.notice import Notice
from traceloom.trace.session import Session, Snapshot, frame_text
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
    """Choices of `traceloom memory`.

    Attributes:
        ranks: Only these ranks; None for all.
        by: How memory is divided: one of `analyze.allocations.BY`.
        depth: How many parts of a scope's or module's path are told apart; None for all.
        at: The instant: `peak`, `start`, `end`, `step N` (the highest point of that step) or nanoseconds after the
            start of the recording, as text.
        top: Rows of a table on a terminal.
        full_op_names: Names keep the namespace of the operator.
    """

    ranks: tuple[int, ...] | None = None
    by: str = "scope"
    depth: int | None = None
    at: str = "peak"
    top: int = 10
    full_op_names: bool = False


SNAPSHOT_ENDING, REPORT_ENDING, ALLOCATIONS_ENDING = ".memory.pickle", ".oom.json", ".allocations.json.gz"


@dataclass(frozen=True, slots=True)
class OutOfMemoryReport:
    """A report of memory that ran out: of which rank, from which file."""

    rank: int | None
    path: str
    document: dict[str, Any]  # as a program left it: nothing in it can be relied on


@dataclass
class Sources:
    """Everything that tells of memory.

    Attributes:
        name: What the user gave.
        session: The run; None where only files about memory were given.
        snapshots: Snapshots that were given, and their ranks.
        attached: Snapshots that lie beside a trace of `session`, by the trace's path.
        timelines: Memory timelines.
        reports: Reports of memory that ran out.
        notices: Files beside traces that were refused.
    """

    name: str
    session: Session | None = None
    snapshots: list[tuple[int | None, Snapshot]] = field(default_factory=list)
    attached: dict[str, Snapshot] = field(default_factory=dict)
    timelines: list[MemoryTimeline] = field(default_factory=list)
    reports: list[OutOfMemoryReport] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    def explained(self, *, full_op_names: bool = False) -> Iterator[ExplainedMemory]:
        """The blocks of each trace and each snapshot, one after the other."""
        for trace in self.session.traces if self.session is not None else ():
            snapshot = self.attached.get(trace.meta.path)
            if trace.allocations.height:
                yield explain(trace, full_op_names=full_op_names, snapshot=snapshot)
            if snapshot is not None and not (trace.allocations["device_type"] != "cpu").any():
                yield explain_snapshot(snapshot, trace.rank)
        for rank, snapshot in self.snapshots:
            yield explain_snapshot(snapshot, rank)

    @property
    def several(self) -> bool:
        """Whether there is more than one trace or snapshot."""
        traces = 0 if self.session is None else len(self.session.traces)
        return traces + len(self.snapshots) > 1

    def of_ranks(self, ranks: tuple[int, ...] | None) -> Sources:
        """Only these ranks; UsageError where one is not there."""
        if ranks is None:
            return self
        session = self.session.of_ranks(ranks) if self.session is not None else None
        snapshots = [pair for pair in self.snapshots if pair[0] in ranks]
        reports = [report for report in self.reports if report.rank in ranks]
        return replace(self, session=session, snapshots=snapshots, reports=reports)

    def snapshot_of(self, trace: Trace) -> Snapshot | None:
        """The snapshot beside a trace, or the one that the trace was made of."""
        snapshots = [*(snapshot for _, snapshot in self.snapshots), *self.attached.values()]
        made_of = next((snapshot for snapshot in snapshots if snapshot.path == trace.meta.path), None)
        return self.attached.get(trace.meta.path, made_of)

    def all_notices(self) -> list[Notice]:
        """Those of the run, of snapshots, and of files that were refused."""
        run = list(self.session.notices) if self.session is not None else []
        snapshots = [*(snapshot for _, snapshot in self.snapshots), *self.attached.values()]
        return [*run, *self.notices, *(notice for snapshot in snapshots for notice in snapshot.notices)]

    @property
    def epoch_ns(self) -> int:
        """What times are relative to: the start of the run, else the first thing known."""
        if self.session is not None:
            return self.session.epoch_ns
        starts = [int(line.time_ns[0]) for line in self.timelines if line.time_ns.size]
        starts += [explain_snapshot(snapshot).trace.start_ns for _, snapshot in self.snapshots]
        starts += [time for report in self.reports if isinstance(time := report.document.get("time_ns"), int)]
        return min(starts, default=0)


def of_session(session: Session) -> Sources:
    """A run, with the files about memory that the recorder left beside its traces."""
    out = Sources(session.name, session)
    for trace in session.traces:
        _beside(trace, out)
    return out


def find(paths: list[str], *, cache: bool = True) -> Sources:
    """Tell by their content what the files are, and read them.

    Args:
        paths: Runs, traces, snapshots (pickles), timelines, reports of memory that ran out, allocations that probes
            recorded; directories are runs.
        cache: Look into the cache of read traces.

    Raises:
        InputError: nothing that was given can be read.
        UsageError: as `traceloom.load`.
    """
    out = Sources(restore_addresses(", ".join(paths)))
    rest = []
    for text in paths:
        path = Path(text)
        kind = detect_kind(path) if path.is_file() else None
        if kind == SNAPSHOT:
            out.snapshots.append((rank_of(path), read_snapshot(path)))
        elif kind == TIMELINE:
            out.timelines.append(read_timeline(path))
        elif kind == OUT_OF_MEMORY:
            out.reports.append(OutOfMemoryReport(rank_of(path), text, read_out_of_memory(path)))
        elif kind == ALLOCATIONS:
            _add_allocations(path, out)
        else:
            rest.append(text)
    if not rest:
        return out
    try:
        session = load(*rest, cache=cache)
    except InputError as error:
        if error.slug not in ("no-traces", "damaged-capture") or not _without_traces(rest, out):
            raise
        return out
    out.session, out.name = session, session.name
    for trace in session.traces:
        _beside(trace, out)
    return out


def _without_traces(paths: list[str], out: Sources) -> bool:
    """A run that ended before its window was written may have left a report alone."""
    has_files = False
    for folder in (Path(text) for text in paths):
        if not folder.is_dir():
            continue
        for path in sorted(folder.glob(f"*{REPORT_ENDING}")):
            note_input(path)
            out.reports.append(OutOfMemoryReport(rank_of(path), str(path), read_out_of_memory(path)))
            has_files = True
        for path in sorted(folder.glob(f"*{SNAPSHOT_ENDING}")):
            note_input(path)
            out.snapshots.append((rank_of(path), read_snapshot(path)))
            has_files = True
        for path in sorted(folder.glob(f"*{ALLOCATIONS_ENDING}")):
            note_input(path)
            _add_allocations(path, out)
            has_files = True
    return has_files


def _add_allocations(path: Path, out: Sources) -> None:
    rank, snapshots = read_allocations(path)
    out.snapshots += [(rank, snapshot) for snapshot in snapshots]


def _beside(trace: Trace, out: Sources) -> None:
    """What the recorder left for the process of this trace; files that cannot be read become notices."""
    try:
        snapshot = find_sidecar(trace, SNAPSHOT_ENDING)
        if snapshot is not None:
            out.attached[trace.meta.path] = read_snapshot(snapshot)
        allocations = find_sidecar(trace, ALLOCATIONS_ENDING)
        if allocations is not None:
            _add_allocations(allocations, out)
        report = find_sidecar(trace, REPORT_ENDING)
        if report is not None and str(report) not in {other.path for other in out.reports}:
            out.reports.append(OutOfMemoryReport(trace.rank, str(report), read_out_of_memory(report)))
    except InputError as error:
        out.notices.append(Notice("refused-input", "warning", str(error), rank=trace.rank))


_NONE = "a memory timeline holds levels by category, not single allocations"
_PATHS = (
    "memories[*].largest", "memories[*].growth", "memories[*].activations", "memories[*].allocator",
    "memories[*].capacity_bytes", "memories[*].peak_step", "memories[*].start_bytes", "memories[*].curve.stacks",
    "memories[*].reserved_at_peak_bytes", "ranks[*].lifetimes", "memories[*].categories[*].block_count",
    "memories[*].curve.scopes", "ranks[*].steps", "memories[*].modules", "ranks[*].rank",
)  # fmt: skip


def entry(timeline: MemoryTimeline, at: str, absent: UnknownValues) -> MemoryRankRow:
    """One entry of `ranks`.

    Raises:
        UsageError: slug `bad-instant`, for an instant that only a run with steps has.
    """
    for path in _PATHS:
        absent.say(path, _NONE)
    total = timeline.levels.sum(axis=0)
    times = timeline.time_ns - absent.epoch_ns
    if not total.size or at == "peak":
        index = int(total.argmax()) if total.size else 0
    elif at in ("start", "end"):
        index = 0 if at == "start" else total.size - 1
    elif at.isascii() and at.isdigit():
        index = max(int(np.searchsorted(times, int(at), side="right")) - 1, 0)
    else:
        raise UsageError(
            f"a memory timeline has no instant `{at}`",
            slug="bad-instant",
            hint="give peak, start, end, or a time as 12.5ms",
        )
    peak = int(total.argmax()) if total.size else 0
    rows = instants(total) + 1  # positions in the levels themselves: there is no start before them
    levels = timeline.levels[:, index] if total.size else np.zeros(len(CATEGORIES), dtype=np.int64)
    held = [(name, int(size)) for name, size in zip(CATEGORIES, levels.tolist(), strict=True) if size]
    held.sort(key=lambda pair: (-pair[1], pair[0]))
    whole = max(sum(size for _, size in held), 1)
    parts: list[MemoryPartRow] = [
        {"name": name, "bytes": size, "block_count": None, "fraction": size / whole} for name, size in held
    ]
    curve: list[MemorySeriesRow] = [
        {"name": name, "bytes": level.tolist()}
        for name, level in zip(CATEGORIES, timeline.levels[:, rows], strict=True)
        if level.any()
    ]
    categories: list[MemoryCategoryRow] = [
        {
            "category": name, "evidence": "none" if name == "unknown" else "recorded", "bytes": size,
            "block_count": None, "fraction": size / whole,
        }
        for name, size in held
    ]  # fmt: skip
    tree: list[Any] = tree_of([((name,), size, 0) for name, size in held]).to_dicts()  # as the document has it
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
        "capacity_bytes": None,
        "instant": {"time_ns": int(times[index]) if total.size else 0, "bytes": sum(size for _, size in held)},
        "tree": tree,
        "categories": categories,
        "parts": parts,
        "largest": [],
        "growth": [],
        "modules": [],
        "activations": [],
        "allocator": None,
        "curve": {"time_ns": times[rows].tolist(), "categories": curve, "scopes": curve, "stacks": None},
    }
    return {"rank": None, "path": timeline.path, "memories": [memory], "steps": [], "lifetimes": []}


MARK = "[OutOfMemory]"
MOST_FRAMES = 60
_DEVICE = ("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes", "retries")
_OF_CATEGORY = {
    "parameter": why.KINDS["parameter"], "buffer": why.KINDS["buffer"], "gradient": why.KINDS["gradient"],
    "optimizer_state": why.KINDS["optimizer_state"], "activation": why.KINDS["activation"],
}  # fmt: skip


class OutOfMemoryHolders(TypedDict):
    """The part of an entry that says who held what, the same as a tree, and what to try."""

    bytes: int
    kinds: list[MemoryEndKindsRow]
    tree: list[MemoryNodeRow]
    advice: list[MemoryAdviceRow]


def of_reports(sources: Sources, ranks: list[MemoryRankRow], epoch_ns: int) -> list[MemoryEndRow]:
    """One entry for each report that a run left.

    Args:
        sources: What was given.
        ranks: Entries of the document: they know what grows.
        epoch_ns: What times are relative to.
    """
    out: list[MemoryEndRow] = []
    for report in sources.reports:
        document = report.document
        listed = document.get("stack")
        stack = [str(frame)[:2000] for frame in listed[-MOST_FRAMES:]] if isinstance(listed, list) else []
        live = why.census_of(document)
        asked_bytes, time = whole(document.get("asked_bytes")), whole(document.get("time_ns"))
        devices = _devices(document.get("devices"))
        world = sources.session.world_size if sources.session is not None else None
        growing = [
            (row["site"], row["bytes_per_step"], row["bytes"])
            for entry in ranks
            if entry["rank"] == report.rank
            for memory in entry["memories"]
            for row in memory["growth"]
        ]
        held = why.kinds(live)
        suggestions = why.advice(
            held, live, asked=asked_bytes, stack=stack, devices=devices, ranks=world, growing=growing
        )
        out.append(
            {
                "rank": report.rank,
                "path": report.path,
                "evidence": "census",
                "time_ns": None if time is None else time - epoch_ns,
                "step": whole(document.get("step")),
                "asked_bytes": asked_bytes,
                "message": str(document.get("message", ""))[:4000],
                "where": why.where_in_program(stack),
                "stack": stack,
                "devices": devices,
                **_holders(held, why.tree(live), suggestions),
            }
        )
    return out


def of_blocks(explained: ExplainedMemory, sources: Sources, epoch_ns: int) -> list[MemoryEndRow]:
    """One entry for each time that a trace or a snapshot says that memory ran out, where no report says it better."""
    if explained.trace.rank in {report.rank for report in sources.reports}:
        return []
    if explained.stacks is None:
        return _of_marks(explained, epoch_ns)
    snapshots = [*(snapshot for _, snapshot in sources.snapshots), *sources.attached.values()]
    snapshot = next(snapshot for snapshot in snapshots if snapshot.path == explained.trace.meta.path)
    ends = snapshot.entries.with_row_index("order").filter(pl.col("action") == "oom")
    times = explained.trace.allocations["time_ns"].to_numpy()
    out: list[MemoryEndRow] = []
    for asked_bytes, time_us, number, free in ends.select("bytes", "time_us", "stack", "address").rows():
        stack = [frame_text(frame) for frame in reversed(snapshot.stacks[number])][-MOST_FRAMES:]
        python = [frame for frame in stack if ".py(" in frame]
        row = times.size - 1 if time_us is None else int(np.searchsorted(times, time_us * 1000, side="right")) - 1
        out.append(
            {
                "rank": explained.trace.rank,
                "path": snapshot.path,
                "evidence": "snapshot",
                "time_ns": None if time_us is None else time_us * 1000 - epoch_ns,
                "step": None,
                "asked_bytes": asked_bytes,
                "message": f"{free} bytes were free on the device",
                "where": why.where_in_program(python or stack),
                "stack": stack,
                "devices": [],
                **_of_blocks(explained, row, asked_bytes, python or stack),
            }
        )
    return out


def _holders(held: dict[str, int], tree: pl.DataFrame, suggestions: Iterable[why.Advice]) -> OutOfMemoryHolders:
    total = sum(held.values())
    return {
        "bytes": total,
        "kinds": [{"name": name, "bytes": size, "fraction": size / max(total, 1)} for name, size in held.items()],
        "tree": to_rows(tree),
        "advice": [
            {"action": advice.action, "text": advice.text, "bytes": advice.bytes, "why": advice.why}
            for advice in suggestions
        ],
    }


def _devices(listed: object) -> list[MemoryDeviceRow]:
    """What the allocators said, with what is in use outside them."""
    out: list[MemoryDeviceRow] = []
    for entry in listed if isinstance(listed, list) else []:
        if not isinstance(entry, dict) or any((whole(entry.get(key)) or 0) < 0 for key in _DEVICE):
            continue
        allocated, reserved, free, total, retries = (whole(entry.get(key)) or 0 for key in _DEVICE)
        out.append(
            {
                "device_type": str(entry.get("device_type", ""))[:40],
                "device": whole(entry.get("device")),
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "free_bytes": free,
                "total_bytes": total,
                "retries": retries,
                "outside_bytes": max(total - free - reserved, 0),
            }
        )
    return out


def _of_marks(explained: ExplainedMemory, epoch_ns: int) -> list[MemoryEndRow]:
    """Marks of PyTorch in a trace: what was asked for and when; who held what follows from the blocks."""
    trace = explained.trace
    marks = trace.marks.filter(pl.col("name") == MARK)
    if not marks.height:
        return []
    threads = marks.select(
        "time_ns", pl.col("process").cast(pl.Int64, strict=False), pl.col("thread").cast(pl.Int64, strict=False)
    )
    positions = innermost(trace, forest(trace), threads)
    at = np.searchsorted(trace.allocations["time_ns"].to_numpy(), marks["time_ns"].to_numpy(), side="right") - 1
    out: list[MemoryEndRow] = []
    for k, (time, asked_bytes) in enumerate(marks.select("time_ns", "bytes").rows()):
        position, where = int(positions[k]), None
        if position >= 0:  # scope and op
            places = explained.named.places
            path, label = places.paths[int(places.path[position])], places.labels[int(places.label[position])]
            where = f"{path}.{label}" if path else label
        step = trace.steps.filter((pl.col("start_ns") <= time) & (pl.col("end_ns") > time))["step"]
        out.append(
            {
                "rank": trace.rank,
                "path": restore_addresses(trace.meta.path),
                "evidence": "trace",
                "time_ns": time - epoch_ns,
                "step": int(step[0]) if step.len() else None,
                "asked_bytes": asked_bytes,
                "message": "",
                "where": where,
                "stack": [],
                "devices": [],
                **_of_blocks(explained, int(at[k]), asked_bytes, []),
            }
        )
    return out


def _of_blocks(explained: ExplainedMemory, row: int, asked_bytes: int | None, stack: list[str]) -> OutOfMemoryHolders:
    """Who held what just after a row of the allocations, in the memory that held most."""
    pools = range(len(explained.named.blocks.pools))
    allocations = answers(explained, dict.fromkeys(pools, row))
    totals = allocations.categories.group_by("pool").agg(pl.col("bytes").sum()).sort("bytes", descending=True)
    pool = int(totals["pool"][0]) if totals.height else 0
    in_pool = pl.col("pool") == pool
    held: dict[str, int] = {}
    for category, size in allocations.categories.filter(in_pool).select("category", "bytes").rows():
        kind = _OF_CATEGORY.get(category, category.replace("_", " "))
        held[kind] = held.get(kind, 0) + size
    nobody = why.census_of({})
    growing = growth(explained.trace, explained.named).select("site", "bytes_per_step", "bytes").rows()
    suggestions = why.advice(held, nobody, asked=asked_bytes, stack=stack, devices=[], ranks=None, growing=growing)
    largest_first = dict(sorted(held.items(), key=lambda pair: -pair[1]))
    return _holders(largest_first, allocations.peak.filter(in_pool).drop("pool"), suggestions)


def write(sources: Sources, options: MemoryOptions, handle: BinaryIO, *, whole: bool) -> None:
    """All allocations in the order they were made: `name,bytes`, and with `whole` all that is known of each.

    With several ranks a column `rank` stands first. Times are relative to the start of the run. Memory timelines tell
    of no single allocations.
    """
    part = sources.of_ranks(options.ranks)
    several = part.several
    names = [*(["rank"] if several else []), *(LONG if whole else SHORT)]
    handle.write((",".join(names) + "\n").encode())
    epoch_ns = part.epoch_ns
    for explained in part.explained(full_op_names=options.full_op_names):
        stacks = explained.stack_reader() if whole else None
        for rows in slices(explained.trace, explained.named, explained.kinds, explained.whose, stacks, whole=whole):
            rank = pl.lit(explained.trace.rank, dtype=pl.Int32)
            frame = rows.with_columns(rank=rank) if several else rows
            if whole:
                frame = frame.with_columns(pl.col("time_ns") - epoch_ns)
            frame.select(names).write_csv(handle, include_header=False)
