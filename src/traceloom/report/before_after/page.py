"""A what-if as a page of its own in the frame of the report's page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from traceloom.model import units
from traceloom.report.before_after.payload import BeforeAfter
from traceloom.report.table import Col
from traceloom.report.views.html.frame import asset, framed, key_numbers, one_after_the_other
from traceloom.report.views.html.table import table
from traceloom.report.views.html.text import prose, text
from traceloom.report.whatif import part_name, trust

if TYPE_CHECKING:
    from traceloom.report.documents.whatif import WhatIfDocument

_TIMES = (
    Col("before_ns", "Before", "time", scale="t"),
    Col("after_ns", "After", "time", scale="t"),
)
_SAVED = Col("saved_ns", "Saved", "time", scale="t")
_ABOUT_TIMELINE = (
    "Every lane as it was and, below it, as it would be, on one axis. A dark edge marks what the changes are about, "
    "a line the critical path: what decides how long it takes."
)
_ABOUT_PATH = "What decides how long it takes; each column adds up to the whole."


def render(document: WhatIfDocument, view: BeforeAfter | None = None) -> str:
    """The document as one HTML page that needs nothing but itself.

    Args:
        document: What `traceloom.report.whatif.build` made of a what-if.
        view: The timeline before and after; a page without one says so.
    """
    name = document["name"]
    before, after, saved = document["before_ns"], document["after_ns"], document["saved_ns"]
    whole = max(before, after, 1)
    bars = "".join(
        f'<rect class="{side}" x="0" y="{14 * k}" width="{time / whole * 100:.2f}" height="10"/>'
        for k, (side, time) in enumerate((("before", before), ("after", after)))
    )
    label = f"before {units.duration(before)}, after {units.duration(after)}"
    picture = (
        f'<svg class="sides" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{bars}</svg>'
    )
    shown = [
        ("Before", units.duration(before), "as measured"),
        ("After", units.duration(after), "with the changes"),
        ("Saved", units.duration(saved), f"{units.share(saved, before)} of it" if saved >= 0 else "it takes longer"),
    ]
    if document["rescaled_saved_ns"] != saved:
        shown.append(("Unrecorded", units.duration(document["rescaled_saved_ns"]), "saved when not recording"))
    else:
        error = f"{100 * document['law']['honest_error']:+.2f} %"
        shown.append(
            ("Error of the graph", error, "more than that is saved" if document["trusted"] else "take it as a hint")
        )
    return framed(
        title=f"What if: {document['sentence']} – {name}",
        name=f"What if: {name}",
        headline=f"<h1>{text(document['sentence'])}</h1>{picture}",
        numbers=key_numbers((label, value, "", more) for label, value, more in shown),
        footer=(
            f"<p>Traceloom {text(document['traceloom'])} · times count from the beginning of the graph</p>"
            "<p>The same for programs: <code>traceloom whatif … -o whatif.json</code>; the whole timeline after the "
            "change: <code>-o after.perfetto.json.gz</code></p>"
        ),
        data=view.payload if view else "",
        **one_after_the_other(_sections(document, view)),
    )


def _sections(document: WhatIfDocument, view: BeforeAfter | None) -> Iterator[tuple[str, str, str, str]]:
    changes = "".join(
        f'<li><code>{text(change["change"])}</code> <span class="quiet">Assumed: {text(change["assumes"])}.</span></li>'
        for change in document["changes"]
    )
    yield "changes", "Changes", "What was asked, and what each change assumes.", f"<ul>{changes}</ul>"
    if view is None:
        missing = '<p class="quiet absent">Timeline: nothing takes any time on any thread or stream.</p>'
        yield "timeline", "Timeline", "", missing
    else:
        note = f'<p class="quiet">{prose(view.said)}</p>' if view.said else ""
        yield "timeline", "Timeline", _ABOUT_TIMELINE, note + asset("timeline.html")
    if len(document["ranks"]) > 1:
        columns = (Col("rank", "Rank", "count"), *_TIMES, _SAVED)
        yield (
            "ranks",
            "Ranks",
            "How long each rank takes.",
            table("ranks-table", columns, document["ranks"], {}, "Ranks"),
        )
    parts = [{**part, "of": part_name(part)} for part in document["path"]]
    kinds = (Col("of", "Time", hint="kind of time on the path"), *_TIMES)
    yield "path", "Critical path", _ABOUT_PATH, table("path-table", kinds, parts, {}, "Critical path")
    yield "trust", "Trust", "How far the answer goes.", f"<p>{text(trust(document))}</p>"
