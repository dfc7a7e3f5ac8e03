"""A simulation on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.text import Text

from traceloom.model import units
from traceloom.report.names import rank_label, short
from traceloom.report.table import Row
from traceloom.report.views.terminal.columns import TextColumn, heading, lines, paragraph
from traceloom.report.whatif import part_name

_ROWS = 8
_NOTICES = 4
_OWN = ("transfer-flag", "device-kept", "groups-assumed")  # of the simulation, not of the recording
_KINDS = {
    "before_ns": "before", "end_ns": "after",
    "compute_ns": "compute", "exposed_communication_ns": "exposed",
    "memory_ns": "copies", "host_ns": "host", "other_ns": "other",
}  # fmt: skip


def render(document: Row, width: int) -> Iterator[Text]:
    """The lines on a terminal."""
    yield Text(short(document["name"], width), "bold")
    yield Text("")
    if document["identity"]:
        yield from paragraph(document["identity"], width)
    yield from paragraph(document["sentence"], width, "bold")
    worth_saying = [notice for notice in document["notices"] if notice["severity"] != "info"]
    worth_saying.sort(key=lambda notice: notice["slug"] not in _OWN)
    for notice in worth_saying[:_NOTICES]:
        yield from paragraph(f"{notice['severity']}: {notice['message']} [{notice['slug']}]", width)
    if len(worth_saying) > _NOTICES:
        yield from paragraph(f"and {len(worth_saying) - _NOTICES} more notices; --json has them all", width)
    yield from _ranks(document, width)
    for head, hint, key, names, name in _TABLES:
        rows = _ROWS_OF[key](document) if key in _ROWS_OF else document[key][:_ROWS]
        if rows:
            yield from heading(head, hint, width)
            cells: list[list[str | Text]] = [[shown(row[field]) for field, _, shown in names] for row in rows]
            columns = [TextColumn(title) for _, title, _ in names]

            def label(i: int, room: int, rows: list[Row] = rows, name: Callable[[Row], str] = name) -> str:
                return short(name(rows[i]), room)

            yield from lines(columns, cells, ("of", label), width)


def _ranks(document: Row, width: int) -> Iterator[Text]:
    """What the ranks do with their time: those that end last, and first."""
    ranks = document["ranks"]
    by_end = sorted(ranks, key=lambda row: (-(row["end_ns"] or 0), row["rank"]))
    shown = (
        ranks if len(ranks) <= _ROWS else sorted(by_end[: _ROWS // 2] + by_end[-_ROWS // 2 :], key=lambda r: r["rank"])
    )
    hint = "exposed: communication while nothing computes"
    if len(shown) < len(ranks):
        hint = f"of the first and last of {len(ranks)} ranks"
    yield from heading("Time", hint, width)
    keys = [key for key in _KINDS if any(row[key] is not None for row in ranks)]
    rows: list[list[str | Text]] = [
        [rank_label(row["rank"]), *(_time(row[key]) for key in keys)]
        for row in sorted(shown, key=lambda row: row["rank"])
    ]
    columns = [TextColumn("", right=False), *(TextColumn(_KINDS[key]) for key in keys)]
    yield from lines(columns, rows, ("", lambda *_: ""), width)


def _busiest(document: Row) -> list[Row]:
    """The links that were busy for longest."""
    used = [row for row in document["links"] if row["bytes"]]
    return sorted(used, key=lambda row: (-row["busy_ns"], -row["waiting_ns"], row["link"]))[:_ROWS]


def _by_rule(document: Row) -> list[Row]:
    """How much work each rule put on the other device."""
    sums: dict[str, Row] = {}
    for row in document["device"]["account"] if document["device"] else ():
        total = sums.setdefault(row["rule"], {"rule": row["rule"]})
        for name in ("count", "here_ns", "there_ns", "low_ns", "high_ns"):
            total[name] = total.get(name, 0) + row[name]
    return list(sums.values())


def _time(value: int | None) -> str:
    return "" if value is None else units.duration(value)


def _became_name(row: Row) -> str:
    rank = "" if row["rank"] is None else f"rank {row['rank']}: "
    return f"{rank}{part_name(row)}, {row['name']}"


_Shown = Callable[[Any], str]
_ROWS_OF: dict[str, Callable[[Row], list[Row]]] = {"links": _busiest, "device": _by_rule}
_TABLES: tuple[tuple[str, str, str, tuple[tuple[str, str, _Shown], ...], Callable[[Row], str]], ...] = (
    (
        "Critical path", "what decides how long it takes", "path",
        (("before_ns", "before", _time), ("after_ns", "after", _time)), part_name,
    ),
    (
        "New on the critical path", "what did not decide before", "became_critical",
        (("count", "count", str), ("time_ns", "time", _time)), _became_name,
    ),
    (
        "Busiest links", "waiting: what it made transfers longer by", "links",
        (("bytes", "bytes", units.size), ("busy_ns", "busy", _time), ("waiting_ns", "waiting", _time)),
        lambda row: str(row["name"]),
    ),
    (
        "Device", "the work of all ranks by the rule that put it there", "device",
        (("count", "pieces", str), ("here_ns", "here", _time), ("there_ns", "there", _time),
         ("low_ns", "at least", _time), ("high_ns", "at most", _time)),
        lambda row: str(row["rule"]),
    ),
)  # fmt: skip
