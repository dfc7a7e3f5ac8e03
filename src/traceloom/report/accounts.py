"""The window that every view of a report document is of, and the accounts of time in it."""

from __future__ import annotations

from collections.abc import Iterator

from traceloom.report.table import Row

AT_EDGES = "edges_of_recording"
AT_EDGES_MEANING = "before the first and after the last GPU work of the recording"
_GPU_WORK = "from first to last GPU work"


def gpu_accounts(document: Row) -> list[tuple[Row, Row]]:
    """The ranks that have GPU work, each with its part of the time that the answer is of."""
    return [(rank, rank["gpu_account"]) for rank in document["ranks"] if rank["gpu_account"]]


def gpu_window(document: Row) -> str:
    """Of which time the accounts of the devices are, in words."""
    windows = {account["window"] for _, account in gpu_accounts(document)}
    if windows == {"steps"}:
        return _in_steps(document)
    return _GPU_WORK if windows == {"gpu_work"} else f"{_in_steps(document)}, without steps {_GPU_WORK}"


def idle_causes(account: Row) -> Iterator[Row]:
    """Device, cause, idle_ns and gap_count: the causes of gaps, then the time at the edges of the recording."""
    yield from account["idle"]
    for device in account["devices"]:
        if edge := device["edge_idle_ns"]:
            yield {"device": device["device"], "cause": AT_EDGES, "idle_ns": edge, "gap_count": None}


def main_account(rank: Row) -> list[Row]:
    """What the main thread of a rank did in its steps; without steps, in the whole window."""
    host = rank.get("host") or {}
    lanes = {thread["lane"] for thread in host.get("threads") or [] if thread["main"]}
    rows = [row for row in host.get("account") or [] if row["lane"] in lanes]
    in_steps = [row for row in rows if row["step"] is not None]
    return in_steps if any(row["ns"] for row in in_steps) else rows


def host_window(document: Row) -> str:
    """Of which time the accounts of the main threads are, in words."""
    stepped = any(row["step"] is not None for rank in document["ranks"] for row in main_account(rank))
    return _in_steps(document) if stepped else "in the whole window"


def _in_steps(document: Row) -> str:
    return "in all steps" if any(len(rank["steps"]) > 1 for rank in document["ranks"]) else "in the step"
