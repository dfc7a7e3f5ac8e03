"""What the user gave, by rank: kinds told by content, pairs by process, rank or name; captures with a graph step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from support.trace_pairs import NestedOp, build_trace_pair
from traceloom.errors import InputError, TraceloomError, UsageError
from traceloom.graph.inputs import Inputs, find_inputs
from traceloom.graph.linking import load_ranks
from traceloom.testing import HostTraceBuilder, TraceBuilder

STEP = [
    NestedOp("forward", (NestedOp("aten::mm"), NestedOp("aten::relu"))),
    NestedOp("aten::add_"),
    NestedOp("backward", (NestedOp("aten::mm"),)),
]


def shown(found: Inputs) -> list[tuple[int, str, str | None]]:
    return [
        (one.rank, one.device.path.name, one.host.path.name if one.host else None)
        for one in found.ranks
    ]


def slugs(found: Inputs) -> set[str]:
    return {notice.slug for notice in found.notices}


def device(
    folder: Path, name: str, *, rank: int | None, process: int, world: int | None = 4
) -> Path:
    made = TraceBuilder(
        rank=rank,
        world_size=world,
        process=process,
        device_name=None,
        base_ns=1_700_000_000 * 10**9,
    )
    made.op("forward", 1, 5, thread=process, **{"Record function id": 7})
    return made.write(folder / name)


def host(folder: Path, name: str, *, process: int) -> Path:
    made = HostTraceBuilder(process=process)
    made.op("forward", record_id=7)
    return made.write(folder / name)


# -- plain files ------------------------------------------------------------------------------------------------------


def test_kinds_are_told_by_content_and_pairs_by_process(tmp_path):
    files = [
        host(tmp_path, "a.json", process=12),
        device(tmp_path, "b.json.gz", rank=0, process=11),
        device(tmp_path, "c.json.gz", rank=1, process=12),
        host(tmp_path, "d.json.gz", process=11),
    ]
    for given in (files, files[::-1], [tmp_path]):
        found = find_inputs(*given)
        assert shown(found) == [(0, "b.json.gz", "d.json.gz"), (1, "c.json.gz", "a.json")]
        assert slugs(found) == {"missing-ranks"}


def test_equal_process_ids_on_two_machines_are_told_apart_by_rank(tmp_path):
    for rank in (0, 1):
        device(tmp_path, f"rank{rank}.kineto.json", rank=rank, process=5, world=2)
        host(tmp_path, f"rank{rank}.host.json", process=5)
    found = find_inputs(tmp_path)
    assert shown(found) == [
        (rank, f"rank{rank}.kineto.json", f"rank{rank}.host.json") for rank in (0, 1)
    ]
    assert not found.notices


def test_names_pair_what_neither_process_nor_rank_does(tmp_path):
    made = [
        device(tmp_path, f"{name}.kineto.json", rank=rank, process=20 + rank, world=2)
        for rank, name in enumerate("xy")
    ]
    traces = [host(tmp_path, f"{name}_et.json", process=90) for name in "yx"]
    found = find_inputs(*made, *traces)
    assert shown(found) == [(0, "x.kineto.json", "x_et.json"), (1, "y.kineto.json", "y_et.json")]


def test_device_traces_alone_are_enough_and_it_is_said(tmp_path):
    found = find_inputs(device(tmp_path, "trace.json", rank=None, process=3))
    assert shown(found) == [(0, "trace.json", None)]
    assert slugs(found) == {"no-host-trace"}
    assert load_ranks(tmp_path / "trace.json", cache=False).ranks[0].matching is None


def test_one_rank_is_spoken_of_as_one(tmp_path):
    for rank in range(2):
        device(tmp_path, f"rank{rank}.kineto.json", rank=rank, process=30 + rank, world=3)
    host(tmp_path, "rank0.host.json", process=30)
    said = {notice.slug: notice.message for notice in find_inputs(tmp_path).notices}
    assert (
        said["missing-ranks"]
        == "1 of 3 ranks is missing (2); when it arrives at collectives is assumed"
    )
    assert said["no-host-trace"].startswith("there is no host trace for rank 1: ")
    host(tmp_path, "rank1.host.json", process=31)
    host(tmp_path, "rank7.host.json", process=99)
    said = {notice.slug: notice.message for notice in find_inputs(tmp_path).notices}
    assert said["unpaired-host-trace"].startswith("no device trace goes with 1 host trace: ")


def test_host_traces_of_nobody_are_left_out_and_said(tmp_path):
    for rank in range(2):
        device(tmp_path, f"rank{rank}.kineto.json", rank=rank, process=30 + rank, world=2)
        host(tmp_path, f"rank{rank}.host.json", process=30 + rank)
    stray = host(tmp_path, "rank7.host.json", process=99)
    found = find_inputs(tmp_path)
    assert slugs(found) == {"unpaired-host-trace"}
    assert stray.name in next(notice.message for notice in found.notices)
    assert len(found.ranks) == 2


def test_missing_ranks_are_said(tmp_path):
    found = find_inputs(device(tmp_path, "rank1.json", rank=1, process=3, world=4))
    said = next(notice for notice in found.notices if notice.slug == "missing-ranks")
    assert said.count == 3
    assert "0, 2, 3" in said.message


def test_files_that_are_no_traces_are_refused_where_they_were_named_and_skipped_in_directories(
    tmp_path,
):
    device(tmp_path, "rank0.json", rank=0, process=3, world=1)
    (tmp_path / "settings.json").write_text('{"a": 1}')
    assert not find_inputs(tmp_path).refused
    named = find_inputs(tmp_path / "rank0.json", tmp_path / "settings.json")
    assert [error.slug for error in named.refused] == ["not-a-trace"]


def _slug(error: type[TraceloomError], *paths: Path, **options: Any) -> str:
    with pytest.raises(error) as raised:
        load_ranks(*paths, cache=False, **options)
    assert "\n" not in str(raised.value)
    return raised.value.slug


def test_what_cannot_be_is_refused(tmp_path):
    first = device(tmp_path, "rank0.json", rank=0, process=3)
    again = device(tmp_path, "rank0_again.json", rank=0, process=3)
    nameless = []
    for number in (1, 2):
        made = TraceBuilder(
            rank=None, process=40 + number, device_name=None, base_ns=1_700_000_000 * 10**9
        )
        made.metadata(distributedInfo={"backend": "nccl", "world_size": 2}).op(
            "a", 1, 1, thread=40 + number
        )
        nameless.append(made.write(tmp_path / f"t{number}.json"))
    windows = []
    for number in (1, 2):
        made = TraceBuilder(rank=None, process=50, device_name=None, base_ns=1_700_000_000 * 10**9)
        windows.append(made.op("a", 1e6 * number, 1, thread=50).write(tmp_path / f"w{number}.json"))
    one, two = host(tmp_path, "h1.json", process=3), host(tmp_path, "h2.json", process=3)
    other = host(tmp_path, "h3.json", process=4)
    assert _slug(InputError, one) == "no-device-trace"
    assert _slug(InputError, one, two, first) == "two-host-traces"
    assert _slug(InputError, other, first) == "host-mismatch"
    assert _slug(UsageError) == "no-inputs"
    assert _slug(InputError, tmp_path / "nowhere.json") == "unreadable"
    assert _slug(InputError, first, again) == "several-windows"
    assert _slug(InputError, *nameless) == "unknown-ranks"
    assert _slug(InputError, *windows) == "several-windows"


def test_a_damaged_host_trace_that_was_named_is_refused(tmp_path):
    first = device(tmp_path, "rank0.json", rank=0, process=3)
    bad = tmp_path / "rank0.host.json"
    bad.write_text('{"schema": "1.0.1", "pid": 3, "nodes": [')
    assert _slug(InputError, first, bad) == "empty-host-trace"


# -- real files -------------------------------------------------------------------------------------------------------


def test_the_dlrm_job_pairs_in_any_order(shared_data):
    files = sorted(
        (shared_data / "multirank").glob("dlrm_*.json.gz"), key=lambda path: path.name[::-1]
    )
    found = find_inputs(*files)
    assert [one.rank for one in found.ranks] == list(range(8))
    assert all(one.host and f"rank{one.rank}." in one.host.path.name for one in found.ranks)
    assert not found.notices


def test_all_dlrm_ranks_match_every_op(shared_data):
    loaded = load_ranks(*(shared_data / "multirank").glob("dlrm_*.json.gz"), cache=False)
    assert [(one.matching.matched, one.matching.ops) for one in loaded.ranks if one.matching] == [
        (1672, 1672)
    ] * 8


def test_two_runs_in_one_directory_are_refused(shared_data):
    assert _slug(UsageError, shared_data / "multirank") == "several-runs"


def test_a_host_trace_given_with_another_ranks_device_trace_is_refused(shared_data):
    folder = shared_data / "multirank"
    assert (
        _slug(InputError, folder / "dlrm_rank1.host.json.gz", folder / "dlrm_rank0.kineto.json.gz")
        == "host-mismatch"
    )


# -- captures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Three timed steps and a graph step of one rank, in which the observer's ids join host and device trace."""
    folder = tmp_path / "run"
    folder.mkdir()
    timed = TraceBuilder(device_name=None, process=4242, rank=0, base_ns=1_700_000_000 * 10**9)
    time = 0
    for number in range(3):
        timed.mark(number, time, thread=4242)
        for name, start, length in (
            ("forward", 1, 6),
            ("aten::mm", 2, 1),
            ("aten::relu", 4, 1),
            ("aten::add_", 8, 1),
            ("backward", 10, 4),
            ("aten::mm", 11, 1),
        ):
            timed.op(name, time + start, length, thread=4242, **{"Record function id": 0})
        timed.op(f"only::in{number}", time + 15, 1, thread=4242)
        time += 20
    timed.mark(3, time, thread=4242)
    timed.write(folder / "rank0.kineto.json.gz")
    graph, observed = build_trace_pair([STEP])
    graph.write(folder / "rank0.graph.kineto.json.gz")
    observed.write(folder / "rank0.host.json.gz")
    _entry(
        folder, {"step": 3, "file": "rank0.graph.kineto.json.gz", "host_file": "rank0.host.json.gz"}
    )
    return folder


def _entry(folder: Path, graph_step: dict[str, Any] | None) -> None:
    entry = {
        "rank": 0,
        "world_size": 1,
        "name": "rank0",
        "process": 4242,
        "graph_step": graph_step,
        "window": {
            "file": "rank0.kineto.json.gz",
            "kind": "steps",
            "first_step": 0,
            "step_count": 3,
        },
    }
    document = {"format": "traceloom-capture", "version": 1, "run": {}, "ranks": [entry]}
    (folder / "capture.json").write_text(json.dumps(document))


def test_the_graph_steps_host_ops_are_carried_over_to_every_timed_step(capture):
    loaded = load_ranks(capture, cache=False)
    rank = loaded.ranks[0]
    found = rank.matching
    assert found is not None
    assert not loaded.notices
    assert rank.trace.meta.path.endswith("rank0.kineto.json.gz")
    assert (found.evidence, found.matched, found.ops, found.carried) == ("inferred", 6, 6, (18, 3))
    events = rank.trace.events.with_columns(pl.Series("host_op", found.host_op))
    joined = events.filter(pl.col("host_op") >= 0)
    assert joined["step"].value_counts().sort("step").rows() == [(0, 6), (1, 6), (2, 6)]
    names = dict(found.host.ops.select("id", "name").iter_rows())
    assert [names[op] for op in joined["host_op"].to_list()] == joined["name"].to_list()
    per_step = [group.sort("start_ns")["host_op"].to_list() for _, group in joined.group_by("step")]
    assert per_step[0] == per_step[1] == per_step[2] == sorted(per_step[0])
    counts = {
        (subject, outcome): count for _, subject, outcome, count, _ in found.coverage().iter_rows()
    }
    assert counts["host-ops", "matched: record function id"] == 6
    assert counts["timed-ops", "unmatched: not in the graph step"] == 3


def test_the_graph_step_itself_is_exact_and_its_cost_is_said(capture):
    loaded = load_ranks(capture, window="graph", cache=False)
    found = loaded.ranks[0].matching
    assert found is not None
    assert (found.exact, found.matched, found.ops, found.carried) == (True, 6, 6, None)
    assert {notice.slug for notice in loaded.notices} == {"observer-cost"}


def test_a_capture_without_a_graph_step_links_its_window_alone(capture):
    _entry(capture, None)
    loaded = load_ranks(capture, cache=False)
    assert loaded.ranks[0].matching is None
    assert {notice.slug for notice in loaded.notices} == {"no-host-trace"}
    assert _slug(InputError, capture, window="graph") == "graph-step-missing"


def test_a_damaged_host_trace_of_a_capture_costs_only_itself(capture):
    (capture / "rank0.host.json.gz").write_bytes(b"")
    loaded = load_ranks(capture, cache=False)
    assert loaded.ranks[0].matching is None
    assert {notice.slug for notice in loaded.notices} == {"host-trace-unused"}


def test_names_in_capture_json_never_lead_out_of_the_directory(capture, tmp_path):
    (capture / "rank0.host.json.gz").rename(tmp_path / "rank0.host.json.gz")
    outside = "../rank0.host.json.gz"
    _entry(capture, {"step": 3, "file": "rank0.graph.kineto.json.gz", "host_file": outside})
    assert find_inputs(capture).ranks[0].host is None


def test_files_of_a_capture_may_be_named_beside_it(capture):
    found = find_inputs(*sorted(capture.iterdir()))
    assert [one.device.path.name for one in found.ranks] == ["rank0.kineto.json.gz"]
    assert found.ranks[0].graph_step is not None


def test_a_capture_and_other_traces_are_two_runs(capture, tmp_path):
    other = device(tmp_path, "rank1.json", rank=1, process=3)
    assert _slug(UsageError, capture, other) == "several-runs"


def test_steps_unlike_the_graph_step_are_said(capture):
    changed = TraceBuilder(device_name=None, process=4242, rank=0)
    changed.mark(0, 0, thread=4242)
    for number in range(9):
        changed.op(f"new::op{number}", 2 * number + 1, 1, thread=4242)
    changed.op("aten::relu", 30, 1, thread=4242).mark(1, 40, thread=4242).write(
        capture / "rank0.kineto.json.gz"
    )
    found = load_ranks(capture, cache=False).ranks[0].matching
    assert found is not None
    assert found.carried == (1, 9)
    assert "unlike-graph-step" in {notice.slug for notice in found.notices}
    assert int((np.asarray(found.host_op) >= 0).sum()) == 1
