"""Device time and idle causes of random traces, against a reference that looks at one microsecond at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl
from hypothesis import HealthCheck, given, settings, strategies as st

from traceloom.analyze import communication, gpu_time, idle, kernels, step_times
from traceloom.analyze.gpu_time import FIELDS
from traceloom.analyze.host_time import find_main_lane
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

END = 300
KINDS = ("compute", "communication", "memory")


@dataclass(frozen=True)
class Work:
    device: int
    stream: int
    start: int
    duration: int
    kind: str
    call: tuple[int, int] | None  # start and duration of its launch; None for orphans
    thread: int
    inner: tuple[
        int, ...
    ]  # durations of further work of the same launch, one after the other with 1 µs between


works = st.builds(
    Work,
    device=st.integers(0, 1),
    stream=st.sampled_from([7, 8]),
    start=st.integers(20, END - 40),
    duration=st.integers(0, 30),
    kind=st.sampled_from(KINDS),
    call=st.none() | st.tuples(st.integers(0, END), st.integers(0, 20)),
    thread=st.sampled_from([1, 2]),
    inner=st.just(()) | st.lists(st.integers(1, 5), max_size=3).map(tuple),
)
host_spans = st.lists(
    st.tuples(
        st.sampled_from(["op", "python", "annotation"]),
        st.integers(0, END),
        st.integers(1, 80),
        st.sampled_from([1, 2]),
    ),
    max_size=8,
)
steps = st.just([]) | st.lists(st.integers(10, END), min_size=1, max_size=3, unique=True).map(
    sorted
)


def built(items: list[Work], host: list[tuple[str, int, int, int]], starts: list[int]) -> Trace:
    builder = TraceBuilder(devices=2)
    builder.annotation("whole", 0, END, thread=9)
    for index, start in enumerate(starts):
        stop = starts[index + 1] if index + 1 < len(starts) else END
        builder.step(index, start, stop - start, thread=9)
    for kind, start, duration, thread in host:
        getattr(builder, kind)(f"{kind} {start}", start, min(duration, END - start), thread=thread)
    for correlation, item in enumerate(items, start=1):
        if item.call is not None:
            start, duration = item.call
            builder.launch(
                "cudaLaunchKernel",
                start,
                min(duration, END - start),
                correlation=correlation,
                thread=item.thread,
            )
        for name, low, high in pieces(item):
            where: dict[str, Any] = {
                "stream": item.stream,
                "device": item.device,
                "correlation": correlation,
            }
            if name == "memory":
                builder.copy("Memcpy DtoD (Device -> Device)", low, high - low, bytes=1, **where)
            else:
                label = {"compute": "gemm", "communication": "ncclDevKernel_AllReduce"}[name]
                builder.kernel(label, low, high - low, **where)
    return builder.build()


def pieces(item: Work) -> list[tuple[str, int, int]]:
    """Kind, start and end of each piece of work of an item."""
    out = [(item.kind, item.start, item.start + item.duration)]
    for duration in item.inner:
        low = out[-1][2] + 1
        out.append((item.kind, low, low + duration))
    return out


def micros(found: list[tuple[str, int, int]], *kinds: str) -> set[int]:
    return {t for kind, low, high in found if kind in kinds for t in range(low, high)}


def reference(found: list[tuple[str, int, int]], tile: range) -> dict[str, int]:
    """The additive fields of one device in one stretch of time, counted in microseconds."""
    inside = set(tile)
    first, last = min(low for _, low, _ in found), max(high for *_, high in found)
    sets = {kind: micros(found, kind) & inside for kind in KINDS}
    busy = micros(found, *KINDS) & inside
    window = set(range(first, last)) & inside
    here = [f for f in found if f[1] in inside]
    ran = [f for f in found if f[0] != "memory"]
    return {
        "window_ns": len(window),
        "busy_ns": len(busy),
        "idle_ns": len(window - busy),
        **{f"{kind}_ns": len(sets[kind]) for kind in KINDS},
        "exposed_communication_ns": len(sets["communication"] - sets["compute"]),
        "exposed_memory_ns": len(sets["memory"] - sets["compute"] - sets["communication"]),
        "gpu_work_count": len(here),
        "kernel_count": sum(kind != "memory" for kind, *_ in here),
        "kernel_ns": sum(len(set(range(low, high)) & inside) for _, low, high in ran),
        "edge_idle_before_ns": len(inside & set(range(first))),
        "edge_idle_after_ns": len(inside - set(range(last))),
    }


def scaled(row: dict[str, int]) -> dict[str, int]:
    return {key: value * (1000 if key.endswith("_ns") else 1) for key, value in row.items()}


slow = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@slow
@given(st.lists(works, max_size=8), steps)
def test_gpu_time_is_what_counting_microseconds_gives(items: list[Work], starts: list[int]) -> None:
    trace = built(items, [], starts)
    result = gpu_time(trace)
    end = (trace.end_ns - trace.start_ns) // 1000
    bounds = [*starts, END] if starts else [END, END]
    for device in {item.device for item in items}:
        found = [piece for item in items if item.device == device for piece in pieces(item)]
        row = result.devices.filter(pl.col("device") == device).to_dicts()[0]
        assert {field: row[field] for field in FIELDS} == scaled(
            reference(found, range(end + 1))
        ) | {"edge_idle_after_ns": scaled(reference(found, range(end)))["edge_idle_after_ns"]}
        rows = result.steps.filter(pl.col("device") == device).to_dicts()
        assert [r["step"] for r in rows] == [*range(len(starts)), None]
        for index, low in enumerate(starts):
            wanted = scaled(reference(found, range(low, bounds[index + 1])))
            assert {field: rows[index][field] for field in FIELDS} == wanted
    added = result.steps.group_by("device").agg(pl.col(FIELDS).sum()).sort("device")
    assert added.equals(result.devices.select("device", *FIELDS))


def idle_reference(items: list[Work], device: int) -> dict[str, int]:
    """Microseconds of idle time by cause, the host's doings as one; no event waits in these traces."""
    rows = [
        (low, high, number, index, item)
        for number, item in enumerate(items)
        if item.device == device
        for index, (_, low, high) in enumerate(pieces(item))
    ]
    busy = {t for low, high, *_ in rows for t in range(low, high)}
    causes: dict[str, int] = {}
    if not rows:
        return causes
    first, last = min(low for low, *_ in rows), max(high for _, high, *_ in rows)
    for t in range(first, last):
        if t in busy:
            continue
        low = max(high for _, high, *_ in rows if high <= t)
        high = min(start for start, *_ in rows if start > t)
        cause = idle_cause(t, low, high, rows)
        causes[cause] = causes.get(cause, 0) + 1000
    return causes


def idle_cause(t: int, low: int, high: int, rows: list[Any]) -> str:
    # rows of one start stand as in the file: longer ones first, then in the order they were written
    ending = min((r for r in rows if r[0] == high), key=lambda r: -r[1])
    *_, item = ending
    if item.call is None:
        return "launch_not_recorded"
    same = sorted((r for r in rows if r[2] == ending[2]), key=lambda r: (r[0], -r[1]))
    if same[0] is not ending:
        return "graph_internal"
    call, back = item.call[0], min(item.call[0] + item.call[1], END)
    blocked = item.kind == "memory" and back >= ending[1] and call < low
    if not blocked and call >= low and t < min(call, high):
        return "host"
    submitted = min(max(back, low), high)
    if not blocked and back > low and (t < submitted or high - submitted <= 100):
        return "launch_latency"
    return "kernel_to_kernel" if high - low <= 30 else "dependency or unexplained"


@slow
@given(st.lists(works, max_size=8), host_spans, steps)
def test_every_idle_microsecond_has_the_cause_of_its_definition(
    items: list[Work], host: list[tuple[str, int, int, int]], starts: list[int]
) -> None:
    trace = built(items, host, starts)
    found = idle(trace)
    for device in (0, 1):
        wanted = idle_reference(items, device)
        totals: dict[str, int] = {}
        for row in found.totals.filter(pl.col("device") == device).to_dicts():
            cause = "host" if row["cause"].startswith("host_") else row["cause"]
            cause = "dependency or unexplained" if cause in ("dependency", "unexplained") else cause
            totals[cause] = totals.get(cause, 0) + row["idle_ns"]
        assert totals == wanted
    time = gpu_time(trace)
    for frame, keys, whole in (
        (found.totals, ["device"], time.devices),
        (found.causes, ["device", "step"], time.steps),
    ):
        added = frame.group_by(keys).agg(pl.col("idle_ns").sum()).sort(keys)
        assert added.equals(whole.filter(pl.col("idle_ns") > 0).select(*keys, "idle_ns").sort(keys))


def host_class(trace: Trace, lane: int, t: int) -> str | None:
    """What one thread was at in the microsecond after t: the innermost event that is no annotation; None for nothing."""
    at = t * 1000 + trace.start_ns
    rows = trace.events.filter(
        (pl.col("lane") == lane) & (pl.col("start_ns") <= at) & (pl.col("nested_end_ns") > at)
    ).sort("depth")
    if not rows.height:
        return None
    known = rows.filter(pl.col("category") != "annotation")
    if not known.height:
        return "host_unobserved"
    names = {"op": "host_op", "python": "host_python", "runtime": "host_launch"}
    return (
        "host_blocking_call"
        if waits_for_its_copy(trace, known[-1])
        else names[known["category"][-1]]
    )


def waits_for_its_copy(trace: Trace, call: pl.DataFrame) -> bool:
    """Whether a call submitted copies alone and came back when they had ended, or later."""
    work = trace.events.filter(pl.col("launch") == call["event"][0])
    ends = (work["start_ns"] + work["duration_ns"]).to_list()
    returned = call["start_ns"][0] + call["duration_ns"][0]
    return work.height > 0 and (work["category"] == "copy").all() and returned >= max(ends)


@slow
@given(st.lists(works, min_size=2, max_size=5), host_spans)
def test_the_hosts_part_is_what_the_launching_thread_or_else_the_main_thread_did(
    items: list[Work], host: list[tuple[str, int, int, int]]
) -> None:
    trace = built(items, host, [])
    main = find_main_lane(trace)
    wanted: dict[tuple[int, str], int] = {}
    for gap in (
        idle(trace)
        .gaps.filter(pl.col("cause").cast(pl.String).str.starts_with("host_"))
        .unique("gap")
        .to_dicts()
    ):
        lane, call = trace.events["lane"][gap["launch"]], trace.events["start_ns"][gap["launch"]]
        work = trace.events[gap["before"]]
        low = (work["start_ns"][0] + work["duration_ns"][0] - trace.start_ns) // 1000
        high = (min(call, trace.events["start_ns"][gap["after"]]) - trace.start_ns) // 1000
        for t in range(low, high):
            cause = host_class(trace, lane, t) or host_class(trace, main, t) or "host_unobserved"
            wanted[gap["device"], cause] = wanted.get((gap["device"], cause), 0) + 1000
    totals = idle(trace).totals.filter(pl.col("cause").cast(pl.String).str.starts_with("host_"))
    assert {(row["device"], row["cause"]): row["idle_ns"] for row in totals.to_dicts()} == wanted


@slow
@given(st.lists(works, max_size=8), host_spans, steps)
def test_all_results_of_any_trace_have_one_schema_and_agree(
    items: list[Work], host: list[tuple[str, int, int, int]], starts: list[int]
) -> None:
    trace, nothing = built(items, host, starts), built([], [], [])
    for analysis in (gpu_time, idle, kernels, communication, step_times):
        one, other = analysis(trace), analysis(nothing)
        for name, value in vars(one).items():
            if isinstance(value, pl.DataFrame):
                assert value.schema == getattr(other, name).schema
    devices, talk = gpu_time(trace).devices, communication(trace).devices
    assert talk["union_ns"].sum() == devices["communication_ns"].sum()
    assert talk["exposed_ns"].sum() == devices["exposed_communication_ns"].sum()
    categories = dict(kernels(trace).categories.select("category", "union_ns").rows())
    assert categories == {kind: devices[f"{kind}_ns"].sum() for kind in KINDS}
