"""One kernel: how long it took in each job over time, in which shapes, and when it changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from htpy import Node

from traceloom.agent.http.answers import RequestError
from traceloom.model import units
from traceloom.portal.asking import PageAnswer, ask, asking_form, nothing, pattern_of, to_page
from traceloom.portal.charts import ChartDot, ChartLevel, dots, legend
from traceloom.portal.links import to_capture, to_job
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.pages.regressions import sentence, to_change
from traceloom.portal.table import PageTable
from traceloom.portal.visit import Visit

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


async def compute(visit: Visit) -> KernelView:
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


def content(view: KernelView) -> PageContent:
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
    label = f"Mean duration of a piece of work of {view.kernel} in {units.counted(len(rows), 'job')} over time"
    picture = dots(points, levels, list(dict(marks).items()), label=label, write=lambda ns: units.written(ns, "time"))
    names = [(version or "version not known", look[version], "") for version in versions[: len(LOOKS)]]
    return [picture, legend(names) if len(versions) > 1 else None]


PAGE = Page(
    "/kernels/history", "Kernel", "One kernel: its duration in each job over time, its shapes, its changes, its jobs.",
    compute, content,
)  # fmt: skip
