"""The page: one file with everything in it."""

from __future__ import annotations

import time
from html import escape
from itertools import islice
from typing import TYPE_CHECKING

from traceloom.model import Session, units
from traceloom.report.beside import with_beside
from traceloom.report.names import rank_name
from traceloom.report.views.html import capture, featured, findings, inputs, navigation, overview, sections, timeline
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.frame import asset, framed, key_numbers, rank_choice
from traceloom.report.views.html.navigation import PageSection
from traceloom.report.views.html.text import prose, text

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument

_KEY_NUMBERS = 4
_ABOUT_FINDINGS = (
    "What each fix saves by re-timing the linked graph, with the fixes above it applied; savings do not overlap."
)


def render(document: ReportDocument, session: Session) -> str:
    """The report as one HTML page that needs nothing but itself.

    Args:
        document: What `traceloom.report.document.build` made of the session.
        session: The session, for the timeline.
    """
    began = time.perf_counter()
    reasons = Reasons(document["absent"])
    few = None if document.get("runs") else featured.choose(document, session)
    near = document if few is None else few.document(document)
    drawn = session if few is None else few.session(session)
    view = None
    if not document.get("runs") and any(trace.events.height for trace in drawn.traces):
        kernels = document.get("kernels") or []
        communication = {row["name"] for row in kernels if row.get("category") == "communication"}
        curves = (document.get("memory") or {}).get("curve") or []
        epoch_ns = int(document["epoch_ns"]) if document.get("epoch_ns") else drawn.epoch_ns
        view = timeline.build(
            with_beside(drawn), communication, curves, path=document.get("critical_path"), epoch_ns=epoch_ns
        )
    note = "" if few is None else f'<p class="quiet">{prose(few.sentence(document))}</p>'
    events = '<p class="quiet absent">Timeline: the trace has no events.</p>'
    if view is not None:
        events = note + asset("timeline.html")
        if view.omitted:
            largest_first = sorted(view.omitted.items(), key=lambda pair: -pair[1])
            kinds = ", ".join(f"{units.count(number)} {kind}" for kind, number in largest_first)
            events += (
                f'<p class="quiet">The timeline shows {units.count(view.shown)} events. The shortest ones are left out '
                f"to keep the page small ({escape(kinds)}); every table and number counts them. "
                "<code>traceloom report … -o x.perfetto.json.gz</code> writes all of them for Perfetto.</p>"
            )
    first, *others = navigation.views(_sections(document, near, reasons, events))
    name = document.get("name") or session.name
    version, epoch = text(document.get("traceloom", "")), text(document.get("epoch_ns", ""))
    versions = {f"{k} {v}" for entry in document.get("inputs") or [] for k, v in (entry.get("versions") or {}).items()}
    recorded = text(", ".join(sorted(versions))) or "no versions named in the files"
    return framed(
        title=f"{name} – Traceloom",
        name=name,
        ranks=rank_choice([rank_name(r, k) for k, r in enumerate(near["ranks"][: sections.MOST_RANKS])]),
        headline=overview.headline(document),
        numbers=key_numbers(islice(overview.numbers(document), _KEY_NUMBERS)),
        links=navigation.links([first, *others]),
        sections=first.body + navigation.in_short(others),
        more=navigation.templates(others),
        window=view.window if view else "",
        footer=(
            f"<p>Traceloom {version} · {recorded} · times count from {epoch} ns (Unix time where the trace gives it) · "
            f"page made in {time.perf_counter() - began:.2f} s</p>"
            "<p>The same numbers for programs: <code>traceloom report … -o report.json</code></p>"
        ),
        data=view.payload if view else "",
    )


def _sections(document: ReportDocument, near: ReportDocument, reasons: Reasons, events: str) -> list[PageSection]:
    """All sections, in no order; `near` has the ranks that are shown one by one."""
    data = inputs.notices(document["notices"], reasons) + inputs.inputs(document, reasons)
    about_data = "What was read, and what to know about it."
    if document.get("runs"):
        runs = inputs.runs(document, reasons)
        return [
            PageSection("runs", "runs", "Runs", "Report one of them alone to see more.", runs),
            PageSection("data", "data", "Data", about_data, data),
        ]
    ranked = findings.findings(document, reasons)
    return [
        PageSection("findings", "findings", "What to fix first", _ABOUT_FINDINGS, ranked),
        PageSection("timeline", "timeline", "Timeline", "Every event of every thread and stream.", events),
        *sections.sections(document, near, reasons),
        PageSection("data", "data", "Data", about_data, data + capture.capture(document, reasons)),
    ]
