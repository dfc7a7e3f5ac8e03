"""When a job hangs, and when it only seems to: on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from traceloom.agent import steps as module
from traceloom.agent.config import Hangs
from traceloom.agent.hangs.detector import Hang, HangDetector, JobKey
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.steps import StepCounter, StepsTaken

BUCKETS = (0,) * (len(module._BOUNDS) + 1)
EPOCH_NS = 1_700_000_000 * 10**9


def process(rank: int, job: str = "j", uid: int = 7, state: str = "S", pid: int = 0) -> Process:
    pid = pid or 100 + rank
    return Process(
        key=f"{pid}@1",
        pid=pid,
        start_ticks=1,
        started_ns=0,
        parent_pid=1,
        uid=uid,
        command="",
        state=state,
        owner=Owner(job=job, rank=rank),
    )


class Host:
    """Two ranks that step, a clock, and a watch that looks every second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: Hangs | None = None) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.steps = StepCounter()
        self.watch = HangDetector(settings or Hangs())
        self.processes = [process(0), process(1)]
        self.wall_ns = 0  # how far the wall clock was set
        self.disk: dict[str, float] = {}

    def step(self, *processes: Process, seconds: float = 0.5) -> None:
        for each in processes or self.processes:
            self.steps.report(each.key, each.owner.job, each.owner.rank, [seconds])

    def check(self) -> list[Hang]:
        now_ns = EPOCH_NS + int(self.now * 1e9) + self.wall_ns
        return self.watch.check(self.now, now_ns, self.processes, self.steps, self.disk)

    def run(
        self, seconds: float, *, stepping: Sequence[Process] = (), every: float = 1.0
    ) -> list[Hang]:
        """Time goes by, with a look each second; the hangs that were seen."""
        new: list[Hang] = []
        end = self.now + seconds
        while self.now < end:
            self.now += every
            if stepping:
                self.step(*stepping)
            new += self.check()
        return new


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(monkeypatch)
    host.run(20, stepping=host.processes)
    return host


def test_no_step_for_a_minute_is_a_hang_seen_once(host: Host) -> None:
    last = host.now
    assert host.run(59) == []
    (hang,) = host.run(30)
    assert (hang.job, hang.uid, hang.median_s) == ("j", 7, 0.5)
    assert [(each.pid, each.rank, each.steps) for each in hang.processes] == [
        (100, 0, 20),
        (101, 1, 20),
    ]
    assert hang.since_ns == EPOCH_NS + int(last * 1e9)
    assert hang.seen_ns == hang.since_ns + 60 * 10**9
    assert host.watch.hangs == {JobKey("j", 7): hang}
    assert host.run(7200) == []


def test_of_long_steps_ten_have_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    for _ in range(5):
        host.step(seconds=20.0)
        host.run(20)
    assert host.run(179) == []
    assert len(host.run(2)) == 1


def test_one_long_step_does_not_make_them_long(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.step(seconds=500.0)  # it compiled
    host.run(10, stepping=host.processes)
    assert len(host.run(61)) == 1


def test_steps_that_are_told_seldom_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    for _ in range(4):
        for each in host.processes:
            host.steps.report(each.key, "j", each.owner.rank, [0.5] * 200)
        assert host.run(100) == []
    assert host.run(199) == []  # three times the usual time between two reports, since the last
    assert len(host.run(2)) == 1


def test_a_process_that_stepped_alone_counts_after_three_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch)
    host.run(2, stepping=host.processes)
    assert host.run(600) == []
    assert host.watch.stepping == set()
    host.run(1, stepping=host.processes)
    assert host.watch.stepping == {JobKey("j", 7)}
    assert len(host.run(600)) == 1


def test_a_job_goes_on_and_hangs_again(host: Host) -> None:
    (first,) = host.run(61)
    host.run(1, stepping=host.processes)
    (over,) = host.watch.over
    assert over.hang == first
    assert over.recovered
    host.run(1, stepping=host.processes)
    assert host.watch.over == []
    (second,) = host.run(61)
    assert second.since_ns > first.since_ns


def test_it_goes_on_only_with_all_that_hung(host: Host) -> None:
    host.run(61)
    host.run(5, stepping=host.processes[:1])
    assert JobKey("j", 7) in host.watch.hangs
    host.run(1, stepping=host.processes[1:])
    assert host.watch.hangs == {}


def test_one_rank_of_those_that_step_alone(host: Host) -> None:
    (hang,) = host.run(120, stepping=host.processes[:1])
    assert [each.rank for each in hang.processes] == [1]


def test_a_job_that_ends_does_not_hang(host: Host) -> None:
    host.run(30)
    host.processes = []
    assert host.run(120) == []
    assert host.watch.hangs == {}


def test_a_job_that_ends_while_it_hangs(host: Host) -> None:
    host.run(61)
    host.processes = []
    host.check()
    assert [over.recovered for over in host.watch.over] == [False]


def test_a_rank_that_was_killed_is_named(host: Host) -> None:
    host.run(5)
    del host.processes[1]
    (hang,) = host.run(70)
    assert [each.rank for each in hang.processes] == [0]
    (gone,) = hang.gone
    assert (gone.pid, gone.rank) == (101, 1)
    assert gone.ended_ns == EPOCH_NS + int(1026e9)


def test_processes_that_are_not_listed_for_a_while_have_not_ended(host: Host) -> None:
    host.watch.alive = lambda key: key == "101@1"
    listed = host.processes
    host.processes = listed[:1]
    (hang,) = host.run(61)
    assert [each.rank for each in hang.processes] == [0]
    assert hang.gone == ()
    host.watch.alive = lambda _: True
    host.processes = []
    assert host.run(5) == []
    assert host.watch.hangs == {hang.key: hang}
    host.processes = listed
    host.run(1, stepping=listed)
    assert [over.recovered for over in host.watch.over] == [True]


def test_a_rank_that_was_started_again_is_not_missing(host: Host) -> None:
    host.processes[1] = process(1, pid=300)
    (hang,) = host.run(70)
    assert hang.gone == ()


def test_batches_without_steps_are_an_evaluation(host: Host) -> None:
    for _ in range(300):
        host.now += 1
        host.steps.count(StepsTaken("100@1", BUCKETS, 0.0, 0.1), "j", 0)
        host.steps.report("101@1", "j", 1, [], 0.1)
        assert host.check() == []
    assert len(host.run(61)) == 1


def test_much_that_is_written_is_a_checkpoint(host: Host) -> None:
    for _ in range(30):
        host.disk["100@1"] = host.disk.get("100@1", 0.0) + 50e6
        assert host.run(10) == []
    assert len(host.run(61)) == 1


def test_a_log_is_no_checkpoint(host: Host) -> None:
    seen = []
    for _ in range(7):
        host.disk["100@1"] = host.disk.get("100@1", 0.0) + 1e6
        seen += host.run(10)
    assert len(seen) == 1


def test_work_without_steps_has_an_end(host: Host) -> None:
    seen: list[Hang] = []
    for _ in range(400):
        host.disk["100@1"] = host.disk.get("100@1", 0.0) + 50e6
        seen += host.run(10)
    (hang,) = seen
    assert hang.busy
    assert hang.seen_ns >= EPOCH_NS + int((1020 + 1800) * 1e9)


def test_who_has_looked_at_it_may_say_that_it_works(host: Host) -> None:
    (hang,) = host.run(61)
    host.watch.works(hang, host.now + 60)
    assert host.watch.hangs == {}
    assert host.run(59) == []
    assert len(host.run(5)) == 1


def test_a_job_that_somebody_stopped_does_not_hang(host: Host) -> None:
    running = host.processes
    host.processes = [msgspec.structs.replace(each, state="T") for each in running]
    assert host.run(7200) == []
    host.processes = running  # it goes on, and steps only after a while
    assert host.run(50) == []
    assert host.run(60, stepping=running) == []


def test_one_rank_that_is_stopped_makes_the_job_hang(host: Host) -> None:
    host.processes = [host.processes[0], msgspec.structs.replace(host.processes[1], state="T")]
    assert len(host.run(61)) == 1


@pytest.mark.parametrize("jump_s", [-86_400, 86_400], ids=["back", "ahead"])
def test_a_wall_clock_that_is_set_changes_nothing(host: Host, jump_s: int) -> None:
    host.run(30)
    host.wall_ns = jump_s * 10**9
    assert host.run(29) == []
    (hang,) = host.run(2)
    assert hang.seen_ns - hang.since_ns == 60 * 10**9


def test_an_agent_that_stood_still_has_not_seen_that_nothing_happened(host: Host) -> None:
    host.run(30)
    host.now += 3600  # a virtual machine that was paused, with all jobs
    assert host.check() == []
    assert host.run(59) == []
    assert len(host.run(2)) == 1


def test_jobs_of_one_name_of_two_users_are_two(host: Host) -> None:
    others = [process(0, uid=8, pid=200), process(1, uid=8, pid=201)]
    host.processes += others
    host.run(10, stepping=others)
    hangs = host.run(100, stepping=others)
    assert [hang.uid for hang in hangs] == [7]


def test_without_a_job_or_steps_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.processes = [process(0, job=""), process(0, job="other", pid=300)]
    host.run(20, stepping=host.processes[:1])
    assert host.run(600) == []


def test_an_agent_that_starts_again_goes_on_with_what_was_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Host(monkeypatch)
    before.run(20, stepping=before.processes)
    paces = {each.key: before.steps.pace(each.key) for each in before.processes}
    host = Host(monkeypatch)
    for key, pace in paces.items():
        assert pace is not None
        host.steps.resume(key, pace)
    assert host.run(59) == []
    (hang,) = host.run(2)  # it hung while no agent ran
    assert [each.steps for each in hang.processes] == [20, 20]
    again = Host(monkeypatch)
    for key, pace in paces.items():
        assert pace is not None
        again.steps.resume(key, pace)
    again.watch.resume(hang)
    assert again.run(600) == []  # it is known
    again.run(1, stepping=again.processes)
    assert [over.recovered for over in again.watch.over] == [True]
