"""Steps of the two servers' public traces: their facts, and GPU time counted again from the JSON."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from support.public_traces import DATA, GPU_WORK
from traceloom.analyze import inference
from traceloom.formats import load

KINETO = DATA / "kineto"
FILES = sorted(path.name.removesuffix(".json.gz") for path in KINETO.glob("*.json.gz"))
VLLM, SGLANG = "mi300_vllm_piecewise_graphs", "mi300_sglang_decode_graphs"

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        VLLM not in FILES, reason="the public traces (../shared/data) are not on this machine"
    ),
]


def _ns(us: Any) -> int:
    return int(Decimal(str(us)) * 1000)


def spans(name: str) -> list[dict[str, Any]]:
    events = json.loads(
        gzip.decompress((KINETO / f"{name}.json.gz").read_bytes()), parse_float=Decimal
    )["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def steps(name: str) -> list[dict[str, Any]]:
    return inference(load(KINETO / f"{name}.json.gz")).steps.to_dicts()


def test_the_mixed_step_of_vllm() -> None:
    (row,) = steps(VLLM)
    assert (row["framework"], row["kind"], row["requests"]) == ("vllm", "mixed", 46)
    assert (row["context_requests"], row["context_tokens"], row["context_kv_tokens"]) == (
        9,
        8155,
        8430,
    )
    assert (row["generation_requests"], row["generation_tokens"], row["generation_kv_tokens"]) == (
        37,
        37,
        34489,
    )
    assert row["context_tokens"] + row["generation_tokens"] == 8192  # as its name says


def test_the_decode_step_of_sglang_with_both_of_its_annotations() -> None:
    (row,) = steps(SGLANG)
    assert (row["framework"], row["kind"], row["requests"]) == ("sglang", "decode", 32)
    assert (row["generation_tokens"], row["generation_kv_tokens"], row["context_tokens"]) == (
        32,
        32785,
        0,
    )
    assert (row["work_count"], row["graph_work_count"]) == (558, 544)


@pytest.mark.parametrize("name", [VLLM, SGLANG])
def test_gpu_time_equals_a_plain_count(name: str) -> None:
    found = spans(name)
    (row,) = steps(name)
    low, high = row["start_ns"], row["start_ns"] + row["duration_ns"]
    base = next(_ns(e["ts"]) for e in found if e["name"] == row["name"])
    calls = {
        e["args"]["correlation"]
        for e in found
        if e.get("cat") == "cuda_runtime"
        and base <= _ns(e["ts"]) < base + (high - low)
        and "correlation" in e["args"]
    }
    work = [e for e in found if e.get("cat") in GPU_WORK]
    mine = sorted(
        (_ns(e["ts"]), _ns(e["ts"]) + _ns(e["dur"]))
        for e in work
        if e["args"]["correlation"] in calls
    )
    busy, reach = 0, 0
    for start, end in mine:
        busy += max(0, end - max(start, reach))
        reach = max(reach, end)
    assert row["work_count"] == len(mine)
    assert row["gpu_ns"] == busy
    assert row["gpu_span_ns"] == max(end for _, end in mine) - mine[0][0]


@pytest.mark.parametrize("name", [name for name in FILES if name not in {VLLM, SGLANG}])
def test_other_traces_have_no_steps_of_a_server(name: str) -> None:
    found = inference(load(KINETO / f"{name}.json.gz"), tokens_per_step=10)
    assert not found.steps.height
    assert set(found.rates["evidence"]) <= {"declared"}


@pytest.mark.parametrize("name", [VLLM, SGLANG])
def test_a_capture_of_the_same_kernels_maps_every_node(name: str, tmp_path: Path) -> None:
    """The capture is made of the trace itself: each kernel of its graphs launched by an operator of its own."""
    found = spans(name)
    calls = {
        e["args"].get("correlation") for e in found if "GraphLaunch" in e["name"] and "args" in e
    }
    replayed = [
        e for e in found if e.get("cat") == "kernel" and e["args"].get("correlation") in calls
    ]
    replayed.sort(key=lambda event: event["ts"])
    events: list[dict[str, Any]] = []
    for number, kernel in enumerate(replayed, start=1):
        shared = {"ph": "X", "pid": 1, "tid": 1}
        events.append(
            {
                **shared,
                "cat": "cpu_op",
                "name": f"op {number}",
                "ts": 10 * number,
                "dur": 8,
                "args": {"External id": number},
            }
        )
        call = {"External id": number, "correlation": number}
        events.append(
            {
                **shared,
                "cat": "cuda_runtime",
                "name": "hipLaunchKernel",
                "ts": 10 * number + 2,
                "dur": 3,
                "args": call,
            }
        )
        on_gpu = {
            "ph": "X",
            "cat": "kernel",
            "name": kernel["name"],
            "pid": 0,
            "tid": 7,
            "ts": 10 * number + 6,
            "dur": 3,
        }
        events.append({**on_gpu, "args": {**call, "device": 0, "stream": 7}})
    path = tmp_path / "eager.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}), encoding="utf-8")
    mapped = inference(load(KINETO / f"{name}.json.gz"), capture=load(path))
    assert mapped.mapped_fraction == 1.0
    assert mapped.nodes["reason"].null_count() == mapped.nodes.height
    assert set(mapped.nodes["evidence"]) == {"correlated"}
    assert mapped.operators["kernel_count"].sum() == len(replayed)
