"""The page of device time by owner: dimensions in any order, drill-down, and a chart over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from htpy import Node, a, div, fragment, li, ol, span

from traceloom.fleet.analyses.attribution import ATTRIBUTION_DIMENSIONS, UNATTRIBUTED
from traceloom.fleet.portal.asking import (
    QueryResult,
    build_empty_notice,
    build_filter_form,
    build_select_field,
    fetch_answer,
)
from traceloom.fleet.portal.charts import (
    DAY_NS,
    HOUR_NS,
    ChartColumn,
    IcicleBox,
    draw_columns,
    draw_icicle,
    draw_legend,
)
from traceloom.fleet.portal.page import (
    ContentSection,
    KeyFigure,
    Page,
    PageContent,
    build_host_url,
    build_job_url,
)
from traceloom.fleet.portal.page_request import PageRequest, PageUrl
from traceloom.fleet.portal.tables import PageColumn, PageRow, PageTable
from traceloom.server.problem import HttpError
from traceloom.system import units

DEFAULT_DIMENSIONS = "division,product,user"
MAX_DIMENSIONS = 6
STATE_COLOURS = {
    "busy_ms": "compute",
    "idle_ms": "communication",
    "unallocated_ms": "idle",
    "unreachable_ms": "blocking",
}
"""Part of device time -> its colour group."""

_STATE_LABELS = {
    "busy_ms": "Busy",
    "idle_ms": "Held, idle",
    "unallocated_ms": "Free",
    "unreachable_ms": "Unreachable",
}
_MIN_BOX_SHARE = 0.002  # narrower boxes, as a share of the whole, are not drawn
_TOP_N_CHOICES = {
    "10": "10 largest parts",
    "20": "20 largest parts",
    "50": "50 largest parts",
    "100": "100 largest parts",
}
PartPath = tuple[str, ...]
"""Values of dimensions, outermost first, which identify a part of device time."""


@dataclass(frozen=True)
class AttributionView:
    """Data of the page. `at`: the selected part, its values outermost first."""

    at: PartPath
    whole: QueryResult
    over: QueryResult
    bucket_ns: int

    @property
    def by(self) -> tuple[str, ...]:
        """The dimensions, outermost first."""
        return tuple(self.whole.fact("by"))


async def fetch_attribution(request: PageRequest) -> AttributionView:
    """Asks for the tree, and for the same over time.

    Raises:
        HttpError: `wrong-request`: the URL names no part.
    """
    dimensions = request.address.query.get("by", DEFAULT_DIMENSIONS)
    try:
        selected_path = msgspec.json.decode(request.address.query.get("at", "[]"), type=PartPath)
    except msgspec.MsgspecError as error:
        raise HttpError(
            400, f"`at` names no part of device time: {error}", slug="wrong-request"
        ) from error
    totals = await fetch_answer(request, "attribution", by=dimensions)
    bucket = "hour" if totals.fact("until_ns") - totals.fact("since_ns") <= 3 * DAY_NS else "day"
    over_time = await fetch_answer(request, "attribution", by=dimensions, over=bucket)
    return AttributionView(
        selected_path, totals, over_time, HOUR_NS if bucket == "hour" else DAY_NS
    )


def build_attribution_content(view: AttributionView) -> PageContent:
    filters = fragment[
        _build_dimension_picker(view.whole.address, view.by),
        build_filter_form(
            view.whole.address,
            extra=build_select_field(view.whole.address, "top", _TOP_N_CHOICES, "20", "Parts"),
            preserved=("by", "at"),
        ),
    ]
    address, rows = view.whole.address, view.whole.tables["rows"]
    tree = {tuple(row["values"]): row for row in rows}
    selected = tree.get(view.at)
    if not rows or selected is None or not selected["device_ms"]:
        empty = div(".empty", id="of-part")[build_empty_notice("device time")]
        return PageContent(
            "Device time",
            [ContentSection("divided", "Parts", empty)],
            above=_build_breadcrumbs(view, address),
            asking=filters,
        )
    depth = len(view.at)
    parts = [
        row
        for row in rows
        if len(row["values"]) == depth + 1 and tuple(row["values"][:depth]) == view.at
    ]
    bucket = "day" if view.bucket_ns == DAY_NS else "hour"
    sections = [
        ContentSection(
            "tree",
            "At a glance",
            _draw_icicle_chart(view, tree),
            "as wide as the device time; the line: jobs compute",
        ),
        ContentSection(
            "over", "Over time", _draw_time_chart(view), f"device hours by {bucket}, UTC"
        ),
    ]
    if parts:
        dimension = _get_dimension_label(view.by[depth])
        sections.append(
            ContentSection("divided", f"By {dimension}", _build_parts_table(view, parts, selected))
        )
    heading = f"{view.at[-1]}: " if view.at else ""
    heading += f"{_format_hours(selected['device_ms'])} device hours"
    if allocated_ms := selected["busy_ms"] + selected["idle_ms"]:
        heading += f"; jobs that held them computed {units.format_share(selected['busy_ms'], allocated_ms)} of the time"
    else:
        heading += " that no job held"
    return PageContent(
        heading,
        sections,
        above=_build_breadcrumbs(view, address),
        numbers=_build_key_figures(view, selected),
        asking=filters,
        lead=[
            a(href="/owners")["Rules"],
            f" say whose a job is; what nobody says is {UNATTRIBUTED}.",
        ],
    )


def _build_key_figures(view: AttributionView, selected: Mapping[str, Any]) -> list[KeyFigure]:
    figures = [
        KeyFigure(
            label,
            units.format_share(selected[name], selected["device_ms"]),
            f"{_format_hours(selected[name])} device hours",
        )
        for name, label in _STATE_LABELS.items()
    ]
    if selected["cost"] is not None:
        priced = units.format_share(selected["cost_known_ms"], selected["device_ms"])
        cost = f"{units.format_number(selected['cost'])} {view.whole.fact('currency') or ''}"
        figures.append(KeyFigure("Cost", cost, f"of {priced} of the time"))
    if selected["energy_mj"] is not None:
        measured = units.format_share(selected["energy_known_ms"], selected["device_ms"])
        kwh = selected["energy_mj"] / 3.6e9
        figures.append(
            KeyFigure("Energy", f"{units.format_number(kwh)} kWh", f"of {measured} of the time")
        )
    return figures


def _draw_icicle_chart(view: AttributionView, tree: Mapping[PartPath, Mapping[str, Any]]) -> Node:
    """Draws the path to the selected part at full width, and its children below."""
    depth = len(view.at)
    total_ms = tree[view.at]["device_ms"]
    boxes = [_build_box(view, tree[view.at[:level]], level, 0.0, 1.0) for level in range(depth + 1)]
    starts: dict[PartPath, float] = {view.at: 0.0}
    for values, row in tree.items():
        if len(values) <= depth or values[:depth] != view.at or values[:-1] not in starts:
            continue
        start, size = starts[values[:-1]], row["device_ms"] / total_ms
        starts[values] = start
        starts[values[:-1]] = start + size
        if size >= _MIN_BOX_SHARE:
            boxes.append(_build_box(view, row, len(values), start, size))
    label = f"Device time by {', then '.join(map(_get_dimension_label, view.by))}"
    entries = [
        (state_label, STATE_COLOURS[name], "")
        for name, state_label in _STATE_LABELS.items()
        if tree[view.at][name]
    ]
    return fragment[draw_icicle(boxes, label), draw_legend(entries)]


def _build_box(
    view: AttributionView, row: Mapping[str, Any], level: int, start: float, size: float
) -> IcicleBox:
    values = tuple(row["values"])
    hours = f"{_format_hours(row['device_ms'])} h"
    allocated_ms = row["busy_ms"] + row["idle_ms"]
    busy_text = (
        f", {units.format_share(row['busy_ms'], allocated_ms)} of those held compute"
        if allocated_ms
        else ""
    )
    name = values[-1] if values else "All devices"
    largest = max(STATE_COLOURS, key=lambda part: row[part])
    colour = "compute" if allocated_ms else STATE_COLOURS[largest]
    return IcicleBox(
        level,
        start,
        size,
        name,
        f"{name}: {hours}{busy_text}",
        hours,
        row["busy_ms"] / row["device_ms"] if allocated_ms else 1.0,
        colour,
        build_part_url(view.whole.address, values),
        here=values == view.at,
    )


def _draw_time_chart(view: AttributionView) -> Node:
    rows = [row for row in view.over.tables["rows"] if tuple(row["values"]) == view.at]
    columns = [
        ChartColumn(
            row["time_ns"],
            [(STATE_COLOURS[name], row[name] / 3.6e6) for name in STATE_COLOURS],
            ", ".join(
                f"{_STATE_LABELS[name].lower()} {_format_hours(row[name])} h"
                for name in STATE_COLOURS
                if row[name]
            ),
        )
        for row in rows
    ]
    name = view.at[-1] if view.at else "all devices"
    entries = [
        (label, STATE_COLOURS[name], "")
        for name, label in _STATE_LABELS.items()
        if any(row[name] for row in rows)
    ]
    picture = draw_columns(
        columns,
        view.bucket_ns,
        label=f"Device hours of {name} over time",
        write=units.format_number,
    )
    return fragment[picture, draw_legend(entries)]


def _build_parts_table(
    view: AttributionView, parts: Sequence[Mapping[str, Any]], selected: Mapping[str, Any]
) -> PageTable:
    dimension = view.by[len(view.at)]
    rows: list[PageRow] = [
        {
            "part": row["values"][-1],
            "hours": row["device_ms"] / 3.6e6,
            "share": row["device_ms"] / selected["device_ms"],
            "use": row["busy_ms"] / allocated_ms
            if (allocated_ms := row["busy_ms"] + row["idle_ms"])
            else None,
            "idle": row["idle_ms"] / 3.6e6,
            "energy": None if row["energy_mj"] is None else row["energy_mj"] / 3.6e9,
            "cost": row["cost"],
            "about": "about it",
        }
        for row in parts
    ]
    columns = [
        PageColumn(
            "part",
            _get_dimension_label(dimension).capitalize(),
            "name",
            link=lambda row: build_part_url(view.whole.address, (*view.at, str(row["part"]))),
        ),
        PageColumn("hours", "Device hours", "number", "hours of devices, whatever they did"),
        PageColumn("share", "Share", "share", "of the part above"),
        PageColumn(
            "use",
            "Use",
            "share",
            "share of the time that jobs held in which they computed",
            "no job held devices",
        ),
        PageColumn(
            "idle",
            "Held, idle, h",
            "number",
            "hours in which a job held the device, and nothing ran",
        ),
        PageColumn("energy", "Energy, kWh", "number", "what was measured", "no device measures it"),
        PageColumn(
            "cost",
            f"Cost, {view.whole.fact('currency')}",
            "number",
            "at the prices",
            "it has no price",
        )
        if view.whole.fact("currency")
        else None,
    ]
    if dimension in {"job", "host"}:
        build_url = build_job_url if dimension == "job" else build_host_url
        columns.append(PageColumn("about", "", link=lambda row: build_url(str(row["part"]))))
    return PageTable(
        "of-part",
        f"Device time by {_get_dimension_label(dimension)}",
        list(filter(None, columns)),
        rows,
    )


def build_part_url(address: PageUrl, values: PartPath) -> str:
    return address.changed(
        {"at": msgspec.json.encode(values).decode() if values else "", "of-part.leaf": ""}
    )


def _build_breadcrumbs(view: AttributionView, address: PageUrl) -> list[tuple[str, str]]:
    if not view.at:
        return []
    return [
        ("All devices", build_part_url(address, ())),
        *(
            (value, build_part_url(address, view.at[: index + 1]))
            for index, value in enumerate(view.at[:-1])
        ),
    ]


def _build_dimension_picker(address: PageUrl, dimensions: Sequence[str]) -> Node:
    """Builds the list of dimensions, each with links to move it outwards or remove it, and of those
    to add.
    """

    def to(names: Sequence[str]) -> str:
        return address.changed({"by": ",".join(names), "at": "", "of-part.leaf": ""})

    chips = []
    for index, name in enumerate(dimensions):
        moved_outward = (
            [*dimensions[: index - 1], name, dimensions[index - 1], *dimensions[index + 1 :]]
            if index
            else None
        )
        without_it = [other for other in dimensions if other != name]
        chips.append(
            li(".chip")[
                a(
                    href=to(moved_outward),
                    title=f"{_get_dimension_label(name)} before {_get_dimension_label(dimensions[index - 1])}",
                    aria_label=f"{name} outer",
                )["‹"]
                if moved_outward
                else None,
                _get_dimension_label(name),
                a(
                    href=to(without_it),
                    title=f"Do not divide by {_get_dimension_label(name)}",
                    aria_label=f"Drop {name}",
                )["×"]
                if without_it
                else None,
            ]
        )
    addable = (
        [name for name in ATTRIBUTION_DIMENSIONS if name not in dimensions]
        if len(dimensions) < MAX_DIMENSIONS
        else []
    )
    return div(".order")[
        span(".quiet")["Divided by"],
        ol[chips],
        span(".quiet")["then by"] if addable else None,
        div(".more")[
            (a(href=to((*dimensions, name)))[_get_dimension_label(name)] for name in addable)
        ],
    ]


def _get_dimension_label(name: str) -> str:
    return {"device_model": "model of device", "application": "sort of work"}.get(name, name)


def _format_hours(ms: float) -> str:
    return units.format_number(ms / 3.6e6)


ATTRIBUTION_PAGE = Page(
    "/attribution",
    "Device time",
    "Whose the time of devices was, by division, product, user, job, host or device, in "
    "any order, drilled down and over time; with energy and cost. All levels have the same sum.",
    fetch_attribution,
    build_attribution_content,
    menu="Account",
)
