"""Kinds, shapes, efficiency, copies and counters of the public traces, counted again with plain loops over the JSON."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl
import pytest

from support.public_traces import DATA, GPU_TIME, GPU_WORK, NEEDS_TRACES, trace_of
from traceloom.analyze import (
    copies,
    counters,
    kernel_bounds,
    kernel_efficiency,
    kernel_kinds,
    kernel_shapes,
)
from traceloom.analyze.kernel_kinds import PRIORITY, classify_kinds
from traceloom.analyze.kernel_rules import select_gpu_work

pytestmark = NEEDS_TRACES


@lru_cache(maxsize=1)
def raw(path: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / path) as stream:
        events: list[dict[str, Any]] = json.load(stream, parse_float=str)["traceEvents"]
    return events


def ns(text: Any) -> int:
    """Decimal microseconds as whole nanoseconds, never through a double."""
    whole, _, part = str(text).partition(".")
    return int(whole) * 1000 + int((part + "000")[:3])


def work_of(path: str) -> list[dict[str, Any]]:
    return [e for e in raw(path) if e.get("ph") == "X" and e.get("cat") in GPU_WORK]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", sorted(GPU_TIME))
def test_kinds_and_idle_time_add_up_to_the_window_of_every_device(path: str) -> None:
    trace = trace_of(path)
    found = kernel_kinds(trace)
    found.check()
    tolerance = 1e-5 if "v100_ns_resolution" in path else 0
    devices = {str(row["device"]): row for row in found.devices.to_dicts()}
    assert set(devices) == set(GPU_TIME[path]["devices"])
    for device, fields in GPU_TIME[path]["devices"].items():
        assert devices[device]["count"] == fields["gpu_work_count"]
        for name in ("window_ns", "busy_ns", "idle_ns"):
            assert devices[device][name] == pytest.approx(fields[name], rel=tolerance, abs=0)
    assert found.rules["sum_ns"].sum() == found.kinds["sum_ns"].sum()
    assert found.steps["exclusive_ns"].sum() == found.kinds["exclusive_ns"].sum()
    assert found.steps["count"].sum() == found.kinds["count"].sum()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", sorted(GPU_TIME))
def test_bounds_add_up_to_all_work_and_to_the_busy_time_of_every_device(path: str) -> None:
    trace = trace_of(path)
    found, kinds_of = kernel_bounds(trace), kernel_kinds(trace)
    for row in kinds_of.devices.to_dicts():
        mine = found.bounds.filter(pl.col("device").eq_missing(row["device"]))
        assert (mine["sum_ns"].sum(), mine["exclusive_ns"].sum()) == (row["sum_ns"], row["busy_ns"])
        assert mine["count"].sum() == row["count"]
    assert found.kinds["sum_ns"].sum() == kinds_of.devices["sum_ns"].sum()


@pytest.mark.parametrize(
    ("path", "known", "largest"),
    [
        ("kineto/h100_owlv2.json.gz", 0.97, "memory"),
        ("kineto/mi300_bert_small.json.gz", 0.99, "latency"),
    ],
)
def test_what_bounds_two_models_on_two_vendors(path: str, known: float, largest: str) -> None:
    """Owlv2 waits for the memory that its softmax over all patches reads; the small BERT is too small for an MI300X."""
    found = kernel_bounds(trace_of(path))
    assert found.known_fraction == pytest.approx(known, abs=0.02)
    shares = dict(found.bounds.select("bound", "fraction").rows())
    assert shares[largest] > 0.5


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", sorted(GPU_TIME))
def test_shapes_efficiency_and_copies_add_up(path: str) -> None:
    trace = trace_of(path)
    work = select_gpu_work(trace)
    whole = int((work["end_ns"] - work["start_ns"]).sum())
    shapes = kernel_shapes(trace)
    assert (shapes.rows["total_ns"].sum(), shapes.total_ns, shapes.rows["count"].sum()) == (
        whole,
        whole,
        work.height,
    )
    efficiency = kernel_efficiency(trace)
    kernel_ns = efficiency.devices["kernel_ns"].sum()
    assert efficiency.matrix["total_ns"].sum() == efficiency.kernels["total_ns"].sum() == kernel_ns
    assert kernel_ns == pytest.approx(
        GPU_TIME[path]["kernel_ns"], rel=1e-5 if "v100_ns" in path else 0, abs=0
    )
    assert efficiency.matrix["count"].sum() == GPU_TIME[path]["kernel_count"]
    moved = copies(trace)
    memory = sum(fields["memory_ns"] for fields in GPU_TIME[path]["devices"].values())
    assert moved.kinds["total_ns"].sum() == moved.ops["total_ns"].sum()
    assert moved.kinds["union_ns"].sum() >= memory * (
        1 - 1e-5
    )  # unions of single directions, which may overlap


@pytest.mark.parametrize(
    "path",
    [
        "kineto/a100_ddp_nccl.json.gz",
        "kineto/h800_deepseek_train.json.gz",
        "kineto/mi300_sglang_decode_graphs.json.gz",
    ],
)
def test_exclusive_time_by_a_walk_through_all_starts_and_ends(path: str) -> None:
    trace = trace_of(path)
    work = select_gpu_work(trace).with_columns(told=classify_kinds(trace)["kind"])
    edges = []
    for start, end, kind in work.select("start_ns", "end_ns", "told").iter_rows():
        edges += [(start, 1, kind), (end, -1, kind)]
    edges.sort(key=lambda edge: edge[0])
    running: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    before = edges[0][0]
    for at, change, kind in edges:
        owner = next((name for name in PRIORITY if running[name]), None)
        if owner is not None:
            alone[owner] += at - before
        running[kind] += change
        before = at
    found = {
        row["kind"]: row["exclusive_ns"]
        for row in kernel_kinds(trace).kinds.to_dicts()
        if row["exclusive_ns"]
    }
    assert found == dict(+alone)


def test_kinds_of_a_trained_resnet_on_nvidia() -> None:
    """Kernels joined to operators by external id, as the file has it."""
    path = "kineto/a100_ddp_nccl.json.gz"
    op = {e["args"]["External id"]: e["name"] for e in raw(path) if e.get("cat") == "cpu_op"}
    sums: Counter[str] = Counter()
    for event in work_of(path):
        name, launcher = event["name"], op.get(event["args"].get("External id"), "")
        if event["cat"] != "kernel":
            sums["copied"] += ns(event["dur"])
        elif "nccl" in name:
            sums["communication"] += ns(event["dur"])
        elif "convolution" in launcher:
            sums["convolution"] += ns(event["dur"])
        elif "cudnn::bn_" in name or "batch_norm" in launcher or "softmax" in name.lower():
            sums["normalisation"] += ns(event["dur"])
        elif "gemm" in name:
            sums["gemm"] += ns(event["dur"])
    found = {row["kind"]: row["sum_ns"] for row in kernel_kinds(trace_of(path)).kinds.to_dicts()}
    for kind in ("communication", "convolution", "normalisation"):
        assert found[kind] == sums[kind]
    assert (
        found["gemm"] >= sums["gemm"] > 0
    )  # and the sums of split products, which are named otherwise
    assert found["copy"] >= sums["copied"]
    assert found["convolution"] == 56_152_003


@pytest.mark.parametrize(
    "path",
    [
        "kineto/a100_ddp_nccl.json.gz",
        "kineto/v100_ns_resolution.json.gz",
        "kineto/mi250_minitoy.json.gz",
    ],
)
def test_what_the_step_of_an_optimizer_launches_is_the_optimizers(path: str) -> None:
    spans = [
        (ns(e["ts"]), ns(e["ts"]) + ns(e["dur"]), e["tid"])
        for e in raw(path)
        if e.get("cat") == "user_annotation" and e["name"].startswith("Optimizer.step#")
    ]
    launched = {
        e["args"]["correlation"]
        for e in raw(path)
        if e.get("cat") == "cuda_runtime"
        and any(start <= ns(e["ts"]) < end and tid == e["tid"] for start, end, tid in spans)
    }
    work = [e for e in work_of(path) if e["args"].get("correlation") in launched]
    found = kernel_kinds(trace_of(path)).kinds.filter(pl.col("kind") == "optimizer")
    assert (found["count"].sum(), len(work) > 0) == (len(work), True)
    assert found["sum_ns"].sum() == pytest.approx(
        sum(ns(e["dur"]) for e in work), rel=1e-5 if "v100" in path else 0
    )


def test_kinds_of_a_language_model_on_amd() -> None:
    path = "kineto/mi300_qwen_0.5b.json.gz"
    sums: Counter[str] = Counter()
    for event in work_of(path):
        for part, kind in (("Cijk_", "gemm"), ("attn_fwd", "attention"), ("MeanOps", "reduction")):
            if part in event["name"]:
                sums[kind] += ns(event["dur"])
    found = {row["kind"]: row["sum_ns"] for row in kernel_kinds(trace_of(path)).kinds.to_dicts()}
    assert (found["gemm"], found["gemm"]) == (sums["gemm"], 16_887_733)
    assert (
        found["attention"] >= sums["attention"] > 5_000_000
    )  # and what prepares it under the same operator
    assert found["normalisation"] == found["optimizer"] == found["communication"] == 0


@pytest.mark.parametrize("path", ["kineto/h100_owlv2.json.gz", "kineto/mi300_qwen_0.5b.json.gz"])
def test_kernels_by_shapes_as_the_operators_of_the_file_have_them(path: str) -> None:
    said = {e["args"]["External id"]: e for e in raw(path) if e.get("cat") == "cpu_op"}
    wanted: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for event in work_of(path):
        op = said.get(event["args"].get("External id"))
        if (
            op is not None
            and op["name"] in ("aten::bmm", "aten::addmm", "aten::mm")
            and event["cat"] == "kernel"
        ):
            shapes = json.dumps(op["args"]["Input Dims"], separators=(",", ":"))
            wanted[op["name"], shapes, event["name"]].append(ns(event["dur"]))
    rows = kernel_shapes(trace_of(path)).rows.filter(
        pl.col("op").is_in(["aten::bmm", "aten::addmm", "aten::mm"])
    )
    found = {
        (
            row["op"],
            json.dumps(json.loads(row["shapes"]), separators=(",", ":")),
            row["kernel"],
        ): row
        for row in rows.to_dicts()
        if not row["kernel"].startswith("Mem")
    }
    assert set(found) == set(wanted)
    for key, durations in wanted.items():
        row = found[key]
        assert (row["count"], row["total_ns"]) == (len(durations), sum(durations))
        assert (row["min_ns"], row["max_ns"]) == (min(durations), max(durations))


def test_sm_efficiency_and_occupancy_by_their_formula() -> None:
    """No two kernels overlap for long here, so the plain sum is within a thousandth."""
    path = "kineto/h100_owlv2.json.gz"
    kernels = [e for e in work_of(path) if e["cat"] == "kernel"]
    work = work_of(path)
    window = max(ns(e["ts"]) + ns(e["dur"]) for e in work) - min(ns(e["ts"]) for e in work)
    filled = sum(min(float(e["args"]["blocks per SM"]), 1.0) * ns(e["dur"]) for e in kernels)
    whole = sum(ns(e["dur"]) for e in kernels)
    # 0 % of an SM that holds a warp is an estimate that failed
    told = [
        e
        for e in kernels
        if e["args"]["est. achieved occupancy %"] or float(e["args"]["warps per SM"]) < 1
    ]
    lit = sum(float(e["args"]["est. achieved occupancy %"]) * ns(e["dur"]) for e in told)
    known = sum(ns(e["dur"]) for e in told)
    row = kernel_efficiency(trace_of(path)).devices.row(0, named=True)
    assert row["kernel_ns"] == row["measured_ns"] == whole
    assert row["sm_efficiency"] == pytest.approx(filled / window, rel=1e-3)
    assert row["sm_fill"] == pytest.approx(filled / whole, rel=1e-9)
    assert (row["estimated_ns"], known < whole) == (known, True)
    assert row["occupancy"] == pytest.approx(lit / known / 100, rel=1e-9)


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("kineto/h100_bert_small.json.gz", r"tensorop|xmma|flash_fwd"),
        ("kineto/mi300_bert_small.json.gz", r"Cijk_.*_MI\d|attn_fwd"),
        ("kineto/v100_ns_resolution.json.gz", r"884"),
    ],
)
def test_matrix_units_by_names(path: str, pattern: str) -> None:
    used = sum(
        ns(e["dur"])
        for e in work_of(path)
        if e["cat"] == "kernel" and re.search(pattern, e["name"])
    )
    found = dict(kernel_efficiency(trace_of(path)).matrix.select("matrix_units", "total_ns").rows())
    assert found["used"] == used
    assert (used > 0) == (
        "v100" not in path
    )  # single precision on a V100 runs on scalar units only
    assert (found["unused"] > 0) == ("v100" in path)


@pytest.mark.parametrize(
    "path",
    [
        "kineto/h100_owlv2.json.gz",
        "diff/v100_test.json.gz",
        "kineto/mi300_vllm_piecewise_graphs.json.gz",
    ],
)
def test_bytes_and_bandwidth_by_direction(path: str) -> None:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    pageable = 0
    for event in work_of(path):
        if event["cat"] == "kernel":
            continue
        direction = event["name"].split()[1] if event["name"].startswith("Memcpy") else "fill"
        size, length = int(event["args"]["bytes"]), ns(event["dur"])
        row = sums[direction]
        row[0] += 1
        row[1] += size
        row[2] += length
        row[3] += size if length else 0
        row[4] += length == 0
        pageable += "Pageable" in event["name"]
    table = copies(trace_of(path)).kinds
    for direction, (count, size, length, timed, instant) in sums.items():
        mine = table.filter(pl.col("kind") == direction)
        assert (mine["count"].sum(), mine["bytes"].sum(), mine["total_ns"].sum()) == (
            count,
            size,
            length,
        )
        assert mine["instant_count"].sum() == instant
        if mine.height == 1:
            assert mine["bytes_per_s"].item() == pytest.approx(timed / length * 1e9)
    assert set(table["kind"]) == set(sums)
    assert table.filter(pl.col("pageable"))["count"].sum() == pageable


@pytest.mark.parametrize("path", ["kineto/h100_owlv2.json.gz", "diff/a100_control.json.gz"])
def test_the_area_below_the_bandwidth_curve_is_what_was_copied(path: str) -> None:
    found = copies(trace_of(path))
    for (kind,), curve in found.curve.group_by("kind"):
        times, rates = curve["time_ns"].to_numpy(), curve["bytes_per_s"].to_numpy()
        rows = found.kinds.filter(pl.col("kind") == kind)
        timed = rows["bytes"].sum() - rows["instant_bytes"].sum()
        assert float((rates[:-1] * np.diff(times)).sum() / 1e9) == pytest.approx(timed, rel=1e-9)
        assert rates[-1] == 0.0


def test_counters_of_kernels_belong_to_the_operators_that_launched_them() -> None:
    path = "kineto/a100_cupti_counters.json.gz"
    ops = [e for e in raw(path) if e.get("cat") == "cpu_op"]
    calls = sorted(
        (e for e in raw(path) if e.get("name") == "cudaLaunchKernel" and e.get("ph") == "X"),
        key=lambda e: ns(e["ts"]),
    )
    ranges = sorted(
        (e for e in raw(path) if e.get("cat") == "cuda_profiler_range"), key=lambda e: ns(e["ts"])
    )
    assert len(calls) == len(ranges) == 77
    wanted: Counter[tuple[str, str]] = Counter()
    for call, measured in zip(calls, ranges, strict=True):
        around = [
            o
            for o in ops
            if o["tid"] == call["tid"]
            and ns(o["ts"]) <= ns(call["ts"]) < ns(o["ts"]) + ns(o["dur"])
        ]
        innermost = max(around, key=lambda o: ns(o["ts"]))["name"]
        for key, value in measured["args"].items():
            wanted[innermost, key] += int(value)
    found = counters(trace_of(path))
    assert {
        (row["op"], row["counter"]): row["value"] for row in found.operators.to_dicts()
    } == dict(wanted)
    assert (found.unpaired, found.range_count, found.launch_count) == (None, 77, 77)
    assert found.ranges.filter(pl.col("kernel").is_null())["range"].unique().to_list() == [1]
