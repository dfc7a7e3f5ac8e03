"""Communication by collective, on devices and on the host."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from functools import cache
from typing import Any

import polars as pl
import pytest

from support.odd_traces import Row, covered, gpu_rows_of
from traceloom.analyze import collectives, communication, declared_groups, groups, matrix
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

ARGS = TraceBuilder.collective_args


def rows(builder: TraceBuilder) -> list[dict[str, Any]]:
    return communication(builder.build()).collectives.to_dicts()


def test_kernels_with_arguments_are_told_apart_by_kind_group_and_type() -> None:
    builder = TraceBuilder().group("0", [0, 1], description="default_pg")
    builder.kernel(
        "ncclDevKernel_AllReduce", 0, 10, stream=20, **ARGS("allreduce", "0", 2, 1000, "Float")
    )
    builder.kernel(
        "ncclDevKernel_AllReduce", 20, 20, stream=20, **ARGS("allreduce", "0", 2, 500, "Float")
    )
    builder.kernel(
        "ncclDevKernel_AllGather",
        50,
        5,
        stream=20,
        **ARGS("_allgather_base", "0", 2, 8, "BFloat16"),
    )
    one, other = rows(builder)
    assert (one["kind"], one["group"], one["group_description"], one["group_size"]) == (
        "all_reduce",
        "0",
        "default_pg",
        2,
    )
    assert (one["element_type"], one["where"], one["count"], one["bytes"]) == (
        "Float",
        "device",
        2,
        6000,
    )
    assert (one["total_ns"], one["mean_ns"], one["min_ns"], one["max_ns"]) == (
        30_000,
        15_000,
        10_000,
        20_000,
    )
    assert (other["kind"], other["element_type"], other["bytes"]) == ("all_gather", "BFloat16", 16)


def test_exposed_is_the_time_that_compute_does_not_cover() -> None:
    builder = (
        TraceBuilder().kernel("gemm", 0, 10).kernel("ncclDevKernel_AllReduce", 4, 10, stream=20)
    )
    result = communication(builder.build())
    assert result.collectives["exposed_ns"].to_list() == [4_000]
    assert result.devices.to_dicts() == [
        {"device": 0, "count": 1, "total_ns": 10_000, "union_ns": 10_000, "exposed_ns": 4_000}
    ]


def test_a_kernel_without_arguments_takes_those_of_the_op_that_launched_it() -> None:
    builder = TraceBuilder().collective("allreduce", 0, 10, elements=100)
    builder.launch("cudaLaunchKernel", 2, 2, correlation=1)
    builder.kernel("ncclDevKernel_Generic", 20, 5, stream=20, correlation=1)
    (row,) = rows(builder)
    assert (row["kind"], row["group_size"], row["bytes"]) == ("all_reduce", 2, 400)


def test_bytes_of_one_op_are_not_counted_for_each_of_its_kernels() -> None:
    builder = TraceBuilder().collective("allreduce", 0, 10, elements=100)
    for correlation in (1, 2):
        builder.launch("cudaLaunchKernel", correlation * 3, 2, correlation=correlation)
        builder.kernel(
            "ncclDevKernel_Generic", 20 * correlation, 5, stream=20, correlation=correlation
        )
    (row,) = rows(builder)
    assert (row["kind"], row["count"], row["bytes"]) == ("all_reduce", 2, None)


def test_a_kernel_of_an_old_file_is_named_by_the_annotation_around_its_launch() -> None:
    builder = TraceBuilder(generation="2023").annotation("nccl:all_to_all", 0, 10)
    builder.launch("cudaLaunchKernel", 2, 2, correlation=1)
    builder.kernel("ncclKernel_SendRecv_RING", 20, 5, stream=20, correlation=1)
    assert {(r["kind"], r["where"]) for r in rows(builder)} == {
        ("all_to_all", "device"),
        ("all_to_all", "host"),
    }


def test_a_kernel_alone_is_named_by_its_own_name_and_its_bytes_are_unknown() -> None:
    (row,) = rows(TraceBuilder().kernel("ncclDevKernel_ReduceScatter_Sum_bf16", 0, 5, stream=20))
    assert (row["kind"], row["group"], row["bytes"]) == ("reduce_scatter", None, None)


def test_gloo_calls_of_a_cpu_only_run_are_first_class() -> None:
    builder = TraceBuilder(device_name=None)
    gloo: dict[str, Any] = {"Input Dims": [[1000]], "Input type": ["float"]}
    builder.annotation("gloo:all_reduce", 0, 10, thread=5, **gloo).annotation(
        "gloo:all_reduce", 20, 30, thread=6, **gloo
    )
    builder.annotation("gloo:barrier", 60, 1, thread=5)
    reduce, barrier = rows(builder)
    assert (reduce["kind"], reduce["where"], reduce["count"], reduce["bytes"]) == (
        "all_reduce",
        "host",
        2,
        8000,
    )
    assert (reduce["element_type"], reduce["total_ns"], reduce["exposed_ns"]) == (
        "Float",
        40_000,
        None,
    )
    assert (barrier["kind"], barrier["bytes"]) == ("barrier", None)


def test_what_an_all_gather_gathers_is_unknown_from_its_input_alone() -> None:
    builder = TraceBuilder(device_name=None)
    builder.annotation("gloo:all_gather", 0, 10, **{"Input Dims": [[10]], "Input type": ["float"]})
    assert [r["bytes"] for r in rows(builder)] == [None]


def test_a_trace_without_communication_has_frames_without_rows() -> None:
    result = communication(TraceBuilder().kernel("gemm", 0, 5).build())
    assert result.collectives.height == result.devices.height == 0


# -- against adding up kernel by kernel ---------------------------------------------------------------------------

KINDS = (
    ("allreduce", "all_reduce"),
    ("_allgather_base", "all_gather"),
    ("reduce_scatter_tensor", "reduce_scatter"),
)


@cache
def mixed(seed: int) -> Trace:
    """Collectives of several kinds, groups and types over two devices, some beside compute, some on the host."""
    chance = random.Random(seed)
    builder = (
        TraceBuilder(0, 4, devices=2).group("0", [0, 1, 2, 3]).group("1", [0, 2], description="dp")
    )
    for step in range(3):
        builder.step(step, 400 * step, 400, thread=9)
    for number in range(60):
        at, device = chance.randrange(1150), chance.choice([0, 1])
        builder.launch(
            "cudaLaunchKernel",
            max(at - chance.randrange(60), 0),
            1,
            correlation=number,
            thread=1 + number,
        )
        if chance.random() < 0.4:
            builder.kernel("gemm", at, chance.randrange(60), device=device, correlation=number)
            continue
        kind = chance.choice(KINDS)[0]
        group, size = chance.choice([("0", 4), ("1", 2)])
        told = ARGS(
            kind, group, size, chance.choice([0, 64, 4096]), chance.choice(["Float", "BFloat16"])
        )
        told["Process Group Ranks"] = {"0": "[0, 1, 2, 3]", "1": "[0, 2]"}[group]
        if chance.random() < 0.2:
            del told["In msg nelems"], told["Out msg nelems"]
        builder.kernel(
            "ncclDevKernel_X",
            at,
            chance.randrange(50),
            device=device,
            stream=20,
            correlation=number,
            **told,
        )
    for at in (50, 420):
        builder.annotation(
            "gloo:all_reduce", at, 30, thread=88, **{"Input Dims": [[10]], "Input type": ["float"]}
        )
    return builder.build()


def recorded(trace: Trace) -> list[Row]:
    """The communication kernels with what the file says of each."""
    said = {row["event"]: row for row in trace.collectives.to_dicts()}
    return [
        row | said[row["event"]] for row in gpu_rows_of(trace) if row["name"].startswith("nccl")
    ]


def hidden(trace: Trace, device: int) -> list[tuple[int, int]]:
    """When a device computes."""
    return [
        (r["start_ns"], r["end_ns"])
        for r in gpu_rows_of(trace)
        if r["name"] == "gemm" and r["device"] == device
    ]


def exposed(rows: list[Row], trace: Trace) -> int:
    """Device time in which any of the rows runs and no compute does."""
    total = 0
    for device in {row["device"] for row in rows}:
        compute = hidden(trace, device)
        own = [(row["start_ns"], row["end_ns"]) for row in rows if row["device"] == device]
        total += covered(own + compute) - covered(compute)
    return total


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_what_adding_up_its_kernels_gives(seed: int) -> None:
    trace = mixed(seed)
    kinds = dict(KINDS)
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in recorded(trace):
        groups[
            kinds.get(row["kind"], row["kind"]),
            row["group"],
            row["group_size"],
            row["element_type"],
        ].append(row)
    found = communication(trace)
    rows = found.collectives.filter(pl.col("where") == "device").to_dicts()
    assert len(rows) == len(groups)
    for row in rows:
        own = groups[row["kind"], row["group"], row["group_size"], row["element_type"]]
        ns = [r["ns"] for r in own]
        assert (row["count"], row["total_ns"], row["mean_ns"]) == (
            len(ns),
            sum(ns),
            sum(ns) // len(ns),
        )
        assert (row["min_ns"], row["max_ns"], row["exposed_ns"]) == (
            min(ns),
            max(ns),
            exposed(own, trace),
        )
        assert row["group_description"] == {"0": "default_pg", "1": "dp"}[row["group"]]
    for row in found.devices.to_dicts():
        own = [r for r in recorded(trace) if r["device"] == row["device"]]
        spans = [(r["start_ns"], r["end_ns"]) for r in own]
        assert (row["count"], row["total_ns"]) == (len(own), sum(r["ns"] for r in own))
        assert (row["union_ns"], row["exposed_ns"]) == (covered(spans), exposed(own, trace))


@pytest.mark.parametrize("seed", range(4))
def test_single_collectives_have_their_bandwidth_and_what_nothing_hides_of_them(seed: int) -> None:
    trace = mixed(seed)
    calls = {
        row["event"]: row
        for row in collectives(trace).calls.filter(pl.col("where") == "device").to_dicts()
    }
    said = {row["event"]: row for row in recorded(trace)}
    assert calls.keys() == said.keys()
    for event, row in calls.items():
        own = said[event]
        assert row["duration_ns"] == own["ns"]
        assert row["exposed_ns"] == exposed([own], trace)
        assert row["blocking_ns"] is None or 0 <= row["blocking_ns"] <= row["exposed_ns"]
        size = {
            "all_reduce": own["in_bytes"],
            "all_gather": own["out_bytes"],
            "reduce_scatter": own["in_bytes"],
        }[row["kind"]]
        assert row["size_bytes"] == size
        share = (row["group_size"] - 1) / row["group_size"]
        assert row["bus_factor"] == pytest.approx(
            2 * share if row["kind"] == "all_reduce" else share
        )
        if size is None or not own["ns"]:
            assert row["bus_gb_per_s"] is None
            continue
        assert row["algorithm_gb_per_s"] == pytest.approx(size / own["ns"])
        assert row["bus_gb_per_s"] == pytest.approx(row["bus_factor"] * size / own["ns"])


@pytest.mark.parametrize("seed", range(4))
def test_the_summary_and_the_groups_are_the_calls_added_up(seed: int) -> None:
    trace = mixed(seed)
    found = collectives(trace)
    assert found.summary["count"].sum() == found.calls.height
    assert found.summary["total_ns"].sum() == found.calls["duration_ns"].sum()
    for row in found.summary.to_dicts():
        keys = ("where", "kind", "group", "group_size", "size_bytes")
        own = found.calls.filter(pl.col(key).eq_missing(row[key]) for key in keys)
        ns = own["duration_ns"].to_list()
        assert (row["count"], row["min_ns"], row["max_ns"]) == (len(ns), min(ns), max(ns))
        assert row["median_ns"] == int(statistics.median(ns))
        rates = own["bus_gb_per_s"].drop_nulls().to_list()
        assert row["best_bus_gb_per_s"] == (max(rates) if rates else None)
    listed = groups(found.calls, declared_groups(trace), 4).groups
    assert listed["count"].sum() == found.calls.height
    assert listed["total_ns"].sum() == found.calls["duration_ns"].sum()
    members = dict(listed.drop_nulls("group").select("group", "members").rows())
    assert members == {"0": [0, 1, 2, 3], "1": [0, 2]}
    strides = dict(listed.drop_nulls("group").select("group", "stride").rows())
    assert strides == {"0": 1, "1": 2}


@cache
def ring(kind: str, ranks: int, elements: int, **more: Any) -> pl.DataFrame:
    """One call of every rank of a group."""
    frames = []
    for rank in range(ranks):
        told = (
            ARGS(kind, "0", ranks, elements, "Float")
            | {"Process Group Ranks": str(list(range(ranks)))}
            | more
        )
        frames.append(
            collectives(
                TraceBuilder(rank, ranks).kernel("ncclX", 0, 10, stream=20, **told).build()
            ).calls
        )
    return pl.concat(frames)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(
    ("kind", "per_rank"),
    [("allreduce", 2), ("_allgather_base", 1), ("_reduce_scatter_base", 1), ("all_to_all", 1)],
)
def test_what_all_ranks_send_is_what_bandwidth_is_defined_on(
    kind: str, per_rank: int, ranks: int
) -> None:
    cells = matrix(ring(kind, ranks, 960))
    assert cells.height == ranks * (ranks - 1)
    assert (cells["source"] != cells["target"]).all()
    each = per_rank * 960 * 4 * (ranks - 1) // ranks
    for way in ("source", "target"):
        sums = cells.group_by(way).agg(pl.col("bytes").sum()).sort(way)
        assert sums["bytes"].to_list() == pytest.approx([each] * ranks, abs=ranks)
    assert cells["exact_bytes"].sum() == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize(
    ("kind", "from_root"),
    [("broadcast", True), ("scatter", True), ("reduce", False), ("gather", False)],
)
def test_a_root_sends_to_each_or_gets_from_each(kind: str, from_root: bool, root: int) -> None:
    cells = matrix(ring(kind, 4, 100, Root=root))
    others = [rank for rank in range(4) if rank != root]
    wanted = [(root, rank) for rank in others] if from_root else [(rank, root) for rank in others]
    assert cells.select("source", "target").rows() == sorted(wanted)
    assert set(cells["bytes"]) == {400}


def test_names_of_ranks_change_places_of_the_matrix_alone() -> None:
    calls = ring("allreduce", 4, 960)
    order = {0: 3, 1: 1, 2: 0, 3: 2}
    renamed = calls.with_columns(pl.col("rank").replace(order))
    moved = (
        matrix(calls)
        .with_columns(pl.col("source", "target").replace(order))
        .sort("source", "target")
    )
    assert matrix(renamed).equals(moved)
