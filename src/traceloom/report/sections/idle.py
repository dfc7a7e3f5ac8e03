"""Why the devices of each rank had nothing to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom.analyze.idle_causes import CAUSES
from traceloom.model import units
from traceloom.report.accounts import AT_EDGES, AT_EDGES_MEANING, gpu_accounts, gpu_window, idle_causes
from traceloom.report.names import rank_name
from traceloom.report.sections.section import CoreSection
from traceloom.report.table import Col, Row, Table

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument

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
        summed: dict[str, Row] = {}
        for _, _, account in ranks:
            for row in idle_causes(account):
                total = summed.setdefault(row["cause"], {"idle_ns": 0, "gap_count": None})
                total["idle_ns"] += row["idle_ns"]
                if row["gap_count"] is not None:
                    total["gap_count"] = (total["gap_count"] or 0) + row["gap_count"]
        whole = sum(total["idle_ns"] for total in summed.values())
        if not whole:
            return
        window = sum(device["window_ns"] for _, _, account in ranks for device in account["devices"])
        totals = sorted(({"cause": cause, **total} for cause, total in summed.items()), key=lambda row: -row["idle_ns"])
        yield Table(
            "idle-causes",
            "Why the GPU was idle",
            _columns(several_devices=False),
            [_row(row, window, whole) for row in totals],
            note=f"{units.duration(whole)} {gpu_window(document)}",
            unknown=_UNKNOWN,
        )
        for name, position, account in ranks if device_count > 1 else ():
            windows = {device["device"]: device["window_ns"] for device in account["devices"]}
            idle = {device["device"]: device["idle_ns"] for device in account["devices"]}
            rows = [_row(row, windows[row["device"]], idle[row["device"]]) for row in idle_causes(account)]
            columns = _columns(several_devices=len(windows) > 1)
            title = f"Causes of idle time of {name}"
            yield Table(f"idle-{position}", title, columns, rows, "", "", _UNKNOWN, position, brief=False)


def _row(row: Row, window: int, idle: int) -> Row:
    return {
        "device": row.get("device"),
        "cause": row["cause"].replace("_", " ").replace("-", " "),
        "meaning": _MEANINGS.get(row["cause"], ""),
        "time": row["idle_ns"],
        "of_idle": row["idle_ns"] / idle if idle else None,
        "share": row["idle_ns"] / window if window else None,
        "gaps": row["gap_count"],
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


SECTION = IdleSection()
