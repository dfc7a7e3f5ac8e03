"""The public traces, against counts and times that were taken from the files independently."""

from __future__ import annotations

import polars as pl
import pytest

from support.public_traces import DATA, GPU_TIME, NEEDS_TRACES
from traceloom.formats import arguments, read_kineto

# Kineto's names that one closed category stands for.
KINETO = {
    "cpu_op": "op",
    "user_annotation": "annotation",
    "gpu_user_annotation": "gpu_annotation",
    "python_function": "python",
    "gpu_memcpy": "copy",
    "gpu_memset": "fill",
    "cuda_runtime": "runtime",
    "mtia_runtime": "runtime",
    "cuda_driver": "driver",
    "cuda_sync": "sync",
    "mtia_ccp_events": "command",
    "cuda_profiler_range": "counter_range",
    "Trace": "profiler",
}

pytestmark = NEEDS_TRACES


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", sorted(GPU_TIME))
def test_events_kernels_and_windows_equal_the_golden_file(name):
    golden = GPU_TIME[name]
    trace = read_kineto(DATA / name)
    trace.check()
    assert trace.meta.event_count == golden["events"]
    counts: dict[str, int] = {}
    for category, count in golden["categories"].items():
        ours = KINETO.get(category, category)
        counts[ours] = counts.get(ours, 0) + count
    assert dict(trace.events["category"].cast(pl.String).value_counts().rows()) == counts
    kernels = trace.events.filter(pl.col("category") == "kernel")
    assert kernels.height == golden["kernel_count"]
    assert kernels["duration_ns"].clip(lower_bound=0).sum() == golden["kernel_ns"]
    assert trace.gpu_work()["launch"].null_count() == golden["orphan_gpu_work"]
    for device, expected in golden["devices"].items():
        work = trace.gpu_work().filter(pl.col("device") == int(device))
        end = work["start_ns"] + work["duration_ns"].clip(lower_bound=0)
        assert end.max() - work["start_ns"].min() == expected["window_ns"]
        assert work.height == expected["gpu_work_count"]
        assert trace.devices.filter(pl.col("device") == int(device))["used"].to_list() == [True]
    totals = kernels.group_by("name").agg(pl.col("duration_ns").sum(), pl.len())
    for top in golden["top_kernels"]:
        assert totals.filter(pl.col("name") == top["name"]).rows()[0][1:] == (
            top["total_ns"],
            top["count"],
        )


@pytest.mark.parametrize(
    "name",
    [
        "kineto/h100_bert_small",
        "kineto/mi300_vllm_piecewise_graphs",
        "critical_path/alexnet",
        "kineto/mtia_inference",
    ],
)
def test_arguments_are_read_again_as_they_stand_in_the_file(name):
    path = DATA / f"{name}.json.gz"
    trace = read_kineto(path)
    correlated = trace.events.filter(pl.col("correlation").is_not_null())
    for event, correlation in (
        correlated[:: max(1, correlated.height // 5)].select("event", "correlation").rows()
    ):
        assert arguments(trace, event)["correlation"] == correlation


@pytest.mark.parametrize(
    "name", ["kineto/a100_ddp_nccl", "diff/a100_control", "damaged_metadata/legacy_categories"]
)
def test_launch_arrows_of_all_generations_join_launches_and_their_work(name):
    trace = read_kineto(DATA / f"{name}.json.gz")
    arrows = trace.flows.filter(
        (pl.col("kind") == "launch")
        & pl.col("source").is_not_null()
        & pl.col("target").is_not_null()
    )
    assert arrows.height > 0
    source = trace.events[arrows["source"]]
    target = trace.events[arrows["target"]]
    work = target["category"].is_in(["kernel", "copy", "fill"])
    assert work.sum() > 0
    assert (source["correlation"] == target["correlation"]).filter(work).all()


def test_the_ddp_trace_has_its_group_steps_and_collectives():
    trace = read_kineto(DATA / "kineto/a100_ddp_nccl.json.gz")
    assert trace.groups.rows() == [("0", "default_pg", "cuda:nccl", 2, [0, 1])]
    assert trace.steps["evidence"].unique().to_list() == ["profiler-step"]
    category = trace.events[trace.collectives["event"]]["category"]
    on_device = trace.collectives.filter(category == "kernel")
    assert dict(on_device["kind"].value_counts().rows()) == {"all_reduce": 15, "broadcast": 6}
    assert on_device["in_bytes"].null_count() == 0
    assert trace.flows.filter(pl.col("kind") == "forward-backward").height == 543
    assert trace.meta.versions["nccl_version"] == "2.17.1"


def test_external_ids_that_only_repeat_the_correlation_are_null():
    old = read_kineto(DATA / "kineto/h800_deepseek_train.json.gz")
    assert old.gpu_work()["external_id"].null_count() == old.gpu_work().height
    new = read_kineto(DATA / "kineto/h100_bert_small.json.gz")
    assert new.gpu_work()["external_id"].null_count() < new.gpu_work().height


def test_one_graph_launch_owns_all_its_kernels():
    trace = read_kineto(DATA / "kineto/mi300_sglang_decode_graphs.json.gz")
    owners = trace.gpu_work()["launch"].value_counts(sort=True)
    assert owners["count"][0] == 544
    assert trace.events["name"][owners["launch"][0]] == "hipGraphLaunch"


def test_memory_events_know_their_op_and_device():
    trace = read_kineto(DATA / "kineto/h100_owlv2.json.gz")
    assert trace.allocations.height == 13_474
    assert set(trace.allocations["device_type"].unique()) == {"cpu", "cuda"}
    ops = trace.events[trace.allocations["op"].drop_nulls()]
    assert ops["category"].unique().to_list() == ["op"]
    assert ops.height == 8_277
