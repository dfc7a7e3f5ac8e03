"""The top of the page: the answer and four numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom.model import units
from traceloom.report.accounts import main_account
from traceloom.report.names import allocator
from traceloom.report.parts import PHASES, of_answer, order
from traceloom.report.views.html.bars import bar, legend
from traceloom.report.views.html.text import prose

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument

NO_BREAK = "\u202f"
_SMALL = 0.01  # share of the bar below which a part is not listed on its own
_CAUSES = 5  # of idle time with colours of their own
_PHASES = [phase.key for phase in PHASES]


def headline(document: ReportDocument) -> str:
    """The sentence and the bar below it."""
    answer = document.get("answer") or {}
    parts = of_answer(answer)
    whole = sum(ns for _, _, ns in parts)
    picture = ""
    if whole:
        # Colours of the largest causes of idle time by their label; none where there is only one
        idle = sorted((part for part in parts if part[1] == "idle"), key=lambda part: -part[2])
        causes = {label: f"idle-{k}" for k, (label, *_) in enumerate(idle[:_CAUSES], 1)} if len(idle) > 1 else {}
        key = legend(_coloured(_folded(parts, whole), causes), whole)
        picture = f'<div class="answer-bar">{bar(_coloured(parts, causes), whole)}{key}</div>'
    sentence = str(answer.get("sentence") or document.get("name") or "Report")
    return f"<h1>{prose(sentence).replace(' %', NO_BREAK + '%')}</h1>{picture}"


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
    return sorted(out, key=lambda part: order(part[1]))


def _coloured(parts: list[tuple[str, str, int]], causes: dict[str, str]) -> list[tuple[str, str, int]]:
    return [(label, causes.get(label, colour), ns) for label, colour, ns in parts]


def numbers(document: ReportDocument) -> Iterator[tuple[str, str, str, str]]:
    """All key numbers that are known, those that say most first: label, value, exact value, what it is of."""
    answer, ranks = document["answer"], document["ranks"]
    median = answer["step_ns"]
    times = [times for rank in ranks if (times := rank["step_times"]) and times["median_ns"]]
    if median is not None and times:
        count, spread = times[0]["count"], times[0]["spread_fraction"]
        if len(times) > 1:
            more = f"median of all ranks; slowest {units.duration(max(each['median_ns'] for each in times))}"
        elif count == 1:
            more = "the only whole step"
        else:
            more = f"median of {count}" + ("" if spread is None else f", interquartile range {spread * 100:.1f} %")
        yield "Step", units.duration(median), f"{median} ns", more

    # The time of the answer, as the sentence and the bar have it, by kind.
    parts = answer["parts"]
    devices = [device for rank in ranks for device in rank.get("devices") or []]
    if devices and any(part["kind"] in ("compute", "communication", "memory") for part in parts):
        kinds: dict[str, int] = {}
        for part in parts:
            kinds[part["kind"]] = kinds.get(part["kind"], 0) + part["ns"]
        whole = sum(kinds.values())
        busy, exposed = whole - kinds.get("idle", 0), kinds.get("communication", 0)
        more = f"{units.duration(busy)} of {units.duration(whole)}" + (", all GPUs" if len(devices) > 1 else "")
        if whole:
            yield "GPU busy", units.share(busy, whole), f"{busy} of {whole} ns", more
        if whole and any(device.get("communication_ns") for device in devices):
            yield "Exposed communication", units.share(exposed, whole), f"{exposed} of {whole} ns", "of GPU time"
        causes = [part for part in parts if part["kind"] == "idle"] if whole else []
        if causes:
            worst = max(causes, key=lambda part: int(part["ns"]))
            more = f"of the idle time: {str(worst['label']).removeprefix('idle: ')}"
            yield "Idle, mostly", units.share(worst["ns"], kinds["idle"]), f"{worst['ns']} ns", more

    main = [row for rank in ranks for row in main_account(rank)]
    window = sum(row["ns"] for row in main)

    def of_main(label: str, ns: int, more: str) -> Iterator[tuple[str, str, str, str]]:
        if ns:
            yield label, units.share(ns, window), f"{ns} of {window} ns", more

    in_operators = sum(row["ns"] for row in main if row["activity"] == "op")
    yield from of_main("In operators", in_operators, "of the main thread's time")
    loading = sum(row["ns"] for row in main if row["phase"] == "loading")
    yield from of_main("Loading data", loading, "of the main thread's time")
    memories = [
        (peak, memory) for memory in document["memory"]["devices"] if (peak := memory["peak_bytes"]) is not None
    ]
    memories = [each for each in memories if not each[1]["device_type"].startswith("cpu")] or memories
    if memories:
        peak_bytes, memory = max(memories, key=lambda each: each[0])
        yield "Peak memory", units.size(peak_bytes), f"{peak_bytes} B", allocator(memory)
    unobserved = sum(row["ns"] for row in main if row["activity"] == "unobserved")
    yield from of_main("Unobserved", unobserved, "of the main thread: Python or waiting")
    longest = max((rank["window_ns"] or 0 for rank in ranks), default=0)
    if longest:
        events = units.count(sum(rank.get("event_count") or 0 for rank in ranks))
        yield "Recorded", units.duration(longest), f"{longest} ns", f"{events} events"
