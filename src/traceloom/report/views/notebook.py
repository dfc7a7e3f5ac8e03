"""A report in a notebook: `traceloom.show(session)` as the last expression of a cell."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from traceloom.harmless import harmless
from traceloom.model import Session, units
from traceloom.report.accounts import gpu_accounts
from traceloom.report.document import build
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.table import Cells

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument

_COLORS = (
    ("compute", "compute_ns", "#3b82d6"),
    ("exposed communication", "exposed_communication_ns", "#e08a00"),
    ("exposed memory", "exposed_memory_ns", "#c2578f"),
    ("idle", "idle_ns", "#9aa0a6"),
)


@dataclass(frozen=True)
class Shown:
    """A report that shows itself: as HTML in a notebook, as text elsewhere.

    Attributes:
        document: The whole report, as `traceloom report --json` prints it.
        options: What it was made with.
    """

    document: ReportDocument
    options: ReportOptions

    def to_dict(self) -> ReportDocument:
        """The report document."""
        return self.document

    def __repr__(self) -> str:
        from traceloom.report.views import terminal

        stream = io.StringIO()
        terminal.show(self.document, self.options, stream)
        return stream.getvalue()

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{_text(self.document['answer']['sentence'])}</b></p>"]
        for rank, account in gpu_accounts(self.document):
            for device in account["devices"]:
                whole = device["window_ns"] or 1
                times: Cells = device
                cells = "".join(
                    f'<div title="{_text(f"{label}: {units.duration(ns)}, {units.share(ns, whole)}")}" '
                    f'style="width:{100 * ns / whole:.3f}%;background:{color}"></div>'
                    for label, ns, color in ((label, times[key], color) for label, key, color in _COLORS)
                )
                name = f"rank {'?' if rank['rank'] is None else rank['rank']}, GPU {device['device']}"
                text = ", ".join(f"{label} {units.share(times[key], whole)}" for label, key, _ in _COLORS)
                parts.append(
                    f"<div>{_text(f'{name}: {text}')}</div>"
                    f'<div style="display:flex;height:1em;max-width:50em;margin-bottom:.5em">{cells}</div>'
                )
        parts.append(_table("GPU work", self.document["kernels"], ("total_ns", "mean_ns"), self.options.top))
        parts.append(_table("Operators", self.document["operators"], ("self_ns", "total_ns"), self.options.top))
        notices = "".join(f"<li>{_text(notice['message'])}</li>" for notice in self.document["notices"])
        return "".join(parts) + (f"<details><summary>Notices</summary><ul>{notices}</ul></details>" if notices else "")


def show(session: Session, options: ReportOptions | None = None) -> Shown:
    """The report of a session, to look at in a notebook or at a prompt.

    Example:
        >>> traceloom.show(traceloom.load("run"))  # doctest: +SKIP
    """
    options = options or ReportOptions()
    return Shown(build(session, options), options)


def _text(text: str) -> str:
    return escape(harmless(text))


def _table(title: str, rows: Sequence[Cells], columns: tuple[str, ...], top: int) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{column.removesuffix('_ns')}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{units.duration(row[column])}</td>" for column in columns)
        + f"<td>{units.count(row['count'])}</td>"
        + f'<td style="text-align:left" title="{_text(row["name"])}">{escape(short(row["name"], 80))}</td></tr>'
        for row in rows[:top]
    )
    return f"<h4>{title}</h4><table><tr>{head}<th>count</th><th>name</th></tr>{body}</table>"
