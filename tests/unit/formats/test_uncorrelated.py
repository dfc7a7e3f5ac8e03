"""GPU work that was written without correlations joins its launch by an arrow, else by an external id."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.public_traces import DATA
from traceloom.findings import RULES, Context, rank
from traceloom.formats import load

EVALS = DATA / "evals"
COUNT = 12


def document(numbers: str, kernels: int) -> dict[str, Any]:
    """Products that launch `kernels` kernels each, numbered by arrows, by launch or by operator."""
    events: list[dict[str, Any]] = []
    host = {"ph": "X", "pid": 10, "tid": 10}
    for op, kernel in product(range(COUNT), range(kernels)):
        start, number = 100 * op, 1 + kernels * op + kernel
        if kernel == 0:
            args = {
                "External id": 900 + op,
                "Input Dims": [[64, 64], [64, 64]],
                "Input type": ["float", "float"],
            }
            events.append(
                {**host, "cat": "cpu_op", "name": "aten::mm", "ts": start, "dur": 90, "args": args}
            )
        external = {"launch": number, "operator": 900 + op, "arrow": None}[numbers]
        own = {} if external is None else {"External id": external}
        query, call = start + 2 + 20 * kernel, start + 5 + 20 * kernel
        events += [
            {**host, "cat": "cuda_runtime", "name": "hipGetDevice", "ts": query, "dur": 1},
            {**host, "cat": "cuda_runtime", "name": "hipLaunchKernel", "ts": call, "dur": 4},
            {"ph": "X", "pid": 2, "tid": 0, "cat": "kernel", "name": f"gemm {number}"},
        ]
        events[-3]["args"], events[-2]["args"] = (
            own if numbers == "operator" else {},
            own | {"nth": number},
        )
        events[-1] |= {"ts": 10_000 + 10 * number, "dur": 8, "args": own}
        if numbers == "arrow":
            place = {"cat": "ac2g", "name": "ac2g", "id": number}
            events += [
                {**place, "ph": "s", "pid": 10, "tid": 10, "ts": call},
                {**place, "ph": "f", "bp": "e", "pid": 2, "tid": 0, "ts": 10_000 + 10 * number},
            ]
    return {"schemaVersion": 1, "traceEvents": events}


@pytest.mark.parametrize("numbers", ["arrow", "launch", "operator"])
@pytest.mark.parametrize("kernels", [1, 3])
def test_each_kernel_joins_the_call_that_launched_it(
    numbers: str, kernels: int, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document(numbers, kernels)))
    events = load(path).traces[0].events
    work = events.filter(pl.col("category") == "kernel").sort("start_ns")
    calls = events.filter(pl.col("name") == "hipLaunchKernel").sort("start_ns")
    ops = events.filter(pl.col("category") == "op")["event"].to_list()
    assert work["launch"].to_list() == calls["event"].to_list()
    assert work["op"].to_list() == [op for op in ops for _ in range(kernels)]


@pytest.mark.data
@pytest.mark.skipif(not EVALS.is_dir(), reason="the public traces are not on this machine")
@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("gemm_01_compute_few_tiles", "low-roofline"),
        ("gemm_03_compute_misaligned", "unaligned-matmul"),
        ("conv_01_large_spatial_small_ch", None),  # its operator is on the host for as long
    ],
)
def test_products_of_low_efficiency_are_found_without_correlations(
    name: str, slug: str | None
) -> None:
    session = load(EVALS / f"{name}.json.gz")
    work = session.traces[0].events.filter(pl.col("category") == "kernel")
    assert work["launch"].null_count() == work["op"].null_count() == 0
    found = rank(Context.of(session, "MI300X"), RULES).time
    assert next((finding.slug for finding in found), None) == slug
    assert not any(notice.slug == "orphan-work" for notice in session.traces[0].notices)
