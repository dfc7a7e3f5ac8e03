"""The critical path in the exported trace: a track of its own, and an arrow wherever it goes from lane to lane."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom.harmless import harmless
from traceloom.model import Session
from traceloom.model.frames import schema
from traceloom.report.exports.perfetto.texts import microseconds

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CriticalPathStretchesRow, CriticalPathValue

_ARROW = "critical_path"
_FIRST = 9 * 10**15  # numbers of these arrows: above those of all others, and whole as doubles
_ARROWS = schema("source target arrow id", {"source": pl.UInt32, "target": pl.UInt32})


def path_arrows(session: Session, path: CriticalPathValue | None) -> dict[int, pl.DataFrame]:
    """By trace, the events in which the path leaves a lane and enters the next one.

    Args:
        session: The traces; the result is keyed by their positions.
        path: `critical_path` of the report document; None without one.

    Returns:
        Frames of `source`, `target` (events; null where that end is in another trace), `arrow`, `id`.
    """
    number_of: dict[int | None, int] = {}
    for number, trace in enumerate(session.traces):
        number_of.setdefault(0 if trace.rank is None else trace.rank, number)
    rows: dict[int, list[tuple[int | None, int | None, str, int]]] = defaultdict(list)
    before: CriticalPathStretchesRow | None = None
    for index, row in enumerate(path["stretches"] if path is not None else ()):
        if row["first_event"] is None or row["rank"] not in number_of:
            continue
        if before is not None and before["start_ns"] + before["duration_ns"] == row["start_ns"]:
            ends = (before["last_event"], row["first_event"])
            of, to = number_of[before["rank"]], number_of[row["rank"]]
            if of == to:
                rows[of].append((*ends, _ARROW, _FIRST + index))
            else:
                rows[of].append((ends[0], None, _ARROW, _FIRST + index))
                rows[to].append((None, ends[1], _ARROW, _FIRST + index))
        before = row
    return {number: pl.DataFrame(arrows, schema=_ARROWS, orient="row") for number, arrows in rows.items()}


def path_track(path: CriticalPathValue | None, process: int, thread: int, shift_ns: int) -> Iterator[str]:
    """The path as a process of one track, its stretches one after the other; nothing without a path.

    Args:
        path: `critical_path` of the report document.
        process: Its number.
        thread: Number of its track.
        shift_ns: Added to the document's times.
    """
    if path is None or not path["stretches"]:
        return
    stretches = path["stretches"]
    subject = "the window" if path["step"] is None else f"step {path['step']}"
    track = {"pid": process, "tid": thread}
    rows: list[dict[str, object]] = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": "critical path"}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": 0}},
        {"ph": "M", **track, "name": "thread_name", "args": {"name": f"critical path of {subject}"}},
    ]
    yield ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    start = microseconds(pl.Series("ts", [row["start_ns"] + shift_ns for row in stretches]))
    length = microseconds(pl.Series("dur", [row["duration_ns"] for row in stretches]))
    opening = f'{{"ph":"X","pid":{process},"tid":{thread},'
    slices = []
    for ts, dur, row in zip(start, length, stretches, strict=True):
        where = harmless(row["where"]) if row["where"] else "nothing recorded"
        rank = "" if row["rank"] is None else f"rank {row['rank']} "
        texts = {"class": row["class"], "edge": row["edge"], "evidence": row["evidence"]}
        arguments = {key: value for key, value in texts.items() if value}
        if row["name"]:
            arguments["longest"] = harmless(row["name"])
        name = {"name": f"{rank}{where}", "cat": _ARROW, "args": arguments}
        text = json.dumps(name, ensure_ascii=False, separators=(",", ":"))
        slices.append(f'{opening}"ts":{ts},"dur":{dur},{text[1:]}')
    yield ",\n".join(slices)
