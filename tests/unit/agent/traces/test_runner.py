"""Which processes a request is about, and which requests are refused before anything is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from traceloom.agent.config import Config, Traces
from traceloom.agent.database import RequestStore
from traceloom.agent.kineto import ProfilerClient, ProfilerRegistry
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.steps import StepCounter
from traceloom.agent.traces.files import TraceDirectories
from traceloom.agent.traces.requests import TraceSpec
from traceloom.agent.traces.runner import TraceService
from traceloom.server.problem import HttpError


class Host:
    """A trace_service, and processes as the kernel's files and the agent have them."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.processes: dict[str, Process] = {}
        self.registry = ProfilerRegistry(str(self.proc))
        self.folder = folder

    def process(
        self, pid: int, parent: int, command: str, rank: int | None = None, *, polls: bool = False
    ) -> None:
        (self.proc / str(pid)).mkdir(parents=True)
        line = f"{pid} (python) S {parent} " + " ".join(["0"] * 17) + " 100 0"
        (self.proc / str(pid) / "stat").write_text(line, encoding="ascii")
        made = Process(
            key=f"{pid}@100",
            pid=pid,
            start_ticks=100,
            started_ns=1,
            parent_pid=parent,
            uid=7,
            command=command,
            owner=Owner(job="j", rank=rank),
        )
        self.processes[made.key] = made
        if polls:
            client = ProfilerClient(
                key=made.key, pid=pid, uid=7, gid=7, start_ticks=100, ancestors=(parent,)
            )
            self.registry.clients[made.key] = client

    def trace_service(self, attach: bool = True) -> TraceService:
        config = Config(traces=Traces(attach=attach))
        store, places = RequestStore(None), TraceDirectories(self.folder / "traces")
        return TraceService(
            config, self.registry, lambda: self.processes, StepCounter(), store, places, "boot"
        )

    def matching(self, **wanted: object) -> list[int]:
        asked = msgspec.convert({"steps": 1, **wanted}, TraceSpec)
        return sorted(
            process.pid for process in self.trace_service().matching(asked, lambda _: True)
        )


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    return Host(tmp_path)


def test_only_with_attach_those_that_do_not_poll(host: Host) -> None:
    host.process(10, 1, "a", 0, polls=True)
    host.process(11, 1, "a", 1)
    assert host.matching(job="j") == [10]
    assert host.matching(job="j", attach=True) == [10, 11]
    assert host.matching(job="j", attach=True, ranks=[1]) == [11]


def test_a_launchers_pid_chooses_its_ranks_without_what_they_started(host: Host) -> None:
    host.process(10, 1, "torchrun train.py")
    for rank in range(2):
        host.process(20 + rank, 10, "python train.py", rank)
        host.process(30 + rank, 20 + rank, "python train.py", rank)  # a worker of its data loader
        host.process(40 + rank, 20 + rank, "python -c spawned", rank)
    assert host.matching(pids=[10], attach=True) == [20, 21]
    assert host.matching(job="j", attach=True) == [20, 21]
    assert host.matching(pids=[31], attach=True) == [31]  # named itself


def test_what_was_forked_from_one_that_matches_is_left_out(host: Host) -> None:
    host.process(10, 1, "python train.py")
    host.process(11, 10, "python train.py")
    host.process(12, 10, "python other.py")
    host.process(13, 10, "python train.py", polls=True)
    assert host.matching(pids=[10], attach=True) == [10, 12, 13]


@pytest.mark.parametrize(
    ("attach", "wanted", "slug"),
    [
        (False, {"attach": True}, "attach-off"),
        (False, {"attach": True, "profilers": ["memory"]}, "attach-off"),
        (True, {"profilers": ["memory"]}, "wrong-request"),
    ],
)
def test_refused(host: Host, attach: bool, wanted: dict[str, object], slug: str) -> None:
    host.process(10, 1, "a", 0)

    async def submitted() -> str:
        trace_service = host.trace_service(attach)
        try:
            with pytest.raises(HttpError) as refusal:
                await trace_service.submit(
                    msgspec.convert({"pids": [10], "steps": 1, **wanted}, TraceSpec),
                    "uid 7",
                    lambda _: True,
                )
        finally:
            await trace_service.close()
        return refusal.value.slug

    assert asyncio.run(submitted()) == slug
    assert not (host.folder / "traces").exists()


def test_ranks_whose_steps_are_known_and_agree_begin_with_one_step(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_service = host.trace_service()
    made: dict[str, int | None] = {"a": 100, "b": 101}
    rates: dict[str, float | None] = {"a": 10.0, "b": 9.0}
    monkeypatch.setattr(trace_service.steps, "total", made.get)
    monkeypatch.setattr(trace_service.steps, "per_second", rates.get)
    by_steps = TraceSpec(steps=3)
    assert trace_service._choose_step(by_steps, ["a", "b"]) == 101 + 40 + 1  # four seconds ahead
    assert trace_service._choose_step(by_steps, ["a"]) == 0
    assert trace_service._choose_step(TraceSpec(duration_s=1.0), ["a", "b"]) == 0
    assert trace_service._choose_step(TraceSpec(steps=3, at_ns=5), ["a", "b"]) == 0
    assert trace_service._choose_step(by_steps, ["a", "b", "c"]) == 0  # unknown
    made["b"] = 160
    assert trace_service._choose_step(by_steps, ["a", "b"]) == 0  # jobs of their own
