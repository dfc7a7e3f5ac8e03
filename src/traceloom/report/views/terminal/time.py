"""Where the time goes, as bars: devices, host threads, steps, idle time."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.accounts import gpu_accounts, gpu_window, host_window, idle_causes, main_account
from traceloom.report.names import short
from traceloom.report.views.terminal.bars import plain, sparkline, stacked
from traceloom.report.views.terminal.columns import Column, with_bars
from traceloom.report.views.terminal.look import ACTIVITIES, DEVICE, DIM, PHASES, Kind

Row = dict[str, Any]
_WIDEST_SPARKLINE = 12
_MOST_BARS = 16


def rank_label(rank: int | None) -> str:
    """`rank 3`; `rank ?` where the file does not say."""
    return f"rank {'?' if rank is None else rank}"


def place_label(document: Row, rank: Row, device: int | None = None) -> str:
    """Whose row it is, as short as it can be: the rank where there are several or it is known, the device."""
    numbers = {d["device"] for r in document["ranks"] for d in r["devices"]}
    named = rank["rank"] is not None or len(document["ranks"]) > 1
    parts = [rank_label(rank["rank"])] if named else []
    if device is not None and (len(numbers) > 1 or not named):
        parts.append(f"GPU {device}")
    return " ".join(parts)


def heading(title: str, note: str, width: int) -> Iterator[Text]:
    """A section's heading after a blank line; a long note stands below it."""
    yield Text("")
    if len(title) + len(note) + 2 <= width:
        yield Text.assemble((title, "bold"), ("  " + note if note else "", DIM))
        return
    yield Text(title, "bold")
    for line in textwrap.wrap(note, width - 2, break_on_hyphens=False):
        yield Text(" " + line, DIM)


def devices(document: Row, width: int) -> Iterator[Text]:
    """One bar per device: compute, exposed communication, exposed memory, idle, in the window of the answer."""
    rank_devices = [(rank, device) for rank, account in gpu_accounts(document) for device in account["devices"]]
    if not rank_devices:
        return
    yield from heading("GPU time", _device_note([device for _, device in rank_devices], gpu_window(document)), width)
    shown = rank_devices[:_MOST_BARS]
    rows: list[list[str | Text]] = []
    for rank, device in shown:
        label = place_label(document, rank, device["device"])
        shares = [units.share(device[kind.key], device["window_ns"]) for kind in DEVICE]
        rows.append([label, units.duration(device["window_ns"]), *shares])
    columns = [Column("", right=False), Column("window"), *(Column(kind.heading) for kind in DEVICE)]
    bars = [[device[kind.key] for kind in DEVICE] for _, device in shown]
    yield from with_bars(columns, rows, lambda i, room: stacked(DEVICE, bars[i], room), width)
    if len(rank_devices) > len(shown):
        yield Text(f" … and {len(rank_devices) - len(shown)} more, in the JSON report", DIM)


def _device_note(devices: Sequence[Row], window: str) -> str:
    """The device's name, of which time the shares are, and what they do not show: hidden communication."""
    notes = []
    names = {harmless(d["name"]) for d in devices if d["name"]}
    if len(names) == 1:
        notes.append(next(iter(names)))
    hidden = sum(d["communication_ns"] - d["exposed_communication_ns"] for d in devices)
    if hidden > 0:
        communication = sum(d["communication_ns"] for d in devices)
        notes.append(f"{units.share(hidden, communication)} of communication hidden behind compute")
    return "; ".join([*notes, window])


def host(document: Row, width: int) -> Iterator[Text]:
    """The main thread of every rank: by phase where there are phases, and by what it did."""
    accounts = [(rank, main_account(rank)) for rank in document["ranks"]]
    accounts = [(rank, account) for rank, account in accounts if account][:_MOST_BARS]
    if not accounts:
        return
    yield from heading("Host time", f"main thread; {host_window(document)}", width)
    has_devices = any(rank["devices"] for rank in document["ranks"])
    phased = any(row["phase"] != "other" for _, account in accounts for row in account)
    if phased:
        yield from _bars(document, PHASES, "phase", accounts, width)
    if not phased or not has_devices:
        if phased:
            yield Text("")
        yield from _bars(document, ACTIVITIES, "activity", accounts, width)


def _bars(
    document: Row, kinds: Sequence[Kind], key: str, accounts: list[tuple[Row, list[Row]]], width: int
) -> Iterator[Text]:
    sums = [[sum(row["ns"] for row in account if row[key] == kind.key) for kind in kinds] for _, account in accounts]
    used = [i for i in range(len(kinds)) if any(parts[i] for parts in sums)]
    kept = [kinds[i] for i in used]
    rows: list[list[str | Text]] = []
    for (rank, _), parts in zip(accounts, sums, strict=True):
        whole = sum(parts)
        label = place_label(document, rank) or "main"
        rows.append([label, units.duration(whole), *(units.share(parts[i], whole) for i in used)])
    columns = [Column("", right=False), Column("window"), *(Column(kind.heading) for kind in kept)]
    bars = [[parts[i] for i in used] for parts in sums]
    yield from with_bars(columns, rows, lambda i, room: stacked(kept, bars[i], room), width)


def steps(document: Row, top: int, width: int) -> Iterator[Text]:
    """One rank: a bar per step. Several ranks: a line per rank."""
    ranks = [rank for rank in document["ranks"] if rank["steps"]]
    if not ranks:
        return
    if len(ranks) == 1:
        yield from _steps_of_one(ranks[0], top, width)
    else:
        yield from _steps_of_many(ranks[:_MOST_BARS], width)


def _steps_of_one(rank: Row, top: int, width: int) -> Iterator[Text]:
    shown_steps = rank["steps"][:top]
    times, note = rank["step_times"], ""
    if times is not None:
        note = f"median {units.duration(times['median_ns'])}"
        if times["count"] > 1:
            note += f", {units.duration(times['min_ns'])} to {units.duration(times['max_ns'])}"
    yield from heading("Steps", note, width)
    longest = max(step["duration_ns"] for step in shown_steps)
    on_device = any(step["devices"] for step in shown_steps)
    rows: list[list[str | Text]] = []
    for step in shown_steps:
        label = str(step["step"]) + ("" if step["complete"] else " (cut)")
        row: list[str | Text] = [label, units.duration(step["duration_ns"])]
        if on_device:
            busy = sum(device["busy_ns"] for device in step["devices"])
            row.append(units.share(busy, len(step["devices"]) * step["duration_ns"]))
            row.append(units.duration(step["lag_ns"]))
        rows.append(row)
    columns = [Column("step", right=False), Column("time")]
    columns += [Column("GPU busy"), Column("GPU lag")] if on_device else []

    def bar(i: int, room: int) -> Text:
        length = round(room * shown_steps[i]["duration_ns"] / longest) if longest else 0
        kinds, parts = _step_parts(shown_steps[i], rank)
        return stacked(kinds, parts, length)

    yield from with_bars(columns, rows, bar, width)
    if len(rank["steps"]) > len(shown_steps):
        yield Text(f" … and {len(rank['steps']) - len(shown_steps)} more (--top {len(rank['steps'])})", DIM)


def _step_parts(step: Row, rank: Row) -> tuple[Sequence[Kind], list[int]]:
    """Of the device where there is one (edge idle counts as idle), else of the main thread."""
    if step["devices"]:
        parts = [sum(d[kind.key] for d in step["devices"]) for kind in DEVICE]
        parts[-1] += sum(d["edge_idle_before_ns"] + d["edge_idle_after_ns"] for d in step["devices"])
        return DEVICE, parts
    account = [row for row in main_account(rank) if row["step"] == step["step"]]
    return PHASES, [sum(row["ns"] for row in account if row["phase"] == kind.key) for kind in PHASES]


def _steps_of_many(ranks: list[Row], width: int) -> Iterator[Text]:
    yield from heading("Steps", "", width)
    several = any(len(rank["steps"]) > 1 for rank in ranks)
    medians = [(rank["step_times"] or {}).get("median_ns") for rank in ranks]
    rows: list[list[str | Text]] = []
    for rank, median in zip(ranks, medians, strict=True):
        row: list[str | Text] = [rank_label(rank["rank"]), str(len(rank["steps"])), units.duration(median)]
        if several:
            times = rank["step_times"] or {}
            row += [units.duration(times.get("min_ns")), units.duration(times.get("max_ns"))]
            row.append(sparkline([step["duration_ns"] for step in rank["steps"]], _WIDEST_SPARKLINE))
        rows.append(row)
    columns = [Column("", right=False), Column("steps"), Column("median" if several else "time")]
    columns += [Column("min"), Column("max"), Column("each", right=False)] if several else []
    longest = max((median or 0 for median in medians), default=0)

    def bar(i: int, room: int) -> Text:
        parts = [_step_parts(step, ranks[i]) for step in ranks[i]["steps"]]
        summed = [sum(column) for column in zip(*(part for _, part in parts), strict=True)]
        return stacked(parts[0][0], summed, round(room * (medians[i] or 0) / longest) if longest else 0)

    yield from with_bars(columns, rows, bar, width)


def idle(document: Row, width: int) -> Iterator[Text]:
    """Idle time of all devices by cause, in the window of the answer."""
    summed: dict[str, list[int]] = {}
    for _, account in gpu_accounts(document):
        for row in idle_causes(account):
            sums = summed.setdefault(row["cause"], [0, 0])
            sums[0] += row["idle_ns"]
            sums[1] += row["gap_count"] or 0
    whole = sum(ns for ns, _ in summed.values())
    if not whole:
        return
    yield from heading("Why the GPU was idle", f"{units.duration(whole)} {gpu_window(document)}", width)
    causes = sorted(((cause, ns, gaps) for cause, (ns, gaps) in summed.items() if ns), key=lambda row: -row[1])
    rows: list[list[str | Text]] = [
        [
            units.duration(ns),
            units.share(ns, whole),
            units.count(gaps) if gaps else "-",
            short(cause.replace("-", " ").replace("_", " "), 40),
        ]
        for cause, ns, gaps in causes
    ]
    columns = [Column("time"), Column("share"), Column("gaps"), Column("cause", right=False)]
    yield from with_bars(columns, rows, lambda i, room: plain(causes[i][1] / whole, room, DIM), width)
