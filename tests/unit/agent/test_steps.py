"""Steps of jobs: a histogram by rank, a rate by process, no guess."""

from __future__ import annotations

import math

import pytest

from traceloom.agent import steps as module
from traceloom.agent.metrics import HistogramReading, Reading
from traceloom.agent.steps import StepCounter, StepsTaken


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def test_steps_fill_a_histogram() -> None:
    steps = StepCounter()
    steps.report("1@1", "job", 3, [0.001, 0.0011, 0.3, 1e6, math.nan, -1.0], 0.5)
    steps.report("1@1", "job", 3, [0.3], 0.25)
    histogram, waited = steps.readings()
    assert isinstance(histogram, HistogramReading)
    assert histogram.labels == ("job", "3")
    assert histogram.number == 5
    assert histogram.total == pytest.approx(1e6 + 0.6021)
    by_bound = dict(zip(module._BOUNDS, histogram.counts, strict=True))
    assert (by_bound[0.001], by_bound[0.0025], by_bound[0.25], by_bound[0.5], by_bound[60.0]) == (
        1,
        2,
        2,
        4,
        4,
    )
    assert waited == Reading("dataloader_wait_seconds_total", ("job", "3"), 0.75)


def test_a_wait_that_nobody_measured_is_absent() -> None:
    steps = StepCounter()
    steps.report("1@1", "", None, [0.1])
    assert [reading.metric for reading in steps.readings()] == ["step_seconds"]
    assert steps.readings()[0].labels == ("", "")


def test_the_rate_is_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, steps = _Clock(monkeypatch), StepCounter()
    steps.report("1@1", "job", 0, [0.1] * 1000)  # of before anybody looked
    assert steps.per_second("1@1") is None
    for _ in range(10):
        clock.now += 1
        steps.report("1@1", "job", 0, [0.1] * 8)
    assert steps.per_second("1@1") == pytest.approx(8.0)
    clock.now += 5  # it stands still
    assert steps.per_second("1@1") == pytest.approx(80 / 15)
    clock.now += 120
    assert steps.per_second("1@1") is None
    assert steps.per_second("2@1") is None


def test_a_total_is_what_a_process_says_or_probes_have_counted_and_goes_on_with_its_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, steps = _Clock(monkeypatch), StepCounter()
    for second in range(10):
        clock.now += 1
        steps.report("1@1", "job", 0, [0.1] * 8, total=100 + 8 * second)
        steps.report("2@1", "job", 1, [0.1] * 8)  # does not say it
        steps.count(
            StepsTaken("3@1", (8,) + (0,) * len(module._BOUNDS), 0.8, None, 8 * second), "job", 2
        )
    assert (steps.total("1@1"), steps.total("2@1"), steps.total("3@1")) == (172, None, 72)
    steps.report("1@1", "job", 0, [0.1] * 8)
    assert steps.total("1@1") == 180
    clock.now += 5
    assert 180 + 5 * 4 < (steps.total("1@1") or 0) <= 180 + 5 * 9
    steps.forget({"2@1"})
    assert steps.total("1@1") is None


def test_who_has_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, steps = _Clock(monkeypatch), StepCounter()
    steps.report("1@1", "job", 0, [0.1])
    steps.report("2@1", "job", 1, [0.1])
    clock.now += 400
    steps.report("1@1", "job", 0, [0.1])
    clock.now += 400
    steps.forget({"1@1"})
    assert [reading.labels for reading in steps.readings()] == [("job", "0")]
    assert steps.per_second("2@1") is None


def test_steps_that_are_seen_from_outside_count_where_none_are_reported() -> None:
    steps, buckets = StepCounter(), [0] * (len(module._BOUNDS) + 1)
    buckets[3], buckets[-1] = 2, 1
    steps.count(StepsTaken("1@1", tuple(buckets), 100.0, None), "job", 0)
    (histogram,) = steps.readings()
    assert isinstance(histogram, HistogramReading)
    assert (histogram.number, histogram.total) == (3, 100.0)
    assert (histogram.counts[2], histogram.counts[3], histogram.counts[-1]) == (0, 2, 2)
    steps.report("1@1", "job", 0, [0.1])
    steps.count(StepsTaken("1@1", tuple(buckets), 100.0, 1.0), "job", 0)  # the same steps once more
    (histogram,) = steps.readings()
    assert isinstance(histogram, HistogramReading)
    assert histogram.number == 4
    assert steps.take("1@1") == 4
