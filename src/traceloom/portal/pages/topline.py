"""The topline: what jobs, models, hosts or the fleet get out of their devices, and how its numbers go together."""

from __future__ import annotations

from dataclasses import dataclass

from htpy import Node, div, p
from markupsafe import Markup

from traceloom.fleet.topline import METRICS
from traceloom.model import units
from traceloom.portal.asking import PageAnswer, ask, asking_form, choice, nothing, to_page
from traceloom.portal.links import to_host, to_job
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable
from traceloom.portal.visit import Visit

BY = {
    "model": "by model", "division": "by division", "product": "by product", "user": "by user",
    "framework": "by framework", "job": "by job", "host": "by host", "device_model": "by device",
}  # fmt: skip
_SHORT = {
    "device_use": "Device use", "flop_rate": "FLOP/s", "compute_use": "Compute use", "power_w": "Power, W",
    "roofline_fraction": "Roofline", "mfu": "MFU", "reference_hours_per_byte": "Reference h per byte",
}  # fmt: skip
_CELL = 46


@dataclass(frozen=True)
class ToplineView:
    """What the page shows: everything in one row, and divided."""

    whole: PageAnswer
    divided: PageAnswer
    by: str


async def compute(visit: Visit) -> ToplineView:
    """Ask twice."""
    by = visit.address.query.get("by", "model")
    return ToplineView(await ask(visit, "topline", by=""), await ask(visit, "topline", by=by, top="1000"), by)


def content(view: ToplineView) -> PageContent:
    """What is shown of it."""
    asking = asking_form(view.divided.address, extra=choice(view.divided.address, "by", BY, "model", "By"))
    rows = view.divided.tables["rows"]
    of_rows = view.divided.question.tables["rows"].columns

    def lead(row: PageRow) -> str:
        value = str(row[view.by])
        if view.by in {"job", "host"}:
            return to_job(value) if view.by == "job" else to_host(value)
        return to_page("/topline", view.divided.address, by="job", **{view.by: value})

    columns = [
        PageColumn(view.by, view.by.replace("_", " ").capitalize(), "name", link=lead if view.by else None),
        *view.divided.columns("rows", ("device_hours",)),
        *(
            PageColumn(name, _SHORT[name], of_rows[name].unit, of_rows[name].meaning, of_rows[name].unknown)
            for name in METRICS
        ),
    ]
    table = PageTable("rows", f"The topline {BY.get(view.by, '')}", columns, rows, nothing("device time"))
    strongest: list[PageRow] = [
        {**row, "first": _SHORT[row["first"]], "second": _SHORT[row["second"]]}
        for row in sorted(view.whole.tables["correlations"], key=lambda row: -abs(row["correlation"] or 0.0))
    ]
    pairs = PageTable(
        "correlations", "Pairs of numbers",
        view.whole.columns("correlations", ("first", "second", "correlation", "jobs")), strongest,
    )  # fmt: skip
    sections = [
        ContentSection("divided", BY.get(view.by, "Parts").capitalize(), table, "the most device time first"),
        ContentSection("together", "What goes together", _correlations(view.whole), "rank correlation over jobs"),
        ContentSection("pairs", "The same as a table", pairs, "the strongest first"),
    ]
    whole = view.whole.tables["rows"][0] if view.whole.tables["rows"] else None
    if not rows or whole is None or whole["device_use"] is None:
        return PageContent("The topline", sections[:1], asking=asking)
    numbers = [
        KeyNumber(_SHORT[name], units.written(whole[name], of_rows[name].unit), of_rows[name].meaning)
        for name in METRICS
        if whole[name] is not None and name != "reference_hours_per_byte"
    ]
    heading = (
        f"Devices that jobs hold compute {units.share(whole['device_use'], 1.0)} of the time"
        if whole["compute_use"] is None
        else f"Devices that jobs hold compute {units.share(whole['device_use'], 1.0)} of the time, at "
        f"{units.share(whole['compute_use'], 1.0)} of their peak at least"
    )
    lead_text = (
        "None of these numbers says enough alone: a device can be busy and compute nothing, draw power and wait, reach "
        "its FLOP/s on work that is thrown away."
    )
    return PageContent(heading, sections, lead=lead_text, numbers=numbers, asking=asking)


def _correlations(asked: PageAnswer) -> Node:
    """A triangle of coloured fields, one for each pair."""
    pairs = {(row["first"], row["second"]): row for row in asked.tables["correlations"]}
    names = [name for name in METRICS if any(name in pair for pair in pairs)]
    if not pairs or all(row["correlation"] is None for row in pairs.values()):
        return div(".empty")[p["Fewer than ten jobs have two of the numbers: nothing is said of how they go together."]]
    cells = Markup("")
    left = 170
    for down, second in enumerate(names[1:]):
        y = down * _CELL
        cells += Markup('<text class="side" x="{}" y="{}" text-anchor="end">{}</text>').format(
            left - 12, y + _CELL / 2 + 4, _SHORT[second]
        )
        for across, first in enumerate(names[: down + 1]):
            row = pairs.get((first, second)) or pairs.get((second, first))
            value = None if row is None else row["correlation"]
            x = left + across * 2 * _CELL
            says = f"{_SHORT[first]} and {_SHORT[second]}: "
            says += "not known" if value is None else f"{value:+.2f} over {units.counted(row['jobs'], 'job')}"  # type: ignore[index]
            look = "none" if value is None else "with" if value > 0 else "against"
            cells += Markup(
                '<g class="pair {}"><title>{}</title><rect x="{}" y="{}" width="{}" height="{}" rx="5" '
                'fill-opacity="{:.2f}"/><text x="{}" y="{}" text-anchor="middle">{}</text></g>'
            ).format(
                look, says, x, y + 2, 2 * _CELL - 4, _CELL - 4, 0.08 + 0.72 * abs(value or 0.0), x + _CELL - 2,
                y + _CELL / 2 + 4, "–" if value is None else f"{value:+.2f}",
            )  # fmt: skip
    foot = Markup("").join(
        Markup('<text class="side" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            left + at * 2 * _CELL + _CELL - 2, (len(names) - 1) * _CELL + 18, _SHORT[name]
        )
        for at, name in enumerate(names[:-1])
    )
    width, height = left + (len(names) - 1) * 2 * _CELL, (len(names) - 1) * _CELL + 28
    picture = Markup(
        '<svg class="pairs" role="img" aria-label="Rank correlations of pairs of numbers over jobs" width="{}" '
        'height="{}">{}{}</svg>'
    ).format(width, height, cells, foot)
    return div(".scroll", tabindex="0", role="region", aria_label="Correlations")[picture]


PAGE = Page(
    "/topline", "Topline", "What jobs, models, hosts or the whole fleet get out of their devices: use, FLOP/s, power, "
    "roofline, MFU, reference hours; and how these go together.", compute, content, menu="Account",
)  # fmt: skip
