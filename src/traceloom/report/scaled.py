"""A job at another scale as a document, and on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from traceloom import __version__
from traceloom.model import units
from traceloom.model.frames import rows
from traceloom.report.names import short
from traceloom.report.views.terminal.columns import Cell, TextColumn, heading, lines, paragraph
from traceloom.simulate.scale import Scaled

if TYPE_CHECKING:
    from traceloom.report.documents.scaled import ScaledDocument

FORMAT = "traceloom-scaled"
VERSION = 1
_ROWS = 12


def build(answer: Scaled, name: str, machine: str = "") -> ScaledDocument:
    """The document: the answer, how far it can be trusted, and its tables.

    Args:
        answer: The scaled job.
        name: The workload, as the user named it.
        machine: Name of the machine; "" for the recorded one.
    """
    step = f"{'measured ' * answer.measured}step of {units.duration(answer.before_ns)}"
    drawn = f"{units.duration(answer.identity_ns)} ({answer.identity_error * 100:+.2f} %)"
    identity = f"Drawn at the recorded size, the {step} comes back as {drawn}."
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": name,
        "machine": machine,
        "sentence": answer.sentence,
        "identity": identity,
        "ranks_before": answer.ranks_before,
        "ranks": answer.ranks,
        "data_parallel_before": answer.data_parallel_before,
        "data_parallel": answer.data_parallel,
        "recorded": answer.recorded,
        "before_ns": answer.before_ns,
        "measured": answer.measured,
        "identity_ns": answer.identity_ns,
        "identity_error": answer.identity_error,
        "equal_ns": answer.equal_ns,
        "after_ns": answer.after_ns,
        "p10_ns": answer.p10_ns,
        "p90_ns": answer.p90_ns,
        "quantiles": rows(answer.quantiles),
        "collectives": rows(answer.collectives),
        "draws": answer.draws,
        "seed": answer.seed,
        "notices": [notice.to_dict() for notice in answer.notices],
    }


def render(document: ScaledDocument, width: int) -> Iterator[Text]:
    """The lines on a terminal."""
    yield Text(short(document["name"], width), "bold")
    yield Text("")
    yield from paragraph(document["identity"], width)
    yield from paragraph(document["sentence"], width, "bold")
    yield from heading("Steps", "so many of a hundred take no longer", width)
    quantiles = document["quantiles"]
    cells: list[list[Cell]] = [[units.duration(row["time_ns"]) for row in quantiles]]
    columns = [TextColumn(f"P{row['percent']}") for row in quantiles]
    yield from lines(columns, cells, ("", lambda *_: ""), width)
    meetings = document["collectives"][:_ROWS]
    if meetings:
        yield from heading("Collectives", "of a rank: bytes it puts in, transfer, waiting for others", width)
        cells = [
            [
                str(row["calls"]),
                f"{row['ranks_before']} > {row['ranks_after']}",
                units.size(row["in_bytes_after"]),
                f"{units.duration(row['transfer_before_ns'])} > {units.duration(row['transfer_after_ns'])}",
                f"{units.duration(row['waiting_before_ns'])} > {units.duration(row['waiting_after_ns'])}",
            ]
            for row in meetings
        ]
        columns = [TextColumn(title) for title in ("calls", "ranks", "bytes", "transfer", "waiting")]
        yield from lines(columns, cells, ("kind", lambda i, room: short(meetings[i]["kind"] or "unknown", room)), width)
    for notice in document["notices"]:
        yield Text("")
        yield from paragraph(notice["message"], width)
