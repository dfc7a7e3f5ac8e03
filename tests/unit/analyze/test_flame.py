"""Folded call stacks: self and total, recursion, threads, steps, GPU work by launching stack."""

from __future__ import annotations

import re
from collections import defaultdict

import polars as pl
import pytest

from support.odd_traces import Row, above, gpu_rows_of, odd_trace, rows_of
from traceloom.analyze import flame
from traceloom.analyze.flame import list_thread_names
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace


def program() -> TraceBuilder:
    builder = TraceBuilder()
    for number in (1, 2):
        at = 100 * (number - 1)
        builder.step(number, at, 100)
        builder.python(f"<built-in method run of T object at 0x7f0{number}>", at, 90)
        builder.python("train.py(7): walk", at + 10, 60)
        builder.python("train.py(7): walk", at + 20, 30)
        builder.op("aten::mm", at + 25, 10 * number)
        builder.launch("cudaLaunchKernel", at + 26, 2, correlation=number)
        builder.kernel("gemm", at + 50, 5 * number, correlation=number)
    return builder


def by_path(frames: pl.DataFrame) -> dict[str, tuple[int, ...]]:
    names: dict[int, str] = {}
    out = {}
    for row in frames.to_dicts():
        above = names.get(row["parent"])
        path = names[row["node"]] = f"{above}/{row['name']}" if above else row["name"]
        out[path] = (
            row["calls"],
            row["self_ns"],
            row["total_ns"],
            row["self_device_ns"],
            row["device_ns"],
        )
    return out


def test_calls_of_one_path_are_one_row_whatever_their_address_and_step() -> None:
    found = by_path(flame(program().build()).frames)
    root = "main thread/ProfilerStep#/<built-in method run of T>"
    assert found == {
        "main thread": (0, 0, 200_000, 0, 15_000),
        "main thread/ProfilerStep#": (2, 20_000, 200_000, 0, 15_000),
        root: (2, 60_000, 180_000, 0, 15_000),
        f"{root}/walk": (2, 60_000, 120_000, 0, 15_000),
        f"{root}/walk/walk": (2, 30_000, 60_000, 0, 15_000),
        f"{root}/walk/walk/aten::mm": (2, 26_000, 30_000, 0, 15_000),
        f"{root}/walk/walk/aten::mm/cudaLaunchKernel": (2, 4000, 4000, 15_000, 15_000),
    }


def test_a_function_that_calls_itself_counts_once_to_its_total() -> None:
    row = flame(program().build()).functions.filter(pl.col("name") == "walk").row(0, named=True)
    assert (row["file"], row["line"], row["calls"]) == ("train.py", 7, 4)
    assert (row["self_ns"], row["total_ns"], row["device_ns"]) == (90_000, 120_000, 15_000)


def test_functions_are_told_per_step_with_their_spread() -> None:
    row = flame(program().build()).functions.filter(pl.col("name") == "aten::mm").row(0, named=True)
    assert (row["mean_self_ns"], row["min_self_ns"], row["max_self_ns"], row["step_count"]) == (
        13_000.0,
        8000,
        18_000,
        2,
    )


def test_chosen_steps_cut_host_time_at_their_bounds() -> None:
    builder = program().op("aten::add", 90, 20, thread=2)
    found = flame(builder.build(), steps=(2, 2))
    rows = by_path(found.frames)
    assert rows["thread 2"] == (0, 0, 10_000, 0, 0)
    assert rows["thread 2/aten::add"][:2] == (0, 10_000)  # it began in the step before
    assert (found.gpu_work_ns, rows["main thread"][4]) == (10_000, 10_000)


def test_one_thread_can_be_chosen() -> None:
    trace = program().op("aten::add", 90, 20, thread=2).build()
    lane = trace.lanes.filter(pl.col("thread") == "2")["lane"].item()
    found = flame(trace, lane=lane)
    assert set(by_path(found.frames)) == {"thread 2", "thread 2/aten::add"}
    assert found.unattributed_device_ns == found.gpu_work_ns == 15_000


def test_a_session_holds_its_ranks_one_after_the_other() -> None:
    ranks = tuple(
        TraceBuilder(rank=r, world_size=2).op("aten::mm", 0, 10 + r).build() for r in (0, 1)
    )
    found = flame(Session(ranks, "run"))
    assert found.frames.select("rank", "node", "parent", "total_ns").rows() == [
        (0, 0, None, 10_000),
        (0, 1, 0, 10_000),
        (1, 2, None, 11_000),
        (1, 3, 2, 11_000),
    ]


def test_work_of_unknown_launch_is_told_apart() -> None:
    found = flame(program().kernel("orphan", 300, 7, correlation=99).build())
    assert (found.unattributed_device_ns, found.gpu_work_ns) == (7000, 22_000)


def test_very_deep_stacks_count_to_the_deepest_level_kept() -> None:
    builder = TraceBuilder()
    for level in range(1100):
        builder.python(f"f.py({level}): f", level, 3000 - 2 * level)
    found = flame(builder.build())
    assert found.frames["self_ns"].sum() == 3_000_000
    assert found.frames["depth"].max() == 1024


@pytest.mark.parametrize(
    "builder", [TraceBuilder(), TraceBuilder().kernel("k", 0, 5), TraceBuilder(device_name=None)]
)
def test_columns_do_not_depend_on_the_trace(builder: TraceBuilder) -> None:
    some, none = flame(program().build()), flame(builder.build())
    assert (none.frames.schema, none.functions.schema) == (
        some.frames.schema,
        some.functions.schema,
    )
    assert none.frames.height == 0


# -- against a reference that walks up from every event -----------------------------------------------------------

Path = tuple[str, ...]


def folded(trace: Trace, low: int | None = None, high: int | None = None) -> dict[Path, list[int]]:
    """Calls, self, total, self device and device time by path; host time between two instants where these are given."""
    events = rows_of(trace)
    lanes = dict(enumerate(list_thread_names(trace)))
    values: dict[Path, list[int]] = defaultdict(lambda: [0] * 5)

    def path(row: Row) -> Path:
        names = [
            re.sub(r"^(ProfilerStep|traceloom\.step)#.*", r"\1#", part["name"])
            for part in (row, *above(events, row))
        ]
        names = [re.sub(r"^[^ ]*\(\d+\): ", "", name) for name in names]
        return (lanes[row["lane"]], *reversed(names))

    children: dict[int, list[Row]] = defaultdict(list)
    for row in events:
        if row["parent"] is not None:
            children[row["parent"]].append(row)

    def inside(row: Row) -> int:
        least = row["start_ns"] if low is None else max(low, row["start_ns"])
        most = row["end_ns"] if high is None else min(high, row["end_ns"])
        return max(most - least, 0)

    host = [row for row in events if row["device"] is None]
    for row in host:
        own = inside(row) - sum(map(inside, children[row["event"]]))
        values[path(row)][0] += low is None or high is None or low <= row["start_ns"] < high
        _credit(values, path(row), own, 1)
    steps = set(trace.steps.filter(start_ns=low)["step"]) if low is not None else None
    for work in gpu_rows_of(trace):
        launch = work["launch"] if work["launch"] is not None else work["op"]
        if launch is not None and (steps is None or work["step"] in steps):
            _credit(values, path(events[launch]), work["ns"], 3)
    return {path: row for path, row in values.items() if any(row)}


def _credit(values: dict[Path, list[int]], path: Path, ns: int, at: int) -> None:
    """Own time of a path, which is part of the totals of all paths above it."""
    values[path][at] += ns
    for length in range(1, len(path) + 1):
        values[path[:length]][at + 1] += ns


def test_every_path_is_what_walking_up_from_each_event_gives(odd: Trace) -> None:
    found = flame(odd)
    wanted = {"/".join(path): tuple(values) for path, values in folded(odd).items()}
    assert by_path(found.frames) == wanted
    host_lanes = odd.lanes.filter(kind="host")["lane"].to_list()
    roots = [row for row in rows_of(odd) if row["lane"] in host_lanes and row["parent"] is None]
    assert found.busy_ns == sum(row["ns"] for row in roots)
    assert found.gpu_work_ns == sum(row["ns"] for row in gpu_rows_of(odd))
    assert found.gpu_work_ns == found.frames["self_device_ns"].sum() + found.unattributed_device_ns


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_paths_of_a_step_are_cut_at_its_bounds(seed: int) -> None:
    trace = odd_trace(seed)
    for number, low, high in trace.steps.select("step", "start_ns", "end_ns").rows():
        found = flame(trace, steps=(number, number))
        wanted = {
            "/".join(path): tuple(values) for path, values in folded(trace, low, high).items()
        }
        assert by_path(found.frames) == wanted


def test_steps_one_by_one_are_the_same_steps_together(odd: Trace) -> None:
    numbers = odd.steps["step"].to_list()
    together = flame(odd, steps=(min(numbers, default=0), max(numbers, default=0)))
    single = [flame(odd, steps=(number, number)) for number in numbers]
    for name in ("busy_ns", "gpu_work_ns", "unattributed_device_ns"):
        assert getattr(together, name) == sum(getattr(part, name) for part in single)


def test_threads_one_by_one_are_all_threads_together(odd: Trace) -> None:
    whole = by_path(flame(odd).frames)
    parts: dict[str, tuple[int, ...]] = {}
    for lane in odd.lanes.filter(kind="host")["lane"]:
        parts |= by_path(flame(odd, lane=lane).frames)
    assert parts == whole


def test_functions_are_the_paths_by_name_and_nested_calls_count_once(odd: Trace) -> None:
    events = rows_of(odd)
    host = [row for row in events if row["device"] is None]
    calls: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in host:
        name = re.sub(r"^(ProfilerStep|traceloom\.step)#.*", r"\1#", row["name"])
        calls[name][0] += 1
        if row["name"] not in [other["name"] for other in above(events, row)]:
            calls[name][1] += row["ns"]
    places = pl.concat_str(
        pl.col("file") + "(", pl.col("line").cast(pl.String) + "): ", "name", ignore_nulls=True
    )
    found = flame(odd).functions.with_columns(places.alias("said"))
    assert {row["said"]: [row["calls"], row["total_ns"]] for row in found.to_dicts()} == calls
    assert found["self_ns"].sum() == flame(odd).busy_ns
