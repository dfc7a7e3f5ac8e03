"""The six rules of PyTorch's trace validator on the public traces, against plain loops over the JSON."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from typing import Any

import pytest

from support.public_traces import CALLS, DATA, GPU_WORK, KERNELS, NEEDS_TRACES, OPERATORS, TRACES
from traceloom.analyze import quality
from traceloom.formats import load

DETAILS = ("Collective name", "dtype", "In msg nelems", "Out msg nelems", "Group size")
NODE = "autograd::engine::evaluate_function: "

pytestmark = NEEDS_TRACES


def broken(events: list[dict[str, Any]]) -> dict[str, int]:
    """How often each rule is broken; rules that are not are left out."""
    spans = [e for e in events if e.get("ph") == "X"]
    launched = {
        e["args"]["correlation"]: float(e["ts"])
        for e in reversed(spans)
        if e.get("cat") in CALLS and "correlation" in e.get("args", {})
    }
    records = {
        e["args"]["correlation"]: float(e["ts"])
        for e in spans
        if "EventRecord" in e["name"] and "correlation" in e.get("args", {})
    }
    work = [e for e in spans if e.get("cat") in GPU_WORK]
    syncs = [e for e in spans if e.get("cat") == "cuda_sync"]
    waits = [
        e for e in syncs if e["args"].get("cuda_sync_kind") in {"Stream Wait Event", "Event Sync"}
    ]

    def record(event: dict[str, Any]) -> int:
        number = int(event["args"].get("wait_on_cuda_event_record_corr_id", -1))
        return -1 if number == 2**32 - 1 else number

    early = sum(
        float(e["ts"]) < launched[c]
        for e in work
        if (c := e["args"].get("correlation")) in launched
    )
    running = 0
    for sync in syncs:
        if sync["args"].get("cuda_sync_kind") == "Stream Sync":
            at, where = float(sync["ts"]), (sync["args"].get("device"), sync["args"].get("stream"))
            running += any(
                float(e["ts"]) < at < float(e["ts"]) + float(e["dur"])
                for e in work
                if e["cat"] in KERNELS and (e["args"]["device"], e["args"]["stream"]) == where
            )
    unknown = sum(
        record(e) not in records or records[record(e)] > float(e["ts"])
        for e in waits
        if e["args"]["cuda_sync_kind"] == "Stream Wait Event" and record(e) >= 0
    )
    bare = sum(
        any(key not in e.get("args", {}) for key in DETAILS)
        for e in spans
        if e["name"] == "record_param_comms" and e.get("cat") in OPERATORS
    )
    nodes = defaultdict(set)
    for e in spans:
        args = e.get("args", {})
        if e["name"].startswith(NODE) and int(args.get("Sequence number", -1)) >= 0:
            nodes[e["pid"], args.get("Fwd thread id"), args["Sequence number"]].add(e["name"])
    counts = {
        "gpu-work-before-launch": early,
        "waits-without-record": sum(record(e) < 0 for e in waits),
        "syncs-while-running": running,
        "waits-for-unknown-record": unknown,
        "collectives-without-details": bare,
        "ambiguous-backward": sum(len(names) > 1 for names in nodes.values()),
    }
    return {slug: count for slug, count in counts.items() if count}


@pytest.mark.parametrize("path", TRACES)
def test_the_six_rules_find_what_loops_over_the_file_find(path: str) -> None:
    with gzip.open(DATA / path) as stream:
        wanted = broken(json.load(stream)["traceEvents"])
    checks = quality(load(DATA / path).traces[0]).checks
    rules = {
        "gpu-work-before-launch",
        "waits-without-record",
        "syncs-while-running",
        "waits-for-unknown-record",
        "collectives-without-details",
        "ambiguous-backward",
    }
    found = {
        row["check"]: row["affected_count"] for row in checks.to_dicts() if row["check"] in rules
    }
    assert {slug: count for slug, count in found.items() if count} == wanted


def test_rules_that_public_traces_are_known_to_break() -> None:
    for path, slug, count in (
        ("critical_path/event_sync_multi_stream.json.gz", "waits-without-record", 1),
        ("diff/a100_control.json.gz", "collectives-without-details", 102),
        ("multirank/dlrm_rank0.kineto.json.gz", "collectives-without-details", 13),
    ):
        checks = {
            row["check"]: row for row in quality(load(DATA / path).traces[0]).checks.to_dicts()
        }
        assert checks[slug]["affected_count"] == count
        assert checks[slug]["affects"]


def test_details_of_collectives_may_stand_in_an_annotation_inside() -> None:
    trace = load(DATA / "multirank" / "dlrm_rank0.kineto.json.gz").traces[0]
    (notice,) = [one for one in quality(trace).notices if one.slug == "collectives-without-details"]
    assert notice.message.startswith("13 of 13 collective calls")
    assert "missing: group in 13; kind, type, size in 5" in notice.message, (
        "8 have an annotation that tells the rest"
    )
