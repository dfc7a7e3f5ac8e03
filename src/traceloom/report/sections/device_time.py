"""Sections about GPU time, idle causes and the longest gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import polars as pl

from traceloom import analyze
from traceloom.analyze.idle import CAUSES, PARTS_SCHEMA, find_longest_gaps
from traceloom.report.document import (
    Bar,
    Cells,
    Col,
    ListSchema,
    ReportOptions,
    Table,
    UnknownValues,
)
from traceloom.report.labels import (
    ACTIVITIES,
    AT_EDGES,
    AT_EDGES_MEANING,
    DEVICE_TIMES,
    PHASES,
    IdleCause,
    TimeKind,
    build_time_parts,
    describe_gpu_window,
    describe_host_window,
    fit_name,
    format_rank_name,
    get_main_thread_account,
    list_gpu_accounts,
    list_idle_causes,
)
from traceloom.report.sections.section import (
    Columns,
    CoreSection,
    Measurements,
    Section,
    build_table,
    format_rank_suffix,
)
from traceloom.system import units
from traceloom.trace.batch import run_in_batches
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
    key, title = "breakdown", "Breakdown"
    shows_only = True
    anchor = "breakdown-section"
    note = "Where the time of every rank went."
    path = "ranks[*].devices"
    in_markdown = True

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """Yields the GPUs of every rank; then the main threads, first by phase, then by
        activity.
        """
        names = {id(rank): format_rank_name(rank, k) for k, rank in enumerate(document["ranks"])}
        models = {
            device["name"]
            for _, account in list_gpu_accounts(document)
            for device in account["devices"]
        }
        rows = [
            {
                "rank": names[id(rank)],
                "device": str(device["device"])
                + (f" · {device['name']}" if len(models) > 1 and device["name"] else ""),
                "bar": Bar(build_time_parts(DEVICE_TIMES, device), device["window_ns"]),
                **compute_shares(DEVICE_TIMES, device, device["window_ns"]),
                "window": device["window_ns"],
            }
            for rank, account in list_gpu_accounts(document)
            for device in account["devices"]
        ]
        if rows:
            devices = [
                device
                for _, account in list_gpu_accounts(document)
                for device in account["devices"]
            ]
            hidden = sum(d["communication_ns"] - d["exposed_communication_ns"] for d in devices)
            notes = [str(model) for model in models if model and len(models) == 1]
            if hidden > 0:
                total_ns = sum(d["communication_ns"] for d in devices)
                notes.append(
                    f"{units.format_share(hidden, total_ns)} of communication overlapped by compute"
                )
            yield Table(
                "breakdown",
                "GPU time",
                [
                    Col("rank", "Rank"),
                    Col("device", "GPU", narrow=len({row["device"] for row in rows}) > 1),
                    Col("window", "Window", "time", describe_gpu_window(document)),
                    *build_share_columns(DEVICE_TIMES),
                    Col("bar", "Time on the GPU", "bar"),
                ],
                rows,
                note="; ".join([*notes, describe_gpu_window(document)]),
            )
        accounts = [(names[id(rank)], get_main_thread_account(rank)) for rank in document["ranks"]]
        accounts = [
            (name, account) for name, account in accounts if sum(row["ns"] for row in account)
        ]
        phased = any(
            row["phase"] != "other" and row["ns"] for _, account in accounts for row in account
        )
        if phased:
            yield _build_main_thread_table(document, accounts, PHASES, "phase")
        if accounts and not (phased and rows):
            yield _build_main_thread_table(document, accounts, ACTIVITIES, "activity")

    def definition(self, document: ReportDocument) -> str:
        return (
            _DEFINITIONS["device"] + _DEFINITIONS["host"]
            if list_gpu_accounts(document)
            else _DEFINITIONS["host"]
        )


def compute_shares(
    parts: tuple[TimeKind, ...], times: Cells, total_ns: int
) -> dict[str, float | None]:
    """Returns the parts as fractions of a window, by colour group; null where it has no length."""
    return {
        part.group: (times.get(part.key) or 0) / total_ns if total_ns else None for part in parts
    }


def build_share_columns(parts: tuple[TimeKind, ...], *, narrow: bool = True) -> list[Col]:
    return [Col(part.group, part.title, "share", part.hint, narrow, part.group) for part in parts]


def _build_main_thread_table(
    document: ReportDocument,
    accounts: list[tuple[str, list[AccountRow]]],
    parts: tuple[TimeKind, ...],
    key: Literal["phase", "activity"],
) -> Table:
    """Returns the main thread of every rank by phase or by activity; kinds without time have no
    column.
    """
    rows: list[Cells] = []
    for name, account in accounts:
        times: Counter[str] = Counter()
        for row in account:
            times[row[key]] += row["ns"]
        total_ns = sum(times.values())
        rows.append(
            {
                "rank": name,
                "bar": Bar(build_time_parts(parts, times), total_ns),
                **compute_shares(parts, times, total_ns),
                "window": total_ns,
            }
        )
    used = tuple(part for part in parts if any(row[part.group] for row in rows))
    return Table(
        f"main-thread-{key}",
        f"Main thread by {key}",
        [
            Col("rank", "Rank"),
            Col("window", "Window", "time", describe_host_window(document)),
            *build_share_columns(used),
            Col("bar", "Time of the main thread", "bar"),
        ],
        rows,
        note=describe_host_window(document),
    )


SECTION = BreakdownSection()

_MEANINGS = {**CAUSES, AT_EDGES: AT_EDGES_MEANING}
_UNKNOWN_REASONS = {"gaps": "the edges of the recording are no gaps"}


class IdleSection(CoreSection):
    key, title = "idle", "Idle time"
    shows_only = True
    note = "Why the GPU had nothing to do, gap by gap."
    path = "ranks[*].devices"
    nothing = "Never idle."

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """Yields the causes over all devices, and, for several ranks, those of each."""
        names = {
            id(rank): (format_rank_name(rank, k), k) for k, rank in enumerate(document["ranks"])
        }
        ranks = [(*names[id(rank)], account) for rank, account in list_gpu_accounts(document)]
        device_count = sum(len(account["devices"]) for _, _, account in ranks)
        idle_ns: Counter[str] = Counter()
        gap_counts: Counter[str] = Counter()
        for _, _, account in ranks:
            for cause in list_idle_causes(account):
                idle_ns[cause.cause] += cause.idle_ns
                if cause.gap_count is not None:
                    gap_counts[cause.cause] += cause.gap_count
        total_ns = sum(idle_ns.values())
        causes = [
            IdleCause(None, cause, time, gap_counts.get(cause))
            for cause, time in idle_ns.most_common()
        ]
        if not total_ns:
            return
        window = sum(
            device["window_ns"] for _, _, account in ranks for device in account["devices"]
        )
        yield Table(
            "idle-causes",
            "Why the GPU was idle",
            _build_cause_columns(several_devices=False),
            [_build_cause_row(cause, window, total_ns) for cause in causes],
            note=f"{units.format_duration(total_ns)} {describe_gpu_window(document)}",
            unknown=_UNKNOWN_REASONS,
        )
        for name, position, account in ranks if device_count > 1 else ():
            windows: dict[int | None, int] = {
                device["device"]: device["window_ns"] for device in account["devices"]
            }
            idle: dict[int | None, int] = {
                device["device"]: device["idle_ns"] for device in account["devices"]
            }
            yield Table(
                f"idle-{position}",
                f"Causes of idle time of {name}",
                _build_cause_columns(several_devices=len(windows) > 1),
                [
                    _build_cause_row(cause, windows[cause.device], idle[cause.device])
                    for cause in list_idle_causes(account)
                ],
                "",
                "",
                _UNKNOWN_REASONS,
                position,
                brief=False,
            )


def _build_cause_row(cause: IdleCause, window: int, idle: int) -> Cells:
    return {
        "device": cause.device,
        "cause": cause.cause.replace("_", " ").replace("-", " "),
        "meaning": _MEANINGS.get(cause.cause, ""),
        "time": cause.idle_ns,
        "of_idle": cause.idle_ns / idle if idle else None,
        "share": cause.idle_ns / window if window else None,
        "gaps": cause.gap_count,
    }


def _build_cause_columns(*, several_devices: bool) -> list[Col]:
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

_MAX_RANK_GAPS = 50  # gaps of a rank
_MAX_GAPS = 1000  # gaps of all ranks
_MAX_FRAMES = 8  # innermost frames kept of a stack
_MAX_NAME_WIDTH = 48
_NO_LAUNCH_REASON = "the launch happened before the recording, or was lost"
_NOT_HOST_REASON = "the cause is not the host's, or nothing is recorded of what it did"
_GAPS_SCHEMA = ListSchema(
    PARTS_SCHEMA,
    "the longest gaps of the devices; rows of `trace.events` with names",
    {
        "evidence": "the launch is not recorded, so there is nothing to go by",
        "launch": _NO_LAUNCH_REASON,
        "launch_name": _NO_LAUNCH_REASON,
        **dict.fromkeys(("host_event", "host_activity", "stack"), _NOT_HOST_REASON),
        **dict.fromkeys(
            ("producer", "producer_name", "wait", "wait_name"), "only a dependency has one"
        ),
    },
    ("device", "step"),
    "no device was ever idle between two pieces of work",
)


def _explain_gap(row: IdleGapsRow) -> str | None:
    call = row["launch_name"] if row["cause"] in ("launch_latency", "unexplained") else None
    stack = (
        " > ".join([*(row["stack"] or [])[-2:], row["host_activity"]])
        if row["host_activity"]
        else None
    )
    return stack or row["producer_name"] or call


class IdleGapsSection(Section[pl.DataFrame, "list[IdleGapsRow]"]):
    key, title = "idle_gaps", "Longest gaps"
    note = "The longest stretches in which a device had nothing to do, each with its cause and what stands for it."
    schema = _GAPS_SCHEMA.schema()
    reasons = _GAPS_SCHEMA.reasons("idle_gaps")

    def measure(self, trace: Trace, options: ReportOptions) -> pl.DataFrame:
        return _find_longest_gaps(trace).with_columns(pl.col("stack").list.tail(_MAX_FRAMES))

    def build(
        self, measurements: Measurements[pl.DataFrame], unknowns: UnknownValues
    ) -> list[IdleGapsRow]:
        gaps = (
            measurements.concat(lambda gaps: gaps)
            .sort("duration_ns", descending=True, maintain_order=True)
            .head(_MAX_GAPS)
        )
        if not gaps.height:
            unknowns.explain("idle_gaps")
        return unknowns.rows(gaps, "idle_gaps")

    def tables(self, value: list[IdleGapsRow]) -> Iterator[Table]:
        if not value:
            return
        rows = [
            {**row, "cause": row["cause"].replace("_", " "), "because": _explain_gap(row)}
            for row in value
        ]
        columns: Columns = [
            "?rank",
            "duration_ns",
            "start_ns",
            "cause",
            "+cause_ns",
            "+evidence",
            "+step",
            Col(
                "because",
                "Because",
                "name",
                "the host's event and what it stood in, or the awaited work",
            ),
        ]
        yield build_table("idle_gaps", "Longest gaps", columns, rows, key="idle-gaps-longest")
        columns = ["?rank", "duration_ns", "start_ns", "cause", "before_name", "after_name"]
        yield build_table("idle_gaps", "Work around them", columns, rows, key="idle-gaps-work")

    def summary(self, value: list[IdleGapsRow]) -> str | None:
        if not value:
            return None
        top = value[0]
        reason = top["host_activity"] or _explain_gap(top)
        reason_note = f": {fit_name(reason, _MAX_NAME_WIDTH)}" if reason else ""
        length = f"{units.format_duration(top['duration_ns'])}{format_rank_suffix(top, value)}"
        mostly = "" if top["cause_ns"] == top["duration_ns"] else "mostly "
        return f"the longest gap is {length}, {mostly}{top['cause'].replace('_', ' ')}{reason_note}"


@run_in_batches
def _find_longest_gaps(traces: Sequence[Trace]) -> Iterable[pl.DataFrame]:
    return find_longest_gaps(traces, map(analyze.idle, traces), _MAX_RANK_GAPS)


IDLE_GAPS_SECTION = IdleGapsSection()
