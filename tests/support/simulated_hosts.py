"""Hosts of a fleet that speak as agents do, with made captures: whoever tests says when one does what."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from support.sessions import busy_step
from traceloom.agent.requests.model import Target
from traceloom.agent.uplink.client import ServiceClient, ServiceError
from traceloom.agent.uplink.messages import (
    ArmedProcess,
    ClockOffset,
    Enrolled,
    Enrolment,
    Heartbeat,
    HeartbeatAnswer,
    HostDevice,
    HostFile,
    HostProcess,
    HostReport,
    HostState,
    ReportAnswer,
    UsageRow,
    WorkAnswer,
)
from traceloom.testing import TraceBuilder

T = TypeVar("T")
CLOCK = ClockOffset(offset_ns=0, error_ns=1000, round_trips=16)
BASE_NS = 1_790_000_000 * 10**9


def made_part(folder: Path, host: str, rank: int, job: str) -> list[HostFile]:
    """What an agent keeps of a request for one rank, in a new folder: a trace of two steps and `capture.json`."""
    folder.mkdir(parents=True)
    made = TraceBuilder(rank, 2, host=host, base_ns=BASE_NS)
    for step in range(2):
        busy_step(made, step, 1000 * step)
    trace = f"rank{rank}.kineto.json.gz"
    made.write(folder / trace)
    window = {"file": trace, "kind": "steps", "start_ns": BASE_NS, "end_ns": BASE_NS + 9, "step_count": 2}
    entry = {
        "rank": rank, "world_size": 2, "job": job, "name": f"rank{rank}", "host": host, "process": 7, "window": window,
    }  # fmt: skip
    document = {"format": "traceloom-capture", "version": 1, "ranks": [entry], "request": {"id": "r", "targets": []}}
    (folder / "capture.json").write_text(json.dumps(document))
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return [
        HostFile(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    ]


class SimulatedHost:
    """A host with one process of a job.

    Args:
        urls: Of the services that share a state; it asks the next where one does not answer.
        name: Of the host.
        token: By which it joins.
        job: Of its process.
        rank: Of its process.
        folder: For what it keeps of requests.
    """

    def __init__(self, urls: Sequence[str], name: str, token: str, job: str, rank: int, folder: Path) -> None:
        self.clients = [ServiceClient(url, timeout_s=5) for url in urls]
        self.name, self.job, self.rank = name, job, rank
        self.folder = folder / name
        self.files = made_part(self.folder, name, rank, job)
        enrolment = Enrolment(token=token, host=name)
        credential = self.ask(lambda client: client.post("agents/enrol", enrolment, Enrolled)).credential
        for client in self.clients:
            client.credential = credential

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

    def beat(self, usage: Sequence[UsageRow] = (), sent_ns: int | None = None) -> HeartbeatAnswer:
        """Say how it is."""
        process = HostProcess(
            key=f"{self.rank}@1", pid=self.rank + 1, uid=0, job=self.job, rank=self.rank, world_size=2, user="ada",
            polls=True,
        )  # fmt: skip
        beat = Heartbeat(
            sent_ns=time.time_ns() if sent_ns is None else sent_ns, boot_id="b", version="1", processes=[process],
            usage=list(usage), clock=CLOCK, devices=[HostDevice(uuid=f"GPU-{self.rank}", model="H100")],
        )  # fmt: skip
        return self.ask(lambda client: client.post(f"agents/{self.name}/heartbeat", beat, HeartbeatAnswer))

    def work(self) -> WorkAnswer:
        """What it is to do now."""
        return self.ask(lambda client: client.get(f"agents/{self.name}/work?wait=0", WorkAnswer))

    def report(self, request: str, state: HostState) -> ReportAnswer:
        """Say how far it is."""
        process = ArmedProcess(key=f"{self.rank}@1", pid=self.rank + 1, job=self.job, rank=self.rank)
        target = Target(
            request="r", process=process.key, profiler="timeline", pid=process.pid, uid=0, rank=self.rank,
            stem=f"rank{self.rank}", state="accepted" if state == "running" else "kept",
        )  # fmt: skip
        report = HostReport(
            state=state, processes=[process], targets=[] if state == "armed" else [target],
            files=self.files if state in {"uploading", "uploaded"} else [],
            clock=CLOCK,
        )  # fmt: skip
        return self.ask(lambda client: client.post(f"agents/{self.name}/requests/{request}", report, ReportAnswer))

    def send(self, request: str, names: Sequence[str]) -> None:
        """Send some of its files."""
        for file in self.files:
            if file.name in names:
                self.ask(partial(self._put, f"agents/{self.name}/requests/{request}/files/{file.name}", file))

    def _put(self, route: str, file: HostFile, client: ServiceClient) -> None:
        client.put_file(route, self.folder / file.name, file.bytes)

    def upload(self, request: str) -> None:
        """Send what is missing, and say that it is all there."""
        self.send(request, self.report(request, "uploading").missing)
        self.report(request, "uploaded")

    def go_on(self) -> bool:
        """Do what is wanted of it now, as an agent that knows nothing of before; False where nobody answers."""
        try:
            self.beat()
            for work in self.work().work:
                if work.step == "arm":
                    self.report(work.request, "armed")
                else:
                    self.report(work.request, "running")
                    self.upload(work.request)
        except ServiceError as error:
            if error.status not in {0, 404, 503}:  # 404: the request has ended meanwhile
                raise
            return False
        return True

    def close(self) -> None:
        """Let its connections go."""
        for client in self.clients:
            client.close()
