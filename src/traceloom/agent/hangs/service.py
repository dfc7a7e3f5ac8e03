"""Detects hangs, keeps a bundle of each and notes its end; the state survives a restart of the
agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import subprocess
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import msgspec

from traceloom.agent.collectors.collector import read
from traceloom.agent.collectors.processes import TICKS_PER_S
from traceloom.agent.config import Config
from traceloom.agent.hangs.bundle import (
    HangContext,
    HangEvent,
    HungDevice,
    describe_hang,
    write_bundle,
)
from traceloom.agent.hangs.detector import Hang, HangDetector, JobKey
from traceloom.agent.hangs.stacks import collect_stacks, find_rank_pids, find_waiting_call
from traceloom.agent.history import History
from traceloom.agent.kineto import read_process_state
from traceloom.agent.metrics import METRICS, Reading, SeriesKey
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers.telemetry import is_relevant_series, select_job_labels
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.steps import StepCounter, StepPace
from traceloom.agent.traces.files import TraceDirectories
from traceloom.errors import OutputError, TraceloomError, other_version
from traceloom.system.files import write

LOG = logging.getLogger("traceloom.agent")
VERSION = 1
_MAX_RECORDS = 200  # of a user, beyond those that still hang
_MAX_JOBS = 1024  # jobs whose hangs are counted
_SAVE_INTERVAL_S = 10.0  # between writes of the paces
_HISTORY_S = 300.0  # telemetry in a bundle before the last step
_LOOKS, _BETWEEN_S = 4, 0.5  # samples that decide whether a process works
_BUSY_SHARE = 0.3  # of a CPU
_MAX_EXAMINED = 64

State = Literal["hangs", "recovered", "ended", "unknown"]


class HangRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A hang and its outcome.

    `ranks`: those that the others wait for. `directory`: the bundle, "" if there is none, and
    `no_bundle` why. State `unknown`: the host was rebooted, or the agent did not run when it ended.
    `over_ns`: when the end was detected.
    """

    id: str
    hang: Hang
    state: State = "hangs"
    over_ns: int | None = None
    sentence: str = ""
    ranks: tuple[int, ...] = ()
    directory: str = ""
    files: tuple[str, ...] = ()
    no_bundle: str = ""


class _StoredHangs(msgspec.Struct, kw_only=True):
    """The state file: paces of processes, for the current boot; and all hangs."""

    format: str = "traceloom-hangs"
    version: int = VERSION
    boot_id: str
    paces: dict[str, StepPace]
    records: list[HangRecord]


class HangService:
    """Runs in the agent's loop.

    Args:
        config: The agent's.
        host_snapshot: The latest values.
        history: Past values.
        steps: Steps of all processes.
        places: Directories of bundles.
        path: The state file.
        boot_id: Of the host.
        note: Called with entries for the audit log: action and details.
    """

    def __init__(
        self,
        config: Config,
        host_snapshot: Snapshot,
        history: History,
        steps: StepCounter,
        *,
        places: TraceDirectories,
        path: Path,
        boot_id: str,
        note: Callable[[str, dict[str, object]], None],
    ) -> None:
        self.config, self.host_snapshot, self.history, self.steps = (
            config,
            host_snapshot,
            history,
            steps,
        )
        self.places, self.path, self.boot_id, self.note = places, path, boot_id, note
        self.watch = HangDetector(
            config.hangs,
            lambda key: bool(
                read_process_state(
                    int(key.partition("@")[0]), int(key.partition("@")[2]), config.collect.proc
                )
            ),
        )
        self.records: list[HangRecord] = []  # oldest first
        # Called when a hang is confirmed, and when it is over.
        self.listeners: list[Callable[[HangRecord], None]] = []
        self.last_error = ""  # why the state could not be written
        self._open: dict[JobKey, str] = {}  # job that hangs -> id
        self._counts: Counter[str] = Counter()
        self._resumed: dict[str, StepPace] = {}  # of processes not seen yet since the restart
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)  # by user
        self._saving: asyncio.Future[None] | None = None
        self._saved, self._written = 0.0, b""

    async def start(self) -> None:
        """Load the state of the previous agent."""
        try:
            stored = msgspec.json.decode(
                await asyncio.to_thread(self.path.read_bytes), type=_StoredHangs
            )
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            LOG.warning("what was known of hangs cannot be read, and is learnt anew: %s", error)
            return
        if stored.version != VERSION:
            LOG.warning("%s", other_version("file of hangs", stored.version, VERSION, self.path))
            return
        same_boot = stored.boot_id == self.boot_id
        self._resumed = stored.paces if same_boot else {}
        for record in stored.records:
            if record.state == "hangs" and same_boot:
                self.watch.resume(record.hang)
                self._open[record.hang.key] = record.id
            changes: dict[str, object] = {}
            if record.state == "hangs" and not same_boot:
                changes["state"] = "unknown"
            if not record.sentence and not record.no_bundle:
                changes["no_bundle"] = "the agent ended while it looked"
            self.records.append(msgspec.structs.replace(record, **changes))

    async def close(self) -> None:
        """Cancel running tasks; an incomplete bundle stays as it is."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.config.hangs.watch:
            await asyncio.to_thread(self._write, self._document())

    def check(self) -> None:
        """Check all jobs; called about once a second."""
        sheet = self.host_snapshot.results.get("processes")
        if not self.config.hangs.watch or sheet is None:
            return
        for key in [key for key in self._resumed if key in self.host_snapshot.processes]:
            self.steps.resume(key, self._resumed.pop(key))
        disk: dict[str, float] = {}
        for (metric, labels), value in sheet.values.items():
            if metric == "process_disk_bytes_total":
                disk[labels[0]] = disk.get(labels[0], 0.0) + value
        now, now_ns = time.monotonic(), time.time_ns()
        new = self.watch.check(now, now_ns, self.host_snapshot.processes.values(), self.steps, disk)
        for hang, recovered in self.watch.over:
            if (number := self._open.pop(hang.key, None)) is not None:
                state: State = "recovered" if recovered else "ended"
                record = self._replace(number, state=state, over_ns=now_ns)
                LOG.warning("job %s %s", hang.job, "goes on" if recovered else "has ended")
                self.note(
                    "hang-over", {"hang": number, "job": hang.job, "of": hang.uid, "state": state}
                )
                for listener in list(self.listeners):
                    listener(record)
        for hang in new:
            task = asyncio.create_task(self._take_in_turn(hang), name=f"hang of {hang.job}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if now - self._saved >= _SAVE_INTERVAL_S and (self._saving is None or self._saving.done()):
            self._saved = now
            self._saving = asyncio.get_running_loop().run_in_executor(
                None, self._write, self._document()
            )

    def hung_since_ns(self, process: str) -> int | None:
        """Returns since when a process, by its key, makes no steps, if it is part of a confirmed
        hang.
        """
        for hang in self.watch.hangs.values():
            if hang.key in self._open and any(member.key == process for member in hang.processes):
                return hang.since_ns
        return None

    def readings(self) -> list[Reading]:
        """Returns which jobs hang, and the number of hangs of each."""
        names = {key.job for key in (*self.watch.stepping, *self._open)}
        hung = {key.job for key in self._open}
        readings = [Reading("job_hung", (job,), float(job in hung)) for job in sorted(names)]
        # Zeros as well: Prometheus misses the first increment of a counter that starts at 1.
        readings += (
            Reading("job_hangs_total", (job,), float(self._counts[job]))
            for job in sorted(names | {*self._counts})
        )
        return readings

    async def _take_in_turn(self, hang: Hang) -> None:
        """Keep the hangs of a user one after the other: many jobs at once cost the host little."""
        async with self._turns[hang.uid]:
            await self._take(hang)

    async def _take(self, hang: Hang) -> None:
        """Confirm a hang, and keep it."""
        try:
            if not hang.busy and await self._works(hang):
                LOG.info("job %s makes no steps, but works", hang.job)
                self.watch.works(hang, time.monotonic() + self.config.hangs.least)
                return
            if self.watch.hangs.get(hang.key) is not hang:
                return  # it recovered meanwhile
            number = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
            before = next(
                (
                    old
                    for old in reversed(self.records)
                    if old.hang.key == hang.key and old.directory
                ),
                None,
            )
            ago_s = (hang.seen_ns - before.hang.seen_ns) / 1e9 if before is not None else -1.0
            reason = "" if self.config.hangs.bundles else "bundles are switched off"
            if before is not None and 0 <= ago_s < self.config.hangs.every:
                reason = reason or f"one of this job was made {ago_s / 60:.0f} min ago: {before.id}"
            record = HangRecord(id=number, hang=hang, no_bundle=reason)
            self.records.append(record)
            ended = [
                old for old in self.records if old.hang.uid == hang.uid and old.state != "hangs"
            ]
            surplus = {old.id for old in ended[:-_MAX_RECORDS]}
            self.records = [old for old in self.records if old.id not in surplus]
            self._open[hang.key] = number
            self._counts[hang.job] += 1
            if len(self._counts) > _MAX_JOBS:
                del self._counts[next(iter(self._counts))]
            await self._describe(record)
        except Exception:
            LOG.exception("the hang of job %s could not be kept", hang.job)

    async def _describe(self, record: HangRecord) -> None:
        hang, number = record.hang, record.id
        processes = [
            p for p in self.host_snapshot.processes.values() if (p.owner.job, p.uid) == hang.key
        ]
        if not processes:
            return
        try:
            if record.no_bundle:
                summary, ranks = await describe_hang(hang, processes)
                record = self._replace(number, sentence=summary, ranks=ranks)
            else:
                scene = await self._scene(hang, processes)
                directory = await asyncio.to_thread(self.places.prepare_hang, hang.uid, number)
                report = await write_bundle(
                    hang, scene, directory, int(self.config.hangs.max_mb * 1e6)
                )
                await asyncio.to_thread(self.places.hand_over, hang.uid, directory)
                record = self._replace(
                    number,
                    sentence=report.sentence,
                    ranks=report.ranks,
                    directory=str(directory),
                    files=report.files,
                )
                await asyncio.to_thread(self._tidy, hang.uid)
        except TraceloomError as error:
            record = self._replace(number, no_bundle=str(error))
        LOG.warning("%s", record.sentence or f"job {hang.job} hangs; {record.no_bundle}")
        self.note(
            "hang",
            {
                "hang": number,
                "job": hang.job,
                "of": hang.uid,
                "pids": [hung_process.pid for hung_process in hang.processes],
                "sentence": record.sentence,
                "directory": record.directory,
                "no_bundle": record.no_bundle,
            },
        )
        for listener in list(self.listeners):
            listener(record)

    def _replace(self, number: str, **changes: object) -> HangRecord:
        """Change a record, which may be over by now."""
        index = next(index for index, record in enumerate(self.records) if record.id == number)
        self.records[index] = msgspec.structs.replace(self.records[index], **changes)
        return self.records[index]

    async def _works(self, hang: Hang) -> bool:
        """Whether a rank that neither steps nor waits works: it uses or wants a CPU, and its call
        chain changes between samples.

        A loop that spins in one function counts as hanging, whichever of its lines it is at. A rank
        that goes on stepping shows nothing about those that do not.
        """
        processes = [
            p for p in self.host_snapshot.processes.values() if (p.owner.job, p.uid) == hang.key
        ]
        mains = find_rank_pids(processes)
        members = {member.pid for member in hang.processes}
        ranks = [p for p in processes if p.pid in mains or p.pid in members][:_MAX_EXAMINED]
        used = {process.pid: _measure_processor_s(process) for process in ranks}
        paces = {process.pid: self.steps.pace(process.key) for process in ranks}
        begun = time.monotonic()
        chains: dict[int, set[tuple[object, ...]]] = {process.pid: set() for process in ranks}
        waiting: set[int] = set()
        for attempt in range(_LOOKS):
            if attempt:
                await asyncio.sleep(_BETWEEN_S)
            for pid, dump in (await collect_stacks(ranks)).dumps.items():
                stacks = (
                    thread.frames
                    for thread in dump.threads
                    if dump.pid == thread.id or thread.name == "MainThread"
                )
                frames = next(stacks, ())
                chains[pid].add((*frames[:-1], *(frame[:2] for frame in frames[-1:])))
                if find_waiting_call(frames):
                    waiting.add(pid)
        elapsed = time.monotonic() - begun
        return any(
            len(chains[process.pid]) > 1
            and process.pid not in waiting
            and self.steps.pace(process.key) == paces[process.pid]  # no new step
            and _measure_processor_s(process) - used[process.pid] >= _BUSY_SHARE * elapsed
            for process in ranks
        )

    async def _scene(self, hang: Hang, processes: Sequence[Process]) -> HangContext:
        """Returns the data of the snapshot and the history about the job."""
        job_devices = {
            uuid for process in processes for uuid in (*process.devices, *process.owner.devices)
        }
        values: dict[str, dict[str, float]] = {uuid: {} for uuid in job_devices}
        for (name, labels), value, _ in self.host_snapshot.values():
            series_labels = dict(zip(METRICS[name].labels, labels, strict=True))
            device = series_labels.pop("device", "")
            if (
                device in job_devices
                and METRICS[name].kind != "info"
                and "process" not in series_labels
            ):
                label_text = ",".join(
                    f"{label}={text}" for label, text in series_labels.items() if text
                )
                values[device][
                    f"{METRICS[name].full_name}{{{label_text}}}"
                    if label_text
                    else METRICS[name].full_name
                ] = value
        allowed = select_job_labels(self.host_snapshot, processes[0])
        since_ns = hang.since_ns - int(_HISTORY_S * 1e9)
        series: dict[SeriesKey, tuple[array[int], array[float]]] = {}
        for name in {name for (name, _), _, _ in self.host_snapshot.values()}:
            series |= {
                (name, points.labels): (points.times_ns, points.values)
                for points in self.history.recent(name, since_ns, time.time_ns())
                if is_relevant_series((name, points.labels), allowed)
            }
            await asyncio.sleep(0)  # each scans minutes of values; let polls be answered in between
        devices = self.host_snapshot.devices
        return HangContext(
            host=self.config.host_name,
            processes=tuple(processes),
            series=series,
            devices=tuple(
                HungDevice(
                    uuid=uuid,
                    index=devices[uuid].index,
                    model=devices[uuid].model,
                    stale=devices[uuid].stale,
                    values=values[uuid],
                )
                for uuid in sorted(
                    job_devices & devices.keys(), key=lambda uuid: (devices[uuid].index, uuid)
                )
            ),
            events=tuple(
                HangEvent(
                    at_ns=event.at_ns,
                    device=event.device,
                    kind=event.kind,
                    text=event.text,
                    code=event.code,
                )
                for event in self.host_snapshot.events
                if event.device in job_devices
            ),
        )

    def _tidy(self, uid: int) -> None:
        """Delete all but the newest bundles of a user."""
        parent = self.places.hangs(uid)
        bundles = sorted(
            (path for path in parent.iterdir() if path.is_dir() and not path.is_symlink()),
            reverse=True,
        )
        # They are the user's, who may have put directories there as deep as nothing of Python removes.
        surplus = map(str, bundles[self.config.hangs.max_bundles_per_user :])
        subprocess.run(["rm", "-rf", "--", *surplus], check=False, stderr=subprocess.DEVNULL)

    def _document(self) -> bytes:
        paces = {
            key: pace
            for key in self.host_snapshot.processes
            if (pace := self.steps.pace(key)) is not None
        }
        return msgspec.json.encode(
            _StoredHangs(boot_id=self.boot_id, paces=self._resumed | paces, records=self.records)
        )

    def _write(self, document: bytes) -> None:
        """Replace the state file; blocks."""
        if document == self._written:
            return
        try:
            write(self.path, lambda file: file.write(document), force=True, private=True)
        except OutputError as error:
            self.last_error = error.message
            return
        self.last_error, self._written = "", document


def _measure_processor_s(process: Process) -> float:
    """Returns the seconds for which the main thread of a process has used a CPU or waited for one;
    0 if it ended.

    On an overloaded host a working process waits most of its time. If the kernel does not count
    that: the CPU time of the process.
    """
    with contextlib.suppress(OSError, ValueError):
        used_ns, waited_ns, _ = read(f"/proc/{process.pid}/schedstat").split()
        if total_ns := int(used_ns) + int(waited_ns):
            return total_ns / 1e9
    with contextlib.suppress(OSError):
        fields = read(f"/proc/{process.pid}/stat").rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return 0.0
