"""Collectives of the public traces against plain loops over their JSON, and the golden facts of trace-data.md."""

from __future__ import annotations

import gzip
import json
from typing import Any

import polars as pl
import pytest

from support.public_traces import DATA, trace_of
from traceloom import analyze

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not DATA.is_dir(), reason="the public traces (../shared/data) are not on this machine"
    ),
]
ALL = (
    sorted(str(path.relative_to(DATA)) for path in DATA.glob("kineto/*.json.gz"))
    if DATA.is_dir()
    else []
)
SIZES = {"Float": 4, "Long": 8}


def events_of(path: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def test_every_nccl_kernel_of_a_ddp_run_has_the_bytes_rates_and_channels_of_its_json() -> None:
    path = "kineto/a100_ddp_nccl.json.gz"
    kernels = [e for e in events_of(path) if e.get("cat") == "kernel"]
    talk = sorted((e for e in kernels if "nccl" in e["name"]), key=lambda e: e["ts"])
    compute = [
        (round(e["ts"] * 1000), round(e["ts"] * 1000) + round(e["dur"] * 1000))
        for e in kernels
        if "nccl" not in e["name"]
    ]
    calls = analyze.collectives(trace_of(path)).calls.sort("start_ns")
    assert calls.height == len(talk) == 21
    assert calls["kind"].value_counts().sort("kind").rows() == [
        ("all_reduce", 15),
        ("broadcast", 6),
    ]
    for row, event in zip(calls.to_dicts(), talk, strict=True):
        args, duration = event["args"], round(event["dur"] * 1000)
        size = args["In msg nelems"] * SIZES[args["dtype"]]
        factor = 2 * (2 - 1) / 2 if args["Collective name"] == "allreduce" else 1
        assert (row["duration_ns"], row["size_bytes"], row["channels"]) == (
            duration,
            size,
            args["grid"][0],
        )
        assert row["bus_gb_per_s"] == pytest.approx(size / duration * factor)
        assert (row["link"], row["link_peak_gb_per_s"]) == (
            "NVLink 3",
            300,
        )  # both ranks lie on a host of 8 devices
        start = round(event["ts"] * 1000)
        hidden = _covered(compute, start, start + duration)
        # the file's times are decimal microseconds: a double may be one unit off
        assert row["exposed_ns"] == pytest.approx(duration - hidden, abs=4)
        assert 0 <= row["blocking_ns"] <= row["exposed_ns"]
        assert (row["algorithm"], row["protocol"], row["name_certain"]) == ("RING", "LL", False)


def _covered(spans: list[tuple[int, int]], low: int, high: int) -> int:
    total, reach = 0, low
    for start, end in sorted(spans):
        begin, stop = max(start, reach), min(end, high)
        if stop > begin:
            total += stop - begin
        reach = max(reach, min(end, high))
    return total


def test_bus_bandwidth_by_hand() -> None:
    calls = analyze.collectives(trace_of("kineto/a100_ddp_nccl.json.gz")).calls
    row = calls.filter(pl.col("duration_ns") == 2_424_415).to_dicts()[0]
    # 7,875,584 floats = 31,502,336 bytes over 2 ranks in 2.424415 ms: 12.9938 GB/s, times 2 (2 - 1) / 2
    assert row["size_bytes"] == 31_502_336
    assert row["bus_gb_per_s"] == pytest.approx(12.99379, abs=1e-4)
    assert row["link_fraction"] == pytest.approx(12.99379 / 300, abs=1e-6)


def test_exposed_is_not_blocking_where_the_host_comes_late() -> None:
    calls = analyze.collectives(trace_of("kineto/a100_ddp_nccl.json.gz")).calls
    reduces = calls.filter(pl.col("kind") == "all_reduce")
    assert int(reduces["exposed_ns"].sum()) > 30_000_000
    assert int(reduces["blocking_ns"].sum()) < 200_000


def test_expert_parallel_kernels_are_told_apart_and_hidden() -> None:
    calls = analyze.collectives(trace_of("kineto/h800_deepseek_train.json.gz")).calls
    kinds = dict(calls.group_by("kind").len().rows())
    assert kinds == {"dispatch": 8, "combine": 8, "notify": 16, "layout": 4}
    assert set(calls["backend"]) == {"deep_ep"}
    golden = json.loads((DATA / "golden" / "gpu_time.json").read_text())[
        "kineto/h800_deepseek_train.json.gz"
    ]
    (device,) = golden["devices"].values()
    assert int(calls["duration_ns"].sum()) == device["communication_ns"]  # all on one stream
    assert int(calls["exposed_ns"].sum()) == device["exposed_communication_ns"]
    found = analyze.groups(
        calls, analyze.declared_groups(trace_of("kineto/h800_deepseek_train.json.gz")), 64
    ).groups
    assert found["role"].to_list() == ["expert"]


def test_gloo_calls_of_a_run_without_devices_are_rows_on_the_host() -> None:
    path = "kineto/cpu_only_gloo_rank34.json.gz"
    calls = analyze.collectives(trace_of(path)).calls
    known = sorted(
        round(e["dur"] * 1000) for e in events_of(path) if str(e.get("name")).startswith("gloo:")
    )
    assert sorted(calls["duration_ns"].to_list()) == pytest.approx(known, abs=1)
    assert set(calls["where"]) == {"host"}
    assert sorted(set(calls["size_bytes"])) == [321_271 * 4, 2_082_411 * 4]
    assert (
        calls["exposed_ns"].null_count() == calls["bus_gb_per_s"].null_count() == calls.height == 10
    )
    declared = analyze.declared_groups(trace_of(path))
    found = analyze.groups(calls, declared, 300).groups
    assert declared.height == 11
    assert found.filter(pl.col("count") == 0).height == 11, "listed and never called"


def test_the_group_of_a_ddp_run_is_data_parallel() -> None:
    trace = trace_of("kineto/a100_ddp_nccl.json.gz")
    found = analyze.groups(
        analyze.collectives(trace).calls, analyze.declared_groups(trace), 2
    ).groups
    (row,) = found.to_dicts()
    assert (row["group"], row["group_size"], row["members"], row["role"]) == (
        "0",
        2,
        [0, 1],
        "data",
    )
    cells = analyze.matrix(analyze.collectives(trace).calls)
    assert cells.select("source", "target", "exact_bytes").rows() == [(0, 1, 0)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", ALL)
def test_calls_of_every_trace_are_what_communication_counts(path: str) -> None:
    trace = trace_of(path)
    calls = analyze.collectives(trace).calls
    table = analyze.communication(trace).collectives
    for where in ("device", "host"):
        mine, theirs = (
            calls.filter(pl.col("where") == where),
            table.filter(pl.col("where") == where),
        )
        if where == "device" or not (calls["where"] == "device").any():
            assert mine.height == theirs["count"].sum()
            assert mine["duration_ns"].sum() == theirs["total_ns"].sum()
    assert calls.filter(pl.col("blocking_ns") > pl.col("exposed_ns")).height == 0
    assert calls.filter(pl.col("exposed_ns") > pl.col("duration_ns")).height == 0
    summary = analyze.collectives(trace).summary
    assert summary["count"].sum() == calls.height
    assert summary["total_ns"].sum() == calls["duration_ns"].sum()
