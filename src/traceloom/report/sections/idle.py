"""Why the devices of each rank had nothing to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom.analyze.idle_causes import CAUSES
from traceloom.model import units
from traceloom.report.accounts import AT_EDGES, AT_EDGES_MEANING, IdleCause, gpu_accounts, gpu_window, idle_causes
from traceloom.report.names import rank_name
from traceloom.report.sections.section import CoreSection
from traceloom.report.table import Cells, Col, Table

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


SECTION = IdleSection()
