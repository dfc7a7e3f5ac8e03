"""What the agent sums up, without running it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from support.agent_server import ANNA, BERT, locations_in, process
from support.prometheus import free_port
from traceloom.agent import daemon, worker
from traceloom.agent.accelerators.backend import Device
from traceloom.agent.api import HistoryQuery
from traceloom.agent.config import Accelerators, Collect, Config, Otlp, Owners
from traceloom.agent.daemon import Agent
from traceloom.agent.hangs.stacks import StackDumps
from traceloom.agent.metrics import METRICS, HistogramReading, Reading, SeriesKey
from traceloom.agent.ownership.model import Process
from traceloom.agent.snapshot import VisibleSnapshot
from traceloom.server.access import Caller
from traceloom.server.problem import HttpError


@contextmanager
def made(directory: Path, otlp: Otlp = Otlp()) -> Iterator[Agent]:  # noqa: B008  (it is frozen)
    """An agent that does not run."""
    config = Config(accelerators=Accelerators(backends=("simulated",), simulated=1), otlp=otlp)
    agent = Agent(config, locations_in(directory))
    try:
        yield agent
    finally:
        agent.accelerators.close()
        agent.history.close()


def sizes(directory: Path, pattern: str) -> int:
    return sum(
        file.stat().st_size for file in directory.iterdir() if re.fullmatch(pattern, file.name)
    )


def test_the_agent_measures_itself(tmp_path: Path) -> None:
    async def live() -> None:
        with made(
            tmp_path, Otlp(endpoint=f"http://127.0.0.1:{free_port()}", timeout=0.1)
        ) as agent:  # nobody listens
            steps = METRICS["step_seconds"]
            histogram = HistogramReading(
                "step_seconds", ("slurm-7", "0"), (0,) * len(steps.bounds), 1, 99.0
            )
            agent.host_snapshot.put(
                "some", [Reading("host_load_ratio", (), 0.5), histogram], time.time_ns()
            )
            agent.asked("/metrics", 200)
            agent.asked("/metrics", 200)
            agent.asked("/api/v1/query", 404)
            agent.history.write(time.time_ns(), [(("host_load_ratio", ()), 0.5)])
            on_disk = sizes(tmp_path, r"agent\.db(-wal)?")
            assert agent.otlp is not None
            agent.otlp.start()
            agent.otlp.put(agent.host_snapshot.copy())
            agent.otlp.close()
            collector = agent.scheduler.collectors[0]
            began = time.monotonic()
            await agent.scheduler.collect(collector)
            took = time.monotonic() - began
            used = time.process_time()
            agent._sum_up()
            values: dict[SeriesKey, float] = agent.host_snapshot.results["agent"].values
            assert (
                used * 0.99 <= values["agent_cpu_seconds_total", ()] <= time.process_time() * 1.01
            )
            resident = psutil.Process(os.getpid()).memory_info().rss
            assert values["agent_memory_bytes", ()] == pytest.approx(resident, rel=0.2)
            assert values["agent_history_bytes", ()] == on_disk > 0
            assert values["agent_history_lost_total", ("slow-disk",)] == 0
            assert values["agent_requests_total", ("/metrics", "200")] == 2
            assert values["agent_requests_total", ("/api/v1/query", "404")] == 1
            assert values["agent_export_failures_total", ()] == 1
            assert 0 < values["collector_seconds", (collector.name,)] <= took
            of_others = [
                sheet for name, sheet in agent.host_snapshot.results.items() if name != "agent"
            ]
            number = sum(len(sheet.values) + len(sheet.histograms) for sheet in of_others)
            assert values["agent_series", ()] == number >= 2  # as it was when the agent counted

            agent.history.lost["full-disk"] = 3
            agent._sum_up()
            assert (
                agent.host_snapshot.results["agent"].values[
                    "agent_history_lost_total", ("full-disk",)
                ]
                == 3
            )

    asyncio.run(live())


def test_every_collector_has_a_period_and_a_time_out_of_its_own(tmp_path: Path) -> None:
    mapping = tmp_path / "jobs"
    names = (
        "cpu",
        "memory",
        "pressure",
        "disks",
        "network",
        "rdma",
        "accelerators",
        "processes",
        "frameworks",
        "kubelet",
        "job-mapping",
        "cgroups",
        "probes",
    )
    config = Config(
        accelerators=Accelerators(backends=("simulated",), simulated=1),
        collect=Collect(
            periods={name: 30.0 + at for at, name in enumerate(names)},
            timeouts={name: 5.0 + at for at, name in enumerate(names)},
        ),
        owners=Owners(job_mapping=str(mapping)),
    )
    agent = Agent(config, locations_in(tmp_path))
    agent.accelerators.close()
    agent.history.close()
    assert {
        collector.name: (collector.period_s, collector.timeout_s)
        for collector in agent.scheduler.collectors
    } == {name: (30.0 + at, 5.0 + at) for at, name in enumerate(names)}


def _device_seconds(agent: Agent) -> float:
    return sum(
        value
        for (name, _), value, _ in agent.host_snapshot.values()
        if name == "job_device_seconds_total"
    )


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_clock_that_jumps_gives_jobs_no_device_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    async def live() -> None:
        with made(tmp_path) as agent:
            job = process(11, 1000, "slurm-7", 0)
            agent.host_snapshot.processes = {job.key: job}
            agent.host_snapshot.devices = {
                "GPU-0": Device(uuid="GPU-0", index="0", vendor="nvidia", model="H100")
            }
            agent.host_snapshot.put(
                "accelerators", [Reading("gpu_busy_ratio", ("GPU-0",), 0.5)], time.time_ns()
            )
            agent._sum_up()
            real = time.time_ns
            monkeypatch.setattr(time, "time_ns", lambda: real() + jump_s * 10**9)
            before = _device_seconds(agent)
            agent._sum_up()
            assert before <= _device_seconds(agent) < abs(jump_s) / 2

    asyncio.run(live())


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_the_history_has_no_command_lines_for_who_only_reads(tmp_path: Path, on_disk: bool) -> None:
    """And of another user's nothing at all; of their own processes users see them, those of no job too."""
    with made(tmp_path) as agent:
        anna, bert = process(11, ANNA, "slurm-7", 0), process(22, BERT, "slurm-8", 1)
        agent.host_snapshot.processes = {anna.key: anna, bert.key: bert}
        names, now_ns = METRICS["process_info"].labels, time.time_ns()
        readings = [
            Reading(
                "process_info",
                tuple({"process": of.key, "command": of.command}.get(name, "") for name in names),
                1.0,
            )
            for of in (anna, bert)
        ]
        if on_disk:
            agent.history.write(
                now_ns - 86_400 * 10**9,
                [((each.metric, each.labels), each.value) for each in readings],
            )
        else:
            agent.host_snapshot.put("processes", readings, now_ns)
            agent.history.keep(agent.host_snapshot, now_ns)

        def told(
            peer: Caller, by: tuple[str, ...] = (), where: dict[str, str] | None = None
        ) -> list[str]:
            question = HistoryQuery(
                metric="process_info",
                since_ns=now_ns - 2 * 86_400 * 10**9,
                until_ns=now_ns + 10**9,
                by=by,
                where=where or {},
                seen_as=VisibleSnapshot(agent.host_snapshot, peer).seen_as,
            )
            return sorted(series.labels["command"] for series in asyncio.run(agent.query(question)))

        reader = Caller(name="token prometheus", sees="all")
        assert told(reader) == ["", ""]
        assert told(reader, by=("command",)) == [""]
        assert told(reader, where={"command": bert.command}) == []  # nor can one be guessed
        assert told(Caller(name="anna", uid=ANNA, sees="own")) == [anna.command]
        assert told(Caller(name="tcp 127.0.0.1", sees="host")) == []
        root = Caller(name="root", uid=0, sees="all", acts=True, commands=True)
        assert told(root) == [anna.command, bert.command]


def test_memory_has_what_collectors_deliver_between_two_ticks(tmp_path: Path) -> None:
    """While a trace runs they deliver ten times a second."""

    async def live() -> None:
        with made(tmp_path) as agent:
            cpu = next(
                collector for collector in agent.scheduler.collectors if collector.name == "cpu"
            )
            now_ns = time.time_ns()
            for turn in range(5):
                agent.host_snapshot.put(
                    "cpu", [Reading("host_load_ratio", (), turn / 8)], now_ns + turn * 10**8
                )
                agent._delivered(cpu)
            (points,) = agent.history.recent("host_load_ratio", now_ns, now_ns + 10**9)
            assert list(points.values) == [turn / 8 for turn in range(5)]

    asyncio.run(live())


def test_what_is_done_for_one_user_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One user has the agent read a trace, and look at a process, that never come to an end."""
    release = threading.Event()

    def read(task: str, *, user: int | None, **_: object) -> dict[str, object]:
        if user == BERT or os.geteuid():
            assert release.wait(60)
        return {}

    async def look(processes: Sequence[Process], **_: object) -> StackDumps:
        if processes[0].uid == BERT:
            await asyncio.to_thread(release.wait, 60)
        return StackDumps(dumps={}, reasons={})

    monkeypatch.setattr(worker, "run", read)
    monkeypatch.setattr(daemon, "collect_stacks", look)

    async def live() -> None:
        with made(tmp_path) as agent:
            theirs = [
                asyncio.create_task(agent.stacks([process(22, BERT, "b", 0)], native=False))
                for _ in range(8)
            ]
            theirs.append(asyncio.create_task(agent.learn("j", "/x", BERT)))
            await asyncio.sleep(0.05)
            for question in (
                agent.stacks([process(22, BERT, "b", 0)], native=False),
                agent.learn("j", "/x", BERT),
            ):
                with pytest.raises(HttpError, match=r"others are|another"):
                    await question
            await agent.stacks([process(11, ANNA, "a", 0)], native=False)
            if os.geteuid() == 0:
                await agent.learn("k", "/y", ANNA)
            release.set()
            await asyncio.gather(*theirs)

    asyncio.run(live())


def test_who_does_much_does_not_push_what_others_did_out_of_the_audit_log(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").touch(0o666)
    (tmp_path / "audit.jsonl").chmod(0o666)
    with made(tmp_path) as agent:
        for actor, number in (("uid 0", 300), (f"uid {BERT}", 5000), (f"uid {ANNA}", 3)):
            for _ in range(number):
                agent.acts(actor, 7, "/api/v1/stacks", allowed=True)
        agent._writing.shutdown()
        text = (tmp_path / "audit.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
    counts = Counter(line["who"] for line in lines)
    assert (counts["uid 0"], counts[f"uid {ANNA}"]) == (300, 3)
    assert 100 < counts[f"uid {BERT}"] < 1000
    assert {line["result"] for line in lines} == {"done"}
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o077 == 0
