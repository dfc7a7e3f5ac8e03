"""Files, directories and captures to sessions; runs told apart; the cache; reading in processes."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from traceloom.errors import InputError, UsageError
from traceloom.formats import ReadProgress, load, load_inputs, load_runs, loading
from traceloom.formats.inputs import InputFile
from traceloom.testing import TraceBuilder
from traceloom.trace.cache import Cache

UNIX_NS = 1_700_000_000 * 10**9


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def rank(
    number: int, *, world_size: int = 2, seconds: float = 0, process: int = 10, **more
) -> TraceBuilder:
    made = TraceBuilder(
        rank=number,
        world_size=world_size,
        base_ns=UNIX_NS + int(seconds * 1e9),
        process=process + number,
        **more,
    )
    return made.op("aten::mm", 1, 5, thread=process + number).op(
        "aten::add", 8, 2, thread=process + number
    )


def test_a_file_is_a_session_of_one_trace(tmp_path):
    session = load(rank(0).write(tmp_path / "trace.json"))
    assert session.ranks == (0,)
    assert session.name == str(tmp_path / "trace.json")


def test_the_ranks_of_a_directory_are_one_session_in_order(tmp_path):
    for number in (10, 2, 0):
        rank(number, world_size=16).write(tmp_path / f"rank{number}.json.gz")
    session = load(tmp_path)
    assert session.ranks == (0, 2, 10)
    assert session.world_size == 16
    assert session.notices == ()


def test_directories_are_searched_below(tmp_path):
    deep = tmp_path / "log" / "plugins" / "profile"
    deep.mkdir(parents=True)
    rank(0).write(deep / "host_1.123.pt.trace.json")
    rank(1).write(deep / "host_2.124.pt.trace.json.gz")
    (deep / "notes.txt").write_text("no trace")
    assert load(tmp_path).ranks == (0, 1)


def test_other_files_in_a_directory_are_passed_over(tmp_path):
    rank(0).write(tmp_path / "rank0.json")
    (tmp_path / "rank0.host.json").write_text('{"schema": "1.1.1", "pid": 1, "nodes": []}')
    (tmp_path / "settings.json").write_text('{"a": 1}')
    loaded = load_inputs(tmp_path)
    assert [session.ranks for session in loaded.runs] == [(0,)]
    assert loaded.refused == ()


def test_a_given_file_that_is_refused_beside_good_ones_is_a_notice(tmp_path):
    good = rank(0).write(tmp_path / "rank0.json")
    bad = tmp_path / "bad.json"
    bad.write_text('{"schema": "1.1.1", "pid": 1, "nodes": []}')
    loaded = load_inputs(good, bad)
    assert [notice.slug for notice in loaded.refused] == ["refused-input"]
    assert "host trace" in loaded.refused[0].message
    assert loaded.runs[0].notices == loaded.refused


def test_nothing_but_refused_files_is_an_error(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(InputError) as caught:
        load(bad)
    assert caught.value.slug == "not-a-trace"
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert caught.value.slug in ("not-a-trace", "no-traces")


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert caught.value.slug == "no-traces"


def test_no_input_is_a_usage_error():
    with pytest.raises(UsageError) as caught:
        load()
    assert caught.value.slug == "no-inputs"


def test_several_runs_are_told_apart_by_world_size_time_and_job(tmp_path):
    rank(0).write(tmp_path / "a0.json")
    rank(1).write(tmp_path / "a1.json")
    rank(0, world_size=8).write(tmp_path / "b0.json")
    rank(0, seconds=90_000).write(tmp_path / "c0.json")
    rank(0).metadata(PT_PROFILER_JOB_ID="x").write(tmp_path / "d0.json")
    rank(1).metadata(PT_PROFILER_JOB_ID="y").write(tmp_path / "e0.json")
    runs = load_runs(*(tmp_path / f"{name}.json" for name in ("a0", "a1", "b0", "c0")))
    assert [session.ranks for session in runs] == [(0, 1), (0,), (0,)]
    assert len(load_runs(tmp_path / "d0.json", tmp_path / "e0.json")) == 2


def test_several_runs_where_one_is_wanted_are_named(tmp_path):
    rank(0).write(tmp_path / "a.json")
    rank(0, world_size=8).write(tmp_path / "b.json")
    with pytest.raises(UsageError) as caught:
        load(tmp_path)
    assert caught.value.slug == "several-runs"
    assert "a.json" in str(caught.value)
    assert "traceloom report" in caught.value.hint


def test_a_rank_with_several_windows_is_one_rank(tmp_path):
    for window in range(3):
        rank(0, seconds=window * 60).write(tmp_path / f"worker0.{window}.pt.trace.json")
    session = load(tmp_path)
    assert session.ranks == (0, 0, 0)
    starts = [trace.start_ns for trace in session.traces]
    assert starts == sorted(starts)
    assert session.notices == ()


def test_two_files_that_claim_one_rank_at_one_time_are_said(tmp_path):
    rank(0).write(tmp_path / "worker1.json")
    rank(0, process=99).write(tmp_path / "worker2.json")
    session = load(tmp_path)
    assert len(session.traces) == 2
    assert [notice.slug for notice in session.notices] == ["duplicate-rank"]


def test_the_rank_may_stand_in_the_file_name_or_the_arguments(tmp_path):
    named = load(TraceBuilder(rank=None).op("aten::mm", 1, 2).write(tmp_path / "run_rank-7.json"))
    assert named.traces[0].rank == 7
    assert named.traces[0].meta.rank_evidence == "file name"
    assert [n.slug for n in named.traces[0].notices if n.slug != "no-steps"] == ["rank-from-name"]
    made = TraceBuilder(rank=None).collective("allreduce", 1, 2, Rank=5)
    told = load(made.write(tmp_path / "run_rank-7b.json"))
    assert (told.traces[0].rank, told.traces[0].meta.rank_evidence) == (5, "arguments")


def capture(folder: Path) -> None:
    rank(0).annotation("gloo:all_reduce", 20, 5, thread=11).write(folder / "rank0.kineto.json.gz")
    rank(0, seconds=1).write(folder / "rank0.graph.kineto.json.gz")
    entry = {
        "rank": 0,
        "world_size": 2,
        "host": "box",
        "groups": [{"name": "7", "description": "dp", "backend": "gloo", "ranks": [0, 1]}],
        "window": {"file": "rank0.kineto.json.gz"},
        "collectives": {
            "groups": ["7"],
            "group": [0],
            "kinds": ["all_reduce"],
            "kind": [0],
            "types": ["Float"],
            "type": [0],
            "sequence": [3],
            "bytes_in": [4096],
            "bytes_out": [4096],
            "peer": [None],
            "start_ns": [UNIX_NS + 19_000],
        },
    }
    document = {"format": "traceloom-capture", "version": 1, "ranks": [entry]}
    (folder / "capture.json").write_text(json.dumps(document))


def test_a_capture_gives_its_timed_windows_only_with_what_it_knows(tmp_path):
    capture(tmp_path)
    for given in (tmp_path, tmp_path / "capture.json"):
        session = load(given)
        assert session.capture is not None
        assert [Path(trace.meta.path).name for trace in session.traces] == ["rank0.kineto.json.gz"]
        trace = session.traces[0]
        assert trace.meta.rank_evidence == "capture"
        assert trace.groups.filter(trace.groups["group"] == "7")["ranks"].to_list() == [[0, 1]]
        row = trace.collectives.row(0, named=True)
        known = ("kind", "group", "group_size", "element_type", "in_bytes", "sequence")
        assert [row[name] for name in known] == ["all_reduce", "7", 2, "Float", 4096, 3]


def test_a_capture_without_its_document_is_found_by_the_parts_of_its_ranks(tmp_path):
    capture(tmp_path)
    (tmp_path / "capture.json").rename(tmp_path / "rank0.capture.json")
    assert load(tmp_path).traces[0].meta.rank_evidence == "capture"


def test_a_damaged_capture_is_refused(tmp_path):
    (tmp_path / "capture.json").write_text('{"format":')
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert caught.value.slug == "damaged-capture"


def test_names_in_a_capture_never_leave_its_directory(tmp_path):
    inside = tmp_path / "capture"
    inside.mkdir()
    rank(0).write(tmp_path / "secret.json")
    document = {
        "format": "traceloom-capture",
        "version": 1,
        "ranks": [{"rank": 0, "window": {"file": "../secret.json"}}],
    }
    (inside / "capture.json").write_text(json.dumps(document))
    with pytest.raises(InputError):
        load(inside)


def test_standard_input_is_read_once(tmp_path, monkeypatch):
    class Stdin:
        buffer = io.BytesIO(rank(0).text().encode())

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert load("-").traces[0].events.height == 2


def test_the_cache_gives_the_same_trace_under_any_name(tmp_path):
    path = rank(0).kernel("gemm", 3, 4, correlation=1).write(tmp_path / "a.json.gz")
    first = load(path).traces[0]
    moved = shutil.copy(path, tmp_path / "b.json.gz")
    entry = Cache().entry(Path(moved), None)
    assert entry is not None
    assert entry.exists()
    again = load(moved).traces[0]
    assert again.meta.path == str(moved)
    for name, frame in first.frames().items():
        assert again.frames()[name].equals(frame), name
    assert again.notices == first.notices


def test_no_cache_leaves_nothing_behind(tmp_path):
    load(rank(0).write(tmp_path / "a.json"), cache=False)
    assert not Cache()._folder.joinpath("traces").exists()


def test_processes_read_the_same_as_this_one(tmp_path, monkeypatch):
    inputs = [
        InputFile(rank(number).write(tmp_path / f"rank{number}.json"), given=True)
        for number in range(2)
    ]
    (tmp_path / "bad.json").write_text("{}")
    inputs.append(InputFile(tmp_path / "bad.json", given=True))
    here = loading.read_all(inputs, cache=None)
    monkeypatch.setattr(loading, "_MIN_POOL_BYTES", 0)
    seen: list[ReadProgress] = []
    beside = loading.read_all(inputs, cache=None, report=seen.append)
    for one, other in zip(here[:2], beside[:2], strict=True):
        assert one.meta == other.meta
        assert all(other.frames()[name].equals(frame) for name, frame in one.frames().items())
    assert isinstance(beside[2], InputError)
    assert str(beside[2]) == str(here[2])
    assert seen[-1].files_done == 2
