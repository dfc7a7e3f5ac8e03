"""What `traceloom memory` is given: runs, memory snapshots, memory timelines, reports of memory that ran out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from traceloom.analyze.allocations import Explained, explain
from traceloom.analyze.allocations.from_snapshot import explain_snapshot
from traceloom.errors import InputError
from traceloom.files import note_input, with_addresses
from traceloom.model import Notice, Session, Trace
from traceloom.model.snapshot import Snapshot
from traceloom.read import load
from traceloom.read.allocations_file import read_allocations
from traceloom.read.memory_files import (
    ALLOCATIONS,
    OUT_OF_MEMORY,
    SNAPSHOT,
    TIMELINE,
    beside,
    kind_of,
    rank_of,
    read_out_of_memory,
)
from traceloom.read.memory_timeline import MemoryTimeline, read_timeline
from traceloom.read.snapshot import read_snapshot

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

    def explained(self, *, full_op_names: bool = False) -> Iterator[Explained]:
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
    out = Sources(with_addresses(", ".join(paths)))
    rest = []
    for text in paths:
        path = Path(text)
        kind = kind_of(path) if path.is_file() else None
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
        snapshot = beside(trace, SNAPSHOT_ENDING)
        if snapshot is not None:
            out.attached[trace.meta.path] = read_snapshot(snapshot)
        allocations = beside(trace, ALLOCATIONS_ENDING)
        if allocations is not None:
            _add_allocations(allocations, out)
        report = beside(trace, REPORT_ENDING)
        if report is not None and str(report) not in {other.path for other in out.reports}:
            out.reports.append(OutOfMemoryReport(trace.rank, str(report), read_out_of_memory(report)))
    except InputError as error:
        out.notices.append(Notice("refused-input", "warning", str(error), rank=trace.rank))
