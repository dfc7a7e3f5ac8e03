"""Diagnosis of a hang: the bundle of files that is kept, and a sentence that names the rank that
the others wait for.

There are independent sources of evidence: the states of processes (a rank that has ended or is
stopped), their stacks, and PyTorch's flight recorder of collectives if a process provides it.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import textwrap
import time
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Literal

import msgspec

from traceloom import __version__
from traceloom.agent import worker
from traceloom.agent.hangs.detector import Hang
from traceloom.agent.hangs.flight_recorder import (
    FlightDump,
    FlightFindings,
    NoFlightDumpError,
    fetch_flight_record,
)
from traceloom.agent.hangs.stacks import (
    GroupedStacks,
    collect_stacks,
    find_rank_pids,
    group_stacks,
)
from traceloom.agent.kineto import read_process_state
from traceloom.agent.metrics import SeriesKey
from traceloom.agent.ownership.environment import DUMP_PIPE, WORKER_SERVER
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers import telemetry
from traceloom.agent.profilers.py_spy import StackDump, write_new_file
from traceloom.analyze.stuck_jobs import FlightVerdict
from traceloom.errors import TraceloomError
from traceloom.system import units
from traceloom.system.sanitize import sanitize

VERSION = 1
LOG = logging.getLogger("traceloom.agent")
_MAX_RECORDS = 64  # flight records per bundle
_MAX_FETCHES = 16  # at once
_MAX_RECORD_BYTES = 256 << 20  # total of records that are analysed but not kept
_ANALYSIS_TIMEOUT_S = 120.0


class Witness(msgspec.Struct, frozen=True, kw_only=True):
    """One source of evidence: its finding, and the ranks that the others wait for according to it;
    none if it has no result.
    """

    source: Literal["states", "stacks", "flight recorder"]
    sentence: str
    ranks: tuple[int, ...] = ()


class HungDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device of the job with its latest values: metric (and its other labels) -> value."""

    uuid: str
    index: str
    model: str
    stale: str = ""
    values: dict[str, float] = {}


class HangEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a device of the job: xid, ecc, throttle, lost, back."""

    at_ns: int
    device: str
    kind: str
    text: str
    code: int | None = None


class HangProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the job.

    `steps`: how many it has made, if known; `flight`: how its flight record was obtained, or why
    not.
    """

    pid: int
    rank: int | None
    state: str
    command: str
    steps: int | None = None
    flight: str = ""


class HangContext(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's data about the job at the time of the hang.

    `series`: of the last minutes, times in ns and values.
    """

    host: str
    processes: tuple[Process, ...]
    devices: tuple[HungDevice, ...]
    events: tuple[HangEvent, ...]
    series: dict[SeriesKey, tuple[array[int], array[float]]]


class HangReport(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `hang.json`.

    `ranks`: those that the others wait for; `omitted`: file -> why it is missing.
    """

    format: str = "traceloom-hang"
    version: int = VERSION
    traceloom: str = __version__
    host: str
    job: str
    uid: int
    name: str = ""
    world_size: int | None = None
    since_ns: int
    seen_ns: int
    median_step_seconds: float
    sentence: str
    ranks: tuple[int, ...]
    witnesses: tuple[Witness, ...]
    members: tuple[HangProcessInfo, ...]
    devices: tuple[HungDevice, ...]
    events: tuple[HangEvent, ...]
    files: tuple[str, ...] = ()
    omitted: dict[str, str] = {}


class _FlightRecords(msgspec.Struct, frozen=True, kw_only=True):
    """How each record was obtained or why not, by pid; their verdict; and the collectives that
    ranks wait in, by pid.
    """

    notes: dict[int, str]
    verdict: FlightVerdict | None = None
    waits: dict[int, str] = {}


class _BundleDirectory:
    """The files of a bundle, up to a total size."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory, self.room = directory, max_bytes
        self.files: list[str] = []
        self.omitted: dict[str, str] = {}

    def put(self, name: str, content: bytes) -> Path | None:
        """Write a new file; returns None if it does not fit."""
        if len(content) > self.room:
            self.omitted[name] = (
                f"it has {units.format_size(len(content))}, and the bundle would be larger than `max_mb`"
            )
            return None
        path = write_new_file(self.directory / name, content)
        self.room -= len(content)
        self.files.append(name)
        return path


class _HangDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence about the processes of a hang, and the conclusion."""

    dumps: dict[int, StackDump]
    stacks: GroupedStacks
    flight_notes: dict[int, str]
    sentence: str
    ranks: tuple[int, ...]
    witnesses: tuple[Witness, ...]


async def find_collective_waits(processes: Sequence[Process]) -> dict[int, str]:
    """Returns pid -> collective that the rank waits in, from the flight records of processes that
    provide them.
    """
    if not any(
        process.declared.get(name) for process in processes for name in (WORKER_SERVER, DUMP_PIPE)
    ):
        return {}
    with tempfile.TemporaryDirectory(prefix="traceloom-flight-") as name:
        flights = await _collect_flight_records(
            processes, time.time_ns(), _BundleDirectory(Path(name), _MAX_RECORD_BYTES)
        )
    return flights.waits


async def describe_hang(hang: Hang, processes: Sequence[Process]) -> tuple[str, tuple[int, ...]]:
    """Returns the sentence about the hang, and the ranks that the others wait for; nothing is
    kept.
    """
    with tempfile.TemporaryDirectory(prefix="traceloom-flight-") as name:
        diagnosis = await _examine_hang(
            hang, processes, _BundleDirectory(Path(name), _MAX_RECORD_BYTES)
        )
    return diagnosis.sentence, diagnosis.ranks


async def write_bundle(
    hang: Hang, scene: HangContext, directory: Path, max_bytes: int
) -> HangReport:
    """Write the evidence about all processes of the job, and the ranks that they wait for.

    Writes `hang.json`, `hang.md`, `stacks.json`, `rank<N>.dump.json` (or `pid<PID>.dump.json`),
    `flight_rank_<N>` (in the format of torch's own analyser) or `flight_rank_<N>.json`, and
    `<host>.telemetry.json.gz`.

    Args:
        hang: The detected hang.
        scene: The agent's data about the job.
        directory: A new or empty one.
        max_bytes: Approximate limit of all files together.

    Raises:
        ProfilerError: `cannot-write`.
    """
    bundle = _BundleDirectory(directory, max_bytes)
    processes = scene.processes
    diagnosis = await _examine_hang(hang, processes, bundle)
    owner = max((process.owner for process in processes), key=lambda owner: len(owner.sources))
    steps = {member.pid: member.steps for member in hang.processes}
    await asyncio.to_thread(_write_evidence, bundle, scene, diagnosis)
    report = HangReport(
        host=scene.host,
        job=hang.job,
        uid=hang.uid,
        name=owner.name,
        world_size=owner.world_size,
        since_ns=hang.since_ns,
        seen_ns=hang.seen_ns,
        median_step_seconds=hang.median_s,
        sentence=diagnosis.sentence,
        ranks=diagnosis.ranks,
        witnesses=diagnosis.witnesses,
        devices=scene.devices,
        events=scene.events,
        members=tuple(
            HangProcessInfo(
                pid=process.pid,
                rank=process.owner.rank,
                state=read_process_state(process.pid, process.start_ticks) or "ended",
                command=process.command,
                steps=steps.get(process.pid),
                flight=diagnosis.flight_notes.get(process.pid, ""),
            )
            for process in processes
        ),
        files=(*bundle.files, "hang.json", "hang.md"),
        omitted=bundle.omitted,
    )
    document = msgspec.json.format(msgspec.json.encode(report), indent=2)
    await asyncio.to_thread(write_new_file, directory / "hang.json", document)
    await asyncio.to_thread(
        write_new_file, directory / "hang.md", render_bundle_page(report, diagnosis.stacks).encode()
    )
    return report


async def _examine_hang(
    hang: Hang, processes: Sequence[Process], bundle: _BundleDirectory
) -> _HangDiagnosis:
    """Examine the processes and diagnose; flight records are written into the bundle."""
    python_stacks = await collect_stacks(processes)
    flights = await _collect_flight_records(processes, hang.since_ns, bundle)
    # Native stacks last, as they stop the process; one that is already stopped would not respond.
    native = await collect_stacks(
        [
            process
            for process in processes
            if read_process_state(process.pid, process.start_ticks) not in ("T", "t")
        ],
        native=True,
    )
    dumps = python_stacks.dumps | native.dumps
    reasons = {pid: reason for pid, reason in python_stacks.reasons.items() if pid not in dumps}
    now_ns = time.time_ns()
    group = partial(
        group_stacks,
        processes,
        dumps,
        reasons,
        {member.pid: member.steps for member in hang.processes},
        ended={
            ended_process.rank: f"its process {ended_process.pid} ended {units.format_duration(max(now_ns - ended_process.ended_ns, 0))} ago"
            for ended_process in hang.gone
            if ended_process.rank is not None
        },
    )
    stacks_only = await asyncio.to_thread(group)
    stacks = await asyncio.to_thread(group, waits=flights.waits)
    summary, ranks, witnesses = _find_blocking_ranks(
        hang, processes, stacks_only, stacks, flights.verdict
    )
    return _HangDiagnosis(
        dumps=dumps,
        stacks=stacks,
        flight_notes=flights.notes,
        sentence=summary,
        ranks=ranks,
        witnesses=witnesses,
    )


async def _collect_flight_records(
    processes: Sequence[Process], since_ns: int, bundle: _BundleDirectory
) -> _FlightRecords:
    """Fetch every rank's record, and analyse them in a worker process."""
    dumps: dict[int, FlightDump] = {}
    notes: dict[int, str] = {}
    mains = find_rank_pids(processes)
    ranks = [
        process for process in processes if process.pid in mains and process.owner.rank is not None
    ]

    # Threads of their own: ranks that do not answer take none from the rest of the agent.
    loop, pool = asyncio.get_running_loop(), ThreadPoolExecutor(_MAX_FETCHES, "flight")

    async def take(process: Process) -> None:
        assert process.owner.rank is not None
        try:
            dumps[process.owner.rank] = await loop.run_in_executor(
                pool, fetch_flight_record, process, since_ns
            )
            notes[process.pid] = dumps[process.owner.rank].how
        except NoFlightDumpError as error:
            notes[process.pid] = str(error)

    try:
        await asyncio.gather(*(take(process) for process in ranks[:_MAX_RECORDS]))
    finally:
        pool.shutdown(wait=False)
    paths: dict[str, str] = {}
    for rank, dump in sorted(dumps.items()):
        name = f"flight_rank_{rank}" + (".json" if dump.kind == "json" else "")
        if path := await asyncio.to_thread(bundle.put, name, dump.data):
            paths[str(rank)] = str(path)
    if not paths:
        return _FlightRecords(notes=notes)
    try:
        task = partial(worker.run, "flight-records", timeout_s=_ANALYSIS_TIMEOUT_S, files=paths)
        findings = msgspec.convert(await asyncio.to_thread(task), FlightFindings, strict=False)
    except (TraceloomError, msgspec.ValidationError) as error:
        LOG.warning(
            "flight records of job %s were not understood: %s", processes[0].owner.job, error
        )
        return _FlightRecords(notes=notes)
    pids = {str(process.owner.rank): process.pid for process in ranks}
    notes |= {
        pids[rank]: f"its record is not understood: {reason}"
        for rank, reason in findings.bad.items()
    }
    waits = findings.verdict.waits
    waits_by_pid = {
        process.pid: waits[process.owner.rank] for process in ranks if process.owner.rank in waits
    }
    return _FlightRecords(notes=notes, verdict=findings.verdict, waits=waits_by_pid)


def _find_blocking_ranks(
    hang: Hang,
    processes: Sequence[Process],
    stacks_only: GroupedStacks,
    stacks: GroupedStacks,
    flight: FlightVerdict | None,
) -> tuple[str, tuple[int, ...], tuple[Witness, ...]]:
    """Returns the sentence, the ranks that the others wait for, and the finding of each source.

    Args:
        hang: The detected hang.
        processes: Those of the job.
        stacks_only: Groups by stacks alone.
        stacks: Groups by stacks, and by waits known from the flight recorder.
        flight: The verdict of the flight recorder.
    """
    mains = find_rank_pids(processes)
    stopped = sorted(
        process.owner.rank
        for process in processes
        if process.pid in mains
        and process.owner.rank is not None
        and read_process_state(process.pid, process.start_ticks) in ("T", "t")
    )
    ended = sorted(ended.rank for ended in hang.gone if ended.rank is not None)
    elsewhere = _list_diverging_ranks(stacks)
    stop = (
        [
            f"{units.format_ranks(stopped)} {'is' if len(stopped) == 1 else 'are'} stopped by a signal or a debugger"
        ]
        if stopped
        else []
    )
    states = [
        *stop,
        *(
            [f"{units.format_ranks(ended)} {'has' if len(ended) == 1 else 'have'} ended"]
            if ended
            else []
        ),
    ]
    witnesses: list[Witness] = []
    if states:
        witnesses.append(
            Witness(
                source="states", sentence="; ".join(states), ranks=tuple(sorted({*stopped, *ended}))
            )
        )
    witnesses.append(
        Witness(
            source="stacks", sentence=stacks_only.sentence, ranks=_list_diverging_ranks(stacks_only)
        )
    )
    parts = [*stop, stacks.sentence]
    if flight is not None:
        witnesses.append(
            Witness(source="flight recorder", sentence=flight.sentence, ranks=flight.ranks)
        )
        if flight.kind != "nothing":
            parts.append(f"by the flight recorder, {flight.sentence}")
        if elsewhere and flight.ranks and set(elsewhere) != set(flight.ranks):
            parts.append(
                f"the two disagree: stacks name {units.format_ranks(elsewhere)}, the flight recorder {units.format_ranks(flight.ranks)}"
            )
    ranks = tuple(sorted({*stopped, *ended})) or (flight.ranks if flight else ()) or elsewhere
    waiting = [group.waits_in for group in stacks.groups if group.role == "rank"]
    if not ranks and waiting and all(waiting):
        local_ranks = {
            process.owner.rank for process in processes if process.owner.rank is not None
        }
        remote_count = max(
            (p.owner.world_size for p in processes if p.owner.world_size is not None), default=0
        ) - len(local_ranks)
        if remote_count > 0:
            parts.append(
                f"all {len(local_ranks)} ranks of this host wait: who is elsewhere is among the {remote_count} of other hosts"
            )
        elif len(local_ranks) > 1:
            parts.append("all ranks wait, none is elsewhere")
    since = max(hang.seen_ns - hang.since_ns, 0)
    work = "its processes work, but " if hang.busy else ""
    start = f"job {hang.job}: {work}no step for {units.format_duration(since)}, where one took "
    return (
        f"{start}{units.format_duration(int(hang.median_s * 1e9))}: {'; '.join(parts)}",
        ranks,
        tuple(witnesses),
    )


def _list_diverging_ranks(stacks: GroupedStacks) -> tuple[int, ...]:
    return tuple(
        sorted({rank for group in stacks.groups if group.elsewhere for rank in group.ranks})
    )


def _write_evidence(bundle: _BundleDirectory, scene: HangContext, account: _HangDiagnosis) -> None:
    """Write the stacks and the recent telemetry; blocks."""
    document = {"format": "traceloom-stack-groups", "version": 1, "time_ns": time.time_ns()}
    bundle.put("stacks.json", msgspec.json.encode(document | msgspec.to_builtins(account.stacks)))
    ranks: set[int] = set()
    for process in scene.processes:
        rank = process.owner.rank
        if process.pid in account.dumps:
            # Children of a rank inherit its number.
            is_first = rank is not None and rank not in ranks
            stem = f"rank{rank}" if is_first else f"pid{process.pid}"
            ranks |= {rank} if rank is not None else set()
            bundle.put(f"{stem}.dump.json", msgspec.json.encode(account.dumps[process.pid]))
    # The size of telemetry is known only after writing: a file that does not fit is deleted again.
    stem = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in scene.host)[
        :80
    ].lstrip(".")
    path = telemetry.write_series(
        bundle.directory / f"{stem or 'host'}.telemetry.json.gz",
        scene.host,
        scene.series,
        truncated=False,
    )
    size = path.stat().st_size
    if size > bundle.room:
        path.unlink()
        bundle.omitted[path.name] = (
            f"it has {units.format_size(size)}, and the bundle would be larger than `max_mb`"
        )
        return
    bundle.room -= size
    bundle.files.append(path.name)


def render_bundle_page(report: HangReport, stacks: GroupedStacks) -> str:
    """Returns the bundle as a Markdown page.

    Untrusted names appear in code blocks only, where nothing is markup.
    """
    states = {
        "T": "stopped",
        "t": "traced",
        "D": "waits for a disk or device",
        "S": "sleeps",
        "R": "runs",
    }
    members = [
        f"{'-' if entry.rank is None else entry.rank:>5}  {entry.pid:>8}  {states.get(entry.state, entry.state):<26}  "
        f"{'-' if entry.steps is None else entry.steps:>8}  {entry.flight or '-'}"
        for entry in report.members
    ]
    parts = [
        "# A job hangs",
        _format_code_block(textwrap.wrap(report.sentence, 100)),
        "## Witnesses",
        _format_code_block(f"{entry.source}: {entry.sentence}" for entry in report.witnesses),
        "## Processes",
        _format_code_block(
            [f"{'rank':>5}  {'pid':>8}  {'state':<26}  {'steps':>8}  flight record", *members]
        ),
        "## Stacks",
        "From the outermost call to the innermost; ranks that are elsewhere than the others first.",
    ]
    for role, groups in groupby(stacks.groups, key=attrgetter("role")):
        titles = {
            "rank": "Main threads",
            "worker": "Other processes of the job",
            "thread": "Other threads",
        }
        parts.append(f"### {titles[role]}")
        for group in groups:
            subject = (
                units.format_ranks(group.ranks)
                if group.ranks
                else f"process {units.format_ranges(group.pids)}"
            )
            first = " ".join(
                filter(None, (subject, group.thread, "(elsewhere)" if group.elsewhere else ""))
            )
            calls = [
                f"  {frame.function} ({frame.file}{f':{frame.line}' if frame.line else ''})"
                for frame in group.frames
            ]
            parts.append(_format_code_block([first, *calls]))
    lines: list[str] = []
    for device in report.devices:
        lines.append(f"{device.index}  {device.uuid}  {device.model}  {device.stale}".rstrip())
        lines += (f"  {name} = {value:.6g}" for name, value in sorted(device.values.items()))
        for event in report.events:
            if event.device == device.uuid:
                ago = units.format_duration(max(report.seen_ns - event.at_ns, 0))
                code = "" if event.code is None else f" {event.code}"
                lines.append(f"  {ago} before: {event.kind}{code} {event.text}")
    if lines:
        parts += ["## Devices", _format_code_block(lines)]
    parts += [
        "## Files",
        _format_code_block(
            (*report.files, *(f"{name}: {reason}" for name, reason in report.omitted.items()))
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _format_code_block(lines: Iterable[str]) -> str:
    return "\n".join(["```text", *(sanitize(line).replace("```", "'''") for line in lines), "```"])
