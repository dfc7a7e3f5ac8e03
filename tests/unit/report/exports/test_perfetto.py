"""The exported trace: tracks on which slices nest, exact times, arrows, curves."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, strategies as st

from traceloom.report.exports.perfetto import assign_levels, format_microseconds, write
from traceloom.report.views.timeline import compute_busy_percent
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session


def exported(*builders: TraceBuilder) -> list[dict[str, Any]]:
    session = Session(tuple(builder.build() for builder in builders), name="test")
    out = io.BytesIO()
    write(session, session.epoch_ns, out)
    return json.loads(out.getvalue())["traceEvents"]


def of(rows: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["ph"] == phase]


def track_names(rows: list[dict[str, Any]]) -> dict[int, str]:
    return {
        row["tid"]: row["args"]["name"] for row in of(rows, "M") if row["name"] == "thread_name"
    }


def test_kernels_that_overlap_on_a_stream_go_to_overflow_tracks() -> None:
    rows = exported(
        TraceBuilder().kernel("a", 0, 10).kernel("b", 5, 10).kernel("c", 6, 1).kernel("d", 20, 1)
    )
    names = track_names(rows)
    tracks = {row["name"]: names[row["tid"]] for row in of(rows, "X")}
    assert tracks == {
        "a": "GPU 0 stream 7",
        "b": "GPU 0 stream 7 (2)",
        "c": "GPU 0 stream 7 (3)",
        "d": "GPU 0 stream 7",
    }


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_no_two_spans_of_a_level_overlap_and_levels_are_as_low_as_can_be(
    spans: list[tuple[int, int]],
) -> None:
    spans.sort(key=lambda span: (span[0], -span[1]))
    start = np.array([s for s, _ in spans], dtype=np.int64)
    end = np.array([s + d for s, d in spans], dtype=np.int64)
    level = assign_levels(start, end)
    for one in range(len(spans)):
        for other in range(one + 1, len(spans)):
            if level[one] == level[other]:
                assert start[other] >= end[one]
        if level[one]:
            below = [i for i in range(one) if level[i] == level[one] - 1]
            assert any(end[i] > start[one] for i in below)


def test_a_host_event_that_outlives_its_parent_ends_with_it() -> None:
    rows = exported(TraceBuilder(device_name=None).op("parent", 0, 10).op("child", 5, 10))
    ends = {
        row["name"]: Decimal(str(row["ts"])) + Decimal(str(row["dur"])) for row in of(rows, "X")
    }
    assert ends["child"] == ends["parent"]


def test_arrows_follow_the_slices_they_bind_to() -> None:
    builder = TraceBuilder().op("aten::mm", 0, 10).launch("cudaLaunchKernel", 2, 3, correlation=1)
    rows = exported(builder.kernel("gemm", 8, 5, correlation=1))
    start = next(i for i, row in enumerate(rows) if row["ph"] == "s")
    finish = next(i for i, row in enumerate(rows) if row["ph"] == "f")
    assert rows[start - 1]["name"] == "cudaLaunchKernel"
    assert rows[finish - 1]["name"] == "gemm"
    assert rows[finish]["bp"] == "e"
    assert rows[start]["id"] == rows[finish]["id"]
    assert rows[finish]["tid"] == rows[finish - 1]["tid"]


def test_forward_and_backward_are_joined_by_an_arrow() -> None:
    builder = (
        TraceBuilder(device_name=None).op("aten::mm", 0, 10).op("MmBackward0", 20, 10, thread=2)
    )
    rows = exported(builder.forward_backward(5, 0, 20, backward_thread=2))
    assert [row["name"] for row in rows if row["ph"] in "sf"] == [
        "forward-backward",
        "forward-backward",
    ]


def test_ranks_have_numbers_that_never_collide() -> None:
    rows = exported(TraceBuilder(rank=0).kernel("a", 0, 1), TraceBuilder(rank=1).kernel("a", 0, 1))
    named = [row["args"]["name"] for row in of(rows, "M") if row["name"] == "process_name"]
    assert named == ["rank 0 on host0", "rank 1 on host0"]
    assert len({row["tid"] for row in of(rows, "X")}) == 2


def test_steps_stand_on_a_track_of_their_own_with_arguments_on_events() -> None:
    builder = (
        TraceBuilder(device_name=None)
        .step(3, 0, 100)
        .op("aten::mm", 10, 5, shapes=[[2, 3], [3, 4]])
    )
    rows = exported(builder)
    step = next(row for row in of(rows, "X") if row["cat"] == "step")
    assert (step["name"], track_names(rows)[step["tid"]], step["dur"]) == ("step 3", "steps", 100.0)
    op = next(row for row in of(rows, "X") if row["name"] == "aten::mm")
    assert op["args"]["step"] == 3
    assert json.loads(op["args"]["shapes"]) == [[2, 3], [3, 4]]


def test_names_of_strangers_are_valid_json_and_harmless() -> None:
    rows = exported(TraceBuilder().kernel('</script>"\\\n\x01', 0, 1))
    assert of(rows, "X")[0]["name"] == '</script>"\\\\x0a\\x01'


def test_curves_show_busy_time_waiting_launches_memory_and_recorded_counters() -> None:
    builder = (
        TraceBuilder()
        .launch("cudaLaunchKernel", 0, 1, correlation=1)
        .kernel("gemm", 10, 10, correlation=1)
    )
    builder.allocation(5, 512, address=1, total_allocated=512, total_reserved=2048).counter(
        "power", 3, 250.0, key="W"
    )
    rows = of(exported(builder), "C")
    waiting = [
        (row["ts"], row["args"]["value"]) for row in rows if row["name"] == "GPU 0 launches waiting"
    ]
    assert waiting == [(0.0, 1.0), (10.0, 0.0)]
    assert {row["name"] for row in rows} >= {
        "GPU 0 busy %",
        "cuda 0 memory allocated MB",
        "power W",
    }


@pytest.mark.parametrize(
    "epoch", [0, 1_716_423_322_388_068_751]
)  # the second is beyond what a float holds exactly
def test_busy_time_is_shared_over_the_parts_of_the_window(epoch: int) -> None:
    edges, share = compute_busy_percent(
        np.array([0, 100, 5_000]) + epoch, np.array([500, 400, 10_000]) + epoch
    )
    assert (edges[0] - epoch, edges[-1] - epoch) == (0, 10_000)
    assert share.max() <= 100
    covered = (share[:-1] * np.diff(edges)).sum() / 100
    assert covered == pytest.approx(5_500)
    assert share[-1] == 0.0


@given(st.lists(st.integers(0, 2**53), max_size=20))
def test_times_come_out_exact_whether_cut_off_or_rounded(times: list[int]) -> None:
    texts = format_microseconds(pl.Series("t", times, dtype=pl.Int64)).to_list()
    for ns, text in zip(times, texts, strict=True):
        assert round(Decimal(text) * 1000) == ns
        if (
            ns < 10**15
        ):  # eleven days; beyond, doubles of microseconds are coarser than a nanosecond
            assert int(float(text) * 1000.0) == ns
