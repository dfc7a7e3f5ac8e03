"""Everything that says it adds up does: on every public trace, and on random ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, strategies as st

from support.public_traces import DATA
from traceloom.analyze import answer, data_loading, host, memory, modules, operators, quality
from traceloom.analyze.ancestry import build_forest
from traceloom.formats import read_kineto
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

FOLDERS = ("kineto", "multirank", "diff", "critical_path", "damaged_metadata")
FILES = sorted(p for f in FOLDERS for p in (DATA / f).glob("*.json.gz") if ".host." not in p.name)

NAMES = (
    "aten::mm",
    "aten::add",
    "c10d::allreduce_",
    "record_param_comms",
    "traceloom.scope:a",
    "autograd::engine::evaluate_function: MmBackward0",
)
ANNOTATIONS = (
    "## forward ##",
    "Optimizer.step#SGD.step",
    "gloo:all_reduce",
    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    "region",
)
FRAMES = (
    "nn.Module: Linear_0",
    "nn.Module: GPT_0",
    "train.py(1): f",
    "torch/optim/sgd.py(5): step",
)
CALLS = ("cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize")
time_us = st.integers(0, 60)
length_us = st.integers(-1, 30)
thread = st.integers(1, 3)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """A small trace with anything anywhere: crossing spans, orphans, negative durations, steps or none."""
    builder = TraceBuilder(rank=draw(st.sampled_from([None, 0, 3])), world_size=4)
    for _ in range(draw(st.integers(0, 25))):
        at, long, where = draw(time_us), draw(length_us), draw(thread)
        kind = draw(
            st.sampled_from(
                ["op", "op", "annotation", "python", "launch", "kernel", "copy", "memory"]
            )
        )
        number = draw(st.integers(1, 8))
        if kind == "op":
            sequence = draw(st.one_of(st.none(), st.integers(0, 5)))
            forward = draw(st.sampled_from([0, 1]))
            name = draw(st.sampled_from(NAMES))
            builder.op(name, at, long, thread=where, sequence=sequence, forward_thread=forward)
        elif kind == "annotation":
            builder.annotation(draw(st.sampled_from(ANNOTATIONS)), at, long, thread=where)
        elif kind == "python":
            builder.python(draw(st.sampled_from(FRAMES)), at, long, thread=where)
        elif kind == "launch":
            builder.launch(draw(st.sampled_from(CALLS)), at, long, correlation=number, thread=where)
        elif kind == "kernel":
            orphan = draw(st.booleans())
            device = draw(st.integers(0, 1))
            builder.kernel("k", at, long, correlation=None if orphan else number, device=device)
        elif kind == "copy":
            builder.copy("Memcpy DtoH (Device -> Pageable)", at, long, bytes=8, correlation=number)
        else:
            builder.allocation(
                at, long * 8, address=number, total_allocated=900 + long, total_reserved=1000
            )
    start = draw(st.integers(0, 20))
    for step in range(draw(st.integers(0, 3))):
        builder.mark(step, start)
        start += draw(st.integers(1, 25))
    return builder.build()


def check_everything(trace: Trace) -> None:
    check_host(trace)
    check_operators(trace)
    check_modules(trace)
    check_loading_and_memory(trace)
    result = answer(Session((trace,), "run"))
    assert result.parts["ns"].sum() == result.whole_ns
    assert (result.parts["ns"] > 0).all()
    checks = quality(trace).checks
    assert (checks["affected_count"] >= 0).all()
    assert checks["check"].is_unique().all()


def check_host(trace: Trace) -> None:
    result = host(trace)
    assert (result.account["ns"] > 0).all()
    lanes = result.account.group_by("lane").agg(pl.col("ns").sum())
    sums = result.threads.join(lanes, on="lane", how="left").with_columns(pl.col("ns").fill_null(0))
    assert sums["ns"].to_list() == sums["window_ns"].to_list()
    observed = (
        result.account.filter(pl.col("activity") != "unobserved")
        .group_by("lane")
        .agg(pl.col("ns").sum())
    )
    assert (
        observed.join(result.threads, on="lane")
        .select(pl.col("ns") <= pl.col("busy_ns"))
        .to_series()
    ).all()
    window = pl.max_horizontal(
        pl.min_horizontal("end_ns", trace.end_ns) - pl.max_horizontal("start_ns", trace.start_ns), 0
    )
    steps = trace.steps.select("step", window=window).filter(pl.col("window") > 0)
    for lane in result.threads["lane"]:
        mine = result.account.filter((pl.col("lane") == lane) & pl.col("step").is_not_null())
        by_step = mine.group_by("step").agg(pl.col("ns").sum()).sort("step")
        assert by_step.rows() == steps.sort("step").rows()
    assert result.threads["main"].sum() == min(1, result.threads.height)


def check_operators(trace: Trace) -> None:
    work_ns = int(trace.gpu_work()["duration_ns"].clip(lower_bound=0).sum())
    tree = build_forest(trace)
    category = trace.events["category"].gather(tree.row)
    ours = trace.events["name"].gather(tree.row).str.starts_with("traceloom.")
    is_op = ((category == "op") & ~ours).to_numpy()
    top_ns = int(tree.span_ns()[tree.topmost(is_op)].sum())
    for by_shape in (False, True):
        result = operators(trace, by_shape)
        table = result.operators
        assert (
            table["self_device_ns"].sum() + result.unattributed_device_ns
            == result.gpu_work_ns
            == work_ns
        )
        assert table["self_ns"].sum() == top_ns
        assert table["count"].sum() == int(is_op.sum())
        assert (table["device_ns"] >= table["self_device_ns"]).all()
        assert (table["total_ns"] >= table["self_ns"]).all()
        assert (table["device_ns"] <= work_ns).all()
        assert not table.height or np.isclose(table["fraction"].sum(), 1 if top_ns else 0)


def check_modules(trace: Trace) -> None:
    result = modules(trace)
    roots = result.tree.filter(pl.col("parent").is_null())
    assert roots["host_ns"].sum() == result.tree["self_host_ns"].sum()
    assert roots["device_ns"].sum() == result.tree["self_device_ns"].sum()
    assert (result.tree["self_host_ns"] >= 0).all()
    assert result.tree["node"].to_list() == list(range(result.tree.height))
    assert result.tree.filter(pl.col("parent") >= pl.col("node")).height == 0
    children = result.tree.group_by("parent").agg(pl.col("host_ns", "device_ns").sum())
    sums = result.tree.join(children, left_on="node", right_on="parent", how="inner")
    assert sums.select(
        (pl.col("self_host_ns") + pl.col("host_ns_right") == pl.col("host_ns")).all()
    ).item()
    assert sums.select(
        (pl.col("self_device_ns") + pl.col("device_ns_right") == pl.col("device_ns")).all()
    ).item()


def check_loading_and_memory(trace: Trace) -> None:
    loading = data_loading(trace)
    assert loading.steps.height == trace.steps.height
    assert loading.steps["wait_ns"].sum() <= (loading.total_ns or 0)
    result = memory(trace)
    assert result.devices["allocation_count"].sum() + result.devices["free_count"].sum() == (
        trace.allocations.filter(pl.col("bytes") != 0).height
    )
    peaks = result.curve.group_by("device_type", "device").agg(
        pl.col("allocated_bytes").max(), pl.len()
    )
    joined = peaks.join(result.devices, on=["device_type", "device"])
    assert joined.height == result.devices.height
    assert (joined["allocated_bytes"] <= joined["peak_bytes"]).all()
    assert (joined["len"] <= 4000).all()


@pytest.mark.sampled(13)
@pytest.mark.data
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name.removesuffix(".json.gz"))
def test_sums_hold_on_every_public_trace(path: Path, shared_data: Path) -> None:
    check_everything(read_kineto(path))


@given(trace=traces())
def test_sums_hold_on_random_traces(trace: Trace) -> None:
    check_everything(trace)


def plain_activity(
    events: list[dict[str, object]], rows: dict[int, dict[str, object]]
) -> dict[str, int]:
    """The same account by looking at every stretch of one thread: slow, and simple enough to be believed."""
    bounds = sorted({t for e in events for t in (e["start_ns"], e["nested_end_ns"])})  # type: ignore[type-var]
    out: dict[str, int] = {}
    for low, high in pairwise(bounds):
        around = [e for e in events if e["start_ns"] <= low and e["nested_end_ns"] >= high]  # type: ignore[operator]
        at = max(around, key=lambda e: e["depth"], default=None)  # type: ignore[arg-type, return-value]
        said = None
        while at is not None and said is None:
            said = spoken(str(at["category"]), str(at["name"]))
            at = rows.get(at["parent"])  # type: ignore[arg-type]
        if said is not None:
            out[said] = out.get(said, 0) + high - low  # type: ignore[operator]
    return out


def spoken(category: str, name: str) -> str | None:
    if category == "op":
        return None if name.startswith("traceloom.") else "op"
    if category == "annotation":
        return "op" if name.startswith("gloo:") else None
    return {"python": "python", "runtime": "call"}.get(category)


@given(trace=traces())
def test_activities_are_those_of_the_innermost_events(trace: Trace) -> None:
    account = host(trace).account.with_columns(
        pl.col("activity").cast(pl.String).replace({"launch": "call", "blocking_call": "call"})
    )
    rows = {row["event"]: row for row in trace.events.to_dicts()}
    for lane in host(trace).threads["lane"]:
        mine = account.filter((pl.col("lane") == lane) & (pl.col("activity") != "unobserved"))
        sums = dict(mine.group_by("activity").agg(pl.col("ns").sum()).rows())
        assert sums == plain_activity([row for row in rows.values() if row["lane"] == lane], rows)
