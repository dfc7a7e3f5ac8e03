"""Copies of the real traces of a job with planted delays, whose consequences on all ranks are known.

A copy of a recording in which a rank was late by so much, or a kernel was so much slower, must show what would have
followed: later launches, kernels that start later where nothing else held them back, collectives at which the others
wait, synchronisations that return later, and slack that swallows a delay. The rules here are few and their own; with no
fault the copy equals the recording.

Host: all threads of a process stand still together, so one rising function of time moves every host event.
Device: work starts when its launch, the work before it on its stream and, where neither explains its start, the work
that ended last before it allow; each with the delay that the recording shows, at most the usual one.
Collectives: the k-th communication kernel of every rank is one; each part ends its own transfer after the last start.
Synchronisations: a blocking call that ended just after work on the device ends as long after that work's new end.
"""

from __future__ import annotations

import bisect
import gzip
import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_BLOCKING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpyAsync",
    "cudaMemcpy",
)
_LEAST_CALL = 2_000  # ns that a blocking call takes when nothing is left to wait for
_BACK = 60_000  # ns after the end of work within which a call that returns is taken to have waited for it
_GAP = 5_000  # ns between two kernels of a stream that follow each other


@dataclass(frozen=True, slots=True)
class LateOp:
    """A process stands still before an op.

    Attributes:
        rank: The rank.
        ns: For how long.
        op: Name of a host event.
        nth: Which of those of that name, in the order of their starts.
    """

    rank: int
    ns: int
    op: str
    nth: int = 0


@dataclass(frozen=True, slots=True)
class SlowKernel:
    """Kernels take longer.

    Attributes:
        rank: The rank.
        factor: On their durations.
        name: A part of their names; communication is never meant.
        nth: Which of them; all where None.
    """

    rank: int
    factor: float
    name: str = ""
    nth: int | None = None


Planted = LateOp | SlowKernel


@dataclass(frozen=True)
class Copies:
    """What was written, and what is true of it.

    Attributes:
        paths: The files by rank.
        collectives: One row per rank's part of each collective, times in ns as the copies show them: `collective`
            (number), `rank`, `name`, `start_ns`, `end_ns`, `wait_ns` (until the last one came), `last_rank`,
            `moved_ns` (start, against the recording).
        grown_ns: By rank: by how much its last event ends later than in the recording.
    """

    paths: dict[int, Path]
    collectives: pl.DataFrame
    grown_ns: dict[int, int]


def plant(files: Mapping[int, str | Path], faults: Sequence[Planted], folder: str | Path) -> Copies:
    """Write copies of the traces of a job with faults in them.

    Args:
        files: The recording: one Kineto trace per rank, all ranks of the collectives.
        faults: What is planted; none gives copies equal to the recording.
        folder: Where to write, under the names of the recording.

    Raises:
        ValueError: The ranks do not have the same collectives, or there is nothing of a name.
    """
    ranks = {rank: _Recording(rank, Path(path)) for rank, path in sorted(files.items())}
    _number_collectives(ranks)
    for fault in faults:
        if fault.rank not in ranks:
            raise ValueError(f"there is no trace of rank {fault.rank}")
        ranks[fault.rank].plant(fault)
    transfers = _transfers(ranks)
    _replay(ranks, transfers)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    paths = {rank: recording.write(out / recording.path.name) for rank, recording in ranks.items()}
    return Copies(
        paths, _table(ranks), {rank: recording.grown() for rank, recording in ranks.items()}
    )


@dataclass(slots=True)
class _Work:
    """One piece of GPU work; times of the recording, and of the copy."""

    start: int
    end: int
    stream: Any
    correlation: Any
    name: str
    launch: int = -1  # start of its launch; -1 unknown
    collective: int = -1
    new_start: int = 0
    new_end: int = 0
    longer: float = 1.0


@dataclass(slots=True)
class _Moves:
    """A rising function of host time: times of the recording, and by how much they move from there on."""

    at: list[int] = field(default_factory=lambda: [-(1 << 62)])
    by: list[int] = field(default_factory=lambda: [0])

    def __call__(self, time: int) -> int:
        """The time in the copy; between the begin and the end of a shortened wait nothing passes its end."""
        index = bisect.bisect_right(self.at, time) - 1
        moved = time + self.by[index]
        if index + 1 < len(self.at):
            moved = min(moved, self.at[index + 1] + self.by[index + 1])
        return moved

    def add(self, time: int, by: int) -> None:
        """From this time on; times come in order."""
        if by != self.by[-1]:
            self.at.append(time)
            self.by.append(by)


class _Recording:
    """One rank's file."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank = rank
        self.path = path
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        self.document: dict[str, Any] = json.loads(text, parse_float=Decimal)
        self.events: list[dict[str, Any]] = self.document["traceEvents"]
        spans = [event for event in self.events if event.get("ph") == "X"]
        self.unit = 1 if any(isinstance(event["ts"], Decimal) for event in spans) else 1000
        launches = {_correlation(e): _ns(e["ts"]) for e in spans if e.get("cat") in _CALLS}
        self.work = sorted(
            (
                _Work(
                    _ns(e["ts"]),
                    _ns(e["ts"]) + _ns(e["dur"]),
                    e["tid"],
                    _correlation(e),
                    e["name"],
                    launches.get(_correlation(e), -1),
                )
                for e in spans
                if e.get("cat") in _WORK
            ),
            key=lambda work: (work.start, work.end),
        )
        self.calls = sorted(
            (_ns(e["ts"]), _ns(e["ts"]) + _ns(e["dur"]))
            for e in spans
            if e.get("cat") in _CALLS and e["name"].startswith(_BLOCKING)
        )
        self.host = sorted(
            (_ns(e["ts"]), e["name"])
            for e in spans
            if e.get("cat") in ("cpu_op", "user_annotation")
        )
        latencies = sorted(
            work.start - work.launch for work in self.work if 0 <= work.launch <= work.start
        )
        self.latency = latencies[len(latencies) // 20] if latencies else 0
        self.moves = _Moves()
        self.late: list[tuple[int, int]] = []

    def plant(self, fault: Planted) -> None:
        """Take note of a fault."""
        if isinstance(fault, LateOp):
            times = [at for at, name in self.host if name == fault.op]
            if fault.nth >= len(times):
                raise ValueError(
                    f'rank {self.rank} has {len(times)} host events "{fault.op}", number {fault.nth} is none'
                )
            self.late.append((times[fault.nth], fault.ns))
            return
        matches = [work for work in self.work if fault.name in work.name and work.collective < 0]
        if not matches or (fault.nth is not None and fault.nth >= len(matches)):
            raise ValueError(f'rank {self.rank} has {len(matches)} kernels "{fault.name}"')
        for work in matches if fault.nth is None else [matches[fault.nth]]:
            work.longer = fault.factor

    def write(self, path: Path) -> Path:
        """Write the copy; every number but times stands as it stood."""
        moved = {id(event): self._moved(event) for event in self.events if "ts" in event}
        for event in self.events:
            if id(event) in moved:
                start, duration = moved[id(event)]
                event["ts"] = self._us(start)
                if duration is not None:
                    event["dur"] = self._us(duration)
        text = json.dumps(self.document, default=float)
        data = text.encode()
        path.write_bytes(gzip.compress(data, 1, mtime=0) if path.name.endswith(".gz") else data)
        return path

    def _moved(self, event: dict[str, Any]) -> tuple[int, int | None]:
        start = _ns(event["ts"])
        duration = _ns(event["dur"]) if "dur" in event else None
        work = self._work_of(event, start)
        if work is not None:
            return work.new_start, None if duration is None else work.new_end - work.new_start
        if event.get("cat") == "gpu_user_annotation" and duration is not None:
            first, last = self._around(start, start + duration)
            return start + first, duration + last - first
        begin = self.moves(start)
        return begin, None if duration is None else self.moves(start + duration) - begin

    def _work_of(self, event: dict[str, Any], start: int) -> _Work | None:
        """The work that an event is, or at which its arrow ends."""
        if event.get("cat") in _WORK or event.get("ph") == "f":
            number = _correlation(event) if "args" in event else event.get("id")
            low = bisect.bisect_left(self.work, start, key=lambda work: work.start)
            for work in self.work[low:]:
                if work.start != start:
                    break
                if work.correlation == number and event.get("tid") == work.stream:
                    return work
        return None

    def _around(self, start: int, end: int) -> tuple[int, int]:
        """By how much the first and the last work between two times move."""
        inside = [work for work in self.work if work.start >= start and work.end <= end]
        if not inside:
            return 0, 0
        last = max(inside, key=lambda work: work.end)
        return inside[0].new_start - inside[0].start, last.new_end - last.end

    def _us(self, ns: int) -> Any:
        return ns // 1000 if self.unit == 1000 else Decimal(ns) / 1000

    def grown(self) -> int:
        """By how much the last of host and device end later."""
        last = max((work.end for work in self.work), default=0)
        new = max((work.new_end for work in self.work), default=0)
        return max(new - last, self.moves.by[-1])

    def rounded(self, ns: float) -> int:
        """To the unit of the file."""
        return round(ns / self.unit) * self.unit


def _ns(us: Any) -> int:
    return int(us * 1000) if isinstance(us, int) else int(Decimal(us) * 1000)


def _correlation(event: dict[str, Any]) -> Any:
    return (event.get("args") or {}).get("correlation")


def _number_collectives(ranks: Mapping[int, _Recording]) -> None:
    counts = {}
    for rank, recording in ranks.items():
        kernels = [
            work
            for work in recording.work
            if "nccl" in work.name.lower() or "rccl" in work.name.lower()
        ]
        for number, work in enumerate(kernels):
            work.collective = number
        counts[rank] = len(kernels)
    if len(set(counts.values())) > 1:
        counted = ", ".join(f"rank {rank}: {count}" for rank, count in counts.items())
        raise ValueError(f"the ranks have different numbers of communication kernels ({counted})")


def _parts(ranks: Mapping[int, _Recording]) -> dict[int, list[tuple[int, _Work]]]:
    """The parts of each collective: (rank, work)."""
    parts: dict[int, list[tuple[int, _Work]]] = {}
    for rank, recording in ranks.items():
        for work in recording.work:
            if work.collective >= 0:
                parts.setdefault(work.collective, []).append((rank, work))
    return parts


def _transfers(ranks: Mapping[int, _Recording]) -> dict[tuple[int, int], int]:
    """By collective and rank: from the last start of the recording to the end of the part."""
    out: dict[tuple[int, int], int] = {}
    for number, parts in _parts(ranks).items():
        last = max(work.start for _, work in parts)
        out |= {(number, rank): work.end - last for rank, work in parts}
    return out


def _replay(ranks: Mapping[int, _Recording], transfers: Mapping[tuple[int, int], int]) -> None:
    """Everything in the order of the recording; the end of a collective after the starts of all its parts."""
    parts = _parts(ranks)
    latest = {number: max(work.start for _, work in members) for number, members in parts.items()}
    due: list[tuple[int, int, int, int, Any]] = []
    for rank, recording in ranks.items():
        due += [(at, 0, rank, n, ("late", ns)) for n, (at, ns) in enumerate(recording.late)]
        due += [(work.start, 1, rank, n, ("start", work)) for n, work in enumerate(recording.work)]
        due += [
            (
                max(work.end, latest[work.collective]) if work.collective >= 0 else work.end,
                2,
                rank,
                n,
                ("end", work),
            )
            for n, work in enumerate(recording.work)
        ]
        due += [
            (end, 3, rank, n, ("call", (start, end)))
            for n, (start, end) in enumerate(recording.calls)
        ]
    heapq.heapify(due)
    states = {rank: _State(recording) for rank, recording in ranks.items()}
    while due:
        at, _, rank, _, (event, about) = heapq.heappop(due)
        state = states[rank]
        if event == "late":
            state.one.moves.add(at, state.one.moves.by[-1] + about)
        elif event == "start":
            state.start(about)
        elif event == "end":
            if about.collective >= 0:
                last_start = max(work.new_start for _, work in parts[about.collective])
                about.new_end = max(last_start + transfers[about.collective, rank], about.new_start)
            state.end(about)
        else:
            state.call(*about)


class _State:
    """How far the copy of one rank is."""

    def __init__(self, one: _Recording) -> None:
        self.one = one
        self.last_of: dict[Any, _Work] = {}  # by stream: the work before
        self.last: _Work | None = None  # that ended last

    def start(self, work: _Work) -> None:
        """When the work starts in the copy."""
        recording = self.one
        before = self.last_of.get(work.stream)
        bounds = []
        explained = False
        if work.launch >= 0:
            delay = work.start - work.launch
            explained = delay <= recording.latency
            bounds.append(recording.moves(work.launch) + min(delay, max(recording.latency, 0)))
        if before is not None and before.end <= work.start:
            gap = work.start - before.end
            explained |= gap <= _GAP
            bounds.append(before.new_end + min(gap, _GAP))
        if not explained and self.last is not None:
            bounds.append(self.last.new_end + work.start - self.last.end)
            explained = True
        work.new_start = max(bounds) if explained else max([work.start, *bounds])
        duration = work.end - work.start
        work.new_end = work.new_start + (
            duration if work.longer == 1 else recording.rounded(duration * work.longer)
        )
        self.last_of[work.stream] = work

    def end(self, work: _Work) -> None:
        """The work has ended."""
        if self.last is None or work.end >= self.last.end:
            self.last = work

    def call(self, start: int, end: int) -> None:
        """A call that may have waited for the device returns."""
        moves, last = self.one.moves, self.last
        begin = moves(start)
        least = begin + min(end - start, _LEAST_CALL)
        if last is not None and start < last.end <= end and end - last.end <= _BACK:
            new_end = max(least, last.new_end + end - last.end)
        else:
            new_end = begin + end - start
        if moves.at[-1] > start:  # never before what has begun to move meanwhile
            new_end = max(new_end, moves.at[-1] + moves.by[-1])
        moves.add(end, new_end - end)


def _table(ranks: Mapping[int, _Recording]) -> pl.DataFrame:
    rows = []
    for number, parts in sorted(_parts(ranks).items()):
        last_rank, last = max(parts, key=lambda part: (part[1].new_start, part[0]))
        rows += [
            {
                "collective": number,
                "rank": rank,
                "name": work.name,
                "start_ns": work.new_start,
                "end_ns": work.new_end,
                "wait_ns": last.new_start - work.new_start,
                "last_rank": last_rank,
                "moved_ns": work.new_start - work.start,
            }
            for rank, work in parts
        ]
    schema = {
        name: pl.String if name == "name" else pl.Int64
        for name in (
            "collective",
            "rank",
            "name",
            "start_ns",
            "end_ns",
            "wait_ns",
            "last_rank",
            "moved_ns",
        )
    }
    return pl.DataFrame(rows, schema=schema)
