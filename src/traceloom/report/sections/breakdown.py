"""Where the time of every rank went: of its GPUs, and of its main thread by phase and by activity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from traceloom.model import units
from traceloom.report.accounts import gpu_accounts, gpu_window, host_window, main_account
from traceloom.report.names import rank_name
from traceloom.report.parts import ACTIVITIES, DEVICE, PHASES, TimeKind, named
from traceloom.report.sections.section import CoreSection
from traceloom.report.table import Bar, Cells, Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import AccountRow

_DEFINITIONS = {
    "device": """<p>A nanosecond is <b>compute</b> when any computing kernel runs on the device, else
<b>communication</b> when any communication kernel runs, else <b>memory</b> when a copy or a fill runs, else
<b>idle</b>. The four add up to the window to the nanosecond: all steps, or without steps from the first to the last GPU
work. Communication behind computing is hidden and costs nothing here.</p>""",
    "host": """<p>Every nanosecond of the thread has one <b>phase</b> (the outermost region around it: loading, forward,
backward, optimizer, communication) and one <b>activity</b> (the innermost event: an operator, a launch call, a call
that blocks, a Python frame; unobserved where nothing is recorded). Each of the two adds up to the window.</p>""",
}


class BreakdownSection(CoreSection):
    """Where the time of every rank went: of its GPUs, and of its main thread by phase and by activity."""

    key, title = "breakdown", "Breakdown"
    shows_only = True
    anchor = "breakdown-section"
    note = "Where the time of every rank went."
    path = "ranks[*].devices"
    in_markdown = True

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """The GPUs of every rank; the main threads, first by phase, then by activity."""
        names = {id(rank): rank_name(rank, k) for k, rank in enumerate(document["ranks"])}
        models = {device["name"] for _, account in gpu_accounts(document) for device in account["devices"]}
        rows = [
            {
                "rank": names[id(rank)],
                "device": str(device["device"])
                + (f" · {device['name']}" if len(models) > 1 and device["name"] else ""),
                "bar": Bar(named(DEVICE, device), device["window_ns"]),
                **shares(DEVICE, device, device["window_ns"]),
                "window": device["window_ns"],
            }
            for rank, account in gpu_accounts(document)
            for device in account["devices"]
        ]
        if rows:
            devices = [device for _, account in gpu_accounts(document) for device in account["devices"]]
            hidden = sum(d["communication_ns"] - d["exposed_communication_ns"] for d in devices)
            notes = [str(model) for model in models if model and len(models) == 1]
            if hidden > 0:
                whole = sum(d["communication_ns"] for d in devices)
                notes.append(f"{units.share(hidden, whole)} of communication overlapped by compute")
            yield Table(
                "breakdown",
                "GPU time",
                [
                    Col("rank", "Rank"),
                    Col("device", "GPU", narrow=len({row["device"] for row in rows}) > 1),
                    Col("window", "Window", "time", gpu_window(document)),
                    *share_columns(DEVICE),
                    Col("bar", "Time on the GPU", "bar"),
                ],
                rows,
                note="; ".join([*notes, gpu_window(document)]),
            )
        accounts = [(names[id(rank)], main_account(rank)) for rank in document["ranks"]]
        accounts = [(name, account) for name, account in accounts if sum(row["ns"] for row in account)]
        phased = any(row["phase"] != "other" and row["ns"] for _, account in accounts for row in account)
        if phased:
            yield _main_threads(document, accounts, PHASES, "phase")
        if accounts and not (phased and rows):
            yield _main_threads(document, accounts, ACTIVITIES, "activity")

    def definition(self, document: ReportDocument) -> str:
        """How the times are counted."""
        return _DEFINITIONS["device"] + _DEFINITIONS["host"] if gpu_accounts(document) else _DEFINITIONS["host"]


def shares(parts: tuple[TimeKind, ...], times: Cells, whole: int) -> dict[str, float | None]:
    """The parts as fractions of a window, by colour group; null where it has no length."""
    return {part.group: (times.get(part.key) or 0) / whole if whole else None for part in parts}


def share_columns(parts: tuple[TimeKind, ...], *, narrow: bool = True) -> list[Col]:
    """The columns of these shares."""
    return [Col(part.group, part.title, "share", part.hint, narrow, part.group) for part in parts]


def _main_threads(
    document: ReportDocument,
    accounts: list[tuple[str, list[AccountRow]]],
    parts: tuple[TimeKind, ...],
    key: Literal["phase", "activity"],
) -> Table:
    """The main thread of every rank by phase or by activity; kinds of which there is nothing have no column."""
    rows: list[Cells] = []
    for name, account in accounts:
        times: Counter[str] = Counter()
        for row in account:
            times[row[key]] += row["ns"]
        whole = sum(times.values())
        rows.append(
            {"rank": name, "bar": Bar(named(parts, times), whole), **shares(parts, times, whole), "window": whole}
        )
    used = tuple(part for part in parts if any(row[part.group] for row in rows))
    return Table(
        f"main-thread-{key}",
        f"Main thread by {key}",
        [
            Col("rank", "Rank"),
            Col("window", "Window", "time", host_window(document)),
            *share_columns(used),
            Col("bar", "Time of the main thread", "bar"),
        ],
        rows,
        note=host_window(document),
    )


SECTION = BreakdownSection()
