"""FLOPs of the public traces, counted again with plain loops over the JSON; coverage; sums that close."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from math import prod
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import polars as pl
import pytest

from support.public_traces import DATA, NEEDS_TRACES, TRACES, trace_of
from traceloom.analyze.modelled_calls import find_modelled_calls
from traceloom.analyze.roofline import roofline, select_modelled_work
from traceloom.report import ReportOptions, build
from traceloom.report.sections.device_rates import SECTION
from traceloom.trace.session import Session

pytestmark = NEEDS_TRACES


def leaf_flops(name: str, shapes: list[Any], concrete: list[str]) -> int | None:
    """2·M·N·K and its relatives for the innermost operators, written down again."""
    if name == "aten::mm":
        (m, k), (_, n) = shapes[:2]
        return 2 * m * n * k
    if name == "aten::addmm":
        (m, k), (_, n) = shapes[1:3]
        return 2 * m * n * k
    if name == "aten::bmm":
        (b, m, k), (_, _, n) = shapes[:2]
        return 2 * b * m * n * k
    if name == "aten::cudnn_convolution":
        x, w = shapes[:2]
        padding, stride, dilation = (json.loads(concrete[at]) for at in (2, 3, 4))
        out = [
            (x[i + 2] + 2 * padding[i] - dilation[i] * (w[i + 2] - 1) - 1) // stride[i] + 1
            for i in range(len(x) - 2)
        ]
        return 2 * x[0] * prod(out) * prod(w)
    if name == "aten::_flash_attention_forward":
        b, nq, h, d = shapes[0]
        nkv = shapes[1][1]
        pairs = (
            sum(min(nkv, max(0, i + 1 + nkv - nq)) for i in range(nq))
            if concrete[8] == "True"
            else nq * nkv
        )
        return 4 * b * h * pairs * d
    return None


def counted(path: str) -> tuple[int, dict[str, int]]:
    """(FLOPs, calls by name) of all such operators of the file, whether or not they are inside others."""
    with gzip.open(DATA / path, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    total, calls = 0, defaultdict(int)
    for event in events:
        args = event.get("args", {})
        if event.get("cat") == "cpu_op" and args.get("Input Dims"):
            flops = leaf_flops(event["name"], args["Input Dims"], args.get("Concrete Inputs", []))
            if flops is not None:
                total += flops
                calls[event["name"]] += 1
    return total, dict(calls)


FULL = {
    "kineto/h100_owlv2.json.gz": (29_166_401_318_400, 0.974),
    "kineto/h100_qwen_0.5b.json.gz": (5_760_721_390_528, 0.699),
    "kineto/h100_bert_small.json.gz": (8_192_059_392, 0.993),
    "kineto/mi300_qwen_0.5b.json.gz": (5_760_721_390_528, 0.691),
    "kineto/mi300_bert_small.json.gz": (8_192_059_392, 0.994),
    "kineto/mi250_minitoy.json.gz": (327_680, 0.744),
    "diff/a100_control.json.gz": (None, 0.341),
    "multirank/dlrm_rank0.kineto.json.gz": (None, 0.102),
}
"""Matrix FLOPs, and the share of GPU time with a model (not of what was launched before the recording, of old files
without the values of arguments, nor of communication)."""


@pytest.mark.parametrize("path", FULL)
def test_matrix_flops_equal_a_plain_loop_over_the_file(path: str) -> None:
    expected, calls = counted(path)
    found = roofline(trace_of(path))
    assert calls
    assert int(found.whole["hardware_flops"][0]) == expected
    known, covered = FULL[path]
    assert known is None or known == expected
    assert found.whole["modelled_fraction"][0] == pytest.approx(covered, abs=0.001)


@pytest.mark.parametrize("model", ["bert_small", "qwen_0.5b"])
def test_twins_on_two_vendors_do_the_same_work(model: str) -> None:
    one, other = (
        roofline(trace_of(f"kineto/{gpu}_{model}.json.gz")).whole.row(0, named=True)
        for gpu in ("h100", "mi300")
    )
    for key in ("flops", "bytes", "hardware_flops", "model_flops"):
        assert one[key] == other[key] > 0


def test_paged_attention_counts_what_the_annotation_of_the_step_tells() -> None:
    """execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37(sq37sk34489sqsq37sqsk34489)"""
    found = roofline(trace_of("kineto/mi300_vllm_piecewise_graphs.json.gz"), "MI300X")
    rows = {row["name"]: row for row in found.operators.to_dicts()}
    pairs = (7_671_310 - (7_475_785 - 8_155) // 2) + (34_489 - (37 - 37) // 2)
    attention = rows["vllm::unified_attention_with_output"]
    assert attention["count"] == 24
    assert attention["flops"] == 24 * 2 * 64 * pairs * (64 + 64)
    assert attention["bytes"] == 24 * 2 * (8192 * 64 * 128 + (8430 + 34_489) * 8 * 128)
    assert rows["vllm::rocm_unquantized_gemm"]["flops"] == 2 * 46 * 2880 * 201_088
    assert rows["vllm::rocm_unquantized_gemm"]["peak_flop_rate"] == 1307.4e12


def test_work_of_graphs_is_not_guessed() -> None:
    found = roofline(trace_of("kineto/mi300_sglang_decode_graphs.json.gz"))
    row = found.whole.row(0, named=True)
    assert row["modelled_fraction"] < 0.02
    assert row["mfu"] is None
    assert "matrix work without a model" in row["reason"]
    assert found.unmodelled["reason"][0] == "launched by a graph, whose operators are not recorded"
    by_name = dict(
        found.operators.filter(pl.col("name") == "aten::argmax").select("name", "flops").rows()
    )
    assert by_name == {"aten::argmax": 32 * 151_936}


def test_an_inductor_kernel_is_modelled_from_its_recorded_inputs() -> None:
    row = roofline(trace_of("kineto/triton_example.json.gz")).operators.row(0, named=True)
    assert (row["name"], row["flops"], row["bytes"]) == (
        "triton_poi_fused_add_cos_sin_0",
        3 * 100,
        3 * 100 * 4,
    )


@pytest.mark.parametrize(
    "path", ["kineto/a100_ddp_nccl.json.gz", "kineto/v100_ns_resolution.json.gz"]
)
def test_without_shapes_nothing_is_modelled_and_the_reason_is_said(path: str) -> None:
    found = roofline(trace_of(path))
    assert found.operators.height == 0
    assert found.unmodelled["reason"].value_counts().sort("count")["reason"][-1] == (
        "the shapes of the operator's inputs are not recorded"
    )
    assert (
        found.steps["mfu"].null_count() == found.steps["flops"].null_count() == found.steps.height
    )


def test_tf32_is_told_from_fp32_by_the_names_of_kernels() -> None:
    found = roofline(trace_of("diff/a100_control.json.gz")).operators.filter("matrix")
    told = dict(found.group_by("arithmetic").agg(pl.col("peak_flop_rate").first()).rows())
    assert told == {"tf32": 156e12, "fp32": 19.5e12}
    assert found.filter(pl.col("arithmetic") == "tf32")["evidence"].unique().to_list() == [
        "kernel name"
    ]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", TRACES)
def test_every_flop_is_counted_once_and_sums_close(path: str) -> None:
    trace = trace_of(path)
    found = roofline(trace, "bf16=1e15,fp16=1e15,tf32=5e14,fp32=1e14,fp64=5e13,memory=3e12")
    work = select_modelled_work(
        trace, "bf16=1e15,fp16=1e15,tf32=5e14,fp32=1e14,fp64=5e13,memory=3e12"
    )
    whole = found.whole.row(0, named=True)
    assert work["event"].is_unique().all()
    for key in ("flops", "bytes"):
        assert (whole[key] or 0) == int(found.operators[key].sum())
        assert (whole[key] is None) == (not found.operators.height)
        assert int(work[key].sum()) == ((whole[key] or 0) if trace.gpu_work().height else 0)
    gpu = trace.gpu_work()["duration_ns"].clip(lower_bound=0).sum()
    assert whole["gpu_ns"] == gpu == whole["modelled_ns"] + int(found.unmodelled["total_ns"].sum())
    assert int(found.operators["total_ns"].sum()) == whole["modelled_ns"] or not gpu
    if trace.gpu_work().height:
        calls = work.join(trace.events.select("event", "name"), left_on="op", right_on="event")
        modelled_names = set(find_modelled_calls(trace).groups["name"].to_list())
        assert set(calls["name"].to_list()) <= modelled_names
    inside = found.steps
    assert int(inside["flops"].sum()) <= (whole["flops"] or 0)
    assert (inside["roofline_fraction"].drop_nulls() >= 0).all()
    assert (
        inside["rest_ns"].drop_nulls() <= inside.filter(pl.col("rest_ns").is_not_null())["gpu_ns"]
    ).all()


def test_work_of_an_accelerator_that_no_operator_launched_is_not_modelled() -> None:
    found = roofline(trace_of("kineto/mtia_inference.json.gz"))
    assert (found.timed_on, found.flops, found.operators.height) == ("gpu", 0, 0)
    assert found.unmodelled["name"].is_in(["merge"]).any()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", [path for path in TRACES if path.startswith("kineto/")])
def test_the_section_of_every_file_keeps_its_schema_and_explains_what_is_missing(path: str) -> None:
    document = build(Session((trace_of(path),), "run"), ReportOptions(only=("roofline",)))
    value = document["roofline"]
    jsonschema.validate(value, SECTION.schema)
    explained = {entry["path"] for entry in document["absent"]}
    for part in ("operators", "steps", "whole", "unmodelled", "devices"):
        for row in value[part]:
            missing = {f"roofline.{part}[*].{key}" for key, one in row.items() if one is None}
            assert missing <= explained
    ET.fromstring(SECTION.picture(value) or "<svg/>")
    assert all(table.columns for table in SECTION.tables(value))
    sentence = SECTION.summary(value)
    assert sentence is None or "FLOP" in sentence


def test_the_largest_file_is_modelled_once_per_distinct_call() -> None:
    trace = trace_of("kineto/h100_owlv2.json.gz")
    calls = find_modelled_calls(trace)
    assert calls.groups.height < 200 < int((calls.group >= 0).sum())
