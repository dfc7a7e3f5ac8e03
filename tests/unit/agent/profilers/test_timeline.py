"""Each state of a trace has its evidence and its failure: with a stand-in that polls and writes as libkineto does."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.kineto_clients import KinetoClient, trace_text, write_trace
from support.waiting import until
from traceloom.agent.collectors.scheduler import Scheduler
from traceloom.agent.config import Config
from traceloom.agent.database import RequestStore
from traceloom.agent.kineto import KinetoSockets, ProfilerRegistry, read_parent_and_start
from traceloom.agent.metrics import Reading
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers.base import ProfilerError, Window
from traceloom.agent.profilers.telemetry import TelemetryProfiler
from traceloom.agent.profilers.timeline import StartBarrier, TimelineOrder, TimelineProfiler
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.steps import StepCounter
from traceloom.agent.traces.files import TraceDirectories
from traceloom.agent.traces.requests import TraceRequest, TraceSpec
from traceloom.agent.traces.runner import TraceService

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's")
EVERY_S = 0.05  # between polls of the stand-in


class StandIn:
    """Polls in a thread; `obeys(number, configuration)` does what libkineto does and gives the masks of the next polls."""

    def __init__(
        self, directory: Path, obeys: Callable[[int, dict[str, str]], list[int]], masks: list[int]
    ) -> None:
        self.client = KinetoClient(directory)
        self.obeys, self.masks = obeys, masks
        self.told: list[dict[str, str]] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.ended.wait(EVERY_S):
            try:
                self.client.poll(self.masks.pop(0) if self.masks else 3)
            except (ConnectionRefusedError, FileNotFoundError):
                return  # the agent of the test has ended
            text = self.client.answer(10)
            if text:
                lines = dict(line.split("=") for line in text.splitlines())
                self.told.append(lines)
                self.masks = self.obeys(len(self.told), lines)

    def close(self) -> None:
        self.ended.set()
        self.thread.join()
        self.client.close()


class Outcome:
    """What became of a request: states as they were told, the error's slug or "", the facts."""

    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.facts: dict[str, Any] = {}
        self.slug = ""
        self.told: list[dict[str, str]] = []

    def tell(
        self, state: str, reason: str = "", detail: str = "", **facts: Any
    ) -> asyncio.Future[None]:
        if (state, reason) not in self.states[-1:]:
            self.states.append((state, reason))
        self.facts |= facts
        on_disk: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        on_disk.set_result(None)
        return on_disk


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tl"))
    for name in ("incoming", "kept/request"):
        (folder / name).mkdir(parents=True)
    yield folder
    shutil.rmtree(folder)


def traced(
    place: Path,
    obeys: Callable[[int, dict[str, str]], list[int]],
    window: Window,
    masks: tuple[int, ...] = (),
    common: bool = False,
    outcome: Outcome | None = None,
    **order: Any,
) -> Outcome:
    outcome = outcome or Outcome()

    async def live() -> None:
        registry = ProfilerRegistry()
        sockets = KinetoSockets(place / "k", registry)
        sockets.start()
        assert not sockets.last_error
        stand_in = StandIn(place / "k" / str(os.geteuid()), obeys, list(masks))
        ticks = read_parent_and_start("/proc", os.getpid())[1]
        process = Process(
            key=f"{os.getpid()}@{ticks}",
            pid=os.getpid(),
            start_ticks=ticks,
            started_ns=1,
            parent_pid=1,
            uid=os.geteuid(),
            command="",
        )
        wanted = TimelineOrder(
            trace_id="traceloom-1-rank0",
            group_id="traceloom-1",
            incoming=place / "incoming",
            stem="rank0",
            **{"wait_s": 30.0, "start": StartBarrier([process.key]) if common else None, **order},
        )
        try:
            profiler = TimelineProfiler(registry, wanted, outcome.tell)
            await profiler.record(process, window, place / "kept" / "request", "rank0")
        except ProfilerError as error:
            outcome.slug = error.slug
        finally:
            outcome.told = stand_in.told
            await asyncio.to_thread(stand_in.close)
            sockets.close()

    asyncio.run(live())
    assert not list((place / "incoming").iterdir())  # nothing is left behind
    return outcome


STEPS = Window(0, None, 3)
TIME = Window(0, 0.5, None)


def written(_: int, lines: dict[str, str]) -> list[int]:
    write_trace(lines)
    return [1]


def test_from_queued_to_kept(place: Path) -> None:
    outcome = traced(place, written, STEPS)
    assert outcome.slug == ""
    states = [state for state, _ in outcome.states]
    assert [state for state in states if state != "accepted"] == [
        "queued",
        "delivered",
        "written",
        "verified",
        "kept",
    ]
    packed = (place / "kept" / "request" / "rank0.kineto.json.gz").read_bytes()
    assert json.loads(gzip.decompress(packed))["trace_id"] == "traceloom-1-rank0"
    assert (outcome.facts["bytes"], outcome.facts["steps"], outcome.facts["operators"]) == (
        len(packed),
        3,
        3,
    )
    assert outcome.told[0]["ACTIVITIES_ITERATIONS"] == "3"


def test_its_own_profile_is_waited_for(place: Path) -> None:
    """H9: while the mask is busy nothing is told."""
    outcome = traced(place, written, TIME, masks=(1,) * 20)
    assert outcome.slug == ""
    assert ("queued", "own-profiler") in outcome.states
    assert len(outcome.told) == 1


def test_what_is_not_taken_is_rejected(place: Path) -> None:
    outcome = traced(place, lambda *_: [], TIME)
    assert outcome.slug == "rejected"
    assert len(outcome.told) == 1


def test_what_the_program_cancels_is_tried_once_more(place: Path) -> None:
    """H10: busy, a file that has only begun, then idle."""

    def cancelled(number: int, lines: dict[str, str]) -> list[int]:
        if number == 2:
            write_trace(lines)
            return []
        Path(lines["ACTIVITIES_LOG_FILE"] + ".tmp").write_text("", encoding="utf-8")
        return [1, 1]

    outcome = traced(place, cancelled, TIME)
    assert outcome.slug == ""
    assert ("queued", "cancelled-by-program") in outcome.states
    assert len({lines["ACTIVITIES_LOG_FILE"] for lines in outcome.told}) == 2
    again = traced(place, lambda _, lines: cancelled(1, lines), TIME)
    assert (again.slug, len(again.told)) == ("cancelled-by-program", 2)


def test_an_empty_trace_is_tried_once_more(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H11: it was told while PyTorch was still being imported."""
    monkeypatch.setattr("traceloom.agent.profilers.timeline._IMPORT_S", 0.5)
    monkeypatch.setattr("traceloom.agent.profilers.timeline._BACK_OFF_S", 0.2)

    def empty(number: int, lines: dict[str, str]) -> list[int]:
        write_trace(lines, operators=0 if number == 1 else 2)
        return [1]

    outcome = traced(place, empty, TIME)
    assert (outcome.slug, len(outcome.told)) == ("", 2)
    assert ("queued", "empty") in outcome.states


def test_steps_are_waited_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H12: a trace by steps that became one by time, as nothing steps yet, is thrown away and asked for again."""
    monkeypatch.setattr("traceloom.agent.profilers.timeline._IMPORT_S", 0.5)
    monkeypatch.setattr("traceloom.agent.profilers.timeline._BACK_OFF_S", 0.2)

    def later(number: int, lines: dict[str, str]) -> list[int]:
        write_trace(lines, steps=number, operators=number - 1)
        return [1]

    outcome = traced(place, later, STEPS)
    assert (outcome.slug, len(outcome.told), outcome.facts["steps"]) == ("", 3, 3)
    assert ("queued", "not-stepping") in outcome.states
    known = traced(place, written, STEPS, steps_per_second=lambda _: 0.0, wait_s=1.0)
    assert (known.slug, known.told) == ("expired", [])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("how", "slug"),
    [
        ({"text": '{"trace_id": "traceloom-1-rank0", "traceEvents": [{"name"'}, "damaged"),
        ({"text": ""}, "damaged"),
        ({"trace_id": "another"}, "damaged"),
        ({"seconds": 50.0}, "damaged"),
        ({"seconds": 1e300}, "damaged"),
        ({"link": "symbolic"}, "foreign-file"),
        ({"link": "hard"}, "foreign-file"),
        ({"link": "pipe"}, "foreign-file"),
        ({"max_bytes": 10}, "quota"),
        ({"max_kept_bytes": 10}, "quota"),
        ({"max_result_bytes": 10}, "quota"),
    ],
)
def test_what_is_not_the_trace_is_not_kept(place: Path, how: dict[str, Any], slug: str) -> None:
    secret = place / "secret"
    secret.write_text(trace_text("traceloom-1-rank0"), encoding="utf-8")

    def wrong(_: int, lines: dict[str, str]) -> list[int]:
        path = Path(lines["ACTIVITIES_LOG_FILE"])
        if "text" in how:
            path.write_text(how["text"], encoding="utf-8")
        elif how.get("link") == "symbolic":
            path.symlink_to(secret)
        elif how.get("link") == "hard":
            path.hardlink_to(secret)
        elif how.get("link") == "pipe":
            os.mkfifo(path)
        else:
            write_trace(
                {**lines, "REQUEST_TRACE_ID": how.get("trace_id", lines["REQUEST_TRACE_ID"])},
                seconds=how.get("seconds", 0.5),
            )
        return [1]

    limits = {name: value for name, value in how.items() if name.startswith("max_")}
    outcome = traced(place, wrong, TIME, **limits)
    assert outcome.slug == slug
    assert not list((place / "kept" / "request").iterdir())
    assert secret.exists()


def test_what_was_written_stays_until_it_is_on_disk_that_it_is_kept(place: Path) -> None:
    """An agent that is killed in between finds it again."""

    class SlowDisk(Outcome):
        def tell(
            self, state: str, reason: str = "", detail: str = "", **facts: Any
        ) -> asyncio.Future[None]:
            on_disk = super().tell(state, reason, detail, **facts)
            if state != "kept":
                return on_disk
            later: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def written() -> None:
                self.there = [path.name for path in (place / "incoming").iterdir()]
                later.set_result(None)

            asyncio.get_running_loop().call_later(0.3, written)
            return later

    disk = SlowDisk()
    traced(place, written, TIME, outcome=disk)
    assert disk.there == ["traceloom-1-rank0.1.trace"]


def test_a_quota_counts_what_is_kept_and_nothing_else(place: Path) -> None:
    """Not what other processes have written meanwhile, nor copies that are being looked at."""
    for name in ("incoming/rank1.trace", "other/.rank1.kineto.json.gz.copy"):
        (place / "kept" / name).parent.mkdir()
        (place / "kept" / name).write_bytes(b"0" * 100_000)
    assert traced(place, written, TIME, max_kept_bytes=50_000).slug == ""
    (place / "kept" / "other" / "rank1.kineto.json.gz").write_bytes(b"0" * 100_000)
    assert traced(place, written, TIME, max_kept_bytes=50_000).slug == "quota"


KEEPS = """
import json, os, resource, sys
from traceloom.agent.traces import files as keeping
pages = int(open("/proc/self/statm").read().split()[0])
keeping._BASE_MEMORY_BYTES = pages * resource.getpagesize() + (32 << 20)
facts = keeping.verify_and_store(
    folder=sys.argv[1], name="trace", uid=os.geteuid(), to=sys.argv[2], max_bytes=1 << 30, max_kept_bytes=1 << 30,
    trace_id="traceloom-1-rank0", start_ns=None, duration_s=0.5, steps=None,
)
print(json.dumps(facts))
"""


@pytest.mark.parametrize(
    ("events", "fault"), [(3_000_000, "damaged"), (0, "")], ids=["swells", "ordinary"]
)
def test_a_file_that_swells_in_memory_is_refused(place: Path, events: int, fault: str) -> None:
    text = trace_text("traceloom-1-rank0", operators=30_000)
    text = text.replace('"traceEvents": [', '"traceEvents": [' + "{}," * events)
    (place / "incoming" / "trace").write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-c",
        KEEPS,
        str(place / "incoming"),
        str(place / "kept" / "request" / "a.gz"),
    ]
    facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert facts.get("fault", "") == fault, facts
    (place / "incoming" / "trace").unlink()


def test_one_that_polls_too_rarely_or_never_is_not_waited_for_for_ever(place: Path) -> None:
    outcome = traced(place, lambda *_: [], TIME, masks=(1,) * 10_000, wait_s=1.0)
    assert (outcome.slug, outcome.told) == ("expired", [])


def test_a_common_start_is_told_and_measured(place: Path) -> None:
    late_ns = 7_000_000

    def at_the_instant(_: int, lines: dict[str, str]) -> list[int]:
        write_trace(lines, start_ns=int(lines["PROFILE_START_TIME"]) * 1_000_000 + late_ns)
        return [1]

    outcome = traced(place, at_the_instant, TIME, common=True)
    assert outcome.slug == ""
    start_ns = int(outcome.told[0]["PROFILE_START_TIME"]) * 1_000_000
    assert 0 <= outcome.facts["start_ns"] - start_ns < 1_000_000  # libkineto is told milliseconds
    assert abs(outcome.facts["skew_ns"] - late_ns) < 2_000_000


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "damaged"])
def test_what_is_recorded_beside_steps_of_no_known_pace_is_of_the_traces_window(
    place: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    monkeypatch.setattr("traceloom.agent.profilers.timeline.START_LEAD_S", 0.1)
    read: list[tuple[int, float]] = []
    host_snapshot = Snapshot()

    class Counter:
        """Counts its runs; left alone, it runs once a minute."""

        name, period_s, timeout_s = "cpu", 60.0, 5.0

        def collect(self) -> list[Reading]:
            return [Reading("host_cpu_seconds_total", ("user",), len(read))]

        def list_problems(self) -> list[str]:
            return []

    def at_the_instant(_: int, lines: dict[str, str]) -> list[int]:
        start_ns = int(lines["PROFILE_START_TIME"]) * 1_000_000 + 200_000_000
        time.sleep((start_ns - time.time_ns()) / 1e9 + 0.6)
        write_trace(
            lines if is_kept else lines | {"REQUEST_TRACE_ID": "another"}, start_ns=start_ns
        )
        return [1]

    async def live() -> TraceRequest:
        registry = ProfilerRegistry()
        sockets = KinetoSockets(place / "k", registry)
        sockets.start()
        scheduler = Scheduler(host_snapshot, [Counter()])
        host_snapshot.listeners.append(
            lambda _, sheet: read.append((sheet.at_ns, *sheet.values.values()))
        )
        scheduler.start()
        ticks = read_parent_and_start("/proc", os.getpid())[1]
        process = Process(
            key=f"{os.getpid()}@{ticks}",
            pid=os.getpid(),
            start_ticks=ticks,
            started_ns=1,
            parent_pid=1,
            uid=os.geteuid(),
            command="",
        )
        trace_service = TraceService(
            Config(),
            registry,
            lambda: {process.key: process},
            StepCounter(),
            RequestStore(None),
            TraceDirectories(place / "traces"),
            "",
            {"telemetry": lambda: TelemetryProfiler(host_snapshot, scheduler, "node1")},
        )
        stand_in = StandIn(place / "k" / str(os.geteuid()), at_the_instant, [])
        try:
            clients = registry.clients  # how often it polls is known from its second time on
            await asyncio.to_thread(
                until, lambda: process.key in clients and clients[process.key].interval_s < 1
            )
            wanted = TraceSpec(pids=(process.pid,), steps=3, profilers=("timeline", "telemetry"))
            request = await trace_service.submit(wanted, "test", lambda _: True)
            async for _ in trace_service.changes(request):
                pass
            return request
        finally:
            await asyncio.to_thread(stand_in.close)
            await trace_service.close()
            await scheduler.stop()
            sockets.close()

    request = asyncio.run(live())
    timeline, telemetry = request.targets
    if not is_kept:
        assert (timeline.state, timeline.reason) == ("failed", "damaged")
        assert (telemetry.state, telemetry.reason) == ("failed", "no-duration")
        return
    assert (timeline.state, telemetry.state, telemetry.file) == (
        "kept",
        "kept",
        f"{telemetry.stem}.telemetry.json.gz",
    )
    start_ns, end_ns = timeline.window_start_ns, timeline.window_end_ns
    assert start_ns is not None
    assert end_ns is not None
    assert end_ns - start_ns == pytest.approx(5e8)
    path = place / "traces" / str(os.geteuid()) / request.id / telemetry.file
    (series,) = json.loads(gzip.decompress(path.read_bytes()))["series"]
    before = [row for row in read if row[0] <= start_ns]
    inside = [row for row in read if start_ns < row[0] <= end_ns]
    assert list(zip(series["times_ns"], series["values"], strict=True)) == before[-1:] + inside
    assert inside
    assert read[-1][0] > end_ns  # there was more that is left out


def test_ranks_meet_in_each_round() -> None:
    async def live() -> None:
        start = StartBarrier(["a", "b", "c"])
        one = asyncio.create_task(start.ready("a", 1.0))
        await asyncio.sleep(0)
        assert not start.first.done()
        start.leave("c")
        other = asyncio.create_task(start.ready("b", 5.0))
        before = time.time_ns()
        assert await one == await other == await start.first
        assert await one >= before + 4_900_000_000
        again = asyncio.create_task(start.ready("b", 0.0))
        await asyncio.sleep(0)
        assert not again.done()
        start.leave("a")
        assert await again != await one

    asyncio.run(live())


def test_a_profile_that_never_ends_is_given_up(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceloom.agent.profilers.timeline._DRAIN_S", 0.3)
    outcome = traced(place, lambda *_: [1] * 10_000, TIME)
    assert outcome.slug == "deadline"
    assert [state for state, _ in outcome.states][-1] == "accepted"


def test_a_process_that_does_not_poll_is_not_registered(place: Path) -> None:
    outcome = Outcome()
    ticks = read_parent_and_start("/proc", os.getpid())[1]
    process = Process(
        key=f"{os.getpid()}@{ticks}",
        pid=os.getpid(),
        start_ticks=ticks,
        started_ns=1,
        parent_pid=1,
        uid=os.geteuid(),
        command="",
    )
    order = TimelineOrder(
        trace_id="t", group_id="g", incoming=place / "incoming", stem="rank0", wait_s=0.3
    )
    with pytest.raises(ProfilerError) as error:
        asyncio.run(
            TimelineProfiler(ProfilerRegistry(), order, outcome.tell).record(
                process, TIME, place / "kept" / "request", "rank0"
            )
        )
    assert error.value.slug == "not-registered"
    assert outcome.states == [("queued", "not-registered")]
