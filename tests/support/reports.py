"""What a report must hold, and a reader of exported traces as strict as Perfetto."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from support.documents import check_document
from traceloom.report.documents import (
    MemoryDocument,
    ReplayDocument,
    ReportDocument,
    SimulationDocument,
)

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
TYPES: dict[str, Any] = {
    "report.schema.json": ReportDocument,
    "memory.schema.json": MemoryDocument,
    "simulation.schema.json": SimulationDocument,
    "replay.schema.json": ReplayDocument,
}
DEVICE_FIELDS = (
    "window_ns",
    "busy_ns",
    "idle_ns",
    "compute_ns",
    "communication_ns",
    "memory_ns",
    "exposed_communication_ns",
    "exposed_memory_ns",
    "gpu_work_count",
    "kernel_count",
    "kernel_ns",
)


@cache
def _validator(name: str) -> Any:
    schema = json.loads((REFERENCE / name).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def check_schema(document: dict[str, Any], name: str = "report.schema.json") -> None:
    """The document is as a published schema says, and of its type."""
    check_document(document, TYPES[name])
    assert [
        f"{e.json_path}: {e.message[:200]}" for e in _validator(name).iter_errors(document)
    ] == []


def check_report(document: dict[str, Any]) -> None:
    """A report is as the published schema says, and holds the laws of adding up."""
    check_schema(document)
    check_sums(document)
    check_nulls(document)
    assert [
        notice["message"] for notice in document["notices"] if notice["slug"] == "section-failed"
    ] == []


def check_sums(document: dict[str, Any]) -> None:
    """Parts add up to wholes: the answer, devices over steps, idle time over causes, threads, shares."""
    answer = document["answer"]
    assert sum(part["ns"] for part in answer["parts"]) == answer["whole_ns"]
    for rank in document["ranks"]:
        for device in rank["devices"]:
            told = [d for step in rank["steps"] for d in step["devices"]] + rank["outside"]
            mine = [d for d in told if d["device"] == device["device"]]
            for entry in (device, *mine):
                parts = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns", "idle_ns")
                assert sum(entry[part] for part in parts) == entry["window_ns"]
                assert sum(entry["idle_causes"].values()) == entry["idle_ns"]
            for field in DEVICE_FIELDS:
                assert sum(entry[field] for entry in mine) == device[field], field
        for thread in rank["host"]["threads"]:
            account = [
                row["ns"] for row in rank["host"]["account"] if row["lane"] == thread["lane"]
            ]
            assert sum(account) == thread["window_ns"]
    for rows, whole in ((document["kernels"], "total_ns"), (document["operators"], "self_ns")):
        shares = sum(row["fraction"] for row in rows)
        assert math.isclose(shares, float(any(row[whole] for row in rows)), rel_tol=1e-6)


def check_sums_of_sections(document: dict[str, Any]) -> None:
    """The parts of each section of a whole run add up, as docs/reference/report-json.md says."""
    if path := document["critical_path"]:
        for rows in (path["classes"], path["ranks"]):
            assert sum(row["duration_ns"] for row in rows) == path["window_ns"]
        on_lanes = sum(row["duration_ns"] for row in path["stretches"])
        assert on_lanes <= path["window_ns"]
        assert path["omitted_stretch_count"] or on_lanes == path["window_ns"]
    devices = {
        (rank["rank"], device["device"]): device
        for rank in document["ranks"]
        for device in rank["devices"]
    }
    kinds, unique = (
        document["kinds"],
        len({rank["rank"] for rank in document["ranks"]}) == len(document["ranks"]),
    )
    if kinds and unique:
        for rows, field in ((kinds["kinds"], "idle_ns"), (kinds["bounds"], "")):
            alone = _by(rows, "exclusive_ns", "rank", "device")
            for key, ns in alone.items():
                device = devices[key]
                assert ns == (
                    device["window_ns"] - device[field] if field else device["busy_ns"]
                ), key
        shapes = document["kernel_shapes"]
        if shapes and shapes["rows"]:
            of_rank, work = (
                _by(shapes["rows"], "total_ns", "rank"),
                _by(kinds["kinds"], "sum_ns", "rank"),
            )
            for row in shapes["ranks"]:
                assert (
                    of_rank[row["rank"],] + row["rest_ns"] == row["total_ns"] == work[row["rank"],]
                )
    for row in (document["blocking_calls"] or {}).get("sites") or []:
        assert (
            row["gpu_busy_ns"] is None
            or row["gpu_busy_ns"] + row["gpu_idle_ns"] == row["blocked_ns"]
        )
    for row in (document["pipeline"] or {}).get("steps") or []:
        assert row["compute_ns"] + row["other_ns"] + row["bubble_ns"] == row["window_ns"]
    for row in (document["slow_steps"] or {}).get("steps") or []:
        assert row["duration_ns"] - row["median_ns"] == row["over_ns"]


def _by(rows: list[dict[str, Any]], field: str, *keys: str) -> dict[tuple[Any, ...], int]:
    """The sum of a field over the rows that have the same keys."""
    sums: dict[tuple[Any, ...], int] = defaultdict(int)
    for row in rows:
        sums[tuple(row[key] for key in keys)] += row[field]
    return sums


def check_nulls(document: dict[str, Any]) -> None:
    """Every null, and every empty list of what was asked for, has its reason."""
    explained = {entry["path"] for entry in document["absent"]}
    missing = {
        path
        for path in nulls(document)
        if path not in explained and path.partition("[")[0] not in explained
    }
    assert missing == set()


def nulls(value: Any, path: str = "") -> Iterator[str]:
    """The paths of all nulls of a document but those of the capture, which is not ours."""
    if value is None:
        yield path
    elif isinstance(value, dict) and path != "capture":
        for key, item in value.items():
            yield from nulls(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for item in value:
            yield from nulls(item, re.sub(r"\.outside$", ".steps[*].devices", path) + "[*]")


def check_perfetto(text: bytes, document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Read an exported trace as Perfetto does and refuse what Perfetto would drop; slices by name of their track."""
    rows = json.loads(text)["traceEvents"]
    names = {
        row["tid"]: row["args"]["name"]
        for row in rows
        if row["ph"] == "M" and row["name"] == "thread_name"
    }
    called = {
        row["pid"]: row["args"]["name"]
        for row in rows
        if row["ph"] == "M" and row["name"] == "process_name"
    }
    paths = [pid for pid, name in called.items() if name == "critical path"]
    stretches = (document["critical_path"] or {}).get("stretches") or []
    assert len(paths) == bool(
        stretches
    )  # the path goes through all ranks: it is a process of its own
    assert len(called) - len(paths) == len(document["ranks"])
    assert not set(called) & set(names), "a thread must not have the number of a process"
    slices = _check_tracks(rows, names)
    path_track = next((name for name in slices if name.startswith("critical path of ")), "")
    assert len(slices.get(path_track, [])) == len(stretches)
    events = [
        row
        for track, found in slices.items()
        if track not in ("steps", path_track)
        for row in found
    ]
    seen = sorted((row["pid"], row["args"]["event"]) for row in events)
    expected = [
        (i + 1, event)
        for i, rank in enumerate(document["ranks"])
        for event in range(rank["event_count"])
    ]
    assert seen == expected, "every event stands in the export exactly once"
    return slices


def _time(row: dict[str, Any]) -> tuple[int, int]:
    """Start and end in nanoseconds, cut off as Perfetto does."""
    start = int(row["ts"] * 1000.0)
    return start, start + int(row["dur"] * 1000.0)


def _check_tracks(
    rows: list[dict[str, Any]], names: dict[int, str]
) -> dict[str, list[dict[str, Any]]]:
    """Slices nest on every track, and every arrow begins and ends in the slice that was opened last."""
    stacks: dict[int, list[tuple[int, int]]] = defaultdict(list)
    slices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    begun: dict[int, int] = {}
    ended: set[int] = set()
    for row in rows:
        if row["ph"] == "X":
            start, end = _time(row)
            stack = stacks[row["tid"]]
            while stack and stack[-1][1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1][1], (
                f"{row['name']} crosses another slice on {names[row['tid']]}"
            )
            stack.append((start, end))
            slices[names[row["tid"]]].append(row)
        elif row["ph"] in "sf":
            assert stacks[row["tid"]][-1][0] == int(row["ts"] * 1000.0), "the arrow hits no slice"
            if row["ph"] == "s":
                assert row["id"] not in begun
                begun[row["id"]] = row["pid"]
            else:
                assert row["bp"] == "e"
                assert row["id"] not in ended
                ended.add(row["id"])
    assert set(begun) == ended
    return slices
