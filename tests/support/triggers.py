"""Rules that are tried without a job: an agent's parts, a snapshot written by hand, a clock that the test moves."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from traceloom.agent.audit import AuditLog
from traceloom.agent.config import AnyRule, Config, Traces, TriggerBudget
from traceloom.agent.database import RequestStore
from traceloom.agent.kineto import ProfilerClient, ProfilerRegistry
from traceloom.agent.metrics import Reading
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.steps import StepCounter
from traceloom.agent.traces.files import TraceDirectories
from traceloom.agent.traces.requests import TraceRequest
from traceloom.agent.traces.runner import TraceService
from traceloom.agent.triggers.adapter import TriggerEngine
from traceloom.agent.triggers.store import TriggerStore
from traceloom.agent.triggers.watches import Watch

START_NS = 1_800_000_000 * 10**9
_NO_SUCH_PID = 2**22 - 1  # the largest that the kernel ever gives


def rule(text: str, name: str = "rule") -> AnyRule:
    """A rule, from what stands below `[[triggers]]`."""
    return msgspec.toml.decode(
        f'[[triggers]]\nname = "{name}"\n{text}'.encode(), type=Config
    ).triggers[0]


def worker(
    number: int, job: str = "job", rank: int | None = None, devices: tuple[str, ...] = ()
) -> Process:
    """A process of this user that exists in a /proc of the test's own."""
    pid = _NO_SUCH_PID - number
    return Process(
        key=f"{pid}@1",
        pid=pid,
        start_ticks=1,
        started_ns=START_NS - 7 * 86_400 * 10**9,
        parent_pid=1,
        uid=os.geteuid(),
        command="",
        owner=Owner(job=job, rank=rank),
        devices=devices,
        cgroup=f"/{job}",
    )


class Rules:
    """An agent's triggers, with the trace_service that takes their requests."""

    def __init__(
        self,
        *rules: AnyRule,
        folder: Path | None = None,
        budget: TriggerBudget | None = None,
        steps: StepCounter | None = None,
        watches: Mapping[str, Callable[[AnyRule], Watch]] | None = None,
    ) -> None:
        self._made = tempfile.mkdtemp(prefix="tl") if folder is None else ""
        self.folder = folder or Path(self._made)
        self.config = Config(
            host="node1",
            triggers=rules,
            trigger_budget=budget or TriggerBudget(),
            traces=Traces(max_requests_per_user=100_000),
        )
        self.proc = Path(tempfile.mkdtemp(prefix="tl"))
        self.host_snapshot, self.registry, self.steps = (
            Snapshot(),
            ProfilerRegistry(str(self.proc)),
            steps or StepCounter(),
        )
        self.trace_service = TraceService(
            self.config,
            self.registry,
            lambda: self.host_snapshot.processes,
            self.steps,
            RequestStore(self.folder / "requests.db"),
            TraceDirectories(self.folder / "traces"),
            "boot",
        )
        self.audit = AuditLog(self.folder / "audit.jsonl")
        self.disk = ThreadPoolExecutor(1)
        self.store = TriggerStore(self.folder / "triggers.db")
        self.now_ns = START_NS
        self.triggers = TriggerEngine(
            self.config,
            self.host_snapshot,
            self.trace_service,
            self.store,
            self.disk,
            self.audit,
            self.now_ns,
            watches,
        )

    def run(self, *processes: Process, polling: bool = True) -> None:
        """Processes that there are from now on."""
        self.host_snapshot.processes = {process.key: process for process in processes}
        for process in processes:
            (self.proc / str(process.pid)).mkdir(exist_ok=True)
            (self.proc / str(process.pid) / "stat").write_text(
                f"{process.pid} (python) S" + " 0" * 18 + " 1 0"
            )
        self.registry.clients = {
            process.key: ProfilerClient(
                key=process.key, pid=process.pid, uid=process.uid, gid=0, start_ticks=1
            )
            for process in processes
            if polling
        }

    def put(
        self, metric: str, values: Mapping[tuple[str, ...], float], collector: str = "some"
    ) -> None:
        """What a collector delivers now."""
        self.host_snapshot.put(
            collector,
            [Reading(metric, labels, value) for labels, value in values.items()],
            self.now_ns,
        )

    async def after(self, seconds: float) -> list[TraceRequest]:
        """A tick so much later; the requests that it made."""
        before = set(self.trace_service.requests)
        self.now_ns += int(seconds * 1e9)
        await self.triggers.tick(self.now_ns)
        return [
            request for key, request in self.trace_service.requests.items() if key not in before
        ]

    async def ended(self) -> None:
        """All requests have ended, as their processes have."""
        hidden = self.proc.rename(f"{self.proc}.ended")
        for request in list(self.trace_service.requests.values()):
            async for _ in self.trace_service.changes(request):
                pass
        hidden.rename(self.proc)

    def refusals(self, name: str = "rule") -> dict[str, int]:
        return dict(self.triggers.counts[name].refusals)

    async def close(self) -> None:
        """As an agent that ends: everything that was to be written is."""
        await self.trace_service.close()
        await asyncio.to_thread(self.disk.shutdown)
        if self._made:
            await asyncio.to_thread(shutil.rmtree, self._made)
