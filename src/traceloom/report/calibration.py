"""Builds the document of a calibration and renders it on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from traceloom import __version__
from traceloom.report.labels import fit_name
from traceloom.report.views.terminal_table import (
    Cell,
    TextColumn,
    render_heading,
    render_paragraph,
    render_table,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import to_rows
from traceloom.workload.simulate.calibrate import Calibration
from traceloom.workload.simulate.machine_file import build_document

if TYPE_CHECKING:
    from traceloom.report.documents.predictions import CalibrationDocument, TransferFitRow

FORMAT = "traceloom-calibration"
VERSION = 1
_SPANS = {"inside": "in a host", "between": "in several"}


def build_calibration(answer: Calibration) -> CalibrationDocument:
    """Builds the document: the fits, their data, and the machine as in its file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "sentence": summarise_calibration(answer),
        "transfers": to_rows(answer.transfers),
        "machine": build_document(answer.machine),
        "notices": [notice.to_dict() for notice in answer.notices],
    }


def summarise_calibration(answer: Calibration) -> str:
    if answer.samples.is_empty():
        return "No collectives."
    classes = answer.transfers.select("collective", "span", "ranks").n_unique()
    several = f"{classes} kinds and groups" if classes > 1 else "one kind and group"
    late = (
        "late arrivals taken out"
        if answer.transfers["whole"].all()
        else "late arrivals taken out where they are known"
    )
    return f"{answer.samples.height:,} collectives of {several}, {late}."


def render_calibration(document: CalibrationDocument, width: int) -> Iterator[Text]:
    yield Text(fit_name(document["machine"].get("name", ""), width), "bold")
    yield Text("")
    yield from render_paragraph(document["sentence"], width)
    transfers = document["transfers"]
    if transfers:
        yield from _transfer_lines(transfers, width)
    peaks = document["machine"].get("device", {}).get("peaks", {})
    if peaks:
        rates = [
            f"{name} {(units.format_byte_rate if name == 'memory' else units.format_flop_rate)(peak)}"
            for name, peak in peaks.items()
        ]
        yield Text("")
        yield from render_paragraph(f"The device reached {', '.join(rates)}.", width)
    for notice in document["notices"]:
        yield Text("")
        yield from render_paragraph(f"{sanitize(notice['message'])}.", width)


def _transfer_lines(transfers: Sequence[TransferFitRow], width: int) -> Iterator[Text]:
    """Yields the fits as lines on a terminal, with a heading."""
    yield from render_heading("Transfers", "latency + bytes on the bus / bandwidth", width)
    cells: list[list[Cell]] = [
        [
            f"{row['ranks']} {_SPANS[row['span']]}",
            " - ".join(
                dict.fromkeys(
                    units.format_size(size) for size in (row["from_bytes"], row["to_bytes"])
                )
            ),
            f"{row['count']:,}",
            units.format_duration(round(row["alpha_ns"])) if row["form"] != "bandwidth" else "",
            f"{row['bandwidth']:.3g} GB/s" if row["bandwidth"] else "",
            f"{100 * row['residual_p10']:+.0f} {100 * row['residual_p90']:+.0f} %",
        ]
        for row in transfers
    ]
    yield from render_table(
        [TextColumn(name) for name in ("ranks", "size", "count", "latency", "bandwidth", "off by")],
        cells,
        ("", lambda i, room: fit_name(transfers[i]["collective"], room)),
        width,
    )
