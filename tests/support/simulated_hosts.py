"""Hosts of a fleet that speak as agents do, with made captures: when who tests says so, or by themselves."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from support.sessions import busy_step
from traceloom.agent.fleet_link.client import ServiceClient, ServiceError
from traceloom.agent.fleet_link.protocol import (
    ArmedProcess,
    ClockOffset,
    Enrolment,
    Heartbeat,
    HeartbeatResponse,
    HostCredentials,
    HostDevice,
    HostFile,
    HostProcess,
    HostReport,
    HostState,
    ReportResponse,
    UsageRow,
    WorkResponse,
)
from traceloom.agent.traces.requests import TraceTarget
from traceloom.testing import TraceBuilder

T = TypeVar("T")
CLOCK = ClockOffset(offset_ns=120_000, error_ns=310_000, round_trips=16)
_LOOK_S = 0.25
_STEPS = 2


def ranked_process(rank: int, job: str, user: str = "ada") -> HostProcess:
    """A process of a job of two ranks, which can be traced."""
    return HostProcess(
        key=f"{rank}@1",
        pid=rank + 1,
        uid=0,
        job=job,
        rank=rank,
        world_size=2,
        user=user,
        polls=True,
    )


def made_part(
    folder: Path, host: str, processes: Sequence[HostProcess], base_ns: int | None = None
) -> list[HostFile]:
    """What an agent keeps of a request, in a new folder: a trace of two steps of each rank and `capture.json`.

    The traces begin at `base_ns`, Unix time; None: now.
    """
    folder.mkdir(parents=True)
    base_ns = time.time_ns() if base_ns is None else base_ns
    ranks = []
    for process in processes:
        rank, world_size = process.rank or 0, process.world_size or 1
        made = TraceBuilder(rank, world_size, host=host, base_ns=base_ns)
        for step in range(_STEPS):
            busy_step(made, step, 1000 * step)
        trace = f"rank{rank}.kineto.json.gz"
        made.write(folder / trace)
        window = {
            "file": trace,
            "kind": "steps",
            "start_ns": base_ns,
            "end_ns": base_ns + 10**6,
            "step_count": _STEPS,
        }
        ranks.append(
            {
                "rank": rank,
                "world_size": world_size,
                "job": process.job,
                "name": f"rank{rank}",
                "host": host,
                "process": process.pid,
                "window": window,
            }
        )
    document = {
        "format": "traceloom-capture",
        "version": 1,
        "ranks": ranks,
        "request": {"id": "r", "targets": []},
    }
    (folder / "capture.json").write_text(json.dumps(document))
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return [
        HostFile(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    ]


class SimulatedHost:
    """A host that has joined a service. It says and does nothing until it is told to, or to act by itself (`begin`).

    Args:
        urls: Of the services that share a state; it asks the next where one does not answer.
        name: Of the host.
        token: By which it joins.
        processes: That run on it; those of the first one's job are traced.
        folder: For what it keeps of requests.
        devices: It has; None: one for the first process.
        base_ns: When its traces begin, Unix time; None: now. Hosts whose traces begin at one instant have the same
            findings in every run.
    """

    def __init__(
        self,
        urls: Sequence[str],
        name: str,
        token: str,
        processes: Sequence[HostProcess],
        folder: Path,
        devices: Sequence[HostDevice] | None = None,
        base_ns: int | None = None,
    ) -> None:
        self.clients = [ServiceClient(url, timeout_s=5) for url in urls]
        self.name, self.processes, self.folder = name, list(processes), folder / name
        self.traced = [process for process in processes if process.job == processes[0].job]
        usual = [HostDevice(uuid=f"GPU-{processes[0].rank}", model="H100")]
        self.devices = usual if devices is None else list(devices)
        self.files = made_part(self.folder, name, self.traced, base_ns)
        enrolment = Enrolment(token=token, host=name)
        credential = self.ask(
            lambda client: client.post("agents/enrol", enrolment, HostCredentials)
        ).credential
        for client in self.clients:
            client.credential = credential
        self._ended = threading.Event()
        self._acting: threading.Thread | None = None

    def begin(self) -> None:
        """Act by itself from now on: each piece of work when it is due."""

        def act() -> None:
            while not self._ended.wait(_LOOK_S):
                try:
                    self.go_on(early=False)
                except ServiceError as error:  # noqa: PERF203
                    if error.status not in {0, 503}:  # else it is being restarted
                        raise

        self._acting = threading.Thread(target=act, name=self.name)
        self._acting.start()

    def ask(self, question: Callable[[ServiceClient], T]) -> T:
        """The answer of the service that leads.

        Raises:
            ServiceError: None answers, or the one that leads refuses.
        """
        for _ in self.clients:
            try:
                return question(self.clients[0])
            except ServiceError as error:  # noqa: PERF203
                if error.status not in {0, 503}:
                    raise
                self.clients.append(self.clients.pop(0))
                trouble = error
        raise trouble

    def beat(self, usage: Sequence[UsageRow] = (), sent_ns: int | None = None) -> HeartbeatResponse:
        """Say how it is."""
        beat = Heartbeat(
            sent_ns=time.time_ns() if sent_ns is None else sent_ns,
            boot_id="b",
            version="1",
            processes=self.processes,
            usage=list(usage),
            clock=CLOCK,
            devices=self.devices,
        )
        return self.ask(
            lambda client: client.post(f"agents/{self.name}/heartbeat", beat, HeartbeatResponse)
        )

    def work(self) -> WorkResponse:
        """What it is to do now."""
        return self.ask(lambda client: client.get(f"agents/{self.name}/work?wait=0", WorkResponse))

    def report(self, request: str, state: HostState) -> ReportResponse:
        """Say how far it is."""
        processes = [
            ArmedProcess(
                key=of.key,
                pid=of.pid,
                job=of.job,
                rank=of.rank,
                steps_per_second=of.steps_per_second,
            )
            for of in self.traced
        ]
        targets = [
            TraceTarget(
                request="r",
                process=of.key,
                profiler="timeline",
                pid=of.pid,
                uid=of.uid,
                rank=of.rank,
                stem=f"rank{of.rank}",
                state="accepted" if state == "running" else "kept",
            )
            for of in self.traced
        ]
        report = HostReport(
            state=state,
            processes=processes,
            targets=[] if state == "armed" else targets,
            files=self.files if state in {"uploading", "uploaded"} else [],
            clock=CLOCK,
        )
        return self.ask(
            lambda client: client.post(
                f"agents/{self.name}/requests/{request}", report, ReportResponse
            )
        )

    def send(self, request: str, names: Sequence[str]) -> None:
        """Send some of its files."""
        for file in self.files:
            if file.name in names:
                self.ask(
                    partial(
                        self._put, f"agents/{self.name}/requests/{request}/files/{file.name}", file
                    )
                )

    def _put(self, route: str, file: HostFile, client: ServiceClient) -> None:
        client.put_file(route, self.folder / file.name, file.bytes)

    def upload(self, request: str) -> None:
        """Send what is missing, and say that it is all there."""
        self.send(request, self.report(request, "uploading").missing)
        self.report(request, "uploaded")

    def go_on(self, *, early: bool = True) -> bool:
        """Do what is wanted of it now, as an agent that knows nothing of before; False where nobody answers.

        `early`: do not wait for the instant at which it is to begin.
        """
        try:
            self.beat()
            for work in self.work().work:
                if work.step == "arm":
                    self.report(work.request, "armed")
                elif early or work.at_ns <= time.time_ns():
                    self.report(work.request, "running")
                    self.upload(work.request)
        except ServiceError as error:
            if error.status not in {0, 404, 503}:  # 404: the request has ended meanwhile
                raise
            return False
        return True

    def close(self) -> None:
        """Be silent from now on, and let its connections go."""
        self._ended.set()
        if self._acting is not None:
            self._acting.join()
        for client in self.clients:
            client.close()
