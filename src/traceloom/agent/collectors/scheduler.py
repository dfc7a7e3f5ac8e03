"""Runs the collectors: each at its own period, in a thread of its own, abandoned after its
time-out.

A thread cannot be stopped. One that hangs is left until it returns; meanwhile its collector is not
run again, its readings are removed from the snapshot, and the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from traceloom.agent.collectors.collector import Collector
from traceloom.agent.metrics import HistogramReading, Reading
from traceloom.agent.snapshot import CollectorStatus, Snapshot

LOG = logging.getLogger("traceloom.agent")
FAST_S = 0.1  # period while a trace runs
FAILURES = ("timeout", "error", "defect")


class Scheduler:
    """The tasks of all collectors.

    Args:
        host_snapshot: Receives the readings.
        collectors: The collectors.
        delivered: Called in the loop after a collector has delivered.
    """

    def __init__(
        self,
        host_snapshot: Snapshot,
        collectors: Iterable[Collector],
        delivered: Callable[[Collector], None] = lambda _: None,
    ) -> None:
        self.host_snapshot = host_snapshot
        self.collectors = list(collectors)
        self.delivered = delivered
        self._fast_until = 0.0
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._sooner: dict[str, asyncio.Event] = {}
        self._hanging: set[str] = set()
        for collector in self.collectors:
            host_snapshot.collectors[collector.name] = CollectorStatus(
                collector.name, collector.period_s
            )

    def start(self) -> None:
        """Start the tasks; needs a running loop."""
        for collector in self.collectors:
            self._sooner[collector.name] = asyncio.Event()
            self._tasks.append(
                asyncio.create_task(self._run(collector), name=f"collect {collector.name}")
            )

    async def stop(self) -> None:
        """Cancel all tasks; threads that hang end with the process."""
        self._stopping = True  # before Python 3.12 `wait_for` may forget that it was cancelled
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def run_fast(self, seconds: float) -> None:
        """Collect every 100 ms for `seconds`: while a trace runs."""
        self._fast_until = max(self._fast_until, time.monotonic() + seconds)
        for event in self._sooner.values():
            event.set()

    async def collect(self, collector: Collector) -> bool:
        """Run a collector once; returns whether it delivered."""
        state = self.host_snapshot.collectors[collector.name]
        start = time.monotonic()
        try:
            readings = await asyncio.wait_for(self._in_a_thread(collector), collector.timeout_s)
            self.host_snapshot.put(collector.name, readings, time.time_ns())
            state.last_error = ""
        except (asyncio.TimeoutError, TimeoutError):
            self._failed(
                collector, state, "timeout", f"gave nothing within {collector.timeout_s:g} s"
            )
        except OSError as error:
            self._failed(collector, state, "error", str(error))
        except Exception as error:
            # A bug in one collector must not end the agent; it is logged with its traceback.
            if not state.last_error:
                LOG.exception("collector %s has a defect", collector.name)
            self._failed(collector, state, "defect", f"{type(error).__name__}: {error}")
        state.seconds = time.monotonic() - start
        state.runs += 1
        state.ran_ns = time.time_ns()
        return not state.last_error

    def readings(self) -> list[Reading]:
        """Returns the run times and failures of the collectors."""
        readings = [
            Reading("collector_seconds", (state.name,), state.seconds)
            for state in self.host_snapshot.collectors.values()
            if state.runs
        ]
        readings += [
            # Zeros as well: Prometheus misses the first increment of a counter that starts at 1.
            Reading("collector_failures_total", (state.name, reason), state.failures.get(reason, 0))
            for state in self.host_snapshot.collectors.values()
            for reason in FAILURES
        ]
        return readings

    def _failed(self, collector: Collector, state: CollectorStatus, reason: str, text: str) -> None:
        if not state.last_error:
            LOG.warning("collector %s: %s", collector.name, text)
        state.last_error = text
        state.failures[reason] = state.failures.get(reason, 0) + 1
        self.host_snapshot.stale(collector.name)

    async def _run(self, collector: Collector) -> None:
        wake_event = self._sooner[collector.name]
        due = time.monotonic()
        while not self._stopping:
            if await self.collect(collector):
                self.delivered(collector)
            now = time.monotonic()
            # Runs missed while the machine slept or the collector was slow are skipped.
            due = max(due + self._period(collector, now), now)
            wake_event.clear()
            while not self._stopping and (remaining_s := due - time.monotonic()) > 0:
                try:
                    await asyncio.wait_for(wake_event.wait(), remaining_s)
                except (asyncio.TimeoutError, TimeoutError):
                    break
                wake_event.clear()
                due = min(due, time.monotonic() + self._period(collector, time.monotonic()))

    def _period(self, collector: Collector, now: float) -> float:
        return min(FAST_S, collector.period_s) if now < self._fast_until else collector.period_s

    async def _in_a_thread(self, collector: Collector) -> Sequence[Reading | HistogramReading]:
        """Collect in a daemon thread, which does not delay the end of the process."""
        name = collector.name
        if name in self._hanging:
            raise TimeoutError  # an earlier run still hangs
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[Reading | HistogramReading]] = loop.create_future()

        def settle(
            result: Sequence[Reading | HistogramReading] | None, error: BaseException | None
        ) -> None:
            self._hanging.discard(name)
            if not future.done():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result or ())

        def call() -> None:
            result, problem = None, None
            try:
                result = collector.collect()
            except BaseException as error:  # noqa: BLE001  (raised again where it is awaited)
                problem = error
            try:
                loop.call_soon_threadsafe(settle, result, problem)
            except RuntimeError:
                return  # the loop has ended

        self._hanging.add(name)
        threading.Thread(target=call, name=f"collect-{name}", daemon=True).start()
        return await future
