"""What the page shows of the chosen rank: its steps, the causes of idle time, its host threads."""

from __future__ import annotations

from typing import Any

from traceloom.analyze.idle import CAUSES
from traceloom.report.accounts import AT_EDGES, AT_EDGES_MEANING, idle_causes, main_account
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.bars import bar, group
from traceloom.report.views.html.cells import Column
from traceloom.report.views.html.overview import (
    ACTIVITIES,
    DEVICE_SHARES,
    PHASES,
    device_parts,
    device_shares,
    rank_name,
)
from traceloom.report.views.html.table import table

Row = dict[str, Any]
_MEANINGS = {**CAUSES, AT_EDGES: AT_EDGES_MEANING}
MOST_RANKS = 64  # whose own tables stand in the page


def _each(document: Row, make: Any) -> str:
    """One block per rank; the script shows that of the chosen rank."""
    ranks = document["ranks"][:MOST_RANKS]
    if len(ranks) == 1:
        return str(make(ranks[0], 0))
    return "".join(
        f'<div data-of-rank="{k}"><h3 class="of">{rank_name(rank, k).capitalize()}</h3>{make(rank, k)}</div>'
        for k, rank in enumerate(ranks)
    )


def steps(document: Row, reasons: Reasons) -> str:
    """The steps of each rank as bars, the longest step as long as the column."""
    if not any(rank.get("steps") for rank in document["ranks"]):
        return reasons.line("ranks[*].steps", "Steps")
    return _each(document, lambda rank, k: _steps(rank, k, reasons))


def _steps(rank: Row, position: int, reasons: Reasons) -> str:
    longest = max((step["duration_ns"] for step in rank["steps"]), default=0)
    gpu = any(step.get("devices") for step in rank["steps"])
    rows = [
        {
            **(_gpu_step(step, longest) if gpu else _host_step(step, rank, longest)),
            "range": f"{step['start_ns']}-{step['start_ns'] + step['duration_ns']}",
        }
        for step in rank["steps"]
    ]
    if not rows:
        return reasons.line("ranks[*].steps", "Steps")
    columns = [
        Column("step", "Step", "count"),
        Column("bar", "Time on the GPU" if gpu else "Main thread by phase", "bar"),
        Column("duration", "Duration", "time", "from the start of the step to the start of the next"),
        *(DEVICE_SHARES if gpu else ()),
        *((Column("lag", "Lag", "time", "from the end of the step to the end of its last GPU work"),) if gpu else ()),
        *((Column("launches", "Launches", "count", "calls that submitted GPU work"),) if gpu else ()),
        Column("whole", "Whole", "text", "no: the recording cuts the step off"),
    ]
    why_unknown = {
        "lag": reasons.of("ranks[*].steps[*].lag_ns"),
        **{c.key: "no GPU work in this step" for c in DEVICE_SHARES},
    }
    return table(f"steps-{position}", columns, rows, why_unknown, f"Steps of {rank_name(rank, position)}")


def _gpu_step(step: Row, longest: int) -> Row:
    """A step's devices together; before its first and after its last GPU work the device is idle too."""
    devices = step.get("devices") or []
    parts: dict[str, tuple[str, int]] = {}
    whole = 0
    for device in devices:
        whole += (device.get("window_ns") or 0) + _edges(device)
        for label, colour, ns in device_parts({**device, "idle_ns": (device.get("idle_ns") or 0) + _edges(device)}):
            parts[colour] = (label, parts.get(colour, (label, 0))[1] + ns)
    count = max(len(devices), 1)
    listed = [(label, colour, ns // count) for colour, (label, ns) in parts.items()]
    keys = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns")
    summed = {key: sum(device.get(key) or 0 for device in devices) for key in keys}
    summed["idle_ns"] = sum((device.get("idle_ns") or 0) + _edges(device) for device in devices)
    shares = device_shares({"window_ns": whole, **summed}) if whole else {}
    return {
        "step": step["step"],
        "bar": bar(listed, whole // count if whole else step["duration_ns"], longest),
        "duration": step["duration_ns"],
        "lag": step.get("lag_ns"),
        "launches": step.get("launch_count"),
        "whole": "yes" if step.get("complete", True) else "no",
        **shares,
    }


def _edges(device: Row) -> int:
    return (device.get("edge_idle_before_ns") or 0) + (device.get("edge_idle_after_ns") or 0)


def _host_step(step: Row, rank: Row, longest: int) -> Row:
    inside = [row for row in main_account(rank) if row["step"] == step["step"]]
    parts = [(p, group(p), sum(r["ns"] for r in inside if r["phase"] == p)) for p in PHASES]
    return {
        "step": step["step"],
        "bar": bar(parts, step["duration_ns"], longest),
        "duration": step["duration_ns"],
        "whole": "yes" if step.get("complete", True) else "no",
    }


def idle(document: Row, reasons: Reasons) -> str:
    """Why the devices of each rank were idle."""
    if not any(rank.get("devices") for rank in document["ranks"]):
        return reasons.line("ranks[*].devices", "Idle time")
    return _each(document, lambda rank, k: _idle(rank, k, reasons))


def _idle(rank: Row, position: int, reasons: Reasons) -> str:
    account = rank["gpu_account"] or {"devices": [], "idle": []}
    windows = {device["device"]: device["window_ns"] for device in account["devices"]}
    rows = [
        {
            "device": row["device"],
            "cause": row["cause"].replace("_", " "),
            "meaning": _MEANINGS.get(row["cause"], ""),
            "time": row["idle_ns"],
            "share": row["idle_ns"] / windows[row["device"]] if windows.get(row["device"]) else None,
            "gaps": row["gap_count"],
        }
        for row in idle_causes(account)
    ]
    if not rows:
        return reasons.line("ranks[*].devices", "Idle time") if not windows else '<p class="quiet">Never idle.</p>'
    columns = [
        *((Column("device", "GPU", "count"),) if len(windows) > 1 else ()),
        Column("cause", "Cause"),
        Column("meaning", "What it means"),
        Column("time", "Idle", "time"),
        Column("share", "Of the window", "share"),
        Column("gaps", "Gaps", "count", "idle stretches that have this cause"),
    ]
    why_unknown = {"gaps": "the edges of the recording are no gaps"}
    return table(f"idle-{position}", columns, rows, why_unknown, f"Causes of idle time of {rank_name(rank, position)}")


def host(document: Row, reasons: Reasons) -> str:
    """The host threads of each rank and what they did."""
    if not any((rank.get("host") or {}).get("threads") for rank in document["ranks"]):
        return reasons.line("ranks[*].host.threads", "Host threads")
    return _each(document, lambda rank, k: _host(rank, k, reasons))


def _host(rank: Row, position: int, reasons: Reasons) -> str:
    host_part = rank.get("host") or {}
    threads, account = host_part.get("threads") or [], host_part.get("account") or []
    if not threads:
        return reasons.line("ranks[*].host.threads", "Host threads")
    by_lane: dict[int, dict[str, int]] = {}
    for row in account:
        lane = by_lane.setdefault(row["lane"], {})
        lane[row["activity"]] = lane.get(row["activity"], 0) + row["ns"]
    rows = []
    for thread in threads:
        times = by_lane.get(thread["lane"], {})
        name = thread["name"] or f"thread {thread['thread']}"
        parts = [(title, group(a), times.get(a, 0)) for a, title in ACTIVITIES.items()]
        rows.append(
            {
                "name": f"{name} (main)" if thread["main"] and "main" not in name else name,
                "bar": bar(parts, thread["window_ns"]),
                **{a: times.get(a, 0) for a in ACTIVITIES},
                "events": thread["event_count"],
            }
        )
    columns = [
        Column("name", "Thread"),
        Column("bar", "By activity", "bar"),
        *(Column(a, title, "time", "", group(a), "activity") for a, title in ACTIVITIES.items()),
        Column("events", "Events", "count"),
    ]
    return table(f"host-{position}", columns, rows, {}, f"Host threads of {rank_name(rank, position)}")
