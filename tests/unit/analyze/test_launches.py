"""Launching: delays, queues, calls that were held up, short kernels; small traces with known answers, in µs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

import polars as pl
import pytest

from support.odd_traces import Row, covered, gpu_rows_of, odd_trace, rows_of
from traceloom.analyze import launches
from traceloom.analyze.launches import reduce_curve
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


def two() -> TraceBuilder:
    """A kernel that begins 6 µs after its call, and one that has to wait until 50 for it to end."""
    builder = (
        TraceBuilder()
        .launch("cudaLaunchKernel", 0, 4, correlation=1)
        .kernel("one", 10, 40, correlation=1)
    )
    return builder.launch("cudaLaunchKernel", 5, 5, correlation=2).kernel(
        "two", 53, 2, correlation=2
    )


def test_delay_span_and_latency() -> None:
    names = {row["name"]: row for row in launches(two().build()).names.to_dicts()}
    assert [names["one"][f"{key}_max_ns"] for key in ("delay", "span", "latency")] == [
        6_000,
        10_000,
        6_000,
    ]
    assert [names["two"][f"{key}_max_ns"] for key in ("delay", "span", "latency")] == [
        43_000,
        48_000,
        3_000,
    ]
    total = launches(two().build()).totals.to_dicts()[0]
    assert (total["launch_count"], total["work_count"], total["unknown_count"]) == (2, 2, 0)
    assert (total["delay_median_ns"], total["delay_max_ns"]) == (24_500, 43_000)


def test_delays_are_told_by_operator_too() -> None:
    builder = two().op("aten::mm", 100, 20).launch("cudaLaunchKernel", 105, 5, correlation=3)
    found = launches(builder.kernel("three", 120, 5, correlation=3).build()).operators
    assert found.select("name", "launch_count", "delay_max_ns").rows() == [
        (None, 2, 43_000),
        ("aten::mm", 1, 10_000),
    ]


def test_work_that_seems_to_start_before_its_call_returned_has_no_delay_and_is_counted() -> None:
    builder = (
        TraceBuilder()
        .launch("cudaLaunchKernel", 10, 20, correlation=1)
        .kernel("one", 12, 5, correlation=1)
    )
    total = launches(builder.build()).totals.to_dicts()[0]
    assert (total["delay_max_ns"], total["early_count"], total["span_max_ns"]) == (0, 1, 2_000)


def test_the_queue_grows_with_the_call_and_shrinks_with_the_start() -> None:
    found = launches(two().build())
    assert found.curve.select("time_ns", "launches", "works").rows() == [
        (0, 1, 1),
        (5_000, 2, 2),
        (10_000, 1, 1),
        (53_000, 0, 0),
    ]
    queue = found.queues.to_dicts()[0]
    assert (queue["max_launches"], queue["window_ns"], queue["empty_ns"]) == (2, 55_000, 2_000)
    assert queue["mean_launches"] == pytest.approx((5 + 10 + 43) / 55)


def test_a_graph_is_one_launch_and_many_pieces_of_work() -> None:
    builder = TraceBuilder().launch("cudaGraphLaunch", 0, 4, correlation=1)
    for number in range(5):
        builder.kernel(f"node {number}", 10 + 10 * number, 8, correlation=1)
    found = launches(builder.build())
    total = found.totals.to_dicts()[0]
    assert (total["launch_count"], total["work_count"], total["graph_work_count"]) == (1, 5, 4)
    assert found.curve.select("launches", "works").rows() == [
        (1, 5),
        (0, 4),
        (0, 3),
        (0, 2),
        (0, 1),
        (0, 0),
    ]
    assert found.names["name"].to_list() == ["node 0"]
    assert not found.short.height, (
        "a graph's call submits many kernels, and is not compared with one"
    )


def test_a_graph_over_two_streams_is_pending_on_both() -> None:
    builder = TraceBuilder().launch("cudaGraphLaunch", 0, 4, correlation=1)
    for number in range(4):
        builder.kernel(f"node {number}", 10 + 10 * number, 8, correlation=1, stream=7 + number % 2)
    found = launches(builder.build())
    assert found.queues.select(
        "stream", "launch_count", "work_count", "max_launches", "max_works"
    ).rows() == [
        (7, 1, 2, 1, 2),
        (8, 1, 2, 1, 2),
    ]
    assert found.totals["launch_count"].to_list() == [1]
    whole = found.device_queues.select(
        "stream", "launch_count", "work_count", "max_launches", "max_works"
    ).rows()
    assert whole == [(None, 1, 4, 1, 4)]
    assert found.device_curve.select("time_ns", "launches", "works").rows() == [
        (0, 1, 4),
        (10_000, 0, 3),
        (20_000, 0, 2),
        (30_000, 0, 1),
        (40_000, 0, 0),
    ]


def test_clock_skew_and_unknown_launches_never_make_a_depth_negative() -> None:
    builder = TraceBuilder().kernel("orphan", 0, 5).launch("cudaLaunchKernel", 10, 4, correlation=1)
    builder.kernel("early", 8, 5, correlation=1)
    found = launches(builder.build())
    assert found.curve["works"].to_list() == [0]
    assert found.totals["unknown_count"].to_list() == [1]
    assert found.queues["unknown_count"].to_list() == [1]


def full(capacity: int, kernels: int) -> TraceBuilder:
    """Kernels of 100 µs, one after the other; calls take 2 µs as long as fewer than `capacity` are pending.

    A call that finds the queue full returns 3 µs after the end of the kernel that made room.
    """
    builder = TraceBuilder()
    now, ends = 0.0, []
    for number in range(kernels):
        room = ends[number - capacity] + 3 if number >= capacity else 0.0
        returns = max(now + 2, room)
        start = max(ends[-1] + 1 if ends else 0.0, returns + 4)
        builder.launch("cudaLaunchKernel", now, returns - now, correlation=number + 1, flow=False)
        builder.kernel("work", start, 100, correlation=number + 1)
        ends.append(start + 100)
        now = returns
    return builder


def test_calls_that_a_full_queue_held_up_are_found_with_its_size() -> None:
    found = launches(full(1022, 1082).build())
    queue = found.queues.to_dicts()[0]
    assert (queue["held_count"], queue["capacity"]) == (40, 1022)
    # 20 kernels have ended when the queue is full. They end every 101 µs; each held call but the first lasts from one end to the next, instead of 2 µs
    assert queue["held_ns"] == pytest.approx(39 * 99_000, rel=0.05)
    assert set(found.outliers["kind"]) == {"full queue"}


def test_long_calls_with_few_launches_pending_were_not_held_up_by_the_queue() -> None:
    queue = launches(full(40, 200).build()).queues.to_dicts()[0]
    assert (queue["held_count"], queue["held_ns"], queue["capacity"]) == (0, 0, None)
    assert queue["max_launches"] >= 39


def test_outliers_are_late_work_and_long_calls() -> None:
    builder = (
        two()
        .launch("cudaLaunchKernel", 100, 60, correlation=3)
        .kernel("three", 400, 5, correlation=3)
    )
    found = (
        launches(builder.build())
        .outliers.select("kind", "duration_ns", "start_ns", "work_name")
        .rows()
    )
    assert found == [
        ("late work", 240_000, 160_000, "three"),
        ("long call", 60_000, 100_000, "three"),
    ]


def test_late_work_that_was_told_to_wait_is_called_so() -> None:
    builder = two().launch("cudaStreamWaitEvent", 90, 2, correlation=9, flow=False)
    builder.launch("cudaLaunchKernel", 100, 6, correlation=3).kernel("three", 400, 5, correlation=3)
    assert launches(builder.build()).outliers.select("kind", "duration_ns").rows() == [
        ("waiting work", 294_000)
    ]


def test_short_kernels_are_counted_beside_their_calls() -> None:
    found = launches(two().build())
    assert found.short.rows() == [("two", 1, 1, 2_000, 5_000, 2_000)]
    bins = (
        found.bins.filter(kernel_count=1)
        .select("low_ns", "high_ns", "total_ns", "short_count")
        .rows()
    )
    assert bins == [(2_000, 4_000, 2_000, 1), (32_000, 64_000, 40_000, 0)]
    assert found.bins["kernel_count"].sum() == 2


def test_steps_hold_their_launches() -> None:
    builder = two().step(1, 0, 60).step(2, 60, 40)
    builder.launch("cudaLaunchKernel", 70, 4, correlation=3).kernel("three", 80, 5, correlation=3)
    row = launches(builder.build()).steps.to_dicts()[0]
    assert (row["min_launch_count"], row["mean_launch_count"], row["max_launch_count"]) == (
        1,
        1.5,
        2,
    )
    assert (row["min_short_count"], row["max_short_count"]) == (0, 1)


def test_without_gpu_work_there_is_nothing() -> None:
    found = launches(TraceBuilder().op("aten::mm", 0, 5).build())
    assert [
        getattr(found, name).height
        for name in ("totals", "names", "calls", "outliers", "queues", "curve")
    ] == [0] * 6
    assert found.bins["kernel_count"].sum() == 0


# -- against looking at each piece of work ------------------------------------------------------------------------


def by_launch(trace: Trace) -> list[tuple[Row, list[Row]]]:
    """Each call with the work that it submitted to one device, by start."""
    events, groups = rows_of(trace), defaultdict(list)
    for row in gpu_rows_of(trace):
        if row["launch"] is not None:
            groups[row["launch"], row["device"]].append(row)
    return [(events[launch], rows) for (launch, _), rows in sorted(groups.items())]


def times_of(trace: Trace, device: int) -> dict[str, list[int]]:
    work = gpu_rows_of(trace)
    times: dict[str, list[int]] = {"delay": [], "span": [], "latency": []}
    for call, rows in by_launch(trace):
        first = rows[0]
        if first["device"] != device:
            continue
        returned = call["start_ns"] + max(call["duration_ns"], 0)
        before = [
            row["end_ns"]
            for row in work
            if (row["device"], row["stream"]) == (device, first["stream"])
            and row["event"] < first["event"]
        ]
        times["delay"].append(max(first["start_ns"] - returned, 0))
        times["span"].append(max(first["start_ns"] - call["start_ns"], 0))
        times["latency"].append(max(first["start_ns"] - max([returned, *before]), 0))
    return times


def test_times_of_launches_are_those_of_the_first_work_of_each(odd: Trace) -> None:
    found, work = launches(odd), gpu_rows_of(odd)
    assert found.totals["device"].to_list() == sorted({row["device"] for row in work})
    for row in found.totals.to_dicts():
        own = [r for r in work if r["device"] == row["device"]]
        firsts = [rows[0] for _, rows in by_launch(odd) if rows[0]["device"] == row["device"]]
        assert (row["work_count"], row["launch_count"]) == (len(own), len(firsts))
        assert row["unknown_count"] == sum(r["launch"] is None for r in own)
        assert row["graph_work_count"] == len(own) - len(firsts) - row["unknown_count"]
        for name, values in times_of(odd, row["device"]).items():
            assert row[f"{name}_max_ns"] == max(values)
            assert row[f"{name}_median_ns"] == math.floor(statistics.median(values))
            assert abs(sorted(values).index(row[f"{name}_p95_ns"]) - 0.95 * (len(values) - 1)) <= 1


def test_calls_are_told_by_name_with_how_long_they_took(odd: Trace) -> None:
    lengths: dict[str, list[int]] = defaultdict(list)
    for launch in {call["event"]: call for call, _ in by_launch(odd)}.values():
        lengths[launch["name"]].append(max(launch["duration_ns"], 0))
    found = launches(odd).calls
    assert set(found["name"]) == set(lengths)
    for row in found.to_dicts():
        own = lengths[row["name"]]
        long = [ns for ns in own if ns >= 50_000]
        assert (row["call_count"], row["total_ns"], row["max_ns"]) == (len(own), sum(own), max(own))
        assert (row["long_count"], row["long_ns"]) == (len(long), sum(long))
        assert row["median_ns"] == math.floor(statistics.median(own))


def test_depths_of_the_queues_are_what_counting_at_every_instant_gives(odd: Trace) -> None:
    found, events = launches(odd), rows_of(odd)
    lanes: dict[tuple[int, int | None], list[Row]] = defaultdict(list)
    for row in gpu_rows_of(odd):
        lanes[row["device"], row["stream"]].append(row)
        lanes[row["device"], None].append(row)
    for curve, queues in ((found.curve, found.queues), (found.device_curve, found.device_queues)):
        for (device, stream), part in curve.group_by("device", "stream"):
            own = [row for row in lanes[device, stream] if row["launch"] is not None]  # type: ignore[index]
            pending = []  # from the call to the start of each piece, and of the first piece of each launch
            for row in own:
                begun = events[row["launch"]]["start_ns"]
                is_first = row is min(
                    (r for r in own if r["launch"] == row["launch"]), key=lambda r: r["start_ns"]
                )
                pending.append((begun, max(row["start_ns"], begun), is_first))
            for time, deep, works in part.select("time_ns", "launches", "works").rows():
                open_now = [first for begun, started, first in pending if begun <= time < started]
                assert (works, deep) == (len(open_now), sum(open_now)), (device, stream, time)
            row = queues.filter(
                pl.col("device").eq_missing(device), pl.col("stream").eq_missing(stream)
            ).row(0, named=True)
            everything = lanes[device, stream]  # type: ignore[index]
            assert (row["work_count"], row["max_works"]) == (len(everything), part["works"].max())
            start = min(*(begun for begun, *_ in pending), *(r["start_ns"] for r in everything))
            end = max(r["end_ns"] for r in everything)
            assert row["window_ns"] == end - start
            whole = sum(started - begun for begun, started, _ in pending)
            assert row["mean_works"] == pytest.approx(whole / row["window_ns"])
            deep = covered([(begun, started) for begun, started, first in pending if first])
            assert row["empty_ns"] == row["window_ns"] - deep


def test_kernels_fall_into_bins_by_their_length_and_short_ones_are_shorter_than_their_call(
    odd: Trace,
) -> None:
    found = launches(odd)
    kernels = [row for row in gpu_rows_of(odd) if row["category"] == "kernel"]
    for low, high, count, total in found.bins.select(
        "low_ns", "high_ns", "kernel_count", "total_ns"
    ).rows():
        own = [
            row["ns"] for row in kernels if row["ns"] >= low and (high is None or row["ns"] < high)
        ]
        assert (count, total) == (len(own), sum(own))
    short: dict[str, list[int]] = defaultdict(list)
    for call, rows in by_launch(odd):
        if (
            len(rows) == 1
            and rows[0]["category"] == "kernel"
            and rows[0]["ns"] < max(call["duration_ns"], 0)
        ):
            short[rows[0]["name"]].append(rows[0]["ns"])
    told = {
        name: (count, ns)
        for name, count, ns in found.short.select("name", "short_count", "short_ns").rows()
    }
    assert told == {name: (len(ns), sum(ns)) for name, ns in short.items()}
    assert found.bins["short_count"].sum() == sum(map(len, short.values()))


def test_outliers_are_long_and_the_longest_comes_first(odd: Trace) -> None:
    found = launches(odd).outliers
    assert found["duration_ns"].is_sorted(descending=True)
    names = odd.events["name"]
    for row in found.to_dicts():
        assert row["duration_ns"] >= (50_000 if row["kind"] == "long call" else 100_000)
        assert (row["work_name"], row["launch_name"]) == (names[row["work"]], names[row["launch"]])
    late = sum(
        ns >= 100_000
        for row in launches(odd).totals.to_dicts()
        for ns in times_of(odd, row["device"])["latency"]
    )
    assert (
        found.filter(pl.col("kind").cast(pl.String).is_in(["late work", "waiting work"])).height
        == late
    )


def test_what_a_step_launches_is_told_per_device(odd: Trace) -> None:
    steps = odd.steps.filter("complete")["step"].to_list()
    found = launches(odd).steps
    work = gpu_rows_of(odd)
    assert found.height == (
        len({row["device"] for row in work if row["step"] in steps}) if steps else 0
    )
    for row in found.to_dicts():
        own = [r for r in work if r["device"] == row["device"]]
        counts = [sum(r["step"] == step for r in own) for step in steps]
        assert (row["min_work_count"], row["max_work_count"]) == (min(counts), max(counts))
        assert row["mean_work_count"] == pytest.approx(sum(counts) / len(steps))


@pytest.mark.parametrize("points", [1, 2, 7, 10_000])
def test_a_thinned_curve_keeps_the_deepest_of_every_stream(points: int) -> None:
    whole = launches(odd_trace(0)).curve
    few = reduce_curve(whole, points)
    for key, part in whole.group_by("device", "stream"):
        own = few.filter(pl.col("device").eq_missing(key[0]), pl.col("stream").eq_missing(key[1]))
        assert own.height <= points
        assert own["works"].max() == part["works"].max()
        assert own["launches"].max() == part["launches"].max()
        assert own["time_ns"].is_sorted()
    assert few.schema == whole.schema
