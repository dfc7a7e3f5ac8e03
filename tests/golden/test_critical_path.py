"""The critical path on public traces, against what plain loops over their JSON say."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import traceloom
from support.public_traces import DATA
from traceloom.analyze import critical_path
from traceloom.errors import UsageError
from traceloom.graph import link_session

KINETO = sorted(
    path
    for folder in ("kineto", "critical_path", "diff")
    for path in (DATA / folder).glob("*.json.gz")
)

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not DATA.is_dir(), reason="the public traces (../shared/data) are not on this machine"
    ),
]


def events(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / name) as handle:
        return [
            e for e in json.load(handle, parse_float=Decimal)["traceEvents"] if e.get("ph") == "X"
        ]


def ns(us: Decimal | int) -> int:
    return int(Decimal(str(us)) * 1000)


def path_of(*names: str) -> traceloom.analyze.CriticalPath:
    found = critical_path(traceloom.load(*(DATA / name for name in names)))
    found.check()
    return found


def shares(found: traceloom.analyze.CriticalPath) -> dict[str, float]:
    return dict(found.classes.select("class", "fraction").rows())


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", KINETO, ids=lambda path: path.name)
def test_every_trace_has_a_path_that_adds_up(path: Path) -> None:
    session = traceloom.load(path)
    if not link_session(session).nodes["event"].drop_nulls().len():
        with pytest.raises(UsageError, match="no timed events"):
            critical_path(session)
        return
    found = critical_path(session)
    found.check()
    assert found.law.exact_error_ns == 0
    if found.step is not None:
        steps = session.traces[0].steps.filter(pl.col("step") == found.step)
        assert found.window_ns == int((steps["end_ns"] - steps["start_ns"])[0])
    worked = found.path.filter(~pl.col("along_edge"))["node"].drop_nulls()
    assert set(worked) <= set(found.node_slack.filter(pl.col("slack_ns") == 0)["node"])


def test_owlv2_waits_for_its_data_for_half_of_the_step() -> None:
    found = path_of("kineto/h100_owlv2.json.gz")
    rows = events("kineto/h100_owlv2.json.gz")
    loading = sum(ns(e["dur"]) for e in rows if e["name"].startswith("enumerate(DataLoader)#"))
    kernels = sum(ns(e["dur"]) for e in rows if e.get("cat") == "kernel")
    of = dict(found.classes.select("class", "duration_ns").rows())
    assert of["data"] == pytest.approx(loading, rel=0.01)
    # While it waits for data the GPU stands still, so all the rest of the step is its kernels' time.
    assert of["compute"] == pytest.approx(kernels, rel=0.03)
    step = next(
        ns(e["dur"])
        for e in rows
        if e["name"] == "ProfilerStep#6" and e["cat"] == "user_annotation"
    )
    assert found.window_ns == step


@pytest.mark.parametrize("name", ["h100_qwen_0.5b", "mi300_qwen_0.5b", "v100_ns_resolution"])
def test_a_busy_gpu_decides_the_step_on_both_vendors(name: str) -> None:
    assert shares(path_of(f"kineto/{name}.json.gz"))["compute"] > 0.84


@pytest.mark.parametrize("name", ["h100_bert_small", "mi300_bert_small", "a100_ddp_nccl"])
def test_an_idle_gpu_leaves_the_step_to_the_host_on_both_vendors(name: str) -> None:
    of = shares(path_of(f"kineto/{name}.json.gz"))
    assert of["host"] + of["launch"] + of["synchronisation"] > 0.99


def test_dlrm_begins_with_the_rank_that_came_last() -> None:
    names = [f"multirank/dlrm_rank{rank}.kineto.json.gz" for rank in range(8)]
    found = path_of(*names)
    begun = {}
    ended = {}
    for rank, name in enumerate(names):
        step = next(e for e in events(name) if e["name"] == "ProfilerStep#10")
        begun[rank], ended[rank] = ns(step["ts"]), ns(step["ts"]) + ns(step["dur"])
    last = max(begun, key=begun.__getitem__)
    assert found.window_ns == max(ended.values()) - min(begun.values())
    before = found.path.row(0, named=True)
    assert (before["class"], before["rank"]) == ("unrecorded", last)
    assert before["duration_ns"] == begun[last] - min(begun.values())
    assert last == 7
    # Rank 7 arrives last in the first five collectives, rank 5 in the next two, rank 4 in the last one.
    through = found.path["rank"].unique(maintain_order=True).to_list()
    assert through[0] == 7
    assert through[-1] == 4
    assert set(through) <= {7, 5, 4}


def test_steps_of_one_run_add_up_to_their_time() -> None:
    session = traceloom.load(DATA / "kineto" / "v100_ns_resolution.json.gz")
    steps = session.traces[0].steps
    paths = [critical_path(session, step) for step in steps["step"].to_list()]
    for found in paths:
        found.check()
    assert sum(found.window_ns for found in paths) == int(
        (steps["end_ns"] - steps["start_ns"]).sum()
    )
