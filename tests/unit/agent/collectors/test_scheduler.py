"""Collectors run at their own periods; one that hangs, fails or breaks holds up nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from traceloom.agent.collectors.scheduler import Scheduler
from traceloom.agent.metrics import HistogramReading, Reading
from traceloom.agent.snapshot import Snapshot

LOAD = Reading("host_load_ratio", (), 0.5)


class Made:
    """A collector that does what it is told."""

    def __init__(
        self,
        name: str,
        collect: Callable[[], Sequence[Reading]],
        period_s: float = 0.01,
        timeout_s: float = 5.0,
    ) -> None:
        self.name, self.period_s, self.timeout_s = name, period_s, timeout_s
        self.runs = 0
        self._collect = collect

    def collect(self) -> Sequence[Reading | HistogramReading]:
        self.runs += 1
        return self._collect()

    def list_problems(self) -> list[str]:
        return []


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 30 s")


def _lived(scheduler: Scheduler, condition: Callable[[], bool]) -> None:
    async def live() -> None:
        scheduler.start()
        try:
            await _until(condition)
        finally:
            await scheduler.stop()

    asyncio.run(live())


def test_what_is_collected_is_on_the_board_again_and_again() -> None:
    collector, delivered = Made("load", lambda: [LOAD]), []
    scheduler = Scheduler(Snapshot(), [collector], delivered.append)
    _lived(scheduler, lambda: len(delivered) >= 3)
    assert scheduler.host_snapshot.results["load"].values == {("host_load_ratio", ()): 0.5}
    assert scheduler.host_snapshot.collectors["load"].runs >= 3


def test_one_that_hangs_holds_up_nobody_and_comes_back() -> None:
    free = threading.Event()
    first = True

    def hang() -> Sequence[Reading]:
        nonlocal first
        if first:
            first = False
            free.wait(60)
        return [LOAD]

    hanging, other = Made("hangs", hang, timeout_s=0.05), Made("other", lambda: [LOAD])
    host_snapshot = Snapshot()
    scheduler = Scheduler(host_snapshot, [hanging, other])

    async def live() -> None:
        scheduler.start()
        await _until(
            lambda: (
                host_snapshot.collectors["hangs"].failures.get("timeout", 0) >= 3 and other.runs > 3
            )
        )
        assert hanging.runs == 1  # it is not run again on top of itself
        assert "hangs" not in host_snapshot.results
        free.set()
        await _until(lambda: "hangs" in host_snapshot.results)
        await scheduler.stop()

    asyncio.run(live())
    assert host_snapshot.collectors["hangs"].last_error == ""


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError("no such device"), "error"), (ValueError("a defect"), "defect")]
)
def test_what_fails_is_counted_and_taken_off_the_board(error: Exception, reason: str) -> None:
    answers: list[Sequence[Reading] | Exception] = [[LOAD], error]

    def collect() -> Sequence[Reading]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    host_snapshot = Snapshot()
    scheduler = Scheduler(host_snapshot, [Made("some", collect)])
    _lived(scheduler, lambda: host_snapshot.collectors["some"].failures.get(reason, 0) >= 2)
    assert "some" not in host_snapshot.results
    assert str(error) in host_snapshot.collectors["some"].last_error
    assert (
        Reading(
            "collector_failures_total",
            ("some", reason),
            host_snapshot.collectors["some"].failures[reason],
        )
        in scheduler.readings()
    )


def test_readings_that_are_not_declared_are_a_defect() -> None:
    host_snapshot = Snapshot()
    scheduler = Scheduler(
        host_snapshot, [Made("wrong", lambda: [Reading("host_load_ratio", ("too", "many"), 1.0)])]
    )
    _lived(scheduler, lambda: host_snapshot.collectors["wrong"].failures.get("defect", 0) >= 1)
    assert "not declared" in host_snapshot.collectors["wrong"].last_error


def test_while_a_trace_runs_all_are_quick() -> None:
    slow = Made("slow", lambda: [LOAD], period_s=3600)
    scheduler = Scheduler(Snapshot(), [slow])

    async def live() -> None:
        scheduler.start()
        await _until(lambda: slow.runs == 1)
        scheduler.run_fast(60)
        await _until(lambda: slow.runs >= 3)
        await scheduler.stop()

    asyncio.run(live())


def test_it_stops_while_collectors_deliver() -> None:
    """A task that is cancelled as its result arrives may not notice (`asyncio.wait_for` before Python 3.12)."""

    async def live() -> None:
        for _ in range(40):
            collectors = [
                Made(f"quick {number}", lambda: [LOAD], period_s=1e-6) for number in range(8)
            ]
            scheduler = Scheduler(Snapshot(), collectors)
            scheduler.start()
            await _until(
                lambda collectors=collectors: all(collector.runs > 2 for collector in collectors)
            )
            stopping = asyncio.create_task(scheduler.stop())
            await asyncio.wait([stopping], timeout=30)
            assert stopping.done(), "it still collects"

    asyncio.run(live())
