"""Launching on public traces: figures counted again from the JSON by a plain loop, vendor by vendor."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pytest

from support.public_traces import CALLS, DATA, GPU_WORK, KERNELS
from traceloom.analyze import launches
from traceloom.formats import load

KINETO = sorted(path.name.removesuffix(".json.gz") for path in (DATA / "kineto").glob("*.json.gz"))
PLAIN = [
    name for name in KINETO if name != "mtia_inference"
]  # work of command processors has no plain category

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not KINETO, reason="the public traces (../shared/data) are not on this machine"
    ),
]


def _ns(us: Any) -> int:
    return int((Decimal(str(us)) * 1000).to_integral_value())


@lru_cache(maxsize=1)
def told(name: str) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """GPU work, and the outermost call of each correlation, straight from the file."""
    text = gzip.decompress((DATA / "kineto" / f"{name}.json.gz").read_bytes())
    events = [e for e in json.loads(text, parse_float=Decimal)["traceEvents"] if e.get("ph") == "X"]
    work, calls = [], {}
    for event in events:
        args = event.get("args", {})
        entry = {
            "name": event["name"],
            "start": _ns(event["ts"]),
            "end": _ns(event["ts"]) + _ns(event.get("dur", 0)),
            "key": (args.get("device"), args.get("stream")),
            "correlation": args.get("correlation"),
            "kernel": event.get("cat") in KERNELS,
        }
        if event.get("cat") in GPU_WORK:
            work.append(entry)
        elif event.get("cat") in CALLS:
            known = calls.get(entry["correlation"])
            if known is None or (entry["start"], -entry["end"]) < (known["start"], -known["end"]):
                calls[entry["correlation"]] = entry
    return work, calls


def _submitted(name: str) -> dict[Any, list[dict[str, Any]]]:
    """Work by launch, in the order of starts."""
    work, calls = told(name)
    out = defaultdict(list)
    for one in sorted(work, key=lambda one: one["start"]):
        if one["correlation"] in calls:
            out[one["correlation"]].append(one)
    return out


@pytest.mark.parametrize("name", PLAIN)
def test_delays_and_counts_equal_a_plain_count(name: str) -> None:
    _, calls = told(name)
    submitted = _submitted(name)
    delays = sorted(
        max(0, works[0]["start"] - calls[key]["end"]) for key, works in submitted.items()
    )
    found = launches(load(DATA / "kineto" / f"{name}.json.gz").traces[0])
    tolerance = 300 if name == "v100_ns_resolution" else 0  # fractional Unix microseconds
    assert found.totals["launch_count"].sum() == len(delays)
    assert found.totals["work_count"].sum() == len(told(name)[0])
    assert found.totals["graph_work_count"].sum() == sum(
        len(works) - 1 for works in submitted.values()
    )
    if delays:
        assert found.totals["delay_max_ns"].max() == pytest.approx(delays[-1], abs=tolerance)
        middle = (delays[(len(delays) - 1) // 2] + delays[len(delays) // 2]) // 2
        assert found.totals["delay_median_ns"].to_list() == [pytest.approx(middle, abs=tolerance)]


@pytest.mark.parametrize("name", PLAIN)
def test_short_kernels_equal_a_plain_count(name: str) -> None:
    _, calls = told(name)
    alone = [(works[0], calls[key]) for key, works in _submitted(name).items() if len(works) == 1]
    short = [
        1
        for work, call in alone
        if work["kernel"] and work["end"] - work["start"] < call["end"] - call["start"]
    ]
    found = launches(load(DATA / "kineto" / f"{name}.json.gz").traces[0])
    assert found.short["short_count"].sum() == len(short)
    assert found.bins["short_count"].sum() == len(short)
    assert found.bins["kernel_count"].sum() == sum(work["kernel"] for work in told(name)[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", PLAIN)
def test_queues_equal_a_plain_sweep_and_are_never_negative(name: str) -> None:
    _, calls = told(name)
    changes = defaultdict(list)
    for key, works in _submitted(name).items():
        seen = set()
        for one in works:
            begun = calls[key]["start"]
            changes[one["key"]] += [
                (begun, 0, one["key"] not in seen),
                (max(one["start"], begun), 1, one["key"] not in seen),
            ]
            seen.add(one["key"])
    found = launches(load(DATA / "kineto" / f"{name}.json.gz").traces[0])
    for queue in found.queues.to_dicts():
        pending = most = launched = most_launched = 0
        for _, down, first in sorted(changes[queue["device"], queue["stream"]]):
            pending += -1 if down else 1
            launched += (-1 if down else 1) * first
            most, most_launched = max(most, pending), max(most_launched, launched)
            assert pending >= 0
        if (
            name == "v100_ns_resolution"
        ):  # fractional Unix microseconds: starts within 256 ns may change places
            assert queue["max_works"] == pytest.approx(most, abs=1)
            continue
        # an instant at which work is launched and other work starts counts as one
        assert most - 1 <= queue["max_works"] <= most
        assert most_launched - 1 <= queue["max_launches"] <= most_launched
    assert (found.curve["works"] >= 0).all()
    assert (found.curve["launches"] >= 0).all()
    assert (found.curve["launches"] <= found.curve["works"]).all()
    ends = found.curve.group_by("device", "stream", maintain_order=True).last()
    assert ends["works"].to_list() == ends["launches"].to_list() == [0] * ends.height


@pytest.mark.skipif("v100_ns_resolution" not in KINETO, reason="the trace is not on this machine")
def test_the_queue_of_the_v100_was_full_at_1022_launches() -> None:
    found = launches(load(DATA / "kineto" / "v100_ns_resolution.json.gz").traces[0])
    queue = found.queues.to_dicts()[0]
    assert (queue["max_launches"], queue["capacity"]) == (1022, 1022)
    # a call that waits for room lasts; of 6,095 calls 936 last longer than 50 µs
    assert 900 <= queue["held_count"] <= 1300
    assert 0.8 * queue["held_ns"] <= found.calls["long_ns"].sum() <= 1.2 * queue["held_ns"]


@pytest.mark.skipif(
    "mi300_sglang_decode_graphs" not in KINETO, reason="the trace is not on this machine"
)
def test_one_graph_launch_of_544_kernels_is_one_launch() -> None:
    found = launches(load(DATA / "kineto" / "mi300_sglang_decode_graphs.json.gz").traces[0])
    assert found.totals.select("launch_count", "work_count", "graph_work_count").rows() == [
        (15, 558, 543)
    ]
    assert found.queues["max_works"].max() == 544
