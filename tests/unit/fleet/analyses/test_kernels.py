"""Where GPU time goes: sums of made weeks in any division, kernels by time and cycles, and curves worked out by hand."""

from __future__ import annotations

import random
from collections import defaultdict

import polars as pl
import pytest

from traceloom.errors import UsageError
from traceloom.fleet.analyses.attribution import compute_ownership_periods
from traceloom.fleet.analyses.kernels import (
    GPU_TIME_DIMENSIONS,
    compute_shape_coverage,
    divide_gpu_time,
    list_top_kernels,
)
from traceloom.fleet.store.schema import SCHEMAS
from traceloom.testing.fleet_weeks import WeeksRecipe, build_weeks

Frames = dict[str, pl.LazyFrame]


@pytest.fixture(scope="module")
def frames() -> Frames:
    weeks = build_weeks(WeeksRecipe(days=5, usage_days=0, changes=()))
    return {name: SCHEMAS[name].complete(frame).lazy() for name, frame in weeks.tables.items()}


@pytest.fixture(scope="module")
def owned(frames: Frames) -> pl.DataFrame:
    return compute_ownership_periods(frames["jobs"], SCHEMAS["owners"].empty().lazy())


@pytest.mark.parametrize(
    "by",
    [("kind", "bound"), ("device_model",), ("framework", "kind"), ("division", "model"), ("job",)],
)
def test_gpu_time_adds_up_in_any_division(
    frames: Frames, owned: pl.DataFrame, by: tuple[str, ...]
) -> None:
    rows = divide_gpu_time(frames["kernels"], frames["captures"], owned, by).rows
    everything = frames["kernels"].select(pl.col("total_ns", "count").sum()).collect().row(0)
    assert rows.select(pl.col("total_ns", "count").sum()).row(0) == everything
    assert rows["fraction"].sum() == pytest.approx(1)
    assert rows["total_ns"].is_sorted(descending=True)


def test_gpu_time_of_a_value_is_that_of_its_kernels(frames: Frames, owned: pl.DataFrame) -> None:
    """Counted row by row, without joins."""
    division = {row["job"]: row["division"] for row in frames["jobs"].collect().to_dicts()}
    job = {row["capture"]: row["job"] for row in frames["captures"].collect().to_dicts()}
    expected: dict[tuple[str, str], int] = defaultdict(int)
    for row in frames["kernels"].select("capture", "kind", "total_ns").collect().to_dicts():
        expected[division[job[row["capture"]]] or "unattributed", row["kind"]] += row["total_ns"]
    rows = divide_gpu_time(frames["kernels"], frames["captures"], owned, ["division", "kind"]).rows
    assert {
        (a, b): ns for a, b, ns in rows.select("division", "kind", "total_ns").rows()
    } == expected


def test_stretches_of_time_add_up(frames: Frames, owned: pl.DataFrame) -> None:
    day_ns = 86_400 * 10**9
    curve = divide_gpu_time(
        frames["kernels"], frames["captures"], owned, ["kind"], every_ns=day_ns
    ).rows
    whole = divide_gpu_time(frames["kernels"], frames["captures"], owned, ["kind"]).rows
    assert curve["time_ns"].n_unique() >= 5
    assert (curve["time_ns"] % day_ns == 0).all()
    assert dict(curve.group_by("kind").agg(pl.col("total_ns").sum()).rows()) == dict(
        whole.select("kind", "total_ns").rows()
    )
    assert curve.group_by("time_ns").agg(pl.col("fraction").sum())[
        "fraction"
    ].to_list() == pytest.approx([1.0] * curve["time_ns"].n_unique())


def kernels(*rows: dict[str, object]) -> pl.LazyFrame:
    plain = {"capture": "c", "kind": "gemm", "bound": "compute", "count": 1}
    return (
        SCHEMAS["kernels"]
        .complete(pl.DataFrame([plain | row for row in rows], infer_schema_length=None))
        .lazy()
    )


CAPTURES = (
    SCHEMAS["captures"]
    .complete(
        pl.DataFrame(
            [
                {"capture": "c", "job": "a"},
                {"capture": "d", "job": "b"},
                {"capture": "e", "job": "b"},
            ]
        )
    )
    .lazy()
)


def test_kernels_by_time_and_by_cycles() -> None:
    table = kernels(
        {
            "kernel": "slow clock",
            "total_ns": 3_000,
            "clock_hz": 1e9,
            "shapes": "[1]",
            "roofline_ns": 1_000,
        },
        {
            "kernel": "slow clock",
            "total_ns": 1_000,
            "clock_hz": 1e9,
            "shapes": "[2]",
            "capture": "d",
            "count": 3,
        },
        {
            "kernel": "fast clock",
            "total_ns": 3_500,
            "clock_hz": 2e9,
            "shapes": "[1]",
            "capture": "e",
        },
        {"kernel": "no clock", "total_ns": 9_000},
    )
    rows = list_top_kernels(table, CAPTURES).rows
    assert rows["kernel"].to_list() == ["no clock", "slow clock", "fast clock"]
    assert rows["fraction"].to_list() == pytest.approx([9 / 16.5, 4 / 16.5, 3.5 / 16.5])
    assert rows["mean_ns"].to_list() == [9_000, 1_000, 3_500]
    assert rows["cycles"].to_list() == [None, 4_000, 7_000]
    assert rows["cycles_known_ns"].to_list() == [0, 4_000, 3_500]
    assert rows.select("shapes", "captures", "jobs", "example").rows() == [
        (0, 1, 1, "c"),
        (2, 2, 2, "c"),
        (1, 1, 1, "e"),
    ]
    assert rows.select("roofline_ns", "roofline_known_ns").rows() == [
        (None, 0),
        (1_000, 3_000),
        (None, 0),
    ]
    by_cycles = list_top_kernels(table, CAPTURES, sort="cycles", top=2)
    assert by_cycles.rows["kernel"].to_list() == ["fast clock", "slow clock"]
    assert by_cycles.total_ns == 16_500


def test_the_curve_of_the_commonest_shapes() -> None:
    table = kernels(
        *(
            {"kernel": "k", "op": "aten::mm", "shapes": f"[{size}]", "types": "[]", "total_ns": ns}
            for size, ns in ((8, 500), (16, 300), (32, 100))
        ),
        {
            "kernel": "k",
            "op": "aten::mm",
            "shapes": "[8]",
            "types": "[]",
            "total_ns": 20,
            "capture": "d",
        },
        {"kernel": "unshaped", "total_ns": 80},
    )
    curve = compute_shape_coverage(table)
    assert curve.rows.select("number", "shapes", "total_ns").rows() == [
        (1, "[8]", 520),
        (2, "[16]", 300),
        (3, "[32]", 100),
    ]
    assert curve.rows["covered_fraction"].to_list() == pytest.approx([0.52, 0.82, 0.92])
    assert (curve.total_ns, curve.unshaped_ns) == (1_000, 80)
    assert [curve.needed(share) for share in (0.5, 0.8, 0.9, 0.95)] == [1, 2, 3, None]
    assert compute_shape_coverage(table, top=1).rows.height == 1


def test_empty_tables(frames: Frames, owned: pl.DataFrame) -> None:
    nothing = SCHEMAS["kernels"].empty().lazy()
    assert list_top_kernels(nothing, frames["captures"]).rows.height == 0
    assert compute_shape_coverage(nothing).rows.height == 0
    for name in GPU_TIME_DIMENSIONS:
        assert divide_gpu_time(nothing, frames["captures"], owned, [name]).rows.height == 0


def test_what_gpu_time_is_not_divided_by_is_refused(frames: Frames, owned: pl.DataFrame) -> None:
    with pytest.raises(UsageError) as refusal:
        divide_gpu_time(frames["kernels"], frames["captures"], owned, ["knd"])
    assert (refusal.value.slug, "did you mean `kind`" in refusal.value.hint) == (
        "no-such-dimension",
        True,
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_is_of_the_kind_with_most_of_its_time_in_any_order(seed: int) -> None:
    order = random.Random(seed)
    rows = [
        {"kernel": "k", "kind": kind, "total_ns": total_ns}
        for kind, total_ns in (("gemm", 400), ("copy", 500), ("gemm", 300), ("copy", 100))
    ]
    order.shuffle(rows)
    table = list_top_kernels(kernels(*rows), CAPTURES)
    assert table.rows.select("kernel", "kind", "total_ns", "count").rows() == [
        ("k", "gemm", 1300, 4)
    ]
