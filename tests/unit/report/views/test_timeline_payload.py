"""The timeline holds exactly the events of the traces: decoded again, they are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceloom.formats import load
from traceloom.report.views.timeline import build
from traceloom.trace.session import Session

Unpacked = Callable[[str], tuple[dict[str, Any], dict[str, Any]]]

FILES = [
    "kineto/h100_bert_small.json.gz",
    "kineto/a100_ddp_nccl.json.gz",
    "kineto/h800_deepseek_train.json.gz",
    "kineto/h100_qwen_0.5b.json.gz",
    "kineto/mi300_vllm_piecewise_graphs.json.gz",
    "kineto/cpu_only_gloo_rank34.json.gz",
    pytest.param("diff/v100_test.json.gz", marks=pytest.mark.thorough),
]


def events_of(
    session: Session, header: dict[str, Any], decoded: dict[str, Any]
) -> Counter[tuple[Any, ...]]:
    """(trace, lane name, label, category, start, duration, correlation, nested end) of each decoded event."""
    out: Counter[tuple[Any, ...]] = Counter()
    place = 0
    for lane in header["lanes"]:
        for k in range(place, place + lane["count"]):
            name, code = header["labels"][decoded["label"][k]]
            out[
                lane["trace"],
                lane["stream"],
                lane["thread"],
                name,
                header["categories"][code],
                decoded["start"][k] + session.epoch_ns,
                decoded["duration"][k],
                decoded["correlation"][k],
                decoded["start"][k]
                + max(decoded["duration"][k], 0)
                - decoded["clip"][k]
                + session.epoch_ns,
            ] += 1
        place += lane["count"]
    return out


def events_in(session: Session) -> Counter[tuple[Any, ...]]:
    out: Counter[tuple[Any, ...]] = Counter()
    for number, trace in enumerate(session.traces):
        frame = trace.events.join(
            trace.lanes.select("lane", lane_thread="thread", lane_stream="stream"),
            on="lane",
            how="left",
            maintain_order="left",
        )
        for row in frame.select(
            "lane_stream",
            "lane_thread",
            "name",
            "category",
            "start_ns",
            "duration_ns",
            "correlation",
            "nested_end_ns",
        ).iter_rows():
            out[(number, *row)] += 1
    return out


@pytest.mark.sampled(2)
@pytest.mark.data
@pytest.mark.parametrize("file", FILES)
def test_the_payload_equals_the_trace(shared_data: Path, unpacked: Unpacked, file: str) -> None:
    session = load(str(shared_data / file))
    view = build(session, set(), [])
    header, decoded = unpacked(view.payload)
    assert view.shown == session.traces[0].events.height
    assert view.omitted == {}
    assert events_of(session, header, decoded) == events_in(session)


@pytest.mark.data
def test_several_ranks_stand_one_after_the_other(shared_data: Path, unpacked: Unpacked) -> None:
    traces = tuple(
        load(str(shared_data / f"multirank/dlrm_rank{k}.kineto.json.gz")).traces[0] for k in (0, 3)
    )
    session = Session(traces, "two")
    header, decoded = unpacked(build(session, set(), []).payload)
    assert events_of(session, header, decoded) == events_in(session)
    assert [rank["rank"] for rank in header["ranks"]] == [0, 3]


@pytest.mark.thorough
@pytest.mark.data
def test_an_event_costs_less_than_fifteen_bytes(shared_data: Path) -> None:
    view = build(load(str(shared_data / "kineto/h100_owlv2.json.gz")), set(), [])
    assert len(view.payload) * 3 / 4 < 15 * view.shown


def test_gpu_work_points_to_its_launch(session: Session, unpacked: Unpacked) -> None:
    header, decoded = unpacked(build(session, set(), []).payload)
    names = [header["labels"][label][0] for label in decoded["label"]]
    links = {
        (names[k], names[launch], decoded["correlation"][k] == decoded["correlation"][launch])
        for k, launch in enumerate(decoded["launch"])
        if launch is not None
    }
    assert links == {("aten::mm", "cudaLaunchKernel", True), ("HtoD", "cudaMemcpyAsync", True)}


def test_shapes_and_bytes_are_facts_of_their_events(session: Session, unpacked: Unpacked) -> None:
    header, decoded = unpacked(build(session, set(), []).payload)
    facts = {
        tuple(pair.split("\x1f"))
        for fact in decoded["fact"]
        if fact
        for pair in header["facts"][fact - 1].split("\x1e")
    }
    assert ("shapes", "[[4, 8], [8, 2]]") in {
        (key, value.replace(",", ", ").replace(",  ", ", ")) for key, value in facts
    }
    assert ("bytes", "4096") in facts
    assert ("modelled flops", "128 FLOP") in facts  # 2 x 4 x 8 x 2
    assert ("modelled bytes", "224 B") in facts  # (4 x 8 + 8 x 2 + 4 x 2) floats of four bytes


def test_communication_is_told_by_kernel_name(session: Session, unpacked: Unpacked) -> None:
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"
    header, _ = unpacked(build(session, {name}, []).payload)
    assert [header["labels"][label][0] for label in header["communication"]] == [name]


def test_times_in_whole_microseconds_are_packed_as_such(
    session: Session, unpacked: Unpacked
) -> None:
    header, _ = unpacked(build(session, set(), []).payload)
    assert header["unit_ns"] == 1000


def test_with_a_limit_gpu_work_and_long_events_stay_and_the_rest_is_counted(
    session: Session, unpacked: Unpacked
) -> None:
    whole = sum(trace.events.height for trace in session.traces)
    view = build(session, set(), [], limit=18)
    header, decoded = unpacked(view.payload)
    kept = Counter(header["categories"][header["labels"][label][1]] for label in decoded["label"])
    assert view.shown == 18
    assert kept == {"kernel": 8, "copy": 4, "annotation": 4, "op": 2}
    assert sum(view.omitted.values()) == whole - 18
    assert view.omitted == {"op": 2, "runtime": 8}
    assert all(link is None for link in decoded["launch"])


def test_a_trace_without_events_gives_an_empty_timeline(
    session: Session, unpacked: Unpacked
) -> None:
    view = build(session, set(), [], limit=0)
    header, decoded = unpacked(view.payload)
    assert (view.shown, header["lanes"], decoded["start"]) == (0, [], [])


def test_memory_curves_go_to_their_rank(session: Session, unpacked: Unpacked) -> None:
    curve = {
        "rank": 1,
        "device_type": "cuda",
        "device": 0,
        "time_ns": [0, 5],
        "allocated_bytes": [1, 2],
    }
    header, _ = unpacked(build(session, set(), [curve]).payload)
    assert [len(rank["memory"]) for rank in header["ranks"]] == [0, 1]
    assert header["ranks"][1]["memory"][0]["allocated_bytes"] == [1, 2]
