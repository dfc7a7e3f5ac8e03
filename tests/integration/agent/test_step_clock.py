"""Steps and loader waits of stock PyTorch programs, against what they measure themselves."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.probes import needs_probes
from traceloom.agent.config import Config, Probes
from traceloom.agent.metrics import METRICS
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.probes import steps as step_probes
from traceloom.agent.steps import ProbedStepClock

pytestmark = [pytest.mark.torch, needs_probes]

# A loop as anybody writes it; around what the probes see lie the clock readings before and after, which bound it.
JOB = """
import json, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    inside = 0
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        start = time.monotonic_ns()
        with torch.autograd.profiler.record_function("a range within the loader's"):
            time.sleep(0.003)
        Slow.inside += time.monotonic_ns() - start
        return torch.randn(8)

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.Adam(model.parameters(), lr=0.1)
batches = iter(DataLoader(Slow(), batch_size=4))
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    profiler = None
    if order.get("profiled"):
        profiler = torch.profiler.profile(schedule=lambda step: torch.profiler.ProfilerAction.NONE)
        profiler.start()
    around, outside, Slow.inside = [], 0, 0
    for _ in range(order["steps"]):
        start = time.monotonic_ns()
        batch = next(batches)
        outside += time.monotonic_ns() - start
        optimizer.zero_grad()
        with torch.autograd.profiler.record_function("forward"):
            model(batch).sum().backward()
        time.sleep(order.get("sleep", 0.005))
        before = time.monotonic_ns()
        (profiler.step if profiler else optimizer.step)()
        around.append((before, time.monotonic_ns()))
        if order.get("two") or profiler:
            second.step()
    if profiler:
        profiler.stop()
    print(json.dumps({"around": around, "inside": Slow.inside, "outside": outside}), flush=True)
"""


class Job:
    """A program that runs steps when it is asked to."""

    def __init__(self, directory: Path) -> None:
        script = directory / "job.py"
        script.write_text(JOB, encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready\n"
        start_ticks = int(
            Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        )
        self.facts = Process(
            key=f"{self.process.pid}@{start_ticks}",
            pid=self.process.pid,
            start_ticks=start_ticks,
            started_ns=0,
            parent_pid=0,
            uid=0,
            command="",
            owner=Owner(framework="pytorch"),
        )

    def run(self, steps: int, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"steps": steps, **more}) + "\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    started = Job(tmp_path_factory.mktemp("job"))
    yield started
    started.end()


@pytest.fixture
def clock() -> Iterator[Callable[..., ProbedStepClock]]:
    clocks: list[ProbedStepClock] = []

    def make(processes: list[Process], config: Config | None = None) -> ProbedStepClock:
        clocks.append(ProbedStepClock(config or Config(), lambda: processes))
        return clocks[-1]

    yield make
    for made in clocks:
        made.close()


def test_steps_and_waits_are_those_that_the_program_measures(
    job: Job, clock: Callable[..., ProbedStepClock]
) -> None:
    steps = clock([job.facts])
    assert {reading.metric: reading.value for reading in steps.collect()}[
        "agent_probed_libraries"
    ] == 1
    assert steps.taken == []
    truth = job.run(20)
    steps.collect()
    (taken,) = steps.taken
    assert taken.process == job.facts.key
    assert sum(taken.buckets) == 19  # between 20 marks
    around = truth["around"]
    assert around[-1][0] - around[0][1] <= taken.seconds * 1e9 <= around[-1][1] - around[0][0]
    assert taken.waited is not None
    assert truth["inside"] <= taken.waited * 1e9 <= truth["outside"]
    # Every step lies in the bucket of a duration between the shortest and the longest that it can have had.
    bounds = (*METRICS["step_seconds"].bounds, math.inf)
    for number in range(1, len(bounds) + 1):
        at_most = sum(taken.buckets[:number])
        spans = list(pairwise(around))
        surely = sum(after[1] - before[0] <= bounds[number - 1] * 1e9 for before, after in spans)
        perhaps = sum(after[0] - before[1] <= bounds[number - 1] * 1e9 for before, after in spans)
        assert surely <= at_most <= perhaps
    steps.collect()
    assert steps.taken == []
    job.run(3)
    steps.collect()
    assert sum(steps.taken[0].buckets) == 3
    assert steps.list_problems() == []


def test_of_two_optimizers_the_first_counts_and_profiler_steps_come_before_both(
    job: Job, clock: Callable[..., ProbedStepClock]
) -> None:
    steps = clock([job.facts])
    steps.collect()
    job.run(5, two=True)
    steps.collect()
    assert sum(steps.taken[0].buckets) == 4
    job.run(4, profiled=True)
    steps.collect()
    # A range `ProfilerStep#` begins with the profiler and with each step of it.
    assert sum(steps.taken[0].buckets) == 4
    job.run(3)
    steps.collect()
    assert sum(steps.taken[0].buckets) == 3


@pytest.mark.thorough
def test_a_library_is_probed_once_for_all_its_processes(
    job: Job, clock: Callable[..., ProbedStepClock], tmp_path: Path
) -> None:
    other = Job(tmp_path)
    processes = [job.facts, other.facts]
    steps = clock(processes)
    readings = {reading.metric: reading.value for reading in steps.collect()}
    assert readings["agent_probed_libraries"] == 1
    job.run(5)
    other.run(3)
    steps.collect()
    assert {taken.process: sum(taken.buckets) for taken in steps.taken} == {
        job.facts.key: 4,
        other.facts.key: 2,
    }
    other.end()
    processes.remove(other.facts)
    job.run(1)
    steps.collect()
    assert [sum(taken.buckets) for taken in steps.taken] == [1]
    processes.clear()
    readings = {reading.metric: reading.value for reading in steps.collect()}
    assert readings["agent_probed_libraries"] == 0


def test_of_a_pid_that_is_used_again_nothing_old_counts(
    job: Job, clock: Callable[..., ProbedStepClock]
) -> None:
    processes = [job.facts]
    steps = clock(processes)
    steps.collect()
    job.run(5)
    # The same pid, but a process that began after those steps.
    processes[0] = Process(
        key=f"{job.facts.pid}@later",
        pid=job.facts.pid,
        start_ticks=10**12,
        started_ns=0,
        parent_pid=0,
        uid=0,
        command="",
        owner=Owner(framework="pytorch"),
    )
    steps.collect()
    assert steps.taken == []


def test_calls_that_there_is_no_room_for_are_counted(
    job: Job, clock: Callable[..., ProbedStepClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Waits of the loader take it, so that no step has one, or steps do, or another program of this host.
    monkeypatch.setattr(step_probes, "_MAX_MARKS", 1)
    steps = clock([job.facts])
    before = {reading.metric: reading.value for reading in steps.collect()}[
        "agent_probes_lost_total"
    ]
    job.run(4)
    after = {reading.metric: reading.value for reading in steps.collect()}[
        "agent_probes_lost_total"
    ]
    assert after - before >= 4
    assert re.fullmatch(
        r"\d+ steps were not counted: too many processes have some", steps.list_problems()[0]
    )


def test_switched_off_it_touches_nothing(job: Job, clock: Callable[..., ProbedStepClock]) -> None:
    steps = clock([job.facts], Config(probes=Probes(steps=False)))
    assert steps.collect() == []
    job.run(3)
    assert steps.collect() == []
    assert steps.taken == []


def test_it_ends_while_a_run_is_under_way(job: Job, clock: Callable[..., ProbedStepClock]) -> None:
    """The run is in a thread that nobody can stop; what it holds is not closed beneath it."""
    watched = clock([job.facts])
    failures: list[BaseException] = []

    def run() -> None:
        try:
            while not watched._closed:
                watched.collect()
        except BaseException as error:  # noqa: BLE001  (told below)
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    watched.collect()
    watched.close()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert watched.collect() == []
