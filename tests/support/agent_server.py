"""A small agent for tests of what is asked over HTTP and published: a snapshot written by hand, and real listeners."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from traceloom.agent.accelerators.backend import Device, DeviceEvent, DeviceProcess
from traceloom.agent.api import Check, HistoryQuery, SeriesResponse, StatusResponse, StepsBody
from traceloom.agent.audit import AuditLog
from traceloom.agent.collectors.host import OomKill
from traceloom.agent.config import AgentPaths, Config
from traceloom.agent.database import RequestStore
from traceloom.agent.handlers.app import build_app
from traceloom.agent.hangs.service import HangService
from traceloom.agent.hangs.stacks import GroupedStacks, group_stacks
from traceloom.agent.history import History
from traceloom.agent.kineto import ProfilerRegistry
from traceloom.agent.metrics import METRICS, HistogramReading, Reading
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.profilers.py_spy import StackDump, ThreadStack
from traceloom.agent.snapshot import CollectorStatus, Snapshot
from traceloom.agent.steps import StepCounter
from traceloom.agent.topline import TracedFacts
from traceloom.agent.traces.files import TraceDirectories
from traceloom.agent.traces.runner import TraceService
from traceloom.agent.triggers.adapter import TriggerEngine
from traceloom.agent.triggers.store import TriggerStore
from traceloom.server.listener import OpenListeners, serve
from traceloom.system.python_frames import Frame

if TYPE_CHECKING:
    from traceloom.agent.daemon import Agent

ANNA, BERT = 4001, 4002  # two users


def process(
    pid: int, uid: int, job: str, rank: int, steps_per_second: float | None = None
) -> Process:
    """A training process of a job of Slurm."""
    owner = Owner(
        job=job, scheduler="slurm", rank=rank, world_size=2, user=f"user{uid}", framework="pytorch"
    )
    return Process(
        key=f"{pid}@100",
        pid=pid,
        start_ticks=100,
        started_ns=1,
        parent_pid=1,
        uid=uid,
        owner=owner,
        command=f"python train.py --job {job}",
        cgroup=f"/{job}",
        devices=(f"GPU-{rank}",),
        steps_per_second=steps_per_second,
    )


def full_board() -> Snapshot:
    """Every metric that is declared has a series: of two devices, a partition, two jobs of two users."""
    host_snapshot = Snapshot()
    now = time.time_ns()
    host_snapshot.devices = {
        "GPU-0": Device(
            uuid="GPU-0",
            index="0",
            vendor="nvidia",
            model="H100",
            pci="00000000:1A:00.0",
            driver="570.1",
        ),
        "GPU-1": Device(
            uuid="GPU-1",
            index="1",
            vendor="nvidia",
            model="H100",
            pci="00000000:1B:00.0",
            driver="570.1",
        ),
        "MIG-1": Device(
            uuid="MIG-1",
            index="1:0",
            vendor="nvidia",
            model="H100",
            parent="GPU-1",
            partition="1g.10gb gi=7 ci=0",
        ),
    }
    anna, bert = (
        process(11, ANNA, "slurm-7", 0),
        process(22, BERT, "slurm-8", 1, steps_per_second=2.0),
    )
    host_snapshot.processes = {anna.key: anna, bert.key: bert}
    host_snapshot.device_processes = [
        DeviceProcess(device="GPU-0", pid=11),
        DeviceProcess(device="GPU-1", pid=22),
    ]
    host_snapshot.events = [
        DeviceEvent(at_ns=now, device="GPU-0", kind="xid", code=79, text="fell off the bus")
    ]
    host_snapshot.oom_kills = [
        OomKill(
            at_ns=now + 1, cgroup="/slurm-7", job="slurm-7", uid=ANNA, kills=2, limit_bytes=10**9
        ),
        OomKill(at_ns=now + 2, cgroup="/shared", job="", uid=None, kills=1),
    ]
    host_snapshot.collectors["all"] = CollectorStatus("all", 10.0, ran_ns=now, seconds=0.01, runs=1)
    values = {
        "device": ("GPU-0", "GPU-1"),
        "process": (anna.key, bert.key),
        "job": ("slurm-7", "slurm-8"),
        "cgroup": ("/slurm-7", "/slurm-8"),
        "command": ('python "train".py\n\\', "python b.py"),
        "pipe": ("tensor",),
        "engine": ("encoder", "decoder"),
        "part": ("gpu", "memory"),
        "domain": ("sm", "memory"),
        "link": ("pcie", "nvlink"),
        "direction": ("transmit", "receive"),
        "type": ("pcie-replay", "uncorrectable"),
        "host": ("node1",),
        "method": ("declared",),
        "bound": ("lower", "upper"),
        "collector": ("cpu",),
        "mode": ("user", "system"),
        "state": ("used", "free"),
        "rank": ("0", "1"),
        "xid": ("",),
    }
    readings: list[Reading | HistogramReading] = []
    for number, metric in enumerate(METRICS.values()):
        choices = [values.get(label, (label,)) for label in metric.labels]
        for turn in range(max(map(len, choices), default=1)):
            labels = tuple(choice[min(turn, len(choice) - 1)] for choice in choices)
            if metric.kind == "histogram":
                counts = tuple(min(3, place) for place in range(len(metric.bounds)))
                readings.append(HistogramReading(metric.name, labels, counts, 5, 1.25))
            else:
                readings.append(
                    Reading(
                        metric.name, labels, 1.0 if metric.kind == "info" else (number + turn) / 8
                    )
                )
    host_snapshot.put("all", readings, now)
    return host_snapshot


class SmallAgent:
    """Answers from a snapshot that does not change; keeps what it was told."""

    def __init__(self, config: Config | None = None, host_snapshot: Snapshot | None = None) -> None:
        self.config = config or Config()
        self.host_snapshot = host_snapshot or full_board()
        self.acted: list[tuple[str, int | None, str, bool]] = []
        self.told: list[tuple[int, int, StepsBody]] = []
        self.learned: list[tuple[str, str, int]] = []
        self.looked_at: list[tuple[list[int], bool]] = []
        self.requests: list[tuple[str, int]] = []
        self.questions: list[HistoryQuery] = []
        self.trace_service = TraceService(
            self.config,
            ProfilerRegistry(),
            lambda: self.host_snapshot.processes,
            StepCounter(),
            RequestStore(None),
            TraceDirectories(Path("/nowhere")),
            "",
        )
        self.hangs = HangService(
            self.config,
            self.host_snapshot,
            History(None, self.config.history),
            StepCounter(),
            places=self.trace_service.places,
            path=Path("/nowhere/hangs.json"),
            boot_id="",
            note=lambda _what, _details: None,
        )
        self.triggers = TriggerEngine(
            self.config,
            self.host_snapshot,
            self.trace_service,
            TriggerStore(None),
            ThreadPoolExecutor(1),
            AuditLog(Path("/nowhere")),
            time.time_ns(),
        )

    def status(self) -> StatusResponse:
        collectors = [
            {
                "name": s.name,
                "period_seconds": s.period_s,
                "ran_ns": s.ran_ns or None,
                "seconds": s.seconds,
                "runs": s.runs,
                "failures": s.failures,
            }
            for s in self.host_snapshot.collectors.values()
        ]
        return msgspec.convert(
            {
                "version": "0",
                "host": self.config.host_name,
                "boot_id": "",
                "pid": os.getpid(),
                "uid": os.getuid(),
                "started_ns": self.host_snapshot.started_ns,
                "now_ns": time.time_ns(),
                "series": 1,
                "devices": 3,
                "stale_devices": 0,
                "processes": 2,
                "collectors": collectors,
            },
            StatusResponse,
        )

    async def doctor(self) -> list[Check]:
        return [
            Check(
                area="devices",
                name="nvml",
                works="no",
                why="libnvidia-ml.so.1 is not here",
                help="install the driver",
            )
        ]

    async def query(self, question: HistoryQuery) -> Sequence[SeriesResponse]:
        self.questions.append(question)
        names = METRICS[question.metric].labels
        return [
            SeriesResponse(
                labels=dict(zip(names, seen[1], strict=True)), times_ns=[at_ns], values=[value]
            )
            for series, value, at_ns in self.host_snapshot.values()
            if series[0] == question.metric and (seen := question.seen_as(series)) is not None
        ]

    async def pause(self, seconds: float) -> list[str]:
        return ["nvml"]

    async def learn(self, job: str, path: str, user: int) -> TracedFacts:
        self.learned.append((job, path, user))
        return TracedFacts(flops_per_step=2e9)

    async def stacks(self, processes: Sequence[Process], *, native: bool) -> GroupedStacks:
        self.looked_at.append(([process.pid for process in processes], native))
        frames = (Frame("main", "/a/train.py", 3),)
        threads = [
            ThreadStack(id=process.pid, name="MainThread", active=True, frames=frames)
            for process in processes
        ]
        dumps = {
            process.pid: StackDump(
                time_ns=1,
                pid=process.pid,
                rank=process.owner.rank,
                native=native,
                threads=(thread,),
            )
            for process, thread in zip(processes, threads, strict=True)
        }
        return group_stacks(processes, dumps, {})

    def steps(self, pid: int, uid: int, body: StepsBody) -> None:
        self.told.append((pid, uid, body))

    def environment(self, uid: int) -> dict[str, str]:
        return {"UID": str(uid)}

    def acts(
        self, actor: str, pid: int | None, route: str, *, allowed: bool, **details: object
    ) -> None:
        self.acted.append((actor, pid, route, allowed))

    def asked(self, route: str, code: int) -> None:
        self.requests.append((route, code))


def locations_in(directory: Path) -> AgentPaths:
    return AgentPaths(
        directory / "run" / "agent.sock",
        directory / "agent.db",
        directory / "audit.jsonl",
        directory / "kineto",
        directory / "requests.db",
        directory / "traces",
        directory / "hangs.json",
    )


@contextmanager
def listening(agent: SmallAgent, directory: Path) -> Iterator[OpenListeners]:
    """Its listeners, in a loop in a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    try:
        listeners = run(
            serve(
                build_app(cast("Agent", agent)),
                agent.config.tcp,
                agent.config.access,
                locations_in(directory).socket,
            )
        )
        try:
            yield listeners
        finally:
            run(listeners.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


class Reply:
    """What a server sent until it closed the connection."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        self.status = int(lines[0].split()[1]) if data else 0
        self.headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])
        }

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


def connect(target: Path | tuple[str, int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX if isinstance(target, Path) else socket.AF_INET)
    connection.settimeout(30)
    connection.connect(str(target) if isinstance(target, Path) else target)
    return connection


def ask(
    target: Path | tuple[str, int],
    path: str,
    *,
    method: str = "GET",
    body: bytes = b"",
    **headers: str,
) -> Reply:
    """Ask once, over a connection of its own."""
    with connect(target) as connection:
        lines = {
            "Host": "localhost",
            "Connection": "close",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        if body:
            lines["Content-Length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        return Reply(b"".join(iter(lambda: connection.recv(65_536), b"")))
