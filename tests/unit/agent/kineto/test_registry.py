"""Processes that poll: who they are by the kernel's word, how often they ask, what they are handed, when they are gone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from traceloom.agent import kineto as module
from traceloom.agent.kineto import (
    ACTIVITIES,
    EVENTS,
    PendingConfiguration,
    Poll,
    ProfilerClient,
    ProfilerRegistry,
    iterate_ancestors,
    read_parent_and_start,
    read_process_state,
)
from traceloom.agent.metrics import METRICS, PREFIX, HistogramReading, Reading
from traceloom.agent.publishers import build_families
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.steps import StepCounter, StepsTaken

IDLE, BUSY = EVENTS | ACTIVITIES, EVENTS


class Kernel:
    """A /proc, and a clock, that the test writes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc, self.now = folder, 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.registry = ProfilerRegistry(str(folder))

    def start(
        self, pid: int, ticks: int, parent: int = 1, state: str = "S", name: str = "python"
    ) -> None:
        (self.proc / str(pid)).mkdir(exist_ok=True)
        (self.proc / str(pid) / "stat").write_text(
            f"{pid} ({name}) {state} {parent} " + "0 " * 17 + f"{ticks} 0 0\n"
        )

    def end(self, pid: int) -> None:
        (self.proc / str(pid) / "stat").unlink()

    def poll(
        self, pid: int, mask: int = IDLE, address: str = "", uid: int = 7
    ) -> ProfilerClient | None:
        return self.registry.poll(Poll(mask, 0, (5, 1)), pid, uid, uid, address)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path, monkeypatch)


def test_a_process_is_its_pid_and_its_start(kernel: Kernel) -> None:
    kernel.start(40, 100, parent=30)
    kernel.start(30, 90, parent=20)
    kernel.start(20, 80)
    client = kernel.poll(40)
    assert client is not None
    assert (client.key, client.pid, client.ancestors) == ("40@100", 40, (30, 20))
    kernel.now += 2.5
    assert kernel.poll(40) is client
    assert (client.polls, client.interval_s) == (2, 2.5)
    kernel.now += 0.001
    kernel.poll(40)
    assert client.interval_s == 0.1  # no process asks more often
    kernel.now += 500
    kernel.poll(40)
    assert client.interval_s == 60.0
    kernel.start(40, 999)  # the pid is another one's now
    other = kernel.poll(40, address="x")
    assert other is not None
    assert other.key == "40@999"
    assert list(kernel.registry.clients) == ["40@999"]
    assert kernel.registry.by_pid(40) is other


def test_whose_address_is_the_same_is_not_looked_up_again(kernel: Kernel) -> None:
    kernel.start(40, 100)
    client = kernel.poll(40, address="abstract-1", uid=7)
    kernel.end(40)
    assert kernel.poll(40, address="abstract-1", uid=8) is client  # it may have given up its rights
    assert client is not None
    assert client.uid == 8
    assert kernel.poll(40, address="abstract-2") is None
    assert kernel.poll(40) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "40",
        "40 (x",
        "40 (x) S",
        "40 (x) S one " + "0 " * 30,
        "40 (x) S 1 " + "z " * 30,
        "\0" * 100,
    ],
)
def test_what_the_kernel_does_not_say_makes_no_client(kernel: Kernel, content: str) -> None:
    (kernel.proc / "40").mkdir()
    (kernel.proc / "40" / "stat").write_text(content)
    assert kernel.poll(40) is None
    assert kernel.registry.clients == {}
    assert not read_process_state(40, 100, str(kernel.proc))
    assert list(iterate_ancestors(str(kernel.proc), 40)) == [40]


@pytest.mark.parametrize("name", ["python", "a) S 1 2", "(((", ") (", "\n) R 9 9 9", "x" * 60])
def test_a_name_is_no_field(kernel: Kernel, name: str) -> None:
    kernel.start(40, 100, parent=30, name=name)
    assert read_parent_and_start(str(kernel.proc), 40) == (30, 100)
    assert read_process_state(40, 100, str(kernel.proc)) == "S"


@pytest.mark.parametrize(
    ("state", "ticks", "lives"),
    [("R", 100, "R"), ("T", 100, "T"), ("Z", 100, ""), ("X", 100, ""), ("S", 101, "")],
)
def test_this_very_process_lives(kernel: Kernel, state: str, ticks: int, lives: str) -> None:
    kernel.start(40, ticks, state=state)
    assert read_process_state(40, 100, str(kernel.proc)) == lives
    assert bool(read_process_state(40, 100, str(kernel.proc))) is bool(lives)


def test_parents_in_a_circle_have_an_end(kernel: Kernel) -> None:
    for pid, parent in ((40, 41), (41, 42), (42, 40)):  # while pids are given again
        kernel.start(pid, 100, parent=parent)
    above = list(iterate_ancestors(str(kernel.proc), 40))
    assert above[:3] == [40, 41, 42]
    assert len(above) == 10
    assert (
        list(iterate_ancestors(str(kernel.proc), 1))
        == list(iterate_ancestors(str(kernel.proc), 0))
        == []
    )


def test_a_configuration_is_handed_over_once_and_to_an_idle_process(kernel: Kernel) -> None:
    kernel.start(40, 100)
    delivered: list[str] = []
    texts = ["", "A=1\n", "A=2\n"]
    client = kernel.poll(40, BUSY)
    assert client is not None
    offer = PendingConfiguration(
        text=lambda _: texts.pop(0), delivered=lambda: delivered.append("yes")
    )
    kernel.registry.offers[client.key] = offer
    empty = kernel.registry.answer(client)
    assert empty[1] is None
    assert texts[0] == ""  # a busy one is not even asked for
    kernel.poll(40)
    assert kernel.registry.answer(client)[1] is None  # it waits for another poll
    datagram, sent = kernel.registry.answer(client)
    assert b"A=1\n" in datagram
    assert datagram != empty[0]
    assert sent is not None
    assert delivered == []
    replacement = PendingConfiguration(
        text=lambda _: "B=1\n", delivered=lambda: delivered.append("other")
    )
    kernel.registry.offers[client.key] = replacement  # between the answer and its being sent
    sent()
    assert delivered == ["yes"]
    assert kernel.registry.offers == {client.key: replacement}
    datagram, sent = kernel.registry.answer(client)
    assert sent is not None
    sent()
    assert (delivered, kernel.registry.offers) == (["yes", "other"], {})


def test_those_that_have_ended_are_forgotten_and_the_silent_after_a_while(kernel: Kernel) -> None:
    for pid in (40, 41, 42):
        kernel.start(pid, 100)
        client = kernel.poll(pid)
        assert client is not None
        kernel.registry.offers[client.key] = PendingConfiguration(
            text=lambda _: "", delivered=lambda: None
        )
    kernel.end(40)
    kernel.start(41, 200)  # given again
    kernel.registry.forget()
    assert len(kernel.registry.clients) == 3  # they polled just now
    kernel.now += 6
    kernel.registry.forget()
    assert set(kernel.registry.clients) == set(kernel.registry.offers) == {"42@100"}
    assert kernel.registry.by_pid(40) is kernel.registry.by_pid(41) is None
    kernel.now += 1000
    kernel.registry.forget()
    assert kernel.registry.clients == kernel.registry.offers == {}


def test_there_are_so_many_clients_and_no_more(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CLIENTS", 3)
    for pid in range(40, 46):
        kernel.start(pid, 100)
    polls = [kernel.poll(pid, uid=pid) is not None for pid in range(40, 46)]
    assert polls == [True] * 3 + [False] * 3
    kernel.now += 6
    kernel.end(41)
    assert kernel.poll(45) is not None  # one has made room
    assert set(kernel.registry.clients) == {"40@100", "42@100", "45@100"}


def test_one_user_has_half_of_the_clients_at_most(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CLIENTS", 4)
    for pid in range(40, 46):
        kernel.start(pid, 100)
    assert [kernel.poll(pid, uid=7) is not None for pid in (40, 41, 42)] == [True, True, False]
    assert [kernel.poll(pid, uid=8) is not None for pid in (43, 44)] == [True, True]


def test_listeners_hear_of_each_poll_also_those_that_leave_meanwhile(kernel: Kernel) -> None:
    kernel.start(40, 100)
    heard: list[str] = []

    def once(client: ProfilerClient) -> None:
        heard.append(f"once {client.key}")
        kernel.registry.listeners.remove(once)

    listeners: list[Callable[[ProfilerClient], None]] = [
        once,
        lambda client: heard.append(f"always {client.key}"),
    ]
    kernel.registry.listeners += listeners
    client = kernel.poll(40)
    assert client is not None
    for _ in range(2):
        kernel.registry.answered(client)
    assert heard == ["once 40@100", "always 40@100", "always 40@100"]


# The snapshot, and what is written of it.


def test_what_a_collector_delivers_replaces_what_it_delivered() -> None:
    chance, host_snapshot, model = (
        random.Random(1),
        Snapshot(),
        dict[str, dict[tuple[str, tuple[str, ...]], float]](),
    )
    heard: list[tuple[str, int]] = []
    host_snapshot.listeners.append(lambda name, sheet: heard.append((name, len(sheet.values))))
    for turn in range(200):
        name = chance.choice(("a", "b", "c"))
        if chance.random() < 0.2:
            host_snapshot.stale(name)
            model.pop(name, None)
            continue
        values = {
            ("gpu_power_watts", (f"GPU-{name}{row}",)): float(turn)
            for row in range(chance.randrange(4))
        }
        host_snapshot.put(
            name,
            [Reading(metric, labels, value) for (metric, labels), value in values.items()],
            turn,
        )
        model[name] = values
        assert heard[-1] == (name, len(values))
        assert host_snapshot.series() == sum(map(len, model.values()))
        assert {series: value for series, value, _ in host_snapshot.values()} == {
            series: value for values in model.values() for series, value in values.items()
        }
    copied = host_snapshot.copy()
    before = list(copied.values())
    host_snapshot.put("a", [], 999)
    host_snapshot.stale("b")
    assert list(copied.values()) == before


@pytest.mark.parametrize(
    "reading",
    [
        Reading("no_such_metric", (), 1.0),
        Reading("gpu_power_watts", (), 1.0),
        Reading("gpu_power_watts", ("a", "b"), 1.0),
    ],
)
def test_a_reading_that_is_not_declared_is_refused_and_changes_nothing(reading: Reading) -> None:
    host_snapshot = Snapshot()
    host_snapshot.put("x", [Reading("gpu_power_watts", ("a",), 1.0)], 1)
    with pytest.raises(ValueError, match="not declared"):
        host_snapshot.put("x", [Reading("gpu_power_watts", ("a",), 2.0), reading], 2)
    assert [value for _, value, _ in host_snapshot.values()] == [1.0]


def test_buckets_of_a_histogram_are_cumulated_to_its_number() -> None:
    steps, host_snapshot = StepCounter(), Snapshot()
    durations = [0.0004, 0.02, 0.02, 3.0, 1e6]
    steps.report("7@1", "job", 2, durations, 0.5)
    host_snapshot.put("steps", steps.readings(), 1_700_000_000_123_456_789)
    rows = [sample for family in build_families(host_snapshot) for sample in family.samples]
    buckets = {
        row.labels["le"]: row.value for row in rows if row.name == f"{PREFIX}step_seconds_bucket"
    }
    bounds = METRICS["step_seconds"].bounds
    assert buckets == {
        **{repr(bound): sum(duration <= bound for duration in durations) for bound in bounds},
        "+Inf": len(durations),
    }
    single = {row.name.removeprefix(PREFIX): row.value for row in rows if "le" not in row.labels}
    assert single == {
        "step_seconds_count": 5,
        "step_seconds_sum": pytest.approx(sum(durations)),
        "dataloader_wait_seconds_total": 0.5,
    }
    assert all(row.labels["job"] == "job" and row.labels["rank"] == "2" for row in rows)


# Steps, against lists of what was told.


@pytest.mark.parametrize("seed", range(6))
def test_rates_and_totals_are_those_of_the_last_minute_of_a_list(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, steps, clock = random.Random(seed), StepCounter(), [5000.0]
    monkeypatch.setattr("traceloom.agent.steps.time.monotonic", lambda: clock[0])
    reports: list[tuple[float, int, float, float | None]] = []
    taken = 0
    for _ in range(150):
        clock[0] += chance.choice((0.5, 1.0, 5.0, 20.0))
        number = chance.randrange(6)
        durations = [chance.uniform(0.001, 2.0) for _ in range(number)]
        waited = chance.choice((None, 0.25))
        steps.report("7@1", "job", 0, durations, waited)
        reports.append((clock[0], number, sum(durations), waited))
        recent = [row for row in reports if row[0] >= clock[0] - 60]
        rate = steps.per_second("7@1")
        if len(recent) > 1:
            assert rate == pytest.approx(
                sum(number for _, number, _, _ in recent[1:]) / (clock[0] - recent[0][0])
            )
        else:
            assert rate is None
        lately = steps.lately("7@1")
        if number_of_all := sum(number for _, number, _, _ in recent):
            assert lately is not None
            waits = [waited for *_, waited in recent]
            assert lately.number == number_of_all
            assert lately.seconds == pytest.approx(sum(seconds for _, _, seconds, _ in recent))
            assert lately.waited == (
                None
                if None in waits
                else pytest.approx(sum(wait for wait in waits if wait is not None))
            )
        else:
            assert lately is None
        if chance.random() < 0.2:
            assert steps.take("7@1") == sum(number for _, number, _, _ in reports) - taken
            taken = sum(number for _, number, _, _ in reports)
        steps.count(
            StepsTaken("7@1", (0,) * (len(METRICS["step_seconds"].bounds) + 1), 9.0, None), "job", 0
        )  # it reports itself
    (histogram, *_) = steps.readings()
    assert isinstance(histogram, HistogramReading)
    assert (histogram.number, histogram.total) == (
        sum(number for _, number, _, _ in reports),
        pytest.approx(sum(seconds for _, _, seconds, _ in reports)),
    )
