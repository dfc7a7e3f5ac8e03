"""Arguments of any kind in any place: every analysis has an answer that JSON can hold, and says nothing untrue."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.analyses import ALL, parts_of
from support.odd_traces import odd_builder
from traceloom.analyze import (
    counters,
    critical_path,
    kernel_bounds,
    kernel_efficiency,
    memory,
    roofline,
)
from traceloom.formats import read_kineto
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

KEYS = (
    "Input Dims",
    "Input type",
    "Input Strides",
    "Concrete Inputs",
    "Sequence number",
    "Fwd thread id",
    "External id",
    "Record function id",
    "bytes",
    "grid",
    "block",
    "blocks per SM",
    "warps per SM",
    "est. achieved occupancy %",
    "registers per thread",
    "graph id",
    "graph node id",
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "dtype",
    "Process Group Name",
    "Process Group Ranks",
    "Seq",
    "In split size",
    "Out split size",
    "Bytes",
    "Total Allocated",
    "Addr",
    "Device Type",
    "memory bandwidth (GB/s)",
    "Src Rank",
    "Dst Rank",
    "Ev Idx",
)
VALUES = (
    "",
    "abc",
    "[[3,3],[3,3]]",
    "[",
    7,
    -1,
    2**62,
    2**64,
    1.5,
    1e308,
    None,
    True,
    [],
    [[]],
    [[3, 3], [3, 3]],
    [["a"]],
    ["c10::Half", "c10::Half"],
    [None],
    {"a": 1},
    {},
    [[[[[1]]]]],
    [-5],
    [2**70],
    "9" * 22,
    "c10::Half",
    [1.5, 2],
    "NaN",
)
NAMES = (
    "aten::mm",
    "aten::addmm",
    "aten::select",
    "aten::conv2d",
    "record_param_comms",
    "c10d::allreduce_",
    "aten::embedding",
    "aten::_flash_attention_forward",
    "aten::sum",
    "aten::cat",
    "fbgemm::split_embedding_codegen_lookup",
    "cutlass_80_tensorop_f16",
    "ncclDevKernel_AllReduce_Sum",
    "sm90_xmma_gemm_f32f32",
    "[memory]",
)
MORE = {
    "critical path": critical_path,
    "memory": memory,
    "efficiency": kernel_efficiency,
    "bounds": kernel_bounds,
    "counters": counters,
}


class Arguments:
    """Gives arguments of any value to some of the events that a builder adds, and other names to some."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def spoiled(self, text: str) -> dict[str, Any]:
        document = json.loads(text)
        for event in document["traceEvents"]:
            if event["ph"] != "X":
                continue
            if self.chance.random() < 0.3:
                own = {
                    self.chance.choice(KEYS): self.chance.choice(VALUES)
                    for _ in range(self.chance.randrange(1, 5))
                }
                event["args"] = (event.get("args") or {}) | own
            if self.chance.random() < 0.2:
                event["name"] = self.chance.choice(NAMES)
        described = [
            {
                "id": 0,
                "name": name,
                "computeMajor": major,
                "numSms": processors,
                "totalGlobalMem": size,
            }
            for name, major, processors, size in [
                self.chance.choice(
                    [("NVIDIA A100", 8, 108, 2**35), (7, "x", "q", -1), (None, 9.5, 0, 2**70)]
                )
            ]
        ]
        return document | {"deviceProperties": described}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_no_argument_ends_an_analysis(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(Arguments(seed).spoiled(odd_builder(seed).text())))
    trace = read_kineto(path)
    trace.check()
    lengths = trace.gpu_work()["duration_ns"].clip(lower_bound=0).sum()
    for name, analysis in (ALL | MORE).items():
        for part, value in parts_of(analysis(trace)).items():
            if isinstance(value, pl.DataFrame):
                for column, kind in value.schema.items():
                    assert not kind.is_float() or value[column].drop_nulls().is_finite().all(), (
                        name,
                        part,
                        column,
                    )
                    if column in ("total_ns", "device_ns", "gpu_ns", "busy_ns", "duration_ns"):
                        assert (value[column].drop_nulls() >= 0).all(), (name, part, column)
    assert ALL["kernels"](trace).kernels["total_ns"].sum() == lengths
    operators = ALL["operators"](trace)
    assert operators.operators["self_device_ns"].sum() + operators.unattributed_device_ns == lengths


# -- sizes that only the kernels of an operator tell --------------------------------------------------------------------

OGS = "_matmul_ogs_NNT_bf16xbf16xbf16_16x128x64x1"


def experts(*, captured: bool) -> TraceBuilder:
    """24 tokens of 256 go to 2 of 8 experts each: 48 rows in at most 8 + 2 = 10 tiles of 16; 6 and 2 tiles of columns."""
    made = TraceBuilder()
    shapes = {"shapes": [[24, 256], [24, 8]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    made.op("vllm::moe_forward", 0, 100, **shapes)
    made.op(
        "SortTokens",
        5,
        10,
        shapes=[[24, 2], [24, 2], []],
        **{"Input type": ["c10::BFloat16", "short int", "Scalar"]},
    )
    for number, (name, tiles) in enumerate(((f"{OGS}_swiglu", 6), (OGS, 2))):
        about = {"kernel": name, "grid": [10 * tiles, 1, 1]} if captured else {}
        made.launch("cuLaunchKernelEx", 20 + 20 * number, 5, correlation=number + 1, **about)
        if not captured:
            made.kernel(
                name, 200 + 50 * number, 40, correlation=number + 1, grid=[10 * tiles, 1, 1]
            )
    return made


def modelled(trace: Trace) -> list[tuple[Any, ...]]:
    return (
        roofline(trace)
        .operators.filter(name="vllm::moe_forward")
        .select("flops", "count", "matrix")
        .rows()
    )


@pytest.mark.parametrize("captured", [False, True], ids=["ran", "captured"])
def test_the_grids_of_kernels_or_of_the_calls_that_launch_them_tell_the_experts(
    captured: bool, tmp_path: Path
) -> None:
    trace = read_kineto(experts(captured=captured).write(tmp_path / "experts.json"))
    first, second = (
        256 * 6 * 128,
        3 * 128 * 2 * 128,
    )  # half of the columns of the gated product go on
    assert modelled(trace) == [(2 * 24 * 2 * (first + second), 1, True)]


def test_without_the_file_the_experts_are_not_guessed(tmp_path: Path) -> None:
    path = experts(captured=False).write(tmp_path / "experts.json")
    trace = read_kineto(path)
    path.unlink()
    assert modelled(trace) == []
    reasons = roofline(trace).unmodelled.filter(name="vllm::moe_forward")["reason"].to_list()
    assert reasons == ["the sizes of the experts are not recorded"]
