"""Pages that are generated from the declarations of questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from htpy import Node, div, p
from markupsafe import Markup

from traceloom.fleet.analyses.anomalies import MIN_PEERS, OUTLIER_Z
from traceloom.fleet.analyses.efficiency import METRICS
from traceloom.fleet.portal.asking import (
    QueryResult,
    build_empty_notice,
    build_filter_form,
    build_page_url,
    build_select_field,
    fetch_answer,
)
from traceloom.fleet.portal.charts import draw_share_bar
from traceloom.fleet.portal.page import (
    ContentSection,
    KeyFigure,
    Page,
    PageContent,
    build_capture_url,
    build_host_url,
    build_job_url,
)
from traceloom.fleet.portal.page_request import PageRequest
from traceloom.fleet.portal.pages import admin, attribution, kernel
from traceloom.fleet.portal.tables import PageColumn, PageRow, PageTable
from traceloom.system import units

DIMENSION_NAMES = {
    "kind": "kind of work",
    "bound": "what bounds it",
    "device_model": "device",
    "kernel": "kernel",
    "op": "operator",
    "rank": "rank",
    "job": "job",
    "torch": "PyTorch",
    "code": "version",
    "division": "division",
    "product": "product",
    "application": "sort of work",
    "model": "model",
    "user": "user",
    "framework": "framework",
}
"""Dimensions of GPU time in the order of the form -> label."""

_PART_COLOURS = (
    "compute",
    "communication",
    "memory",
    "annotation",
    "forward",
    "launch",
    "optimizer",
    "op",
    "python",
    "other",
)
_LINKED_DIMENSIONS = frozenset(
    {"job", "user", "division", "product", "model", "framework", "device_model"}
)
"""Dimensions that are also filters of all questions."""

_COVERAGE_COLUMNS = ("number", "kernel", "shapes", "total_ns", "fraction", "covered_fraction")


@dataclass(frozen=True)
class WorkView:
    """Data of the page."""

    divided: QueryResult
    coverage: QueryResult


async def compute_characterise(visit: PageRequest) -> WorkView:
    """Asks both questions."""
    return WorkView(
        await fetch_answer(visit, "characterise", top="500"),
        await fetch_answer(visit, "coverage", top="200"),
    )


def build_characterise_content(view: WorkView) -> PageContent:
    asking = build_filter_form(
        view.divided.address,
        extra=build_select_field(view.divided.address, "by", BY_CHOICES, "kind", "By"),
    )
    result = view.divided
    dimensions, rows = result.fact("by"), result.tables["rows"]
    columns = [
        *(
            PageColumn(
                name, DIMENSION_NAMES[name].capitalize(), "name", link=_build_row_link(result, name)
            )
            for name in dimensions
        ),
        *result.columns("rows", ("total_ns", "fraction", "count", "captures")),
    ]
    dimension_text = ", then ".join(DIMENSION_NAMES[name] for name in dimensions)
    table = PageTable(
        "rows", f"GPU time by {dimension_text}", columns, rows, build_empty_notice("GPU work")
    )
    sections: list[ContentSection] = []
    numbers: list[KeyFigure] = []
    heading = "GPU time"
    if rows:
        total = sum(row["total_ns"] for row in rows)
        head, remaining_rows = rows[: len(_PART_COLOURS) - 1], rows[len(_PART_COLOURS) - 1 :]
        parts = [
            (_format_row_name(row, dimensions), colour_group, float(row["total_ns"]))
            for colour_group, row in zip(_PART_COLOURS, head, strict=False)
        ]
        if remaining_rows:
            parts.append(
                (
                    f"{units.format_count(len(remaining_rows))} others",
                    _PART_COLOURS[-1],
                    float(sum(row["total_ns"] for row in remaining_rows)),
                )
            )
        picture = draw_share_bar(
            parts, lambda ns: units.format_share(ns, total), f"GPU time by {dimension_text}"
        )
        sections.append(ContentSection("glance", "At a glance", picture))
        heading = f"{_format_row_name(rows[0], dimensions)} makes up {units.format_share(rows[0]['fraction'], 1.0)} of the GPU time"
        needed = next(
            (
                row["number"]
                for row in view.coverage.tables["rows"]
                if row["covered_fraction"] >= 0.5
            ),
            None,
        )
        unshaped = view.coverage.fact("unshaped_ns")
        numbers = [
            KeyFigure("GPU time", units.format_duration(total), "in captures of this time"),
            KeyFigure("Parts", units.format_count(len(rows)), f"by {dimension_text}"),
            KeyFigure(
                "Half of it",
                "–" if needed is None else units.format_count(needed),
                "shapes of kernels make up half",
            ),
            KeyFigure(
                "Without shapes",
                units.format_share(unshaped, view.coverage.fact("total_ns")),
                "of the GPU time",
            ),
        ]
    sections += [
        ContentSection("divided", f"By {dimension_text}", table),
        ContentSection(
            "coverage",
            "Common shapes",
            PageTable(
                "covered",
                "Kernels with their shapes, the longest first",
                view.coverage.columns(
                    "rows",
                    _COVERAGE_COLUMNS,
                    {
                        "kernel": lambda row: build_page_url(
                            "/kernels/history",
                            result.address,
                            kernel=str(row["kernel"]),
                            shapes=str(row["shapes"]),
                        )
                    },
                ),
                view.coverage.tables["rows"],
                "No shapes were recorded.",
            ),
            "what specialising kernels for the commonest would cover",
        ),
    ]
    return PageContent(heading, sections, numbers=numbers, asking=asking)


def _format_row_name(row: PageRow, dimensions: list[str]) -> str:
    return " · ".join(str(row[name]) for name in dimensions)


def _build_row_link(result: QueryResult, name: str) -> Callable[[PageRow], str] | None:
    if name == "kernel":
        return lambda row: build_page_url(
            "/kernels/history", result.address, kernel=str(row["kernel"])
        )
    if name == "kind":
        return lambda row: build_page_url(
            "/kernels", result.address, **{"rows.q": str(row["kind"])}
        )
    if name in _LINKED_DIMENSIONS:
        return lambda row: build_page_url("/kernels", result.address, **{name: str(row[name])})
    return None


BY_CHOICES = {
    **{name: f"by {words}" for name, words in DIMENSION_NAMES.items()},
    "kind,bound": "by kind and bound",
    "bound,kind": "by bound and kind",
    "division,kind": "by division and kind",
    "model,kind": "by model and kind",
    "framework,kind": "by framework and kind",
}
CHARACTERISE_PAGE = Page(
    "/gpu-time",
    "GPU time",
    "Where GPU time goes, by kind of work, what bounds it, device, version or whose it is; "
    "and what specialising kernels for the commonest shapes would cover.",
    compute_characterise,
    build_characterise_content,
    menu="Understand",
)

INVEST_CHOICES = {
    "rule": "by rule",
    "rule,model": "by rule and model",
    "model": "by model",
    "model,rule": "by model and rule",
    "division": "by division",
    "user": "by user",
    "job": "by job",
    "job,rule": "by job and rule",
}


@dataclass(frozen=True)
class SavingsView:
    """Data of the page."""

    savings: QueryResult
    findings: QueryResult


async def compute_invest(visit: PageRequest) -> SavingsView:
    """Asks both questions."""
    return SavingsView(
        await fetch_answer(visit, "invest", top="1000"),
        await fetch_answer(visit, "findings", top="1000"),
    )


def build_invest_content(view: SavingsView) -> PageContent:
    asking = build_filter_form(
        view.savings.address,
        extra=build_select_field(view.savings.address, "by", INVEST_CHOICES, "rule", "By"),
    )
    result, dimensions = view.savings, view.savings.fact("by")
    rows: list[PageRow] = [
        {**row, "hours": row["saved_ms"] / 3.6e6, **_add_rule_title(row)}
        for row in result.tables["rows"]
    ]
    held_ms, analysed = result.fact("held_ms"), result.fact("analysed_ms")

    def leads(name: str) -> Callable[[PageRow], str]:
        if name == "job":
            return lambda row: build_job_url(str(row["job"]))
        return lambda row: build_page_url(
            "/invest",
            result.address,
            by="job,rule",
            **{"rows.q" if name == "rule" else name: str(row[name])},
        )

    example = {"example": lambda row: build_capture_url(str(row["example"]))}
    columns = [
        *(PageColumn(name, name.capitalize(), link=leads(name)) for name in dimensions),
        *(
            [PageColumn("meaning", "What it is", hint="as `traceloom explain` has it")]
            if "rule" in dimensions
            else []
        ),
        PageColumn("hours", "Saves, device hours", "number", "device hours that fixing would save"),
        *result.columns("rows", ("jobs", "confidence", "example"), example),
    ]
    dimension_text = INVEST_CHOICES.get(",".join(dimensions), ", ".join(dimensions))
    savings = PageTable(
        "rows",
        f"What fixing findings would save, {dimension_text}",
        columns,
        rows,
        build_empty_notice("finding that saves time"),
    )
    findings_result = view.findings
    common: list[PageRow] = [
        {**row, **_add_rule_title(row)} for row in findings_result.tables["rows"]
    ]
    finding_columns = [
        *findings_result.columns("rows", ("rule",), {"rule": leads("rule")}),
        PageColumn("meaning", "What it is", hint="as `traceloom explain` has it"),
        *findings_result.columns(
            "rows",
            ("captures", "fraction", "jobs", "saving_fraction", "confidence", "example"),
            example,
        ),
    ]
    findings = PageTable(
        "findings", "Findings by rule", finding_columns, common, build_empty_notice("finding")
    )
    sections = [
        ContentSection("savings", dimension_text.capitalize(), savings, "the most first"),
        ContentSection(
            "rules",
            "Findings",
            findings,
            f"in {units.format_quantity(findings_result.fact('captures'), 'capture')}",
        ),
    ]
    if not rows:
        return PageContent("Where to invest", sections, asking=asking)
    saved = sum(row["saved_ms"] for row in result.tables["rows"])
    head = result.tables["rows"][: len(_PART_COLOURS) - 1]
    parts = [
        (" · ".join(str(row[name]) for name in dimensions), colour_group, row["saved_ms"] / 3.6e6)
        for colour_group, row in zip(_PART_COLOURS, head, strict=False)
    ]
    if remaining_ms := sum(row["saved_ms"] for row in result.tables["rows"][len(head) :]):
        parts.append(("others", _PART_COLOURS[-1], remaining_ms / 3.6e6))
    picture = draw_share_bar(
        parts,
        lambda hours: f"{units.format_number(hours)} h",
        f"Device hours that fixing would save, {dimension_text}",
    )
    sections.insert(0, ContentSection("glance", "At a glance", picture))
    first = result.tables["rows"][0]
    numbers = [
        KeyFigure(
            "Could be saved",
            f"{units.format_number(saved / 3.6e6)} h",
            f"{units.format_share(saved, held_ms)} of the device time",
        ),
        KeyFigure("Held", f"{units.format_number(held_ms / 3.6e6)} h", "device hours of jobs"),
        KeyFigure(
            "Analysed", units.format_share(analysed, held_ms), "of them, of jobs that have captures"
        ),
    ]
    name = " · ".join(str(first[name]) for name in dimensions)
    return PageContent(
        f"Fixing {name} would save {units.format_number(first['saved_ms'] / 3.6e6)} device hours"
        if dimensions == ["rule"]
        else f"{name} could save {units.format_number(first['saved_ms'] / 3.6e6)} device hours",
        sections,
        numbers=numbers,
        lead="Device time of a job, times the share of its steps that fixing a finding saves. Findings of a capture "
        "are disjoint, so rules add up; time of jobs without captures is in none of it.",
        asking=asking,
    )


def _add_rule_title(row: PageRow) -> PageRow:
    return {"meaning": _load_rule_titles().get(str(row["rule"]), "")} if "rule" in row else {}


@cache
def _load_rule_titles() -> dict[str, str]:
    # Imports all analyses, so only on first use.
    from traceloom.findings import (
        RULES,
    )

    return {rule.slug: rule.title for rule in RULES}


INVEST_PAGE = Page(
    "/invest",
    "Where to invest",
    "Where work on software pays: device time times what fixing findings saves; and how "
    "common each finding is.",
    compute_invest,
    build_invest_content,
    menu="Account",
)

MAX_ROWS = "500"
_SORT_CHOICES = {"time": "by GPU time", "cycles": "by cycles"}
_KERNEL_COLUMNS = (
    "kernel",
    "kind",
    "total_ns",
    "fraction",
    "mean_ns",
    "count",
    "roofline_ns",
    "cycles",
    "shapes",
    "captures",
    "jobs",
    "example",
)


async def compute_kernels(visit: PageRequest) -> QueryResult:
    return await fetch_answer(visit, "kernels", top=MAX_ROWS)


def build_kernels_content(result: QueryResult) -> PageContent:
    asking = build_filter_form(
        result.address,
        extra=build_select_field(result.address, "sort", _SORT_CHOICES, "time", "Order"),
    )
    rows, total = result.tables["rows"], result.fact("total_ns")
    links = {
        "kernel": lambda row: build_page_url(
            "/kernels/history", result.address, kernel=str(row["kernel"])
        ),
        "jobs": lambda row: (
            build_page_url("/kernels/history", result.address, kernel=str(row["kernel"])) + "#jobs"
        ),
        "shapes": lambda row: (
            build_page_url("/kernels/history", result.address, kernel=str(row["kernel"]))
            + "#shapes"
        ),
        "example": lambda row: build_capture_url(str(row["example"])),
    }
    known_clock = any(row["cycles"] is not None for row in rows)
    names = [name for name in _KERNEL_COLUMNS if name != "cycles" or known_clock]
    table = PageTable(
        "rows",
        "Kernels, most first",
        result.columns("rows", names, links),
        rows,
        build_empty_notice("GPU work"),
    )
    if not rows:
        return PageContent("Kernels", [ContentSection("kernels", "Kernels", table)], asking=asking)
    first = rows[0]
    numbers = [
        KeyFigure("GPU time", units.format_duration(total), "in captures of this time"),
        KeyFigure("Largest", units.format_share(first["fraction"], 1.0), first["kernel"]),
        KeyFigure(
            "Ten largest",
            units.format_share(sum(row["fraction"] for row in rows[:10]), 1.0),
            "of the GPU time",
        ),
        KeyFigure(
            "Modelled",
            units.format_share(sum(row["roofline_known_ns"] for row in rows), total),
            "of the GPU time has a time at the peaks",
        ),
    ]
    heading = (
        f"{first['kernel']} takes {units.format_share(first['fraction'], 1.0)} of the GPU time"
    )
    return PageContent(
        heading, [ContentSection("kernels", "Kernels", table)], numbers=numbers, asking=asking
    )


KERNELS_PAGE = Page(
    "/kernels",
    "Kernels",
    "The kernels that take most GPU time: how long each piece of work takes, at the peaks of "
    "the device too, in how many shapes, captures and jobs.",
    compute_kernels,
    build_kernels_content,
    menu="Understand",
)

_MARK_COLUMN = PageColumn(
    "mark", "Outlier", "state", f"z of {OUTLIER_Z} or more, and slower by 5 % at least"
)


async def compute_outliers(visit: PageRequest) -> QueryResult:
    return await fetch_answer(visit, "outliers", top="1000")


def build_outliers_content(result: QueryResult) -> PageContent:
    asking = build_filter_form(result.address)
    sections, slow = [], {}
    for table, title, like, names, links, note in (
        (
            "hosts",
            "Hosts",
            "that ran the same kernels on the same shapes and devices",
            ("device_model", "ratio", "z", "kernels", "jobs"),
            {"jobs": lambda row: build_page_url("/kernels", result.address, host=str(row["host"]))},
            "against hosts that ran the same kernels",
        ),
        (
            "ranks",
            "Ranks",
            "in a capture",
            ("rank", "host", "ratio", "z", "captures"),
            {"host": lambda row: build_host_url(str(row["host"]))},
            "against the ranks of their job",
        ),
    ):
        rows = [
            {**row, "mark": "slow" if row["outlier"] else "like its peers"}
            for row in result.tables[table]
        ]
        slow[table] = [row for row in rows if row["mark"] == "slow"]
        first = "host" if table == "hosts" else "job"
        lead = {
            first: (lambda row: build_host_url(str(row["host"])))
            if table == "hosts"
            else (lambda row: build_job_url(str(row["job"])))
        }
        columns = [
            *result.columns(table, (first,), lead),
            _MARK_COLUMN,
            *result.columns(table, names, links),
        ]
        empty = f"No {table} are compared: it takes {MIN_PEERS} {like} at least. Ask for more time, or drop a filter."
        sections.append(
            ContentSection(
                f"of-{table}", title, PageTable(table, title, columns, rows, empty), note
            )
        )
    hosts = slow["hosts"]
    heading = (
        f"{hosts[0]['host']} takes {units.format_percent(hosts[0]['ratio'] - 1)} % longer than its peers"
        if hosts
        else "No host is slower than its peers"
    )
    numbers = [
        KeyFigure(
            "Slow hosts",
            units.format_count(len(hosts)),
            f"of {units.format_count(len(result.tables['hosts']))} compared",
            "bad" if hosts else "",
            "#of-hosts-part",
        ),
        KeyFigure(
            "Slow ranks",
            units.format_count(len(slow["ranks"])),
            f"of {units.format_count(len(result.tables['ranks']))} compared",
            "bad" if slow["ranks"] else "",
            "#of-ranks-part",
        ),
    ]
    return PageContent(heading, sections, numbers=numbers, asking=asking)


OUTLIERS_PAGE = Page(
    "/outliers",
    "Outliers",
    "Hosts and ranks that are slower than their peers, with how far they are from them.",
    compute_outliers,
    build_outliers_content,
    menu="Understand",
)

TOPLINE_CHOICES = {
    "model": "by model",
    "division": "by division",
    "product": "by product",
    "user": "by user",
    "framework": "by framework",
    "job": "by job",
    "host": "by host",
    "device_model": "by device",
}
_SHORT_METRIC_NAMES = {
    "device_use": "Device use",
    "flop_rate": "FLOP/s",
    "compute_use": "Compute use",
    "power_w": "Power, W",
    "roofline_fraction": "Roofline",
    "mfu": "MFU",
    "reference_hours_per_byte": "Reference h per byte",
}
_CELL_HEIGHT = 46


@dataclass(frozen=True)
class ToplineView:
    """Data of the page: everything in one row, and divided."""

    whole: QueryResult
    divided: QueryResult
    by: str


async def compute_topline(visit: PageRequest) -> ToplineView:
    """Asks the question for the whole, and divided."""
    dimension = visit.address.query.get("by", "model")
    return ToplineView(
        await fetch_answer(visit, "topline", by=""),
        await fetch_answer(visit, "topline", by=dimension, top="1000"),
        dimension,
    )


def build_topline_content(view: ToplineView) -> PageContent:
    asking = build_filter_form(
        view.divided.address,
        extra=build_select_field(view.divided.address, "by", TOPLINE_CHOICES, "model", "By"),
    )
    rows = view.divided.tables["rows"]
    row_columns = view.divided.question.tables["rows"].columns

    def lead(row: PageRow) -> str:
        value = str(row[view.by])
        if view.by in {"job", "host"}:
            return build_job_url(value) if view.by == "job" else build_host_url(value)
        return build_page_url("/topline", view.divided.address, by="job", **{view.by: value})

    columns = [
        PageColumn(
            view.by, view.by.replace("_", " ").capitalize(), "name", link=lead if view.by else None
        ),
        *view.divided.columns("rows", ("device_hours",)),
        *(
            PageColumn(
                name,
                _SHORT_METRIC_NAMES[name],
                row_columns[name].unit,
                row_columns[name].meaning,
                row_columns[name].unknown,
            )
            for name in METRICS
        ),
    ]
    table = PageTable(
        "rows",
        f"The topline {TOPLINE_CHOICES.get(view.by, '')}",
        columns,
        rows,
        build_empty_notice("device time"),
    )
    strongest: list[PageRow] = [
        {
            **row,
            "first": _SHORT_METRIC_NAMES[row["first"]],
            "second": _SHORT_METRIC_NAMES[row["second"]],
        }
        for row in sorted(
            view.whole.tables["correlations"], key=lambda row: -abs(row["correlation"] or 0.0)
        )
    ]
    pairs = PageTable(
        "correlations",
        "Pairs of numbers",
        view.whole.columns("correlations", ("first", "second", "correlation", "jobs")),
        strongest,
    )
    sections = [
        ContentSection(
            "divided",
            TOPLINE_CHOICES.get(view.by, "Parts").capitalize(),
            table,
            "the most device time first",
        ),
        ContentSection(
            "together",
            "What goes together",
            _draw_correlations(view.whole),
            "rank correlation over jobs",
        ),
        ContentSection("pairs", "The same as a table", pairs, "the strongest first"),
    ]
    total_row = view.whole.tables["rows"][0] if view.whole.tables["rows"] else None
    if not rows or total_row is None or total_row["device_use"] is None:
        return PageContent("The topline", sections[:1], asking=asking)
    numbers = [
        KeyFigure(
            _SHORT_METRIC_NAMES[name],
            units.format_value(total_row[name], row_columns[name].unit),
            row_columns[name].meaning,
        )
        for name in METRICS
        if total_row[name] is not None and name != "reference_hours_per_byte"
    ]
    heading = (
        f"Devices that jobs hold compute {units.format_share(total_row['device_use'], 1.0)} of the time"
        if total_row["compute_use"] is None
        else f"Devices that jobs hold compute {units.format_share(total_row['device_use'], 1.0)} of the time, at "
        f"{units.format_share(total_row['compute_use'], 1.0)} of their peak at least"
    )
    lead_text = (
        "None of these numbers says enough alone: a device can be busy and compute nothing, draw power and wait, reach "
        "its FLOP/s on work that is thrown away."
    )
    return PageContent(heading, sections, lead=lead_text, numbers=numbers, asking=asking)


def _draw_correlations(result: QueryResult) -> Node:
    """Draws a triangle of coloured cells, one per pair of metrics."""
    pairs = {(row["first"], row["second"]): row for row in result.tables["correlations"]}
    names = [name for name in METRICS if any(name in pair for pair in pairs)]
    if not pairs or all(row["correlation"] is None for row in pairs.values()):
        return div(".empty")[
            p[
                "Fewer than ten jobs have two of the numbers: nothing is said of how they go together."
            ]
        ]
    cells = Markup("")
    label_width = 170
    for down, second in enumerate(names[1:]):
        y = down * _CELL_HEIGHT
        cells += Markup('<text class="side" x="{}" y="{}" text-anchor="end">{}</text>').format(
            label_width - 12, y + _CELL_HEIGHT / 2 + 4, _SHORT_METRIC_NAMES[second]
        )
        for across, first in enumerate(names[: down + 1]):
            row = pairs.get((first, second)) or pairs.get((second, first))
            value = None if row is None else row["correlation"]
            x = label_width + across * 2 * _CELL_HEIGHT
            says = f"{_SHORT_METRIC_NAMES[first]} and {_SHORT_METRIC_NAMES[second]}: "
            says += (
                "not known"
                if value is None
                else f"{value:+.2f} over {units.format_quantity(row['jobs'], 'job')}"  # type: ignore[index]
            )
            cells += Markup(
                '<g class="pair {}"><title>{}</title><rect x="{}" y="{}" width="{}" height="{}" rx="5" '
                'fill-opacity="{:.2f}"/><text x="{}" y="{}" text-anchor="middle">{}</text></g>'
            ).format(
                "none" if value is None else "with" if value > 0 else "against",
                says,
                x,
                y + 2,
                2 * _CELL_HEIGHT - 4,
                _CELL_HEIGHT - 4,
                0.08 + 0.72 * abs(value or 0.0),
                x + _CELL_HEIGHT - 2,
                y + _CELL_HEIGHT / 2 + 4,
                "–" if value is None else f"{value:+.2f}",
            )
    foot = Markup("").join(
        Markup('<text class="side" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            label_width + index * 2 * _CELL_HEIGHT + _CELL_HEIGHT - 2,
            (len(names) - 1) * _CELL_HEIGHT + 18,
            _SHORT_METRIC_NAMES[name],
        )
        for index, name in enumerate(names[:-1])
    )
    width, height = (
        label_width + (len(names) - 1) * 2 * _CELL_HEIGHT,
        (len(names) - 1) * _CELL_HEIGHT + 28,
    )
    picture = Markup(
        '<svg class="pairs" role="img" aria-label="Rank correlations of pairs of numbers over jobs" width="{}" '
        'height="{}">{}{}</svg>'
    ).format(width, height, cells, foot)
    return div(".scroll", tabindex="0", role="region", aria_label="Correlations")[picture]


TOPLINE_PAGE = Page(
    "/topline",
    "Topline",
    "What jobs, models, hosts or the whole fleet get out of their devices: use, FLOP/s, power, "
    "roofline, MFU, reference hours; and how these go together.",
    compute_topline,
    build_topline_content,
    menu="Account",
)

QUESTION_PAGES: tuple[Page[Any], ...] = (
    kernel.REGRESSIONS_PAGE,
    kernel.REGRESSION_PAGE,
    KERNELS_PAGE,
    kernel.KERNEL_PAGE,
    CHARACTERISE_PAGE,
    OUTLIERS_PAGE,
    kernel.COMPARISON_PAGE,
    attribution.ATTRIBUTION_PAGE,
    TOPLINE_PAGE,
    INVEST_PAGE,
    admin.OWNERS_PAGE,
    admin.PRICES_PAGE,
)
