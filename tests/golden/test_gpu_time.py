"""GPU time of the public traces: the golden numbers to the nanosecond, and sums that close."""

from __future__ import annotations

import polars as pl
import pytest

from support.public_traces import GPU_TIME, NEEDS_TRACES, trace_of
from traceloom.analyze import communication, gpu_time, idle, kernels, longest_gaps, step_times
from traceloom.analyze.gpu_time import FIELDS

pytestmark = NEEDS_TRACES
on_every_trace = pytest.mark.parametrize("path", sorted(GPU_TIME))


@on_every_trace
def test_device_figures_equal_the_golden_file(path: str) -> None:
    trace = trace_of(path)
    found = {str(row["device"]): row for row in gpu_time(trace).devices.to_dicts()}
    wanted = GPU_TIME[path]["devices"]
    # fractional Unix microseconds: the golden file allows 0.001 %
    tolerance = 1e-5 if "v100_ns_resolution" in path else 0
    assert set(found) == set(wanted)
    for device, fields in wanted.items():
        for field, value in fields.items():
            assert found[device][field] == pytest.approx(value, rel=tolerance, abs=0), (
                device,
                field,
            )


@on_every_trace
def test_kernel_counts_and_sums_equal_the_golden_file(path: str) -> None:
    trace, wanted = trace_of(path), GPU_TIME[path]
    devices = gpu_time(trace).devices
    table = kernels(trace).kernels.filter(pl.col("kind") == "kernel")
    tolerance = 1e-5 if "v100_ns_resolution" in path else 0
    assert devices["kernel_count"].sum() == table["count"].sum() == wanted["kernel_count"]
    assert devices["kernel_ns"].sum() == table["total_ns"].sum()
    assert devices["kernel_ns"].sum() == pytest.approx(wanted["kernel_ns"], rel=tolerance, abs=0)
    found = {row["name"]: (row["total_ns"], row["count"]) for row in table.to_dicts()}
    for top in wanted["top_kernels"]:
        total, count = found[top["name"]]
        assert count == top["count"]
        assert total == pytest.approx(top["total_ns"], rel=tolerance, abs=0)


@on_every_trace
def test_the_parts_of_each_row_add_up(path: str) -> None:
    result = gpu_time(trace_of(path))
    for rows in (result.devices, result.steps):
        parts = rows.select(
            pl.sum_horizontal(
                "compute_ns", "exposed_communication_ns", "exposed_memory_ns", "idle_ns"
            )
        )
        assert parts.to_series().to_list() == rows["window_ns"].to_list()
        assert (rows.select(pl.col(FIELDS).min()).fill_null(0).to_numpy() >= 0).all()
    tiles = result.steps.select(
        pl.sum_horizontal("window_ns", "edge_idle_before_ns", "edge_idle_after_ns")
    )
    assert tiles.to_series().to_list() == result.steps["duration_ns"].to_list()


@on_every_trace
def test_steps_and_the_time_outside_add_up_to_each_device(path: str) -> None:
    trace = trace_of(path)
    result = gpu_time(trace)
    added = result.steps.group_by("device").agg(pl.col(FIELDS).sum()).sort("device")
    assert added.equals(result.devices.select("device", *FIELDS).sort("device"))
    durations = (
        result.steps.group_by("device").agg(pl.col("duration_ns").sum())["duration_ns"].to_list()
    )
    assert durations == [trace.end_ns - trace.start_ns] * result.devices.height


@on_every_trace
def test_idle_causes_add_up_to_the_idle_time_of_devices_and_steps(path: str) -> None:
    trace = trace_of(path)
    time, found = gpu_time(trace), idle(trace)
    idle_ns = pl.col("idle_ns")
    for frame, keys, whole in (
        (found.totals, ["device"], time.devices),
        (found.causes, ["device", "step"], time.steps),
        (found.gaps.rename({"duration_ns": "idle_ns"}), ["device", "step"], time.steps),
    ):
        added = frame.group_by(keys).agg(idle_ns.sum()).sort(keys)
        assert added.equals(whole.filter(idle_ns > 0).select(*keys, "idle_ns").sort(keys))
    assert (found.gaps["duration_ns"] > 0).all()
    unknown = found.gaps.filter(pl.col("evidence").is_null())["cause"].unique().to_list()
    assert unknown in ([], ["launch_not_recorded"])


@on_every_trace
def test_the_longest_gaps_are_the_longest_and_their_evidence_fits_the_cause(path: str) -> None:
    trace = trace_of(path)
    found = idle(trace)
    rows = longest_gaps(trace, found, 30)
    lengths = (
        found.gaps.group_by("gap")
        .agg(pl.col("duration_ns").sum())["duration_ns"]
        .sort(descending=True)
    )
    assert rows["duration_ns"].to_list() == lengths.head(30).to_list()
    start, events = trace.events["start_ns"], trace.events
    ends = start + events["duration_ns"].clip(lower_bound=0)
    for row in rows.to_dicts():
        gap_end = row["start_ns"] + row["duration_ns"]
        assert row["start_ns"] == ends[row["before"]]
        assert gap_end == start[row["after"]]
        assert row["cause_ns"] <= row["duration_ns"]
        assert (
            (row["producer"] is None)
            or row["cause"] == "dependency"
            or row["cause_ns"] < row["duration_ns"]
        )
        if row["producer"] is not None:
            assert ends[row["producer"]] <= gap_end + 2_000
        if row["host_event"] is not None:  # it was open in the gap
            assert start[row["host_event"]] < gap_end
            assert ends[row["host_event"]] > row["start_ns"]


@on_every_trace
def test_communication_adds_up_to_the_communication_of_devices(path: str) -> None:
    trace = trace_of(path)
    devices = gpu_time(trace).devices.filter(pl.col("communication_ns") > 0)
    found = communication(trace)
    wanted = (
        devices.select("device", "communication_ns", "exposed_communication_ns")
        .sort("device")
        .rows()
    )
    assert found.devices.select("device", "union_ns", "exposed_ns").rows() == wanted
    on_device = found.collectives.filter(pl.col("where") == "device")
    assert on_device["total_ns"].sum() == found.devices["total_ns"].sum()
    assert on_device["count"].sum() == found.devices["count"].sum()
    assert (on_device["exposed_ns"] <= on_device["total_ns"]).all()


@on_every_trace
def test_categories_add_up_to_the_kernels_and_to_the_devices(path: str) -> None:
    trace = trace_of(path)
    devices, found = gpu_time(trace).devices, kernels(trace)
    by_name = found.kernels.group_by("category").agg(pl.col("count", "total_ns").sum())
    for row in found.categories.to_dicts():
        named = by_name.filter(pl.col("category") == row["category"])
        assert (named["count"].sum(), named["total_ns"].sum()) == (row["count"], row["total_ns"])
        assert row["union_ns"] == devices[f"{row['category']}_ns"].sum()
    if found.kernels.height:
        assert found.kernels["fraction"].sum() == pytest.approx(1.0)


@on_every_trace
def test_steps_are_counted_and_lags_are_not_negative(path: str) -> None:
    trace = trace_of(path)
    times = step_times(trace)
    assert times.steps.height == trace.steps.height
    assert times.count == trace.steps["complete"].sum()
    assert (times.steps["lag_ns"].drop_nulls() >= 0).all()


def test_deepseeks_expert_parallel_communication_is_found_and_mostly_hidden() -> None:
    found = communication(trace_of("kineto/h800_deepseek_train.json.gz"))
    assert dict(found.collectives.select("kind", "count").rows()) == {
        "combine": 8,
        "notify": 16,
        "dispatch": 8,
        "layout": 4,
    }
    assert found.devices["exposed_ns"][0] * 20 < found.devices["union_ns"][0]


def test_a_cpu_only_trace_has_its_gloo_collectives_with_their_bytes() -> None:
    rows = communication(trace_of("kineto/cpu_only_gloo_rank34.json.gz")).collectives.to_dicts()
    assert [
        (r["kind"], r["where"], r["element_type"], r["count"], r["bytes"], r["exposed_ns"])
        for r in rows
    ] == [("all_reduce", "host", "Float", 10, 5 * 4 * (321271 + 2082411), None)]


def test_dlrm_all_to_all_is_named_by_its_annotation_not_by_its_kernel() -> None:
    rows = communication(trace_of("multirank/dlrm_rank7.kineto.json.gz")).collectives
    on_device = rows.filter(pl.col("where") == "device")
    assert dict(on_device.group_by("kind").agg(pl.col("count").sum()).rows()) == {
        "all_to_all": 5,
        "all_reduce": 3,
    }
    assert on_device["bytes"].null_count() == 0


def test_the_idle_time_of_owlv2_is_the_loading_of_its_images() -> None:
    found = idle(trace_of("kineto/h100_owlv2.json.gz"))
    largest = found.totals.to_dicts()[0]
    assert largest["cause"] == "host_data_loading"
    assert largest["idle_ns"] > 0.9 * found.totals["idle_ns"].sum()
    top = found.gaps.sort("duration_ns", descending=True).to_dicts()[0]
    assert top["host_activity"] == "<built-in function zoom_shift>"


def test_inner_gaps_of_graph_launches_are_told_apart() -> None:
    totals = {
        r["cause"]: r
        for r in idle(trace_of("kineto/mi300_sglang_decode_graphs.json.gz")).totals.to_dicts()
    }
    assert (
        totals["graph_internal"]["gap_count"] == 543
    )  # the one graph of 544 kernels, run back to back or not
    assert totals["launch_not_recorded"]["idle_ns"] > 400_000_000
