"""Folded call stacks: self and total, recursion, threads, steps, GPU work by launching stack."""

from __future__ import annotations

import polars as pl
import pytest

from traceloom.analyze import flame
from traceloom.model import Session
from traceloom.testing import TraceBuilder


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
        out[path] = (row["calls"], row["self_ns"], row["total_ns"], row["self_device_ns"], row["device_ns"])
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
    ranks = tuple(TraceBuilder(rank=r, world_size=2).op("aten::mm", 0, 10 + r).build() for r in (0, 1))
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


@pytest.mark.parametrize("builder", [TraceBuilder(), TraceBuilder().kernel("k", 0, 5), TraceBuilder(device_name=None)])
def test_columns_do_not_depend_on_the_trace(builder: TraceBuilder) -> None:
    some, none = flame(program().build()), flame(builder.build())
    assert (none.frames.schema, none.functions.schema) == (some.frames.schema, some.functions.schema)
    assert none.frames.height == 0
