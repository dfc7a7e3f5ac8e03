"""A host as the fleet's service sees it: it speaks an agent's protocol, has devices and processes, and sends made traces."""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
from pathlib import Path

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
    HostWork,
    ReportAnswer,
    UsageRow,
    WorkAnswer,
)
from traceloom.testing import TraceBuilder

_BEAT_S = 0.5


class SimulatedHost:
    """A host that joins a service and does what it is asked.

    Args:
        url: Of the service.
        name: Of the host.
        token: Of enrolment.
        processes: That run on it; those that poll are traced.
        devices: It has.
    """

    def __init__(
        self, url: str, name: str, token: str, processes: list[HostProcess], devices: list[HostDevice]
    ) -> None:
        self.name, self.processes, self.devices = name, processes, devices
        self.usage: list[UsageRow] = []
        self._ended = threading.Event()
        client = ServiceClient(url)
        self.credential = client.post("agents/enrol", Enrolment(token=token, host=name), Enrolled).credential
        client.close()
        self._clients = [ServiceClient(url, credential=self.credential, timeout_s=60) for _ in range(2)]
        self._threads = [threading.Thread(target=loop, name=name) for loop in (self._beat, self._work)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Be silent from now on."""
        self._ended.set()
        for client in self._clients:
            client.abort()
        for thread in self._threads:
            thread.join()
        for client in self._clients:
            client.close()

    def _beat(self) -> None:
        clock = ClockOffset(offset_ns=120_000, error_ns=310_000, round_trips=8)
        while not self._ended.wait(_BEAT_S):
            beat = Heartbeat(
                sent_ns=time.time_ns(), boot_id="b", version="0.2.0", clock=clock, devices=self.devices,
                processes=self.processes, usage=self.usage,
            )  # fmt: skip
            try:
                self._clients[0].post(f"agents/{self.name}/heartbeat", beat, HeartbeatAnswer)
            except ServiceError:
                continue  # it is away, and will be asked again

    def _work(self) -> None:
        version = ""
        while not self._ended.is_set():
            try:
                route = f"agents/{self.name}/work?version={version}&wait=5"
                answer = self._clients[1].get(route, WorkAnswer)
                for work in answer.work:
                    self._do(work)
                version = answer.version
            except ServiceError:  # noqa: PERF203
                self._ended.wait(_BEAT_S)

    def _do(self, work: HostWork) -> None:
        mine = [process for process in self.processes if process.job == work.wanted.job and process.polls]
        armed = [
            ArmedProcess(key=process.key, pid=process.pid, job=process.job, rank=process.rank, steps_per_second=100.0)
            for process in mine
        ]
        clock = ClockOffset(offset_ns=0, error_ns=1000, round_trips=8)
        if work.step == "arm":
            self._report(work, HostReport(state="armed", processes=armed, clock=clock))
            return
        self._ended.wait(max(0.0, (work.at_ns - time.time_ns()) / 1e9))
        self._report(work, HostReport(state="running", processes=armed, clock=clock))
        with tempfile.TemporaryDirectory() as folder:
            files, targets = self._written(Path(folder), work, mine)
            report = HostReport(state="uploading", processes=armed, files=files, targets=targets, clock=clock)
            for name in self._report(work, report).missing:
                path = Path(folder, name)
                route = f"agents/{self.name}/requests/{work.request}/files/{name}"
                self._clients[1].put_file(route, path, path.stat().st_size)
            self._report(work, HostReport(state="uploaded", processes=armed, files=files, targets=targets, clock=clock))

    def _report(self, work: HostWork, report: HostReport) -> ReportAnswer:
        return self._clients[1].post(f"agents/{self.name}/requests/{work.request}", report, ReportAnswer)

    def _written(
        self, folder: Path, work: HostWork, processes: list[HostProcess]
    ) -> tuple[list[HostFile], list[Target]]:
        """Files of a capture of these processes, and how far each target is."""
        ranks = []
        for process in processes:
            name = f"rank{process.rank}.kineto.json"
            made = TraceBuilder(process.rank or 0, process.world_size or 1, host=self.name, base_ns=work.at_ns)
            for number in range(3):
                busy_step(made, number, 1000 * number)
            made.write(folder / name)
            window = {"file": name, "start_ns": work.at_ns, "end_ns": work.at_ns + 10**9}
            place = {"rank": process.rank, "world_size": process.world_size, "name": f"rank{process.rank}"}
            ranks.append({**place, "window": window})
        document = {"format": "traceloom-capture", "version": 1, "stage": "profiled", "run": {}, "ranks": ranks}
        (folder / "capture.json").write_text(json.dumps(document))
        files = [
            HostFile(name=path.name, bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
            for path in sorted(folder.iterdir())
        ]
        targets = [
            Target(
                request=work.request, process=process.key, profiler="timeline", pid=process.pid, uid=process.uid,
                rank=process.rank, stem=f"rank{process.rank}", state="kept",
            )
            for process in processes
        ]  # fmt: skip
        return files, targets
