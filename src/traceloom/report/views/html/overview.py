"""The top of the page: the answer, four numbers, and where the time went by rank."""

from __future__ import annotations

from typing import Any

from traceloom.model import units
from traceloom.report.accounts import gpu_accounts, gpu_window, host_window, main_account
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.bars import bar, group, legend
from traceloom.report.views.html.cells import Column, text
from traceloom.report.views.html.table import table

Row = dict[str, Any]
KEY_NUMBERS = 4
NO_BREAK = "\u202f"
_SMALL = 0.01  # share of the bar below which a part is not listed on its own
# Of the parts of the answer: useful time first, idle time last; the phases of a CPU-only run in their order.
_ORDER = ("compute", "loading", "forward", "backward", "optimizer", "communication", "memory", "other", "idle")

_DEVICE_PARTS = (
    ("compute", "compute", "compute_ns"),
    ("communication not hidden", "communication", "exposed_communication_ns"),
    ("copies and fills not hidden", "memory", "exposed_memory_ns"),
    ("idle", "idle", "idle_ns"),
)
DEVICE_SHARES = (
    Column("compute", "Compute", "share", "kernels that are not communication", "compute"),
    Column("communication", "Comm.", "share", "communication that no computing hides", "communication"),
    Column("memory", "Memory", "share", "copies and fills that nothing hides", "memory"),
    Column("idle", "Idle", "share", "no stream of the device runs anything", "idle"),
)
ACTIVITIES = {
    "op": "operators",
    "launch": "launch calls",
    "blocking_call": "blocking calls",
    "python": "Python",
    "unobserved": "unobserved",
}
PHASES = ("loading", "forward", "backward", "optimizer", "communication", "other")


def rank_name(entry: Row, position: int) -> str:
    """How a rank is called on the page."""
    return f"trace {position + 1}" if entry.get("rank") is None else f"rank {entry['rank']}"


def device_parts(row: Row) -> list[tuple[str, str, int]]:
    """The parts of a device's window, which add up to it: (label, colour group, nanoseconds)."""
    return [(label, colour, row.get(key) or 0) for label, colour, key in _DEVICE_PARTS]


def device_shares(row: Row) -> Row:
    """The same parts as fractions of the window."""
    window = row.get("window_ns")
    return {colour: (row.get(key) or 0) / window if window else None for _, colour, key in _DEVICE_PARTS}


def headline(document: Row) -> str:
    """The sentence and the bar below it."""
    answer = document.get("answer") or {}
    parts = []
    for part in answer.get("parts") or []:
        label = str(part["label"])
        # Parts of the host account are called `phase: activity`; the phase tells more, so it gives the colour.
        phase, colon, _ = label.partition(":")
        colour = group(phase) if colon and phase in PHASES else group(str(part["kind"]))
        parts.append((label, colour, int(part["ns"])))
    whole = sum(ns for _, _, ns in parts)
    parts.sort(key=lambda part: (_place(part[1]), -part[2]))
    picture = (
        f'<div class="answer-bar">{bar(parts, whole)}{legend(_folded(parts, whole), whole)}</div>' if whole else ""
    )
    sentence = str(answer.get("sentence") or document.get("name") or "Report")
    return f"<h1>{text(sentence).replace(' %', NO_BREAK + '%')}</h1>{picture}"


def _folded(parts: list[tuple[str, str, int]], whole: int) -> list[tuple[str, str, int]]:
    """The parts with those of the same colour that are too small to see as one."""
    small = [part for part in parts if part[2] < whole * _SMALL]
    out = [part for part in parts if part[2] >= whole * _SMALL]
    for colour in dict.fromkeys(part[1] for part in small):
        same = [part for part in small if part[1] == colour and part[2]]
        if not same:
            continue
        alone = not any(part[1] == colour for part in out)
        if len(same) == 1:
            label = same[0][0]
        elif colour in PHASES:
            label = colour if alone else f"{colour}: the rest"
        else:
            label = f"{len(same)} {'' if alone else 'other '}{'causes of idle time' if colour == 'idle' else 'parts'}"
        out.append((label, colour, sum(ns for _, _, ns in same)))
    return sorted(out, key=lambda part: _place(part[1]))


def _place(colour: str) -> int:
    return _ORDER.index(colour) if colour in _ORDER else 0


def key_numbers(document: Row) -> str:
    """The four numbers that say most about this run."""
    numbers = [number for number in (make(document) for make in _CANDIDATES) if number]
    items = "".join(
        f'<div><dt>{text(label)}</dt><dd><b title="{text(exact)}">{text(value)}</b><span>{text(more)}</span></dd></div>'
        for label, value, exact, more in numbers[:KEY_NUMBERS]
    )
    return f'<dl class="key">{items}</dl>' if items else ""


Number = tuple[str, str, str, str]
_ON_GPU = ("compute", "communication", "memory")


def _step_time(document: Row) -> Number | None:
    median = (document.get("answer") or {}).get("step_ns")
    times = [r["step_times"] for r in document["ranks"] if r.get("step_times") and r["step_times"].get("median_ns")]
    if median is None or not times:
        return None
    if len(times) > 1:
        slowest = max(int(t["median_ns"]) for t in times)
        return "Step", units.duration(median), f"{median} ns", f"median of all ranks; slowest {units.duration(slowest)}"
    count, spread = times[0]["count"], times[0].get("spread_fraction")
    more = f"median of {count}" if count > 1 else "the only whole step"
    if count > 1 and spread is not None:
        more += f", middle half within {spread * 100:.1f} %"
    return "Step", units.duration(median), f"{median} ns", more


def _devices(document: Row) -> list[Row]:
    return [device for rank in document["ranks"] for device in rank.get("devices") or []]


def _window(document: Row) -> Number | None:
    longest = max((r["window_ns"] or 0 for r in document["ranks"]), default=0)
    events = sum(r.get("event_count") or 0 for r in document["ranks"])
    if not longest:
        return None
    return "Recorded", units.duration(longest), f"{longest} ns", f"{units.count(events)} events"


def _gpu_parts(document: Row) -> tuple[int, dict[str, int]]:
    """The time of the answer, as the sentence and the bar have it, and its parts by kind; nothing without GPUs."""
    parts = (document.get("answer") or {}).get("parts") or []
    if not _devices(document) or not any(part["kind"] in _ON_GPU for part in parts):
        return 0, {}
    kinds: dict[str, int] = {}
    for part in parts:
        kinds[part["kind"]] = kinds.get(part["kind"], 0) + part["ns"]
    return sum(kinds.values()), kinds


def _busy(document: Row) -> Number | None:
    whole, kinds = _gpu_parts(document)
    if not whole:
        return None
    busy = whole - kinds.get("idle", 0)
    more = f"{units.duration(busy)} of {units.duration(whole)}" + (", all GPUs" if len(_devices(document)) > 1 else "")
    return "GPU busy", units.share(busy, whole), f"{busy} of {whole} ns", more


def _communication(document: Row) -> Number | None:
    whole, kinds = _gpu_parts(document)
    if not whole or not sum(device.get("communication_ns") or 0 for device in _devices(document)):
        return None
    exposed = kinds.get("communication", 0)
    return "Communication not hidden", units.share(exposed, whole), f"{exposed} of {whole} ns", "of GPU time"


def _idle_cause(document: Row) -> Number | None:
    whole, kinds = _gpu_parts(document)
    causes = [part for part in (document["answer"] or {}).get("parts") or [] if part["kind"] == "idle"] if whole else []
    if not causes:
        return None
    worst = max(causes, key=lambda part: int(part["ns"]))
    cause = str(worst["label"]).removeprefix("idle: ")
    return "Idle, mostly", units.share(worst["ns"], kinds["idle"]), f"{worst['ns']} ns", f"of the idle time: {cause}"


def _memory(document: Row) -> Number | None:
    devices = (document.get("memory") or {}).get("devices") or []
    with_peak = [d for d in devices if d.get("peak_bytes") is not None]
    accelerators = [d for d in with_peak if not d["device_type"].startswith("cpu")] or with_peak
    if not accelerators:
        return None
    highest = max(accelerators, key=lambda d: int(d["peak_bytes"]))
    return "Peak memory", units.size(highest["peak_bytes"]), f"{highest['peak_bytes']} B", allocator(highest)


def allocator(row: Row) -> str:
    """How the memory of a device is called."""
    kind = str(row["device_type"])
    return kind if kind.startswith("cpu") or row.get("device") in (None, -1) else f"{kind} {row['device']}"


def _share_of(document: Row, label: str, more: str, **conditions: str) -> Number | None:
    rows = [row for rank in document["ranks"] for row in main_account(rank)]
    window = sum(row["ns"] for row in rows)
    part = sum(row["ns"] for row in rows if all(row[k] == v for k, v in conditions.items()))
    if not window or not part:
        return None
    return label, units.share(part, window), f"{part} of {window} ns", more


def _operators(document: Row) -> Number | None:
    return _share_of(document, "In operators", "of the main thread's time", activity="op")


def _loading(document: Row) -> Number | None:
    return _share_of(document, "Loading data", "of the main thread's time", phase="loading")


def _unobserved(document: Row) -> Number | None:
    return _share_of(document, "Unobserved", "of the main thread: Python or waiting", activity="unobserved")


_CANDIDATES = (
    _step_time, _busy, _communication, _idle_cause, _operators, _loading, _memory, _unobserved, _window,
)  # fmt: skip


def breakdown(document: Row, reasons: Reasons) -> str:
    """Where the time of every rank went: of its GPUs, or of the main thread where there is none."""
    places = {id(rank): k for k, rank in enumerate(document["ranks"])}
    rows = [
        {
            "rank": rank_name(rank, places[id(rank)]),
            "device": f"{device['device']}" + (f" · {device['name']}" if device.get("name") else ""),
            "bar": bar(device_parts(device), device["window_ns"]),
            **device_shares(device),
            "window": device["window_ns"],
        }
        for rank, account in gpu_accounts(document)
        for device in account["devices"]
    ]
    if not rows:
        return reasons.line("ranks[*].devices", "GPU time") + host_breakdown(document)
    columns = [
        Column("rank", "Rank"),
        Column("device", "GPU"),
        Column("bar", "Time on the GPU", "bar"),
        *DEVICE_SHARES,
        Column("window", "Window", "time", gpu_window(document)),
    ]
    return table("breakdown", columns, rows, {}, "GPU time by rank") + _DEVICE_DEFINITION


_DEVICE_DEFINITION = """<details class="definition"><summary>How it is counted</summary>
<p>A nanosecond is <b>compute</b> when any computing kernel runs on the device, else <b>communication</b> when any
communication kernel runs, else <b>memory</b> when a copy or a fill runs, else <b>idle</b>. The four add up to the
window to the nanosecond: all steps, or without steps from the first to the last GPU work. Communication behind
computing is hidden and costs nothing here.</p></details>"""


def host_breakdown(document: Row) -> str:
    """The main thread of each rank by phase and by activity."""
    rows = []
    for k, rank in enumerate(document["ranks"]):
        account = main_account(rank)
        window = sum(row["ns"] for row in account)
        if not window:
            continue
        phases = [(p, group(p), sum(row["ns"] for row in account if row["phase"] == p)) for p in PHASES]
        activities = [
            (name, group(a), sum(row["ns"] for row in account if row["activity"] == a))
            for a, name in ACTIVITIES.items()
        ]
        rows.append({"rank": rank_name(rank, k), "what": "phase", "bar": bar(phases, window), "window": window})
        rows.append({"rank": rank_name(rank, k), "what": "activity", "bar": bar(activities, window), "window": window})
    if not rows:
        return ""
    columns = [
        Column("rank", "Rank"),
        Column("what", "By"),
        Column("bar", "Time of the main thread", "bar"),
        Column("window", "Window", "time", host_window(document)),
    ]
    legends = ""
    for names in ({phase: phase for phase in PHASES}, ACTIVITIES):
        items = "".join(f'<li><i class="swatch b-{group(key)}"></i>{name}</li>' for key, name in names.items())
        legends += f'<ul class="legend">{items}</ul>'
    return table("host-breakdown", columns, rows, {}, "Main thread by rank") + legends + _HOST_DEFINITION


_HOST_DEFINITION = """<details class="definition"><summary>How it is counted</summary>
<p>Every nanosecond of the thread has one <b>phase</b> (the outermost region around it: loading, forward, backward,
optimizer, communication) and one <b>activity</b> (the innermost event: an operator, a launch call, a call that blocks,
a Python frame; unobserved where nothing is recorded). Each of the two adds up to the window.</p></details>"""
