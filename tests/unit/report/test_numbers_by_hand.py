"""Every number that sections show of a job of two ranks, worked out by hand from its times (`support/hand_job.py`)."""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import polars as pl
import pytest

from support.hand_job import (
    ADD_US,
    COLLECTIVE_US,
    COPIED,
    COPY_US,
    ELEMENTS,
    GEMM_US,
    NCCL,
    STEP_US,
    STEPS,
    WATTS,
    hand_job,
)
from support.pages import tables, words
from support.reports import check_report, check_sums_of_sections
from traceloom.report import ReportOptions, build
from traceloom.report.document import Table
from traceloom.report.exports.perfetto import write as write_perfetto
from traceloom.report.sections import (
    load_core_sections,
    load_extra_sections,
    select_visible_sections,
)
from traceloom.report.views.files import build_table_frames, write_table
from traceloom.report.views.markdown import render as markdown
from traceloom.report.views.page import render_report_page as page
from traceloom.report.views.terminal import render as terminal

US = 1_000  # ns
COPY = "Memcpy HtoD (Pageable -> Device)"
WINDOW = STEPS * STEP_US * US
COMPUTE = (GEMM_US + ADD_US) * US
EDGES = (
    100 + STEP_US - 750
) * US  # before the first work of the first step, after the last of the last
GAP = (STEP_US - 750 + 100) * US  # from the copy of a step to the first kernel of the next
SUMMED = {name: US * us for name, us in (("gemm", GEMM_US), ("add", ADD_US), (COPY, COPY_US))}


@cache
def document() -> dict[str, Any]:
    return build(hand_job())


@cache
def every_table() -> dict[str, Table]:
    sections = (
        (section, section.value(document()))
        for section in (*load_core_sections(), *select_visible_sections(document()))
    )
    return {
        table.key: table for section, value in sections if value for table in section.tables(value)
    }


def part(key: str, *names: str) -> list[tuple[Any, ...]]:
    """Some columns of a table, row by row."""
    return [tuple(row.get(name) for name in names) for row in every_table()[key].rows]


def test_the_time_of_each_device_is_divided_without_a_rest() -> None:
    expected = []
    for rank, collective in COLLECTIVE_US.items():
        busy = COMPUTE + (collective + COPY_US) * US
        idle = STEP_US * US - busy
        shares = [part / (STEP_US * US) for part in (COMPUTE, collective * US, COPY_US * US, idle)]
        assert sum(shares) == pytest.approx(1)
        expected.append((f"rank {rank}", WINDOW, *map(pytest.approx, shares)))
    assert (
        part("breakdown", "rank", "window", "compute", "communication", "memory", "idle")
        == expected
    )
    ranks = document()["ranks"]
    assert [rank["devices"][0]["idle_ns"] for rank in ranks] == [
        1_200 * US - EDGES,
        1_350 * US - EDGES,
    ]
    assert [rank["devices"][0]["exposed_communication_ns"] for rank in ranks] == [
        600 * US,
        450 * US,
    ]


def test_parts_add_up_to_wholes() -> None:
    check_report(document())
    check_sums_of_sections(document())


def test_steps_have_their_length_their_launches_and_no_lag() -> None:
    for rank in (0, 1):
        rows = part(f"steps-{rank}", "step", "duration", "lag", "launches", "whole")
        # the copy of a step has ended before the step has
        assert rows == [(step, STEP_US * US, 0, 4, "yes") for step in range(STEPS)]
    assert part("steps-by-rank", "rank", "steps", "median_ns", "min_ns", "max_ns") == [
        (f"rank {rank}", STEPS, STEP_US * US, STEP_US * US, STEP_US * US) for rank in (0, 1)
    ]


def test_idle_time_has_causes_that_add_up_to_it() -> None:
    for rank, collective in COLLECTIVE_US.items():
        idle = WINDOW - STEPS * (COMPUTE + (collective + COPY_US) * US)
        causes = dict(part(f"idle-{rank}", "cause", "time"))
        assert sum(causes.values()) == idle
        assert causes["edges of recording"] == EDGES
        # From 750 us nothing is recorded until the next step calls an operator at 10 us: but for the launches after it.
        assert causes["host unobserved"] == 2 * (STEP_US - 750 + 10) * US
        # ... 10 us of `aten::mm` until its launch at 20 us; from then on the launch and its way to the GPU
        assert causes["host op"] == 2 * 10 * US
        assert causes["launch latency"] == 2 * (100 - 20) * US
        # The collective of rank 1 begins 50 us after its stream could; the copy of both 50 us after the collective.
        assert causes["unexplained"] == (150 if rank == 0 else 300) * US
    whole = dict(part("idle-causes", "cause", "time"))
    for cause, of_both in whole.items():
        assert of_both == sum(dict(part(f"idle-{rank}", "cause", "time"))[cause] for rank in (0, 1))
    assert part("idle-gaps-longest", "duration_ns", "start_ns", "step")[:4] == [
        (GAP, (750 + STEP_US * step) * US, step) for _ in (0, 1) for step in (0, 1)
    ]


def test_kernels_are_added_up_over_steps_and_ranks() -> None:
    rows = {
        name: of
        for name, *of in part(
            "kernel-table", "name", "total_ns", "count", "mean_ns", "min_ns", "max_ns"
        )
    }
    nccl = STEPS * sum(COLLECTIVE_US.values()) * US
    assert rows == {
        **{name: [6 * ns, 6, ns, ns, ns] for name, ns in SUMMED.items()},
        NCCL: [nccl, 6, nccl // 6, COLLECTIVE_US[1] * US, COLLECTIVE_US[0] * US],
    }
    whole = nccl + 6 * sum(SUMMED.values())
    assert dict(part("kernel-table", "name", "fraction"))["gemm"] == pytest.approx(
        6 * SUMMED["gemm"] / whole
    )
    totals = [row[0] for row in part("kernel-table", "total_ns")]
    assert totals == sorted(totals, reverse=True)
    assert sum(row[0] for row in part("launches-bins", "total_ns")) == whole - 6 * SUMMED[COPY], (
        "kernels, no copies"
    )
    assert part("launches-bins", "low_ns", "high_ns", "kernel_count") == [
        (32 * US, 64 * US, 6),
        (128 * US, 256 * US, 6),
        (256 * US, 512 * US, 6),
    ]


def test_operators_have_their_own_time_and_that_of_what_they_launch() -> None:
    own = {"aten::mm": 100, "aten::add": 30, "record_param_comms": 20}
    launched = {
        "aten::mm": 2 * GEMM_US,
        "aten::add": 2 * ADD_US,
        "record_param_comms": sum(COLLECTIVE_US.values()),
    }
    rows = {
        name: of
        for name, *of in part("operator-table", "name", "self_ns", "total_ns", "count", "device_ns")
    }
    assert rows == {
        name: [6 * us * US, 6 * us * US, 6, STEPS * launched[name] * US] for name, us in own.items()
    }
    shares = dict(part("operator-table", "name", "fraction"))
    assert {name: round(150 * share) for name, share in shares.items()} == own
    # A thread is in operators without their launch calls, and is seen in nothing else.
    calls = 4 * 5
    inside = sum(own.values()) - 3 * 5
    for rank in (0, 1):
        [(of_ops, of_calls, unobserved)] = part(f"host-{rank}", "op", "launch", "unobserved")
        assert (of_ops, of_calls) == (STEPS * inside * US, STEPS * calls * US)
        assert of_ops + of_calls + unobserved == WINDOW


@pytest.mark.parametrize("rank", [0, 1])
def test_a_usual_step_is_a_third_of_three(rank: int) -> None:
    rows = [row for row in every_table()["per-step-kernels"].rows if row["rank"] == rank]
    usual = {
        row["name"]: (
            row["mean_total_ns"],
            row["min_total_ns"],
            row["max_total_ns"],
            row["step_count"],
        )
        for row in rows
    }
    each = {**SUMMED, NCCL: COLLECTIVE_US[rank] * US}
    assert usual == {name: (ns, ns, ns, STEPS) for name, ns in each.items()}
    kinds = {
        row["kind"]: row["sum_ns"]
        for row in every_table()["kinds-kinds"].rows
        if row["rank"] == rank
    }
    assert kinds == {
        "gemm": STEPS * GEMM_US * US,
        "communication": STEPS * COLLECTIVE_US[rank] * US,
        "copy": STEPS * COPY_US * US,
        "other": STEPS * ADD_US * US,
    }


def test_copies_have_their_bytes_and_their_rate() -> None:
    rate = COPIED / (COPY_US * 1e-6)
    assert part(
        "copies-kinds", "rank", "kind", "bytes", "count", "total_ns", "bytes_per_s", "pageable"
    ) == [
        (rank, "HtoD", STEPS * COPIED, STEPS, STEPS * COPY_US * US, pytest.approx(rate), "yes")
        for rank in (0, 1)
    ]
    assert (
        part("copies-per-step", "mean_copied_bytes", "mean_total_ns")
        == [(COPIED, COPY_US * US)] * 2
    )


def test_samples_of_a_counter_have_their_mean_and_their_instants() -> None:
    instants = (5 * US, (5 + (STEPS - 1) * STEP_US) * US)
    rows = document()["counters"]["series"]
    assert [
        (row["rank"], row["counter"], row["samples"], row["first_ns"], row["last_ns"])
        for row in rows
    ] == [(rank, "power", STEPS, *instants) for rank in (0, 1)]
    assert part("counters-series", "min", "mean", "max") == [(WATTS, WATTS + 50, WATTS + 100)] * 2


def test_launches_wait_for_the_work_before_them() -> None:
    # After the call returned: gemm 75 us, add 265 us (gemm ends then), the collective 280 or 330 us, the copy 495 us,
    # of which stream 7 had nothing to do for 250 us.
    totals = {
        rank: of
        for rank, *of in part(
            "launches-totals", "rank", "launch_count", "delay_median_ns", "latency_median_ns"
        )
    }
    assert totals == {
        0: [12, (265 + 280) * US // 2, (75 + 250) * US // 2],
        1: [12, (265 + 330) * US // 2, (75 + 250) * US // 2],
    }
    names = {
        (rank, name): of
        for rank, name, *of in part(
            "launches-names", "rank", "name", "delay_median_ns", "latency_median_ns"
        )
    }
    assert names[0, "gemm"] == [75 * US, 75 * US]
    assert names[0, "add"] == [265 * US, 0]
    assert names[1, NCCL] == [330 * US, 330 * US]
    assert names[0, COPY] == [495 * US, 250 * US]
    assert part("launches-calls", "call_count", "total_ns") == [
        (9, 45 * US),
        (9, 45 * US),
        (3, 15 * US),
        (3, 15 * US),
    ]


def test_collectives_say_how_long_their_ranks_wait_and_what_the_link_gave() -> None:
    size = 4 * ELEMENTS
    [row] = every_table()["collectives-summary"].rows
    assert (row["kind"], row["size_bytes"], row["count"]) == ("all_reduce", size, 6)
    assert (row["min_ns"], row["median_ns"], row["max_ns"]) == (150 * US, 175 * US, 200 * US)
    # An all-reduce of two ranks moves 2 (n - 1) / n = 1 time its bytes over the link.
    assert row["best_bus_byte_rate"] == pytest.approx(size / 150e-6)
    assert row["exposed_ns"] == STEPS * sum(COLLECTIVE_US.values()) * US
    wait = (COLLECTIVE_US[0] - COLLECTIVE_US[1]) * US
    assert part("across-ranks-ranks", "rank", "root_ns", "wait_ns", "last_count") == [
        (1, STEPS * wait, 0, STEPS),
        (0, 0, STEPS * wait, 0),
    ]
    assert (
        part("across-ranks-collectives", "start_skew_ns", "wait_ns", "last_rank", "transfer_ns")
        == [(wait, wait, 1, COLLECTIVE_US[1] * US)] * STEPS
    )
    assert part("rank-matrix-cells", "source", "target", "bytes") == [
        (0, 1, STEPS * size),
        (1, 0, STEPS * size),
    ]
    assert part("groups-groups", "role", "who", "bytes") == [("world", "0, 1", 6 * size)]
    assert part("imbalance-measures", "word", "max_over_mean", "mean") == [
        ("compute", 1.0, "350 µs")
    ]


def test_the_way_through_a_step_is_the_host_and_its_calls() -> None:
    # The last work of a step ends 250 us before the step: nothing on the GPU decides how long it is.
    assert part("critical-path-classes", "class", "duration_ns", "fraction") == [
        ("host", (STEP_US - 20) * US, 0.98),
        ("launch", 20 * US, 0.02),
    ]
    inside = dict(part("critical-path-names", "name", "path_ns"))
    assert inside["aten::mm"] == (100 - 5) * US
    assert sum(inside.values()) == STEP_US * US
    assert part("threads-concurrency", "rank", "threads", "share") == [
        (rank, count, pytest.approx(share))
        for rank in (0, 1)
        for count, share in ((0, 0.845), (1, 0.155))
    ]


SENTENCES = {
    "steps": "3 whole steps of each of 2 ranks; median 1.00 ms",
    "per_step": "the largest is gemm of rank 0: 300 µs per step",
    "kinds": "gemm 52.2 %, communication 30.4 %, copy 8.7 % of the GPU work, added up",
    "copies": "6.00 MB in 6 copies took 300 µs, 6 of them from or to pageable memory",
    "critical_path": "what decides the 1.00 ms of step 1: the host 98.0 %, launch 2.0 %",
    "idle_gaps": "the longest gap is 350 µs of rank 0, mostly host unobserved: ProfilerStep#0",
    "patterns": "a sequence of 3 kernels occurs 6 times and holds 69.6 % of the GPU's work",
    "threads": "2 threads; none is active 84.5 % of the time, several at once 0 %",
    "collectives": "6 calls, 1.05 ms over all ranks, 100 % of it exposed; most in all_reduce of 4.10 kB (1.05 ms)",
    "groups": "1 group in use: 1 world",
    "slow_steps": None,
    "compile": None,
    "inference": None,
    "counters": "2 recorded over time",
    "graph_launches": None,
}
"""Section -> its main figure: 1.80, 1.05 and 0.30 of 3.45 ms; 2.40 ms of gemm, add and copy of 3.45 ms."""


@pytest.mark.parametrize("key", sorted(SENTENCES))
def test_the_main_figure_of_a_section_is_a_sentence(key: str) -> None:
    [section] = [
        section for section in (*load_core_sections(), *load_extra_sections()) if section.key == key
    ]
    value = section.value(document())
    assert (section.summary(value) if value else None) == SENTENCES[key]


def test_every_view_shows_these_numbers() -> None:
    session = hand_job()
    drawn = tables(page(document(), session), by="key")
    assert {row["name"]: row["total_ns"] for row in drawn["kernel-table"]}["gemm"] == 6 * SUMMED[
        "gemm"
    ]
    assert [row["idle"] for row in drawn["breakdown"]] == pytest.approx([0.4, 0.45])
    assert "2 GPUs" in words(page(document(), session))
    lines = [
        line.plain
        for line in terminal(document(), ReportOptions(only=("kernels", "operators")), 120)
    ]
    [gemm] = [line for line in lines if line.rstrip().endswith(" gemm")]
    assert "1.80 ms" in gemm
    assert "52.2 %" in gemm
    rendered = markdown(document(), ReportOptions())
    [row] = [line for line in rendered.splitlines() if "gemm" in line and line.startswith("|")]
    assert "1.80 ms" in row
    for name, ending in (("kernels.csv", ".csv"), ("kernels.parquet", ".parquet")):
        handle = io.BytesIO()
        write_table(document(), name, None, handle)
        handle.seek(0)
        frame = pl.read_csv(handle) if ending == ".csv" else pl.read_parquet(handle)
        assert frame.filter(name="gemm").select("total_ns", "count").row(0) == (
            6 * SUMMED["gemm"],
            6,
        )
    assert (
        dict(build_table_frames(document()))["copies-kinds"]["bytes"].to_list()
        == [STEPS * COPIED] * 2
    )


def test_perfetto_has_the_work_at_its_time() -> None:
    handle = io.BytesIO()
    write_perfetto(hand_job(), int(document()["epoch_ns"]), handle, document()["critical_path"])
    events = json.loads(handle.getvalue())["traceEvents"]
    work = [event for event in events if event["ph"] == "X" and event["name"] in {"gemm", NCCL}]
    times = sorted(
        (event["name"], event["pid"], round(event["ts"]), round(event["dur"])) for event in work
    )
    expected = [
        ("gemm", rank + 1, 100 + STEP_US * step, GEMM_US)
        for rank in (0, 1)
        for step in range(STEPS)
    ]
    expected += [
        (NCCL, rank + 1, 650 - us + STEP_US * step, us)
        for rank, us in COLLECTIVE_US.items()
        for step in range(STEPS)
    ]
    assert times == sorted(expected)
