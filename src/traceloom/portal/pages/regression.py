"""One change of a kernel: the curve, the jobs behind it, and a capture beside a healthy one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from htpy import a, div

from traceloom.agent.http.answers import RequestError
from traceloom.model import units
from traceloom.portal.asking import PageAnswer, ask, nothing, pattern_of, to_page
from traceloom.portal.links import to_capture, to_job
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.pages.comparison import to_comparison
from traceloom.portal.pages.kernel import KernelView, history_chart
from traceloom.portal.pages.regressions import sentence, times
from traceloom.portal.table import PageColumn, PageTable
from traceloom.portal.visit import Visit

_JOBS = ("job", "mean_ns", "total_ns", "code", "start_ns", "capture")


@dataclass(frozen=True)
class ChangeView:
    """What the page shows."""

    change: dict[str, Any]
    changed: PageAnswer
    history: PageAnswer


async def compute(visit: Visit) -> ChangeView:
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


def content(view: ChangeView) -> PageContent:
    """What is shown of it."""
    change, address = view.change, view.changed.address
    rows = view.history.tables["rows"]
    of_job = {row["job"]: row for row in rows}
    behind = [
        {**of_job[job], "compare": "beside a healthy one"} for job in change["jobs"] if job in of_job
    ]  # fmt: skip
    links = {"job": lambda row: to_job(str(row["job"])), "capture": lambda row: to_capture(str(row["capture"]))}
    columns = [
        *view.history.columns("rows", _JOBS, links),
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


PAGE = Page(
    "/regressions/change", "Regression", "One change of a kernel: its curve over jobs, the jobs behind it, and a "
    "capture beside a healthy one.", compute, content,
)  # fmt: skip
