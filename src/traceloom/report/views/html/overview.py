"""The top of the page: the answer and four numbers."""

from __future__ import annotations

from typing import Any

from traceloom.model import units
from traceloom.report.accounts import main_account
from traceloom.report.names import allocator
from traceloom.report.parts import PHASES, group
from traceloom.report.views.html.bars import bar, legend
from traceloom.report.views.html.text import text

Row = dict[str, Any]
KEY_NUMBERS = 4
NO_BREAK = "\u202f"
_SMALL = 0.01  # share of the bar below which a part is not listed on its own
_PHASES = [phase.key for phase in PHASES]
# Of the parts of the answer: useful time first, idle time last; the phases of a CPU-only run in their order.
_ORDER = ("compute", "loading", "forward", "backward", "optimizer", "communication", "memory", "other", "idle")


def headline(document: Row) -> str:
    """The sentence and the bar below it."""
    answer = document.get("answer") or {}
    parts = []
    for part in answer.get("parts") or []:
        label = str(part["label"])
        # Parts of the host account are called `phase: activity`; the phase tells more, so it gives the colour.
        phase, colon, _ = label.partition(":")
        colour = group(phase if colon and phase in _PHASES else str(part["kind"]))
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
        elif colour in _PHASES:
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
