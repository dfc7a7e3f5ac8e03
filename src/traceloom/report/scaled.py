"""A job at another scale as a document, and on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from traceloom import __version__
from traceloom.model import units
from traceloom.report.names import short
from traceloom.report.table import Row
from traceloom.report.views.terminal.columns import TextColumn, heading, lines, paragraph
from traceloom.simulate.scale import Scaled

FORMAT = "traceloom-scaled"
VERSION = 1
_ROWS = 12


def build(answer: Scaled, name: str, machine: str = "") -> Row:
    """The document: the answer, how far it can be trusted, and its tables.

    Args:
        answer: The scaled job.
        name: The workload, as the user named it.
        machine: Name of the machine; "" for the recorded one.
    """
    head = {"format": FORMAT, "version": VERSION, "traceloom": __version__, "name": name, "machine": machine}
    step = f"{'measured ' * answer.measured}step of {units.duration(answer.before_ns)}"
    drawn = f"{units.duration(answer.identity_ns)} ({answer.identity_error * 100:+.2f} %)"
    identity = f"Drawn at the recorded size, the {step} comes back as {drawn}."
    return {**head, "sentence": answer.sentence, "identity": identity, **answer.to_dict()}


def render(document: Row, width: int) -> Iterator[Text]:
    """The lines on a terminal."""
    yield Text(short(document["name"], width), "bold")
    yield Text("")
    yield from paragraph(document["identity"], width)
    yield from paragraph(document["sentence"], width, "bold")
    yield from heading("Steps", "so many of a hundred take no longer", width)
    quantiles = document["quantiles"]
    cells: list[list[str | Text]] = [[units.duration(row["time_ns"]) for row in quantiles]]
    columns = [TextColumn(f"P{row['percent']}") for row in quantiles]
    yield from lines(columns, cells, ("", lambda *_: ""), width)
    meetings = document["collectives"][:_ROWS]
    if meetings:
        yield from heading("Collectives", "of a rank: bytes it puts in, transfer, waiting for others", width)
        rows: list[list[str | Text]] = [
            [
                str(row["calls"]),
                f"{row['ranks_before']} > {row['ranks_after']}",
                units.NONE if row["in_bytes_after"] is None else units.size(row["in_bytes_after"]),
                *(
                    f"{units.duration(row[f'{time}_before_ns'])} > {units.duration(row[f'{time}_after_ns'])}"
                    for time in ("transfer", "waiting")
                ),
            ]
            for row in meetings
        ]
        columns = [TextColumn(title) for title in ("calls", "ranks", "bytes", "transfer", "waiting")]
        yield from lines(columns, rows, ("kind", lambda i, room: short(meetings[i]["kind"] or "unknown", room)), width)
    for notice in document["notices"]:
        yield Text("")
        yield from paragraph(notice["message"], width)
