"""Files in which the recordings of several ranks were merged are read as these ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.merged import merge_ranks
from traceloom import Session, analyze, load
from traceloom.analyze.answer import answer
from traceloom.errors import InputError
from traceloom.formats import load_inputs
from traceloom.graph.linking import load_ranks
from traceloom.report import ReportOptions, build
from traceloom.testing.known_runs import KnownRun, build_ranks
from traceloom.trace.trace import SCHEMAS
from traceloom.workload.anonymize.policy import Key, Policy
from traceloom.workload.anonymize.run import anonymize


def write(document: dict[str, Any], folder: Path, name: str = "merged.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def read(document: dict[str, Any], folder: Path) -> Session:
    return load(write(document, folder), cache=False)


def find_straggler(runs: list[KnownRun]) -> int:
    return max(range(len(runs)), key=lambda rank: runs[rank].busy_ns)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["label", "name", "list", "rank"])
@pytest.mark.parametrize("seed", range(20))
def test_each_rank_is_what_its_own_file_says(seed: int, how: str, tmp_path: Path) -> None:
    runs = build_ranks(seed, 2 + seed % 5)
    straggler = find_straggler(runs)
    merged = read(merge_ranks(runs, how), tmp_path)
    merged.check()
    alone = [run.builder.build() for run in runs]
    assert [trace.events.height for trace in merged.traces] == [
        trace.events.height for trace in alone
    ]
    assert merged.ranks == ((None,) * len(alone) if how == "list" else tuple(range(len(alone))))
    for trace, own, run in zip(merged.traces, alone, runs, strict=True):
        gemms = trace.events.filter(pl.col("name").cast(pl.String).str.starts_with("gemm"))
        assert gemms["duration_ns"].sum() == run.busy_ns
        joined = [
            "name",
            "start_ns",
            "duration_ns",
            "correlation",
            "launch",
            "op",
            "step",
            "device",
        ]
        assert trace.events.select(joined).equals(own.events.select(joined))
        assert trace.flows.height == own.flows.height or how == "list"
        assert set(trace.frames()) == set(SCHEMAS)
    if how != "list":
        separate = Session(tuple(alone), "separate")
        assert answer(merged).sentence == answer(separate).sentence
        found = analyze.imbalance([analyze.summarize_rank(trace) for trace in merged.traces])
        compute = found.measures.filter(pl.col("measure") == "compute_ns")
        assert compute["max_rank"].to_list() == [straggler]
        (slow,) = merged.of_rank(straggler).traces
        expected = {"name": straggler + 1, "label": 4000 + straggler}
        assert slow.meta.process == expected.get(how, straggler or None)


def test_a_rank_can_be_chosen_and_the_straggler_is_named(tmp_path: Path) -> None:
    runs = build_ranks(3, 3)
    straggler = find_straggler(runs)
    path = write(merge_ranks(runs, "label"), tmp_path)
    session = load(path, cache=False)
    document = build(session, ReportOptions())
    (compute,) = (
        row for row in document["imbalance"]["measures"] if row["measure"] == "compute_ns"
    )
    assert compute["max_rank"] == straggler
    chosen = load_inputs(path, cache=False, ranks=(straggler,)).runs[0].of_rank(straggler)
    assert answer(chosen).sentence.startswith(f"Rank {straggler}, ")
    assert [part.rank for part in load_ranks(path, cache=False).ranks] == list(session.ranks)


def test_labels_of_several_groups_are_numbered_in_the_usual_order(tmp_path: Path) -> None:
    runs = build_ranks(5, 3)
    document = merge_ranks(runs[:2] * 2, "label")
    size, seen = len(document["traceEvents"]) // 4, []
    for index, event in enumerate(document["traceEvents"]):
        tensor, pipeline = divmod(index // size, 2)
        process = event["pid"].split("] ")[1]
        event["pid"] = f"[TP{tensor:02d}-PP{pipeline:02d}] {process}"
        seen.append((2 * pipeline + tensor, event["ph"] == "X"))
    session = read(document, tmp_path)
    assert session.ranks == (0, 1, 2, 3)
    for trace in session.traces:
        assert trace.events.height == sum(is_span for rank, is_span in seen if rank == trace.rank)


def test_work_of_gpus_that_nothing_gives_to_a_process_is_refused(tmp_path: Path) -> None:
    document = merge_ranks(build_ranks(0, 3), "list")
    document["traceEvents"].sort(key=lambda event: event.get("ts", 0))
    with pytest.raises(InputError) as raised:
        read(document, tmp_path)
    assert raised.value.slug == "merged-ranks"


def test_the_cache_keeps_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    path = write(merge_ranks(build_ranks(1, 3), "name"), tmp_path)
    first, again = load(path), load(path)
    assert len(again.traces) > 1
    for one, other in zip(first.traces, again.traces, strict=True):
        assert one.meta == other.meta
        assert one.events.equals(other.events)


def test_a_merged_file_beside_the_files_of_its_ranks_adds_nothing(tmp_path: Path) -> None:
    runs = build_ranks(2, 3)
    write(merge_ranks(runs, "label"), tmp_path, "run-merged.json")
    for rank, run in enumerate(runs):
        run.builder.write(tmp_path / f"run-TP-{rank}.json")
    session = load(tmp_path, cache=False)
    assert session.ranks == tuple(range(len(runs)))
    assert [notice.slug for notice in session.notices] == ["merged-twice"]


def test_a_merged_file_is_not_anonymized(tmp_path: Path) -> None:
    path = write(merge_ranks(build_ranks(2, 3), "label"), tmp_path)
    with pytest.raises(InputError) as raised:
        anonymize([path], tmp_path / "out.json", Policy(), Key(b"a key that only tests have"))
    assert raised.value.slug == "merged-ranks"
