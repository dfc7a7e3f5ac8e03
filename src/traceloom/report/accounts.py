"""The window that every view of a report document is of, and the accounts of time in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import AccountRow, GpuAccountRow, RankRow

AT_EDGES = "edges_of_recording"
AT_EDGES_MEANING = "before the first and after the last GPU work of the recording"
_GPU_WORK = "from first to last GPU work"


class IdleCause(NamedTuple):
    """Idle time by cause, of one device or (None) of all; the edges of a recording are no gaps."""

    device: int | None
    cause: str
    idle_ns: int
    gap_count: int | None


def gpu_accounts(document: ReportDocument) -> list[tuple[RankRow, GpuAccountRow]]:
    """The ranks that have GPU work, each with its part of the time that the answer is of."""
    return [(rank, rank["gpu_account"]) for rank in document["ranks"] if rank["gpu_account"]]


def gpu_window(document: ReportDocument) -> str:
    """Of which time the accounts of the devices are, in words."""
    windows = {account["window"] for _, account in gpu_accounts(document)}
    if windows == {"steps"}:
        return _in_steps(document)
    return _GPU_WORK if windows == {"gpu_work"} else f"{_in_steps(document)}, without steps {_GPU_WORK}"


def idle_causes(account: GpuAccountRow) -> Iterator[IdleCause]:
    """The causes of gaps, then the time at the edges of the recording."""
    for row in account["idle"]:
        yield IdleCause(row["device"], row["cause"], row["idle_ns"], row["gap_count"])
    for device in account["devices"]:
        if edge := device["edge_idle_ns"]:
            yield IdleCause(device["device"], AT_EDGES, edge, None)


def main_account(rank: RankRow) -> list[AccountRow]:
    """What the main thread of a rank did in its steps; without steps, in the whole window."""
    host = rank.get("host") or {}
    lanes = {thread["lane"] for thread in host.get("threads") or [] if thread["main"]}
    rows = [row for row in host.get("account") or [] if row["lane"] in lanes]
    in_steps = [row for row in rows if row["step"] is not None]
    return in_steps if any(row["ns"] for row in in_steps) else rows


def host_window(document: ReportDocument) -> str:
    """Of which time the accounts of the main threads are, in words."""
    stepped = any(row["step"] is not None for rank in document["ranks"] for row in main_account(rank))
    return _in_steps(document) if stepped else "in the whole window"


def _in_steps(document: ReportDocument) -> str:
    return "in all steps" if any(len(rank["steps"]) > 1 for rank in document["ranks"]) else "in the step"
