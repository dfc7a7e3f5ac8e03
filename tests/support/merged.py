"""Files of the ranks of a job merged into one, as tools in use write it."""

from __future__ import annotations

import json
from typing import Any

from traceloom.testing.known_runs import KnownRun


def merge_ranks(runs: list[KnownRun], how: str) -> dict[str, Any]:
    """Returns one document with the events of all ranks, as mergers write it.

    Args:
        runs: Of the ranks, in their order.
        how: `label`: before each process id, as SGLang does; `name`: of processes that are numbered
            anew; `list`: the lists of events one after the other, as they are; `rank`: each event
            with its rank as process.
    """
    events: list[dict[str, Any]] = []
    for rank, run in enumerate(runs):
        own = [json.loads(text) for text in run.builder.events()]
        names = {4000 + rank: "CPU", rank: f"GPU {rank}"} if how in {"list", "rank"} else {}
        own += [
            {"ph": "M", "name": name, "pid": pid, "args": {"name": "python", "labels": label}}
            for pid, label in names.items()
            for name in ("process_name", "process_labels")
        ]
        for event in own:
            numbered = {"label": f"[TP{rank:02d}-EP00] {event['pid']}", "list": event["pid"]}
            event["pid"] = numbered.get(how, rank + (how == "name"))
        if how == "name":
            args = {"name": f"Rank {rank}"}
            own.append({"ph": "M", "name": "process_name", "pid": rank + 1, "args": args})
        events += own
    return {**runs[0].builder.header(), "traceEvents": events}
