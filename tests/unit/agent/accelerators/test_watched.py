"""A back end may hang, fail or vanish: its devices turn stale, nobody waits, and it is tried again."""

from __future__ import annotations

import threading

import pytest

from support.devices import ByHand, values
from traceloom.agent.accelerators.backend import (
    MAX_STUCK_THREADS,
    UNAVAILABLE_RETRY_S,
    BackendUnavailable,
    Sample,
    TimeLimitedBackend,
)
from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.config import Accelerators, Config
from traceloom.agent.metrics import Reading
from traceloom.agent.snapshot import Snapshot


class Made:
    """Counts the back ends that were made, and sets the clock of retries."""

    def __init__(self, limit_s: float = 30.0) -> None:
        self.now = 0.0
        self.all: list[ByHand] = []
        self.error: Exception | None = None
        self.hold: threading.Event | None = None
        self.watched = TimeLimitedBackend("by-hand", self._make, limit_s, clock=lambda: self.now)

    def _make(self) -> ByHand:
        if self.error is not None:
            raise self.error
        back_end = ByHand()
        back_end.hold = self.hold
        self.all.append(back_end)
        return back_end

    def sample(self) -> Sample:
        self.watched.begin()
        return self.watched.finish()


def test_a_sample_comes_through() -> None:
    made = Made()
    sample = made.sample()
    assert [device.uuid for device in sample.devices] == ["GPU-1"]
    assert values(sample.readings, "gpu_busy_ratio") == {("GPU-1",): 0.5}
    assert (made.watched.here, made.watched.last_error) == (True, "")
    assert made.watched.capabilities["gpu_power_watts"] == "the driver has no such call"
    made.sample()
    assert len(made.all) == 1, "the same back end goes on"


def test_what_hangs_is_abandoned_and_its_devices_turn_stale() -> None:
    made = Made()
    made.sample()
    hold = made.all[0].hold = threading.Event()
    made.watched._limit_s = 0.05
    sample = made.sample()
    assert [device.stale for device in sample.devices] == ["its driver has not answered for 0.05 s"]
    assert (sample.readings, sample.processes) == ([], [])
    made.watched._limit_s = 30.0
    assert made.sample().devices[0].stale, "not tried again before its time"
    assert len(made.all) == 1
    made.now = 10.0
    assert not made.sample().devices[0].stale
    assert len(made.all) == 2, "a fresh back end"
    hold.set()
    assert made.all[0].closed.wait(30), "the abandoned thread ends when its driver comes back"


def test_threads_do_not_pile_up_and_intervals_grow() -> None:
    made = Made(limit_s=0.02)
    made.hold = threading.Event()
    tried: list[float] = []
    for second in range(0, 4000, 5):
        made.now = float(second)
        before = len(made.watched._stuck)
        made.watched.begin()
        made.watched.finish()
        if len(made.watched._stuck) > before:
            tried.append(made.now)
    assert tried == [0.0, 10.0], "then no more: two threads hang"
    assert len(made.watched._stuck) == MAX_STUCK_THREADS
    made.hold.set()
    for thread in made.watched._stuck:
        thread._thread.join(30)
    made.watched._limit_s = 30.0
    assert not made.sample().devices[0].stale, "the driver is back"


def test_failures_are_tried_again_at_growing_intervals() -> None:
    made = Made()
    made.error = ValueError("broken")
    tried = []
    for second in range(0, 2000, 5):
        made.now = float(second)
        made.watched.begin()
        if made.watched._pending is not None:
            tried.append(second)
        made.watched.finish()
    assert tried == [0, 10, 30, 70, 150, 310, 630, 1230, 1830]
    assert made.watched.last_error == "it failed: ValueError: broken"
    assert made.watched.here


def test_a_failing_back_end_is_closed_and_made_afresh() -> None:
    made = Made()
    made.sample()
    made.all[0].error = OSError("gone")
    assert made.sample().devices[0].stale == "it failed: OSError: gone"
    assert made.all[0].closed.wait(30)
    made.now = 11.0
    assert not made.sample().devices[0].stale


@pytest.mark.parametrize(
    "reading", [Reading("gpu_magic", ("GPU-1",), 1.0), Reading("gpu_busy_ratio", (), 1.0)]
)
def test_a_back_end_that_says_what_nobody_declared_fails_alone(reading: Reading) -> None:
    bad, good = Made(), Made()
    bad.sample()
    bad.all[0].sampled.readings.append(reading)
    collector = AcceleratorCollector(Config(), [bad.watched, good.watched])
    Snapshot().put("accelerators", collector.collect(), 1)
    assert bad.watched.last_error.endswith("is no metric of the agent")
    assert collector.devices["GPU-1"].stale == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_absent(value: float) -> None:
    made = Made()
    made.sample()
    made.all[0].sampled.readings.append(Reading("gpu_power_watts", ("GPU-1",), value))
    assert [reading.metric for reading in made.sample().readings] == ["gpu_busy_ratio"]


def test_it_may_be_closed_while_a_sample_is_taken() -> None:
    made = Made()
    made.sample()
    hold = made.all[0].hold = threading.Event()
    made.watched.begin()
    made.watched.close()
    made.watched._deadline = 0.0
    assert made.watched.finish().devices[0].stale
    hold.set()
    assert made.all[0].closed.wait(30)


def test_after_a_recovery_all_is_forgotten() -> None:
    made = Made()
    made.error = ValueError("broken")
    for second in (0, 10, 30):
        made.now = float(second)
        made.sample()
    made.error, made.now = None, 70.0
    assert not made.sample().devices[0].stale
    assert made.watched.last_error == ""
    made.all[0].error = OSError("again")
    made.sample()
    made.now = 80.0
    assert not made.sample().devices[0].stale, "the first interval again"


def test_a_host_without_such_devices_is_looked_at_again_later() -> None:
    made = Made()
    made.error = BackendUnavailable("no driver; install it")
    assert made.sample().devices == []
    assert (made.watched.here, made.watched.last_error) == (False, "no driver; install it")
    made.error = None
    made.now = UNAVAILABLE_RETRY_S - 1
    assert made.sample().devices == []
    made.now = UNAVAILABLE_RETRY_S
    assert len(made.sample().devices) == 1


def test_counters_are_released() -> None:
    made = Made()
    assert not made.watched.pause(5.0), "nothing runs yet"
    made.sample()
    assert made.watched.pause(5.0)
    assert made.all[0].paused == 5.0


def test_all_back_ends_are_sampled_at_the_same_time() -> None:
    both = threading.Barrier(2)
    made = [Made(), Made()]
    for each in made:
        each.sample()
        each.all[0].meet = both
    collector = AcceleratorCollector(Config(), [each.watched for each in made])
    collector.collect()
    assert [each.watched.last_error for each in made] == ["", ""], (
        "neither waited for the other to end"
    )


def test_events_say_when_a_device_is_lost_and_back_again() -> None:
    made = Made()
    collector = AcceleratorCollector(Config(), [made.watched])
    readings = collector.collect()
    assert values(readings, "gpu_up") == {("GPU-1",): 1.0}
    assert ("GPU-1", "0", "nvidia", "H", "", "", "", "") in values(readings, "gpu_info")
    device = made.all[0].sampled.devices.pop()
    readings = collector.collect()
    assert values(readings, "gpu_up") == {("GPU-1",): 0.0}, (
        "one that vanished stays for alerts to see"
    )
    assert collector.devices["GPU-1"].stale == "its driver no longer lists it"
    made.all[0].sampled.devices.append(device)
    collector.collect()
    assert [(event.kind, event.device) for event in collector.events] == [
        ("lost", "GPU-1"),
        ("back", "GPU-1"),
    ]


def test_the_earlier_back_end_has_its_say_first_and_the_later_adds() -> None:
    first, second = Made(), Made()
    collector = AcceleratorCollector(Config(), [first.watched, second.watched])
    first.sample()
    second.sample()
    sampled = second.all[0].sampled
    sampled.readings[:] = [
        sampled.readings[0]._replace(value=0.9),
        sampled.readings[0]._replace(metric="gpu_sm_active_ratio", value=0.4),
    ]
    readings = collector.collect()
    assert values(readings, "gpu_busy_ratio") == {("GPU-1",): 0.5}
    assert values(readings, "gpu_sm_active_ratio") == {("GPU-1",): 0.4}
    assert len(collector.device_processes) == 1


def test_a_device_that_any_back_end_sees_is_not_stale() -> None:
    first, second = Made(), Made()
    collector = AcceleratorCollector(Config(), [first.watched, second.watched])
    collector.collect()
    first.all[0].error = OSError("gone")
    readings = collector.collect()
    assert values(readings, "gpu_up") == {("GPU-1",): 1.0}
    second.all[0].error = OSError("gone, too")
    assert values(collector.collect(), "gpu_up") == {("GPU-1",): 0.0}
    assert not any("clock" in line for line in collector.list_problems()), (
        "no estimate is missed of what does not answer"
    )


def test_the_doctor_hears_of_what_matters() -> None:
    works, absent = Made(), Made()
    absent.error = BackendUnavailable("no AMD device")
    absent.watched.name = "amd"
    collector = AcceleratorCollector(Config(), [works.watched, absent.watched])
    collector.collect()
    assert collector.list_problems() == [
        "gpu_flop_utilization_ratio, gpu_flops: the clock is not known",
        "gpu_power_watts: the driver has no such call",
    ], "a host needs no AMD device"
    collector = AcceleratorCollector(Config(), [absent.watched])
    absent.now = 1000.0
    collector.collect()
    assert collector.list_problems() == ["amd: no AMD device"], "but something"
    named = Config(accelerators=Accelerators(backends=("nvml", "amd")))
    collector = AcceleratorCollector(named, [works.watched, absent.watched])
    absent.now = 2000.0
    collector.collect()
    assert "amd: no AMD device" in collector.list_problems(), "and what its configuration names"


@pytest.mark.parametrize("reasons", [("", "no"), ("no", ""), ("", "")])
def test_a_metric_that_any_back_end_has_can_be_had(reasons: tuple[str, str]) -> None:
    collector = AcceleratorCollector(Config(), [Made().watched, Made().watched])
    for back_end, reason in zip(collector.back_ends, reasons, strict=True):
        back_end.capabilities = {"gpu_power_watts": reason}
    assert collector.capabilities() == {"gpu_power_watts": ""}
