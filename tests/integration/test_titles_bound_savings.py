"""What a finding saves is never more than the time that its title names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import traceloom
from traceloom.findings import Ranked, findings
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.session import Session

UNITS = {"ns": 1, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
DURATION = re.compile(r"([\d.\u202f ]*\d) (ns|µs|ms|s)\b")
ROUNDED = 1.006  # titles show three digits
TRACES = (
    "diff/a100_control.json.gz",  # five steps of unlike exposure
    "kineto/mi210_gpu_only.json.gz",  # much of the idle time is launch latency
    "pairs/linear.kineto.json.gz",
    "critical_path/event_sync_multi_stream.json.gz",  # one pause is nearly the whole window
)


def named_ns(title: str) -> float:
    """The time that a title says could be saved: with launch latency where it says so, else the first it names."""
    times = [
        float(number.replace("\u202f", "")) * UNITS[unit]
        for number, unit in DURATION.findall(title)
    ]
    return times[1] if "with launch latency" in title else times[0] if times else float("inf")


def check_bounds(ranked: Ranked) -> None:
    for finding in ranked.time:
        assert (finding.saving_ns or 0) <= named_ns(finding.title) * ROUNDED, finding
        assert (finding.alone_ns or 0) <= named_ns(finding.title) * ROUNDED, finding


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRACES)
def test_no_finding_of_a_public_trace_saves_more_than_its_title_names(
    name: str, shared_data: Path
) -> None:
    ranked = findings(traceloom.load(shared_data / name))
    assert ranked.time
    check_bounds(ranked)


def test_a_pause_of_the_host_is_not_also_a_late_launch() -> None:
    made = TraceBuilder()
    for number, at in enumerate((0, 300, 600, 20_000, 20_300, 20_600), 1):
        made.op("aten::add", at, 290)
        made.launch("cudaLaunchKernel", at + 280, 5, correlation=number)
        made.kernel("add", at + 290, 10, stream=7, correlation=number)
    ranked = findings(Session((made.build(),), "made"))
    check_bounds(ranked)
    idle = {finding.slug: named_ns(finding.title) for finding in ranked.time}
    assert list(idle) == ["host-pause", "launch-bound"]
    assert idle["host-pause"] == 19_100_000  # from the end of one operator to the start of the next
    assert idle["launch-bound"] <= 5 * 290_000  # late by what an operator took, five times
