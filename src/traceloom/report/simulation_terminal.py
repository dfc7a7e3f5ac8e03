"""A simulation on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.text import Text

from traceloom.model import units
from traceloom.report.names import rank_label, short
from traceloom.report.views.terminal.columns import Cell, TextColumn, heading, lines, paragraph
from traceloom.report.whatif import part_name

if TYPE_CHECKING:
    from traceloom.report.documents import SimulationDocument

_ROWS = 8
_NOTICES = 4
_OWN = ("transfer-flag", "device-kept", "groups-assumed")  # of the simulation, not of the recording
_TimeOfRank = Literal[
    "before_ns", "end_ns", "compute_ns", "exposed_communication_ns", "memory_ns", "host_ns", "other_ns"
]
_TIMES: dict[_TimeOfRank, str] = {
    "before_ns": "before", "end_ns": "after",
    "compute_ns": "compute", "exposed_communication_ns": "exposed",
    "memory_ns": "copies", "host_ns": "host", "other_ns": "other",
}  # fmt: skip


class _Listing(NamedTuple):
    """A table: titles of its columns, and of each row what it is of and its cells."""

    title: str
    hint: str
    columns: tuple[str, ...]
    rows: list[tuple[str, list[Cell]]]


def render(document: SimulationDocument, width: int) -> Iterator[Text]:
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
    for title, hint, columns, rows in _listings(document):
        if rows:
            yield from heading(title, hint, width)
            names, cells = zip(*rows, strict=True)

            def label(i: int, room: int, names: tuple[str, ...] = names) -> str:
                return short(names[i], room)

            yield from lines([TextColumn(column) for column in columns], cells, ("of", label), width)


def _ranks(document: SimulationDocument, width: int) -> Iterator[Text]:
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
    keys = [key for key in _TIMES if any(row[key] is not None for row in ranks)]
    rows: list[list[Cell]] = [
        [rank_label(row["rank"]), *("" if row[key] is None else units.duration(row[key]) for key in keys)]
        for row in sorted(shown, key=lambda row: row["rank"])
    ]
    columns = [TextColumn("", right=False), *(TextColumn(_TIMES[key]) for key in keys)]
    yield from lines(columns, rows, ("", lambda *_: ""), width)


def _listings(document: SimulationDocument) -> Iterator[_Listing]:
    """The path, what is new on it, the links that were busy for longest, and the rules for the other device."""
    path: list[tuple[str, list[Cell]]] = [
        (part_name(part), [units.duration(part["before_ns"]), units.duration(part["after_ns"])])
        for part in document["path"][:_ROWS]
    ]
    yield _Listing("Critical path", "what decides how long it takes", ("before", "after"), path)
    became: list[tuple[str, list[Cell]]] = [
        (
            ("" if part["rank"] is None else f"rank {part['rank']}: ") + f"{part_name(part)}, {part['name']}",
            [str(part["count"]), units.duration(part["time_ns"])],
        )
        for part in document["became_critical"][:_ROWS]
    ]
    yield _Listing("New on the critical path", "what did not decide before", ("count", "time"), became)
    used = [row for row in document["links"] if row["bytes"]]
    used.sort(key=lambda row: (-row["busy_ns"], -row["waiting_ns"], row["link"]))
    busiest: list[tuple[str, list[Cell]]] = [
        (row["name"], [units.size(row["bytes"]), units.duration(row["busy_ns"]), units.duration(row["waiting_ns"])])
        for row in used[:_ROWS]
    ]
    hint = "waiting: what it made transfers longer by"
    yield _Listing("Busiest links", hint, ("bytes", "busy", "waiting"), busiest)
    works: dict[str, list[tuple[int, ...]]] = {}
    for row in document["device"]["account"] if document["device"] else ():
        work = row["count"], row["here_ns"], row["there_ns"], row["low_ns"], row["high_ns"]
        works.setdefault(row["rule"], []).append(work)
    by_rule: list[tuple[str, list[Cell]]] = []
    for rule, of_rule in works.items():
        count, *times = map(sum, zip(*of_rule, strict=True))
        by_rule.append((rule, [str(count), *map(units.duration, times)]))
    hint = "the work of all ranks by the rule that put it there"
    yield _Listing("Device", hint, ("pieces", "here", "there", "at least", "at most"), by_rule)
