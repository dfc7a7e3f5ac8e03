"""A measured machine as a document, and on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from traceloom import __version__
from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.model.frames import rows
from traceloom.replay.measure import Measurement
from traceloom.report.calibration import SPANS, transfer_lines
from traceloom.report.names import short
from traceloom.report.views.terminal.columns import Cell, TextColumn, heading, lines, paragraph
from traceloom.simulate.machine.document import machine_document

if TYPE_CHECKING:
    from traceloom.report.documents.measurement import MeasuredKernelRow, MeasuredTimeFields, MeasurementDocument

FORMAT = "traceloom-measurement"
VERSION = 1


def build(answer: Measurement) -> MeasurementDocument:
    """The document: what was measured, what was fitted to it, and the machine as its file has it."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "sentence": sentence(answer),
        "machine": machine_document(answer.machine),
        "transfers": rows(answer.transfers),
        "collectives": rows(answer.collectives),
        "kernel_fits": rows(answer.kernel_fits),
        "kernels": rows(answer.kernels),
        "peaks": answer.peaks,
        "environment": answer.environment,
        "absent": [{"path": what, "reason": reason} for what, reason in answer.absent.items()],
        "notices": [notice.to_dict() for notice in answer.notices],
    }


def sentence(answer: Measurement) -> str:
    """What was measured, in words."""
    where = answer.environment
    ranks = units.counted(int(where["ranks"]), "rank")
    parts = [units.counted(answer.kernels.height, "kernel")]
    if answer.collectives.height:
        parts.append(f"{units.counted(answer.collectives.height, 'collective')} over {where['backend']}")
    return f"{' and '.join(parts)}, {ranks} on {units.counted(int(where['hosts']), 'host')}."


def rate(row: MeasuredKernelRow) -> str:
    """The rate of a kernel in its own unit; empty where it has none."""
    unit = units.flop_rate if row["kernel"] == "matrix_product" else units.byte_rate
    return unit(1e9 * row["rate"]) if row["rate"] else ""


def kernel_size(row: MeasuredKernelRow) -> str:
    """The size of a kernel: rows and columns of a matrix, or bytes of a buffer."""
    return f"{row['size']} x {row['size']}" if row["kernel"] == "matrix_product" else units.size(row["size"])


def render(document: MeasurementDocument, width: int) -> Iterator[Text]:
    """The lines on a terminal."""
    yield Text(short(document["machine"]["name"], width), "bold")
    yield Text("")
    yield from paragraph(document["sentence"], width)
    collectives, kernels = document["collectives"], document["kernels"]
    if collectives:
        yield from heading("Collectives", "median of the slowest rank, how far off its fit, bus bandwidth", width)
        cells: list[list[Cell]] = [
            [f"{row['ranks']} {SPANS[row['span']]}", units.size(row["size_bytes"]), *_timed(row),
             f"{row['rate']:.3g} GB/s"]
            for row in collectives
        ]  # fmt: skip
        columns = [TextColumn(name) for name in ("ranks", "size", "time", "known to", "off by", "bandwidth")]
        yield from lines(columns, cells, ("", lambda i, room: short(collectives[i]["collective"], room)), width)
        yield from transfer_lines(document["transfers"], width)
    yield from heading("Kernels", "on all ranks at the same time", width)
    cells = [[row["element_type"], kernel_size(row), *_timed(row), rate(row)] for row in kernels]
    columns = [TextColumn(name) for name in ("type", "size", "time", "known to", "off by", "rate")]
    yield from lines(columns, cells, ("", lambda i, room: short(kernels[i]["kernel"].replace("_", " "), room)), width)
    for entry in document["absent"]:
        yield Text("")
        yield from paragraph(f"Not measured: {entry['path']}: {entry['reason']}.", width)
    for notice in document["notices"]:
        yield Text("")
        yield from paragraph(f"{harmless(notice['message'])}.", width)


def _timed(row: MeasuredTimeFields) -> list[str]:
    """The cells about the time of a row: its median, how well that is known, and how far off the fit it lies."""
    return [
        units.duration(round(row["median_ns"])),
        f"{100 * row['half_width']:.1f} %" if row["half_width"] < 1 else "> 100 %",
        f"{100 * row['residual']:+.0f} %",
    ]
