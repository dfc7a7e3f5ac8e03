"""SM efficiency, occupancy, use of matrix units, and kernels by operator and shapes."""

from __future__ import annotations

import json
import random
from importlib.resources import files
from pathlib import Path

import polars as pl
import pytest

from traceloom.analyze import kernel_efficiency, kernel_shapes
from traceloom.analyze.kernel_rules import classify_matrix_units
from traceloom.formats import read_kineto
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

TABLE = json.loads(
    files("traceloom.analyze").joinpath("matrix_rules.json").read_text(encoding="utf-8")
)
STATE = {"yes": "used", "no": "unused", "none": "none"}


def kept(made: TraceBuilder, folder: Path) -> Trace:
    """The trace, with its file still there."""
    return read_kineto(made.write(folder / "trace.json.gz"))


def kernel(
    made: TraceBuilder, start: float, length: float, blocks: object, occupancy: object = 50
) -> TraceBuilder:
    said = {"blocks per SM": blocks, "est. achieved occupancy %": occupancy}
    return made.kernel(f"kernel_{start}", start, length, stream=int(start) % 7, **said)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["rule"])
def test_each_rule_of_matrix_units_decides_its_example(row: dict[str, str]) -> None:
    found = classify_matrix_units(pl.DataFrame({"name": [row["example"]], "kind": ["convolution"]}))
    assert found.to_list() == [STATE[row["uses"]]]
    assert row["why"]


def test_only_matrix_products_can_use_matrix_units() -> None:
    names = [
        "ampere_bf16_s16816gemm",
        "ampere_bf16_s16816gemm",
        "strange",
        "strange",
        "volta_sgemm_64x64_nt",
    ]
    frame = pl.DataFrame({"name": names, "kind": ["gemm", "elementwise", "gemm", "copy", "gemm"]})
    assert classify_matrix_units(frame).to_list() == ["used", "none", "unknown", "none", "unused"]


def test_sm_efficiency_counts_blocks_up_to_one_per_sm(tmp_path: Path) -> None:
    made = kernel(TraceBuilder(), 0, 10, 0.5, 20)
    made = kernel(made, 20, 10, 8.0, 80)  # more blocks than SMs fill it once
    made = kernel(made, 90, 10, 0.25, 50)
    found = kernel_efficiency(kept(made, tmp_path))
    device = found.devices.row(0, named=True)
    assert device["sm_efficiency"] == pytest.approx((5 + 10 + 2.5) / 100)
    assert device["sm_fill"] == pytest.approx((5 + 10 + 2.5) / 30)
    assert device["occupancy"] == pytest.approx((0.2 + 0.8 + 0.5) / 3)
    assert found.absent is None


def test_kernels_that_run_at_once_fill_the_gpu_together_and_never_more_than_once(
    tmp_path: Path,
) -> None:
    made = kernel(kernel(TraceBuilder(), 0, 10, 0.5), 5, 10, 0.8)
    device = kernel_efficiency(kept(made, tmp_path)).devices.row(0, named=True)
    assert device["sm_efficiency"] == pytest.approx((5 * 0.5 + 5 * 1.0 + 5 * 0.8) / 15)
    assert device["sm_fill"] == pytest.approx((5 + 8) / 20)


def test_kernels_without_the_argument_are_left_out_and_odd_values_are_none(tmp_path: Path) -> None:
    made = kernel(kernel(TraceBuilder(), 0, 10, 0.5, "N/A"), 50, 10, "nan", True)
    device = kernel_efficiency(kept(made.kernel("bare", 30, 10), tmp_path)).devices.row(
        0, named=True
    )
    assert (device["kernel_ns"], device["measured_ns"]) == (30_000, 10_000)
    assert device["sm_fill"] == pytest.approx(0.5)


def test_an_estimate_of_no_occupancy_on_sms_that_hold_warps_is_none(tmp_path: Path) -> None:
    made = TraceBuilder().kernel(
        "a", 0, 10, **{"est. achieved occupancy %": 40, "warps per SM": 30, "blocks per SM": 4}
    )
    made = made.kernel(
        "b", 20, 90, **{"est. achieved occupancy %": 0, "warps per SM": 372.4, "blocks per SM": 31}
    )
    made = made.kernel(
        "c", 120, 10, **{"est. achieved occupancy %": 0, "warps per SM": 0.2, "blocks per SM": 0.02}
    )
    found = kernel_efficiency(kept(made, tmp_path))
    device = found.devices.row(0, named=True)
    assert device["occupancy"] == pytest.approx(0.2)  # of a and c
    assert device["estimated_ns"] == 20_000
    assert dict(found.kernels.select("name", "occupancy").rows())["b"] is None


def test_the_figures_are_there_without_the_file() -> None:
    found = kernel_efficiency(kernel(TraceBuilder(), 0, 10, 0.5).build())
    assert (found.absent, found.devices["sm_fill"][0]) == (None, pytest.approx(0.5))


def test_writers_that_do_not_record_it_leave_it_unknown_with_a_reason(tmp_path: Path) -> None:
    found = kernel_efficiency(kept(TraceBuilder(generation="rocm").kernel("k", 0, 10), tmp_path))
    assert found.devices.select("sm_efficiency", "sm_fill", "occupancy").row(0) == (
        None,
        None,
        None,
    )
    assert found.absent == "not-recorded"


def test_each_whole_step_has_its_own_sm_efficiency(tmp_path: Path) -> None:
    made = TraceBuilder().step(1, 0, 100).step(2, 100, 100)
    made = kernel(kernel(made, 10, 50, 1.0), 95, 10, 0.5)
    steps = kernel_efficiency(kept(made, tmp_path)).steps
    assert steps.select("step", "sm_efficiency").rows() == [
        (1, pytest.approx((50 + 2.5) / 100)),
        (2, pytest.approx(2.5 / 100)),
    ]


def test_time_by_use_of_matrix_units_adds_up_to_all_kernel_time(tmp_path: Path) -> None:
    made = (
        TraceBuilder()
        .kernel("ampere_bf16_s16816gemm_bf16", 0, 30)
        .kernel("volta_sgemm_64x64_nt", 40, 10)
    )
    made = (
        made.kernel("splitKreduce_kernel", 60, 5)
        .kernel("gemm_of_nobody", 70, 7)
        .kernel("vectorized_elementwise_kernel", 80, 1)
    )
    found = kernel_efficiency(kept(made, tmp_path))
    sums = dict(found.matrix.select("matrix_units", "total_ns").rows())
    assert sums == {"used": 30_000, "unused": 10_000, "unknown": 7_000, "none": 6_000}
    assert found.matrix_share == pytest.approx(0.75)


def test_nothing_is_measured_where_nothing_ran(tmp_path: Path) -> None:
    found = kernel_efficiency(kept(TraceBuilder().op("aten::add", 0, 5), tmp_path))
    assert found.devices.height == found.steps.height == found.kernels.height == 0
    assert found.matrix_share is None
    assert kernel_shapes(TraceBuilder().op("aten::add", 0, 5).build()).rows.height == 0


def test_kernels_by_operator_and_shapes() -> None:
    made = TraceBuilder()
    for number, (size, length) in enumerate([(8, 10), (8, 30), (4, 5)]):
        at = 100 * number
        made = made.step(number + 1, at, 100).op(
            "aten::mm", at, 50, shapes=[[size, size], [size, 2]]
        )
        made = made.launch("cudaLaunchKernel", at + 1, 2, correlation=number + 1)
        made = made.kernel("ampere_sgemm", at + 20, length, correlation=number + 1)
    made = made.kernel("orphan", 290, 1)
    found = kernel_shapes(made.build())
    assert found.rows["total_ns"].sum() == found.total_ns == 46_000
    big, small, orphan = found.rows.to_dicts()
    assert (big["op"], json.loads(big["shapes"]), big["kind"]) == (
        "aten::mm",
        [[8, 8], [8, 2]],
        "gemm",
    )
    assert (big["count"], big["mean_ns"], big["min_ns"], big["max_ns"]) == (
        2,
        20_000,
        10_000,
        30_000,
    )
    assert (big["min_total_ns"], big["max_total_ns"], big["step_count"]) == (0, 30_000, 2)
    assert (json.loads(small["shapes"])[0], small["step_count"]) == ([4, 4], 1)
    assert (orphan["op"], orphan["shapes"], orphan["mean_total_ns"]) == (None, None, None)


# -- random kernels, instant by instant ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_figures_of_random_kernels_are_those_of_looking_at_every_instant(seed: int) -> None:
    chance = random.Random(seed)
    made, runs = TraceBuilder(devices=2), []
    for number in range(30):
        start, length = chance.randrange(200), chance.randrange(40)
        blocks = chance.choice([None, 0.0, 0.125, 0.5, 1.0, 3.5])
        percent = chance.choice([None, 5, 50, 100])
        said: dict[str, float] = {} if blocks is None else {"blocks per SM": blocks}
        said |= {} if percent is None else {"est. achieved occupancy %": percent}
        device, name = chance.randrange(2), chance.choice(["gemm", "add", "softmax"])
        made.kernel(name, start, length, device=device, stream=number, **said)
        runs.append((device, name, start, length, blocks, percent))
    bounds = sorted(chance.sample(range(10, 230), 4))
    for step, low in enumerate(bounds):
        made.mark(step, low)
    found = kernel_efficiency(made.build())

    def area(device: int, low: int, high: int) -> float:
        return sum(
            min(
                sum(
                    b
                    for d, _, s, n, b, _ in runs
                    if d == device and b is not None and s <= at < s + n
                ),
                1,
            )
            for at in range(low, high)
        )

    for row in found.devices.to_dicts():
        own = [run for run in runs if run[0] == row["device"]]
        low, high = min(run[2] for run in own), max(run[2] + run[3] for run in own)
        measured = [(n, b) for *_, n, b, _ in own if b is not None]
        estimated = [(n, p) for *_, n, _, p in own if p is not None]
        assert (row["window_ns"], row["kernel_count"]) == (1000 * (high - low), len(own))
        assert row["kernel_ns"] == 1000 * sum(run[3] for run in own)
        assert (row["measured_ns"], row["estimated_ns"]) == (
            1000 * sum(n for n, _ in measured),
            1000 * sum(n for n, _ in estimated),
        )
        assert row["sm_efficiency"] == pytest.approx(area(row["device"], low, high) / (high - low))
        assert row["sm_fill"] == pytest.approx(
            sum(n * min(b, 1) for n, b in measured) / sum(n for n, _ in measured)
        )
        weighted = sum(n * p / 100 for n, p in estimated) / sum(n for n, _ in estimated)
        assert row["occupancy"] == pytest.approx(weighted)
    for device, step, duration, filled in found.steps.rows():
        assert duration == 1000 * (bounds[step + 1] - bounds[step])
        assert filled == pytest.approx(
            area(device, bounds[step], bounds[step + 1]) * 1000 / duration
        )
    assert (
        found.kernels["total_ns"].sum()
        == found.matrix["total_ns"].sum()
        == 1000 * sum(run[3] for run in runs)
    )
    for row in found.kernels.to_dicts():
        own = [run for run in runs if run[1] == row["name"]]
        measured = [(n, b) for *_, n, b, _ in own if b is not None]
        whole = sum(n for n, _ in measured)
        assert row["count"] == len(own)
        assert row["blocks_per_sm"] == (
            pytest.approx(sum(n * b for n, b in measured) / whole) if whole else None
        )
