"""One kernel, one regression, two captures compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from htpy import Node, a, div, iframe

from traceloom.fleet.analyses.regressions import MIX
from traceloom.fleet.api import CaptureAnswer
from traceloom.fleet.portal.asking import PageAnswer, ask, asking_form, nothing, pattern_of, to_page
from traceloom.fleet.portal.charts import ChartDot, ChartLevel, dots, legend
from traceloom.fleet.portal.page import ContentSection, KeyNumber, Page, PageContent, to_capture, to_job
from traceloom.fleet.portal.page_request import Address, Visit
from traceloom.fleet.portal.tables import PageColumn, PageTable, instant
from traceloom.fleet.questions.catalogue import EVERY_CHANGE
from traceloom.server.problem import RequestError
from traceloom.system import units

COLUMNS = (
    "kernel", "shapes", "change", "low", "high", "since_ns", "before_ns", "after_ns", "extra_ns", "jobs_after", "cause",
)  # fmt: skip
_HOW = {
    "code": "with another version of the program or of PyTorch",
    "host": "on other hosts",
    "device": "as other models of device do more of its work",
    "shapes": "as larger or smaller shapes have more of its work",
    "unknown": "for no cause that is recorded",
}


async def compute_regressions(visit: Visit) -> PageAnswer:
    """Ask for them."""
    return await ask(visit, "regressions", top=str(EVERY_CHANGE.top))


def to_change(address: Address, row: Mapping[str, Any]) -> str:
    """The page of a change, about the same time and filters."""
    names = {name: str(row[name]) for name in ("shapes", "device_model") if row[name] is not None}
    return to_page("/regressions/change", address, kernel=str(row["kernel"]), at=str(row["since_ns"]), **names)


def times(change: float) -> str:
    """A change in words: `9.1× as long`, `26.0 % longer`, `50.0 % shorter`."""
    if change >= 1:
        return f"{1 + change:.1f}× as long"
    return f"{units.per_cent(abs(change))} % {'longer' if change > 0 else 'shorter'}"


def sentence(row: Mapping[str, Any]) -> str:
    """What changed and why, as far as it is known."""
    certain = {"shown": "", "possible": " (possible: no job can tell)", "none": ""}[row["evidence"]]
    return f"takes {times(row['change'])}, {_HOW[row['cause']]}{certain}"


def build_regressions_content(asked: PageAnswer) -> PageContent:
    """What is shown of them."""
    asking = asking_form(asked.address)
    rows = asked.tables["changes"]
    slower = [row for row in rows if row["change"] > 0 and row["cause"] not in MIX]
    faster = [row for row in rows if row["change"] <= 0 and row["cause"] not in MIX]
    mixed = [row for row in rows if row["cause"] in MIX]
    links = {
        "kernel": lambda row: to_change(asked.address, row),
        "jobs_after": lambda row: to_change(asked.address, row) + "#jobs",
    }
    columns = asked.columns("changes", COLUMNS, links)
    series, short = asked.fact("series"), asked.fact("short")
    looked = f"{units.count(series)} kernels with their shapes and devices were looked at"
    empty = (
        f"No kernel became slower by more than chance explains: {looked}, of which {units.count(short)} ran in fewer "
        "than ten jobs. Ask for more time to look at more jobs."
    )
    sections = [
        ContentSection(
            "slower", "Slower", PageTable("slower-changes", "Kernels that became slower", columns, slower, empty),
            "what costs most GPU time first",
        )
    ]  # fmt: skip
    for key, title, of, note in (
        ("mixed", "Another mix", mixed, "each piece of work takes as long as before, but longer ones became more"),
        ("faster", "Faster", faster, ""),
    ):
        if of:
            sections.append(ContentSection(key, title, PageTable(f"{key}-changes", title, columns, of), note))
    costs = sum(row["extra_ns"] for row in slower)
    numbers = [
        KeyNumber(
            "Slower",
            units.count(len({row["kernel"] for row in slower})),
            "kernels",
            "bad" if slower else "",
            "#slower-part",
        ),
        KeyNumber("Cost", units.duration(costs), "GPU time in captures beyond before"),
        KeyNumber(
            "Faster",
            units.count(len({row["kernel"] for row in faster})),
            "kernels",
            leads="#faster-part" if faster else "",
        ),
        KeyNumber("Looked at", units.count(series - short), f"series; {units.count(short)} have too few jobs"),
    ]
    heading = "No kernel became slower"
    if slower:
        heading = f"{slower[0]['kernel']} takes {times(slower[0]['change'])} now"
    return PageContent(heading, sections, numbers=numbers, asking=asking)


REGRESSIONS_PAGE = Page(
    "/regressions", "Regressions", "Kernels that became slower or faster: since when, by how much, with its interval, "
    "what changed with them, and what that costs.", compute_regressions, build_regressions_content, menu="Understand",
)  # fmt: skip

LOOKS = ("compute", "communication", "memory", "annotation", "launch", "other")
"""Colours of versions of a program, by the time of their first job; the last is of all others."""

_JOBS = ("start_ns", "job", "mean_ns", "count", "total_ns", "code", "torch", "capture")
_SHAPES = ("shapes", "device_model", "op", "total_ns", "fraction", "count")
_CHANGES = ("since_ns", "shapes", "change", "before_ns", "after_ns", "cause", "extra_ns")


@dataclass(frozen=True)
class KernelView:
    """What the page shows."""

    kernel: str
    shapes: str
    history: PageAnswer
    coverage: PageAnswer
    changes: list[Any]
    changed: PageAnswer


async def compute_kernel(visit: Visit) -> KernelView:
    """Ask for its history, its shapes and its changes.

    Raises:
        RequestError: `wrong-request`: the address names no kernel.
    """
    kernel, shapes = visit.address.query.get("kernel", ""), visit.address.query.get("shapes", "")
    if not kernel:
        raise RequestError(400, "of which kernel?", slug="wrong-request", hint="the list of kernels leads here")
    history = await ask(visit, "kernel-history")
    pattern = pattern_of(kernel)
    changed = await ask(visit, "regressions", kernel=pattern, top="200")
    coverage = await ask(visit, "coverage", kernel=pattern, top="200")
    changes = [
        row for row in changed.tables["changes"]
        if row["kernel"] == kernel and (not shapes or row["shapes"] in {shapes, None})
    ]  # fmt: skip
    return KernelView(kernel, shapes, history, coverage, changes, changed)


def build_kernel_content(view: KernelView) -> PageContent:
    """What is shown of it."""
    asking = asking_form(view.history.address, keep=("kernel", "shapes"))
    address, rows = view.history.address, view.history.tables["rows"]
    jobs = PageTable(
        "jobs", "Jobs that ran it",
        view.history.columns(
            "rows", _JOBS,
            {"job": lambda row: to_job(str(row["job"])), "capture": lambda row: to_capture(str(row["capture"]))},
        ),
        list(reversed(rows)), nothing("job that ran this kernel"),
    )  # fmt: skip
    shaped = [row for row in view.coverage.tables["rows"] if row["kernel"] == view.kernel]
    shapes = PageTable(
        "shapes", "Shapes of its inputs",
        view.coverage.columns("rows", _SHAPES, {"shapes": lambda row: address.changed({"shapes": str(row["shapes"])})}),
        shaped, "No shapes were recorded: `traceloom record --shapes` does.",
    )  # fmt: skip
    changes = PageTable(
        "changes", "When it changed",
        view.changed.columns("changes", _CHANGES, {"since_ns": lambda row: to_change(address, row)}),
        view.changes, "It did not change by more than chance explains.",
    )  # fmt: skip
    above = [("Kernels", to_page("/kernels", address))]
    if view.shapes:
        above.append((view.kernel, address.changed({"shapes": ""})))
    sections = [
        ContentSection("time", "Duration over time", history_chart(view), "one dot per job, coloured by version; UTC"),
        ContentSection("changed", "Changes", changes),
        ContentSection("of-shapes", "Shapes", shapes, "a shape leads to its own history"),
        ContentSection("of-jobs", "Jobs", jobs, "the latest first"),
    ]
    if not rows:
        sections = [ContentSection("of-jobs", "Jobs", jobs)]
    numbers = [
        KeyNumber("Jobs", units.count(view.history.fact("jobs")), "ran it", leads="#of-jobs-part"),
        KeyNumber("Now", units.duration(rows[-1]["mean_ns"]), "mean of a piece of work in the last job"),
        KeyNumber("GPU time", units.duration(sum(row["total_ns"] for row in rows)), "in captures of these jobs"),
        *(KeyNumber("Changes", units.count(len(view.changes)), sentence(row), "bad" if row["change"] > 0 else "",
                    "#changed-part")
          for row in view.changes[:1]),
    ] if rows else []  # fmt: skip
    lead = f"Only of the shapes {view.shapes}." if view.shapes else None
    return PageContent(view.kernel, sections, above=above, lead=lead, numbers=numbers, asking=asking)


def history_chart(view: KernelView) -> Node:
    """Its duration in each job over time, with the levels before and after each change."""
    rows = view.history.tables["rows"]
    if not rows:
        return None
    versions = list(dict.fromkeys(row["code"] or row["torch"] or "" for row in rows))
    look = {version: LOOKS[min(at, len(LOOKS) - 1)] for at, version in enumerate(versions)}
    points = [
        ChartDot(
            row["start_ns"], row["mean_ns"], look[row["code"] or row["torch"] or ""],
            f"{row['job']}: {units.duration(row['mean_ns'])}", to_job(row["job"]),
        )
        for row in rows
    ]  # fmt: skip
    levels = []
    for change in view.changes if view.shapes else ():
        levels += [
            ChartLevel(rows[0]["start_ns"], change["last_before_ns"], change["before_ns"], "before"),
            ChartLevel(change["since_ns"], rows[-1]["start_ns"], change["after_ns"], "after"),
        ]
    marks = [(change["since_ns"], units.change(change["change"])) for change in view.changes]
    label = f"Mean duration of a piece of work of {view.kernel} in {units.count_of(len(rows), 'job')} over time"
    picture = dots(
        points, levels, list(dict(marks).items()), label=label, write=lambda ns: units.format_value(ns, "time")
    )
    names = [(version or "version not known", look[version], "") for version in versions[: len(LOOKS)]]
    return [picture, legend(names) if len(versions) > 1 else None]


KERNEL_PAGE = Page(
    "/kernels/history", "Kernel", "One kernel: its duration in each job over time, its shapes, its changes, its jobs.",
    compute_kernel, build_kernel_content,
)  # fmt: skip


def to_comparison(base: str, new: str) -> str:
    """The page of a capture against another one."""
    return f"/compare?{urlencode({'base': base, 'new': new})}"


@dataclass(frozen=True)
class TwoCaptures:
    """What is compared."""

    base: CaptureAnswer
    new: CaptureAnswer


async def compute_comparison(visit: Visit) -> TwoCaptures:
    """Ask for both.

    Raises:
        RequestError: `no-such-capture`.
    """
    query = visit.address.query
    if not query.get("base") or not query.get("new"):
        raise RequestError(
            404, "two captures are compared, and no two are named", slug="no-such-capture",
            hint="a page of a capture lets one choose another to hold it against; one of a regression has both",
        )  # fmt: skip
    base, new = [await visit.answer(CaptureAnswer, "/api/v1/captures/{id}", id=query[side]) for side in ("base", "new")]
    return TwoCaptures(base, new)


def build_comparison_content(both: TwoCaptures) -> PageContent:
    """What is shown of them."""
    where = f"/captures/{quote(both.new.id, safe='')}/against/{quote(both.base.id, safe='')}"
    frame = iframe(
        ".report", src=where, title=f"{both.new.id} against {both.base.id}", sandbox="allow-scripts allow-downloads"
    )
    buttons = div(".buttons")[
        a(".button", href=to_capture(both.base.id))["The base"],
        a(".button", href=to_capture(both.new.id))["The new one"],
        a(".button", href=to_comparison(both.new.id, both.base.id))["The other way round"],
        a(".button", href=where)["In a window of its own"],
    ]
    lead: list[Node] = []
    for words, capture in (("Base: ", both.base), (" New: ", both.new)):
        name = capture.job or capture.id
        lead += [words, a(href=to_job(capture.job))[name] if capture.job else name, ", received ",
                 instant(capture.received_ns), "."]  # fmt: skip
    return PageContent(
        f"{both.new.job or both.new.id} against {both.base.job or both.base.id}",
        [ContentSection("comparison", "What changed", [frame, buttons], "as traceloom diff shows it")],
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

_REGRESSION_JOBS = ("job", "mean_ns", "total_ns", "code", "start_ns", "capture")


@dataclass(frozen=True)
class ChangeView:
    """What the page shows."""

    change: dict[str, Any]
    changed: PageAnswer
    history: PageAnswer


async def compute_regression(visit: Visit) -> ChangeView:
    """Look for the change that the address names, and for the jobs around it.

    Raises:
        RequestError: `no-such-change`: it is none, or not any more with the captures that there are now.
    """
    query = visit.address.query
    kernel, shapes = query.get("kernel", ""), query.get("shapes")
    changed = await ask(visit, "regressions", kernel=pattern_of(kernel), top="1000", shapes="")
    model = query.get("device_model")  # a filter too: of a mix over models of devices the row itself has none
    matches = [
        dict(row) for row in changed.tables["changes"]
        if (row["kernel"], row["shapes"], str(row["since_ns"])) == (kernel, shapes, query.get("at"))
        and row["device_model"] in {None, model}
    ]  # fmt: skip
    change = max(matches, key=lambda row: row["device_model"] == model, default=None)
    if change is None:
        raise RequestError(
            404, "there is no such change, or not any more", slug="no-such-change", hint="see the list of regressions"
        )
    return ChangeView(change, changed, await ask(visit, "kernel-history"))


def build_regression_content(view: ChangeView) -> PageContent:
    """What is shown of it."""
    change, address = view.change, view.changed.address
    rows = view.history.tables["rows"]
    of_job = {row["job"]: row for row in rows}
    behind = [
        {**of_job[job], "compare": "beside a healthy one"} for job in change["jobs"] if job in of_job
    ]  # fmt: skip
    links = {"job": lambda row: to_job(str(row["job"])), "capture": lambda row: to_capture(str(row["capture"]))}
    columns = [
        *view.history.columns("rows", _REGRESSION_JOBS, links),
        PageColumn(
            "compare", "Compare", hint="its capture held against one from before",
            link=lambda row: to_comparison(change["healthy_capture"], str(row["capture"])),
        ),
    ]  # fmt: skip
    table = PageTable("jobs", "Jobs behind it", columns, behind, nothing("job"))
    chart = history_chart(
        KernelView(change["kernel"], change["shapes"] or "all", view.history, view.history, [change], view.changed)
    )
    captures = div(".buttons")[
        a(".primary", href=to_comparison(change["healthy_capture"], change["capture"]))["Compare slow and healthy"],
        a(".button", href=to_capture(change["capture"]))["A capture after it"],
        a(".button", href=to_capture(change["healthy_capture"]))["A capture before it"],
        a(".button", href=to_page("/kernels/history", address, kernel=change["kernel"]))["All of this kernel"],
    ]
    shapes, words = f"On inputs of {change['shapes']}. " if change["shapes"] else "", sentence(change)
    numbers = [
        KeyNumber("Change", units.change(change["change"]),
                  f"95 % interval {units.change(change['low'])} to {units.change(change['high'])}",
                  "bad" if change["change"] > 0 else ""),
        KeyNumber("A piece of work", units.duration(change["after_ns"]),
                  f"{units.duration(change['before_ns'])} before"),
        KeyNumber("Costs" if change["extra_ns"] > 0 else "Saves", units.duration(abs(change["extra_ns"])),
                  "GPU time in captures since"),
        KeyNumber("Jobs", units.count(change["jobs_after"]), f"after it, {units.count(change['jobs_before'])} before"),
        KeyNumber("Cause", change["cause"], f"evidence: {change['evidence']}"),
    ]  # fmt: skip
    return PageContent(
        f"{change['kernel']} takes {times(change['change'])}",
        [
            ContentSection("time", "Duration over time", [chart, captures], "one dot per job; lines are medians; UTC"),
            ContentSection("of-jobs", "Jobs behind it", table, "those that lose most by it"),
        ],
        above=[("Regressions", to_page("/regressions", address))],
        lead=f"{shapes}{words[:1].upper()}{words[1:]}.",
        numbers=numbers,
    )  # fmt: skip


REGRESSION_PAGE = Page(
    "/regressions/change", "Regression", "One change of a kernel: its curve over jobs, the jobs behind it, and a "
    "capture beside a healthy one.", compute_regression, build_regression_content,
)  # fmt: skip
