"""The pages of regressions, of one regression, of a kernel, and of two captures compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from htpy import Node, a, div, iframe

from traceloom.fleet.analyses.regressions import MIX_CAUSES
from traceloom.fleet.api import CaptureResponse
from traceloom.fleet.portal.asking import (
    QueryResult,
    build_empty_notice,
    build_filter_form,
    build_name_filter,
    build_page_url,
    fetch_answer,
)
from traceloom.fleet.portal.charts import ChartDot, ChartLevel, draw_dots, draw_legend
from traceloom.fleet.portal.page import (
    ContentSection,
    KeyFigure,
    Page,
    PageContent,
    build_capture_url,
    build_job_url,
)
from traceloom.fleet.portal.page_request import PageRequest, PageUrl
from traceloom.fleet.portal.tables import PageColumn, PageTable, render_time
from traceloom.fleet.questions.catalogue import ALL_CHANGES_QUERY
from traceloom.server.problem import HttpError
from traceloom.system import units

REGRESSION_COLUMNS = (
    "kernel",
    "shapes",
    "change",
    "low",
    "high",
    "since_ns",
    "before_ns",
    "after_ns",
    "extra_ns",
    "jobs_after",
    "cause",
)
_CAUSE_TEXTS = {
    "code": "with another version of the program or of PyTorch",
    "host": "on other hosts",
    "device": "as other models of device do more of its work",
    "shapes": "as larger or smaller shapes have more of its work",
    "unknown": "for no cause that is recorded",
}


async def compute_regressions(visit: PageRequest) -> QueryResult:
    return await fetch_answer(visit, "regressions", top=str(ALL_CHANGES_QUERY.top))


def build_change_url(address: PageUrl, row: Mapping[str, Any]) -> str:
    """Returns the URL of a change with the same time range and filters."""
    names = {name: str(row[name]) for name in ("shapes", "device_model") if row[name] is not None}
    return build_page_url(
        "/regressions/change", address, kernel=str(row["kernel"]), at=str(row["since_ns"]), **names
    )


def format_change(change: float) -> str:
    """Formats a change in words: `9.1× as long`, `26.0 % longer`, `50.0 % shorter`."""
    if change >= 1:
        return f"{1 + change:.1f}× as long"
    return f"{units.format_percent(abs(change))} % {'longer' if change > 0 else 'shorter'}"


def describe_change(row: Mapping[str, Any]) -> str:
    """Describes a change and its cause, as far as known."""
    certain = {"shown": "", "possible": " (possible: no job can tell)", "none": ""}[row["evidence"]]
    return f"takes {format_change(row['change'])}, {_CAUSE_TEXTS[row['cause']]}{certain}"


def build_regressions_content(result: QueryResult) -> PageContent:
    asking = build_filter_form(result.address)
    rows = result.tables["changes"]
    slower = [row for row in rows if row["change"] > 0 and row["cause"] not in MIX_CAUSES]
    faster = [row for row in rows if row["change"] <= 0 and row["cause"] not in MIX_CAUSES]
    mixed = [row for row in rows if row["cause"] in MIX_CAUSES]
    links = {
        "kernel": lambda row: build_change_url(result.address, row),
        "jobs_after": lambda row: build_change_url(result.address, row) + "#jobs",
    }
    columns = result.columns("changes", REGRESSION_COLUMNS, links)
    series, short = result.fact("series"), result.fact("short")
    series_note = (
        f"{units.format_count(series)} kernels with their shapes and devices were looked at"
    )
    empty = (
        f"No kernel became slower by more than chance explains: {series_note}, of which {units.format_count(short)} ran in fewer "
        "than ten jobs. Ask for more time to look at more jobs."
    )
    sections = [
        ContentSection(
            "slower",
            "Slower",
            PageTable("slower-changes", "Kernels that became slower", columns, slower, empty),
            "what costs most GPU time first",
        )
    ]
    for key, title, group_rows, note in (
        (
            "mixed",
            "Another mix",
            mixed,
            "each piece of work takes as long as before, but longer ones became more",
        ),
        ("faster", "Faster", faster, ""),
    ):
        if group_rows:
            sections.append(
                ContentSection(
                    key, title, PageTable(f"{key}-changes", title, columns, group_rows), note
                )
            )
    costs = sum(row["extra_ns"] for row in slower)
    numbers = [
        KeyFigure(
            "Slower",
            units.format_count(len({row["kernel"] for row in slower})),
            "kernels",
            "bad" if slower else "",
            "#slower-part",
        ),
        KeyFigure("Cost", units.format_duration(costs), "GPU time in captures beyond before"),
        KeyFigure(
            "Faster",
            units.format_count(len({row["kernel"] for row in faster})),
            "kernels",
            leads="#faster-part" if faster else "",
        ),
        KeyFigure(
            "Looked at",
            units.format_count(series - short),
            f"series; {units.format_count(short)} have too few jobs",
        ),
    ]
    heading = (
        f"{slower[0]['kernel']} takes {format_change(slower[0]['change'])} now"
        if slower
        else "No kernel became slower"
    )
    return PageContent(heading, sections, numbers=numbers, asking=asking)


REGRESSIONS_PAGE = Page(
    "/regressions",
    "Regressions",
    "Kernels that became slower or faster: since when, by how much, with its interval, "
    "what changed with them, and what that costs.",
    compute_regressions,
    build_regressions_content,
    menu="Understand",
)

VERSION_COLOURS = ("compute", "communication", "memory", "annotation", "launch", "other")
"""Colours of program versions, by the time of their first job; the last one is for all others."""

_JOB_COLUMNS = ("start_ns", "job", "mean_ns", "count", "total_ns", "code", "torch", "capture")
_SHAPE_COLUMNS = ("shapes", "device_model", "op", "total_ns", "fraction", "count")
_CHANGE_COLUMNS = ("since_ns", "shapes", "change", "before_ns", "after_ns", "cause", "extra_ns")


@dataclass(frozen=True)
class KernelView:
    """Data of the page."""

    kernel: str
    shapes: str
    history: QueryResult
    coverage: QueryResult
    changes: list[Any]
    changed: QueryResult


async def compute_kernel(visit: PageRequest) -> KernelView:
    """Asks for the kernel's history, shapes and changes.

    Raises:
        HttpError: `wrong-request`: the URL names no kernel.
    """
    kernel, shapes = visit.address.query.get("kernel", ""), visit.address.query.get("shapes", "")
    if not kernel:
        raise HttpError(
            400, "of which kernel?", slug="wrong-request", hint="the list of kernels leads here"
        )
    history = await fetch_answer(visit, "kernel-history")
    pattern = build_name_filter(kernel)
    changed = await fetch_answer(visit, "regressions", kernel=pattern, top="200")
    coverage = await fetch_answer(visit, "coverage", kernel=pattern, top="200")
    changes = [
        row
        for row in changed.tables["changes"]
        if row["kernel"] == kernel and (not shapes or row["shapes"] in {shapes, None})
    ]
    return KernelView(kernel, shapes, history, coverage, changes, changed)


def build_kernel_content(view: KernelView) -> PageContent:
    asking = build_filter_form(view.history.address, preserved=("kernel", "shapes"))
    address, rows = view.history.address, view.history.tables["rows"]
    jobs = PageTable(
        "jobs",
        "Jobs that ran it",
        view.history.columns(
            "rows",
            _JOB_COLUMNS,
            {
                "job": lambda row: build_job_url(str(row["job"])),
                "capture": lambda row: build_capture_url(str(row["capture"])),
            },
        ),
        list(reversed(rows)),
        build_empty_notice("job that ran this kernel"),
    )
    shapes = PageTable(
        "shapes",
        "Shapes of its inputs",
        view.coverage.columns(
            "rows",
            _SHAPE_COLUMNS,
            {"shapes": lambda row: address.changed({"shapes": str(row["shapes"])})},
        ),
        [row for row in view.coverage.tables["rows"] if row["kernel"] == view.kernel],
        "No shapes were recorded: `traceloom record` and `traceloom trace --shapes` do.",
    )
    changes = PageTable(
        "changes",
        "When it changed",
        view.changed.columns(
            "changes", _CHANGE_COLUMNS, {"since_ns": lambda row: build_change_url(address, row)}
        ),
        view.changes,
        "It did not change by more than chance explains.",
    )
    breadcrumbs = [("Kernels", build_page_url("/kernels", address))]
    if view.shapes:
        breadcrumbs.append((view.kernel, address.changed({"shapes": ""})))
    sections = [
        ContentSection(
            "time",
            "Duration over time",
            draw_history(view),
            "one dot per job, coloured by version; UTC",
        ),
        ContentSection("changed", "Changes", changes),
        ContentSection("of-shapes", "Shapes", shapes, "a shape leads to its own history"),
        ContentSection("of-jobs", "Jobs", jobs, "the latest first"),
    ]
    if not rows:
        sections = [ContentSection("of-jobs", "Jobs", jobs)]
    numbers = (
        [
            KeyFigure(
                "Jobs",
                units.format_count(view.history.fact("jobs")),
                "ran it",
                leads="#of-jobs-part",
            ),
            KeyFigure(
                "Now",
                units.format_duration(rows[-1]["mean_ns"]),
                "mean of a piece of work in the last job",
            ),
            KeyFigure(
                "GPU time",
                units.format_duration(sum(row["total_ns"] for row in rows)),
                "in captures of these jobs",
            ),
            *(
                KeyFigure(
                    "Changes",
                    units.format_count(len(view.changes)),
                    describe_change(row),
                    "bad" if row["change"] > 0 else "",
                    "#changed-part",
                )
                for row in view.changes[:1]
            ),
        ]
        if rows
        else []
    )
    lead = f"Only of the shapes {view.shapes}." if view.shapes else None
    return PageContent(
        view.kernel, sections, above=breadcrumbs, lead=lead, numbers=numbers, asking=asking
    )


def draw_history(view: KernelView) -> Node:
    """Draws the kernel's duration in each job over time, with the levels before and after each
    change.
    """
    rows = view.history.tables["rows"]
    if not rows:
        return None
    versions = list(dict.fromkeys(row["code"] or row["torch"] or "" for row in rows))
    colours = {
        version: VERSION_COLOURS[min(index, len(VERSION_COLOURS) - 1)]
        for index, version in enumerate(versions)
    }
    points = [
        ChartDot(
            row["start_ns"],
            row["mean_ns"],
            colours[row["code"] or row["torch"] or ""],
            f"{row['job']}: {units.format_duration(row['mean_ns'])}",
            build_job_url(row["job"]),
        )
        for row in rows
    ]
    levels = []
    for change in view.changes if view.shapes else ():
        levels += [
            ChartLevel(
                rows[0]["start_ns"], change["last_before_ns"], change["before_ns"], "before"
            ),
            ChartLevel(change["since_ns"], rows[-1]["start_ns"], change["after_ns"], "after"),
        ]
    marks = [(change["since_ns"], units.format_change(change["change"])) for change in view.changes]
    picture = draw_dots(
        points,
        levels,
        list(dict(marks).items()),
        label=f"Mean duration of a piece of work of {view.kernel} in {units.format_quantity(len(rows), 'job')} over time",
        write=lambda ns: units.format_value(ns, "time"),
    )
    names = [
        (version or "version not known", colours[version], "")
        for version in versions[: len(VERSION_COLOURS)]
    ]
    return [picture, draw_legend(names) if len(versions) > 1 else None]


KERNEL_PAGE = Page(
    "/kernels/history",
    "Kernel",
    "One kernel: its duration in each job over time, its shapes, its changes, its jobs.",
    compute_kernel,
    build_kernel_content,
)


def build_comparison_url(base: str, new: str) -> str:
    return f"/compare?{urlencode({'base': base, 'new': new})}"


@dataclass(frozen=True)
class CapturePair:
    """The captures to compare."""

    base: CaptureResponse
    new: CaptureResponse


async def compute_comparison(visit: PageRequest) -> CapturePair:
    """Asks for both captures.

    Raises:
        HttpError: `no-such-capture`.
    """
    query = visit.address.query
    if not query.get("base") or not query.get("new"):
        raise HttpError(
            404,
            "two captures are compared, and no two are named",
            slug="no-such-capture",
            hint="a page of a capture lets one choose another to hold it against; one of a regression has both",
        )
    base, new = [
        await visit.answer(CaptureResponse, "/api/v1/captures/{id}", id=query[side])
        for side in ("base", "new")
    ]
    return CapturePair(base, new)


def build_comparison_content(both: CapturePair) -> PageContent:
    report_url = f"/captures/{quote(both.new.id, safe='')}/against/{quote(both.base.id, safe='')}"
    frame = iframe(
        ".report",
        src=report_url,
        title=f"{both.new.id} against {both.base.id}",
        sandbox="allow-scripts allow-downloads",
    )
    buttons = div(".buttons")[
        a(".button", href=build_capture_url(both.base.id))["The base"],
        a(".button", href=build_capture_url(both.new.id))["The new one"],
        a(".button", href=build_comparison_url(both.new.id, both.base.id))["The other way round"],
        a(".button", href=report_url)["In a window of its own"],
    ]
    lead: list[Node] = []
    for side_label, capture in (("Base: ", both.base), (" New: ", both.new)):
        name = capture.job or capture.id
        lead += [
            side_label,
            a(href=build_job_url(capture.job))[name] if capture.job else name,
            ", received ",
            render_time(capture.received_ns),
            ".",
        ]
    return PageContent(
        f"{both.new.job or both.new.id} against {both.base.job or both.base.id}",
        [
            ContentSection(
                "comparison", "What changed", [frame, buttons], "as traceloom diff shows it"
            )
        ],
        above=[("Captures", "/captures")],
        lead=lead,
    )


COMPARISON_PAGE = Page(
    "/compare",
    "Comparison",
    "A capture held against another one, as `traceloom diff` does it.",
    compute_comparison,
    build_comparison_content,
)

_REGRESSION_JOB_COLUMNS = ("job", "mean_ns", "total_ns", "code", "start_ns", "capture")


@dataclass(frozen=True)
class ChangeView:
    """Data of the page."""

    change: dict[str, Any]
    changed: QueryResult
    history: QueryResult


async def compute_regression(visit: PageRequest) -> ChangeView:
    """Finds the change named in the URL, and the jobs around it.

    Raises:
        HttpError: `no-such-change`: there is none, or no longer one with the current captures.
    """
    query = visit.address.query
    kernel, shapes = query.get("kernel", ""), query.get("shapes")
    changed = await fetch_answer(
        visit, "regressions", kernel=build_name_filter(kernel), top="1000", shapes=""
    )
    # Also a filter: a row about the mix over device models has none itself.
    model = query.get("device_model")
    matches = [
        dict(row)
        for row in changed.tables["changes"]
        if (row["kernel"], row["shapes"], str(row["since_ns"])) == (kernel, shapes, query.get("at"))
        and row["device_model"] in {None, model}
    ]
    change = max(matches, key=lambda row: row["device_model"] == model, default=None)
    if change is None:
        raise HttpError(
            404,
            "there is no such change, or not any more",
            slug="no-such-change",
            hint="see the list of regressions",
        )
    return ChangeView(change, changed, await fetch_answer(visit, "kernel-history"))


def build_regression_content(view: ChangeView) -> PageContent:
    change, address = view.change, view.changed.address
    rows_by_job = {row["job"]: row for row in view.history.tables["rows"]}
    affected_jobs = [
        {**rows_by_job[job], "compare": "beside a healthy one"}
        for job in change["jobs"]
        if job in rows_by_job
    ]
    links = {
        "job": lambda row: build_job_url(str(row["job"])),
        "capture": lambda row: build_capture_url(str(row["capture"])),
    }
    columns = [
        *view.history.columns("rows", _REGRESSION_JOB_COLUMNS, links),
        PageColumn(
            "compare",
            "Compare",
            hint="its capture held against one from before",
            link=lambda row: build_comparison_url(change["healthy_capture"], str(row["capture"])),
        ),
    ]
    table = PageTable("jobs", "Jobs behind it", columns, affected_jobs, build_empty_notice("job"))
    chart = draw_history(
        KernelView(
            change["kernel"],
            change["shapes"] or "all",
            view.history,
            view.history,
            [change],
            view.changed,
        )
    )
    captures = div(".buttons")[
        a(".primary", href=build_comparison_url(change["healthy_capture"], change["capture"]))[
            "Compare slow and healthy"
        ],
        a(".button", href=build_capture_url(change["capture"]))["A capture after it"],
        a(".button", href=build_capture_url(change["healthy_capture"]))["A capture before it"],
        a(".button", href=build_page_url("/kernels/history", address, kernel=change["kernel"]))[
            "All of this kernel"
        ],
    ]
    shapes, change_text = (
        f"On inputs of {change['shapes']}. " if change["shapes"] else "",
        describe_change(change),
    )
    return PageContent(
        f"{change['kernel']} takes {format_change(change['change'])}",
        [
            ContentSection(
                "time",
                "Duration over time",
                [chart, captures],
                "one dot per job; lines are medians; UTC",
            ),
            ContentSection("of-jobs", "Jobs behind it", table, "those that lose most by it"),
        ],
        above=[("Regressions", build_page_url("/regressions", address))],
        lead=f"{shapes}{change_text[:1].upper()}{change_text[1:]}.",
        numbers=[
            KeyFigure(
                "Change",
                units.format_change(change["change"]),
                f"95 % interval {units.format_change(change['low'])} to {units.format_change(change['high'])}",
                "bad" if change["change"] > 0 else "",
            ),
            KeyFigure(
                "A piece of work",
                units.format_duration(change["after_ns"]),
                f"{units.format_duration(change['before_ns'])} before",
            ),
            KeyFigure(
                "Costs" if change["extra_ns"] > 0 else "Saves",
                units.format_duration(abs(change["extra_ns"])),
                "GPU time in captures since",
            ),
            KeyFigure(
                "Jobs",
                units.format_count(change["jobs_after"]),
                f"after it, {units.format_count(change['jobs_before'])} before",
            ),
            KeyFigure("Cause", change["cause"], f"evidence: {change['evidence']}"),
        ],
    )


REGRESSION_PAGE = Page(
    "/regressions/change",
    "Regression",
    "One change of a kernel: its curve over jobs, the jobs behind it, and a "
    "capture beside a healthy one.",
    compute_regression,
    build_regression_content,
)
