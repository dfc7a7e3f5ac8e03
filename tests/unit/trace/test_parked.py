"""Sessions too large for memory: traces whose columns lie in mapped files are the same traces."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import traceloom
from support.jobs import ParallelRecipe, parallel_job
from traceloom.errors import InputError
from traceloom.formats import ReadProgress, load_inputs
from traceloom.testing import TraceBuilder
from traceloom.trace import mapped_arrays, storage
from traceloom.trace.trace import Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    run = parallel_job(ParallelRecipe(data=2, layers=3, stacks=True)).run()
    return run.trace(0).build()


def test_a_parked_trace_is_the_same_trace(trace: Trace) -> None:
    column_files = storage.MappedFiles()
    other = column_files.park(trace)
    other.check()
    assert other.meta == trace.meta
    for name, frame in trace.frames().items():
        kept = other.frames()[name]
        assert kept.schema == frame.schema
        assert kept.equals(frame), name
    assert trace.events.height >= 1024  # so that something was parked


def test_columns_outlive_their_parking(trace: Trace) -> None:
    expected = trace.events["name"].to_list()
    parked_events = storage.MappedFiles().park(trace).events
    names = parked_events["name"]
    del parked_events
    for _ in range(3):
        storage.MappedFiles().park(trace)
    assert names.to_list() == expected


def test_missing_values_stay_missing() -> None:
    builder = TraceBuilder()
    for number in range(2000):
        builder.op(f"op {number % 7} of a name that is not short", number * 10.0, 5)
        if number % 3 == 0:
            builder.launch("cudaLaunchKernel", number * 10.0 + 1, 1, correlation=number)
    trace = builder.build()
    other = storage.MappedFiles().park(trace)
    assert 0 < other.events["correlation"].null_count() < other.events.height
    assert other.events.equals(trace.events)
    assert other.events.filter(pl.col("correlation") == 300)["name"].to_list() == [
        "cudaLaunchKernel"
    ]


def test_only_what_goes_beyond_the_sessions_share_is_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = parallel_job(ParallelRecipe(data=4, steps=4, layers=3)).run()
    folder = run.write(tmp_path / "job")
    small = traceloom.load(folder, cache=False)
    monkeypatch.setattr(storage, "MAX_IN_MEMORY_BYTES", 2 * small.traces[0].meta.file_bytes + 100)
    seen: list[int | None] = []
    park = storage.MappedFiles.park

    def noted(column_files: storage.MappedFiles, one: Trace) -> Trace:
        seen.append(one.rank)
        return park(column_files, one)

    monkeypatch.setattr(storage.MappedFiles, "park", noted)
    large = traceloom.load(folder, cache=False)
    assert seen == [2, 3]
    for one, other in zip(small.traces, large.traces, strict=True):
        assert one.events.equals(other.events)


def test_a_full_disk_is_said(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_size: int) -> None:
        raise mapped_arrays.describe_full_disk(OSError(28, "No space left on device"))

    monkeypatch.setattr(mapped_arrays, "allocate_block", full)
    with pytest.raises(InputError) as caught:
        storage.MappedFiles().park(trace)
    assert caught.value.slug == "no-space"


def test_files_of_other_ranks_are_not_read(tmp_path: Path) -> None:
    folder = parallel_job(ParallelRecipe(data=4, steps=1)).run().write(tmp_path / "job")
    told: list[ReadProgress] = []
    loaded = load_inputs(folder, cache=False, ranks=(1, 3), progress=told.append)
    assert loaded.runs[0].ranks == (1, 3)
    assert {one.files for one in told} == {2}


def test_ranks_that_are_not_there_are_looked_for_in_all_files(tmp_path: Path) -> None:
    folder = parallel_job(ParallelRecipe(data=2, steps=1)).run().write(tmp_path / "job")
    assert load_inputs(folder, cache=False, ranks=(7,)).runs[0].ranks == (0, 1)
