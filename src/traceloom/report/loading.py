"""What to say of the data loader, in one place for every view."""

from __future__ import annotations

from typing import Any

from traceloom.model import units

Row = dict[str, Any]

_MAKERS = {"main_thread": "the main thread makes the batches itself", "workers": "workers make the batches"}
_LOADING_PARTS = {
    "fetch": "fetching from the data set",
    "collate": "collating",
    "pin_memory": "pinning memory",
    "workers": "waiting for workers",
    "operators": "operators",
}


def loader(loading: Row) -> str:
    """Who makes the batches, what the time goes to, and whether the GPU waits too."""
    makers = {wait.get("maker") for wait in loading["waits"]} - {None}
    clauses = [_MAKERS[maker] for maker in sorted(makers)]
    parts: dict[str, int] = {}
    for row in loading.get("spent") or []:
        parts[row["part"]] = parts.get(row["part"], 0) + row["ns"]
    part, ns = max(parts.items(), key=lambda item: item[1], default=("other", 0))
    if part != "other" and 2 * ns > loading["total_ns"]:
        clauses.append(f"{units.share(ns, loading['total_ns'])} of the waits is {_LOADING_PARTS[part]}")
    steps = [row for row in loading["steps"] if row.get("bottleneck") is not None]
    slow = sum(row["bottleneck"] for row in steps)
    if slow:
        clauses.append(f"it holds up {slow} of {len(steps)} {'step' if len(steps) == 1 else 'steps'}")
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}." if text else ""
