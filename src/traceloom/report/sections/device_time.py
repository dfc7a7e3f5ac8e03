"""GPU time, idle causes, longest gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import polars as pl

from traceloom import analyze
from traceloom.analyze.idle import CAUSES, SCHEMA, longest_gaps_of
from traceloom.report.document import Bar, Cells, Col, Part, ReportOptions, Table, UnknownValues
from traceloom.report.labels import (
    ACTIVITIES,
    AT_EDGES,
    AT_EDGES_MEANING,
    DEVICE,
    PHASES,
    IdleCause,
    TimeKind,
    gpu_accounts,
    gpu_window,
    host_window,
    idle_causes,
    main_account,
    named,
    rank_name,
    short,
)
from traceloom.report.sections.section import Columns, CoreSection, Measurements, Section, of_rank_suffix, table
from traceloom.system import units
from traceloom.trace.batch import of_each
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import AccountRow
    from traceloom.report.documents.sections import IdleGapsRow


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

_MEANINGS = {**CAUSES, AT_EDGES: AT_EDGES_MEANING}
_UNKNOWN = {"gaps": "the edges of the recording are no gaps"}


class IdleSection(CoreSection):
    """Why the devices of each rank had nothing to do."""

    key, title = "idle", "Idle time"
    shows_only = True
    note = "Why the GPU had nothing to do, gap by gap."
    path = "ranks[*].devices"
    nothing = "Never idle."

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """The causes over all devices, and of several ranks those of each."""
        names = {id(rank): (rank_name(rank, k), k) for k, rank in enumerate(document["ranks"])}
        ranks = [(*names[id(rank)], account) for rank, account in gpu_accounts(document)]
        device_count = sum(len(account["devices"]) for _, _, account in ranks)
        idle_ns: Counter[str] = Counter()
        gap_counts: Counter[str] = Counter()
        for _, _, account in ranks:
            for cause in idle_causes(account):
                idle_ns[cause.cause] += cause.idle_ns
                if cause.gap_count is not None:
                    gap_counts[cause.cause] += cause.gap_count
        whole = sum(idle_ns.values())
        causes = [IdleCause(None, cause, time, gap_counts.get(cause)) for cause, time in idle_ns.most_common()]
        if not whole:
            return
        window = sum(device["window_ns"] for _, _, account in ranks for device in account["devices"])
        yield Table(
            "idle-causes",
            "Why the GPU was idle",
            _columns(several_devices=False),
            [_row(cause, window, whole) for cause in causes],
            note=f"{units.duration(whole)} {gpu_window(document)}",
            unknown=_UNKNOWN,
        )
        for name, position, account in ranks if device_count > 1 else ():
            windows: dict[int | None, int] = {device["device"]: device["window_ns"] for device in account["devices"]}
            idle: dict[int | None, int] = {device["device"]: device["idle_ns"] for device in account["devices"]}
            rows = [_row(cause, windows[cause.device], idle[cause.device]) for cause in idle_causes(account)]
            columns = _columns(several_devices=len(windows) > 1)
            title = f"Causes of idle time of {name}"
            yield Table(f"idle-{position}", title, columns, rows, "", "", _UNKNOWN, position, brief=False)


def _row(cause: IdleCause, window: int, idle: int) -> Cells:
    return {
        "device": cause.device,
        "cause": cause.cause.replace("_", " ").replace("-", " "),
        "meaning": _MEANINGS.get(cause.cause, ""),
        "time": cause.idle_ns,
        "of_idle": cause.idle_ns / idle if idle else None,
        "share": cause.idle_ns / window if window else None,
        "gaps": cause.gap_count,
    }


def _columns(*, several_devices: bool) -> list[Col]:
    return [
        *((Col("device", "GPU", "count"),) if several_devices else ()),
        Col("cause", "Cause"),
        Col("time", "Idle", "time"),
        Col("of_idle", "Share", "share", "of the idle time"),
        Col("share", "Of the window", "share"),
        Col("gaps", "Gaps", "count", "idle stretches that have this cause"),
        Col("meaning", "What it means", narrow=False),
    ]


IDLE_SECTION = IdleSection()

_EACH = 50  # gaps of a rank
_ALL = 1000  # gaps of all ranks
_FRAMES = 8  # innermost frames of a stack that are kept
_NAME = 48
_NO_LAUNCH = "the launch happened before the recording, or was lost"
_NOT_HOST = "the cause is not the host's, or nothing is recorded of what it did"
_GAPS = Part(
    SCHEMA,
    "the longest gaps of the devices; rows of `trace.events` with names",
    {
        "evidence": "the launch is not recorded, so there is nothing to go by",
        "launch": _NO_LAUNCH,
        "launch_name": _NO_LAUNCH,
        **dict.fromkeys(("host_event", "host_activity", "stack"), _NOT_HOST),
        **dict.fromkeys(("producer", "producer_name", "wait", "wait_name"), "only a dependency has one"),
    },
    ("device", "step"),
    "no device was ever idle between two pieces of work",
)


def _because(row: IdleGapsRow) -> str | None:
    """What explains a gap, in words."""
    call = row["launch_name"] if row["cause"] in ("launch_latency", "unexplained") else None
    stack = " > ".join([*(row["stack"] or [])[-2:], row["host_activity"]]) if row["host_activity"] else None
    return stack or row["producer_name"] or call


class IdleGapsSection(Section[pl.DataFrame, "list[IdleGapsRow]"]):
    """The longest gaps of all devices."""

    key, title = "idle_gaps", "Longest gaps"
    note = "The longest stretches in which a device had nothing to do, each with its cause and what stands for it."
    schema = _GAPS.schema()
    reasons = _GAPS.reasons("idle_gaps")

    def measure(self, trace: Trace, options: ReportOptions) -> pl.DataFrame:
        return _longest(trace).with_columns(pl.col("stack").list.tail(_FRAMES))

    def build(self, study: Measurements[pl.DataFrame], absent: UnknownValues) -> list[IdleGapsRow]:
        gaps = study.concat(lambda gaps: gaps).sort("duration_ns", descending=True, maintain_order=True).head(_ALL)
        if not gaps.height:
            absent.say("idle_gaps")
        return absent.rows(gaps, "idle_gaps")

    def tables(self, value: list[IdleGapsRow]) -> Iterator[Table]:
        if not value:
            return
        rows = [{**row, "cause": row["cause"].replace("_", " "), "because": _because(row)} for row in value]
        because = Col("because", "Because", "name",
                      "the host's event and what it stood in, or the awaited work")  # fmt: skip
        columns: Columns = ["?rank", "duration_ns", "start_ns", "cause", "+cause_ns", "+evidence", "+step", because]
        yield table("idle_gaps", "Longest gaps", columns, rows, key="idle-gaps-longest")
        columns = ["?rank", "duration_ns", "start_ns", "cause", "before_name", "after_name"]
        yield table("idle_gaps", "Work around them", columns, rows, key="idle-gaps-work")

    def summary(self, value: list[IdleGapsRow]) -> str | None:
        if not value:
            return None
        top = value[0]
        reason = top["host_activity"] or _because(top)
        where = f": {short(reason, _NAME)}" if reason else ""
        length = f"{units.duration(top['duration_ns'])}{of_rank_suffix(top, value)}"
        mostly = "" if top["cause_ns"] == top["duration_ns"] else "mostly "
        return f"the longest gap is {length}, {mostly}{top['cause'].replace('_', ' ')}{where}"


@of_each
def _longest(traces: Sequence[Trace]) -> Iterable[pl.DataFrame]:
    return longest_gaps_of(traces, map(analyze.idle, traces), _EACH)


IDLE_GAPS_SECTION = IdleGapsSection()
