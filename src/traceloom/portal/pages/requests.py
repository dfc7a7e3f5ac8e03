"""Traces that were asked for, and how far each is."""

from __future__ import annotations

from htpy import a, fragment, p

from traceloom.collect.plan import FLEET_ENDED
from traceloom.collect.request_routes import FleetRequestAnswer, FleetRequestsAnswer
from traceloom.model import units
from traceloom.portal.layout import command
from traceloom.portal.links import to_capture, to_job, to_request
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable
from traceloom.portal.visit import Visit

COLUMNS = (
    PageColumn("asked_ns", "Asked", "instant", link=lambda row: to_request(str(row["id"]))),
    PageColumn("state", "State", "state"),
    PageColumn("job", "Job", "name", link=lambda row: to_job(str(row["job"]))),
    PageColumn("who", "By"),
    PageColumn("what", "What"),
    PageColumn("hosts", "Hosts", "count"),
    PageColumn("capture", "Capture", unknown="there is none yet", link=lambda row: to_capture(str(row["capture"]))),
    PageColumn("detail", "Why", unknown="there is nothing to say of it"),
)


def length_of(request: FleetRequestAnswer) -> str:
    """How long is traced, in words."""
    if request.wanted.steps is not None:
        return units.counted(request.wanted.steps, "step")
    return units.duration(int((request.wanted.duration_s or 0.0) * 1e9))


def table(requests: list[FleetRequestAnswer], *, of_job: bool = False) -> PageTable:
    """The table of requests, newest first; `of_job`: all are of one, which need not be named."""
    rows: list[PageRow] = [
        {
            "id": request.id,
            "asked_ns": request.asked_ns,
            "state": request.state,
            "job": request.wanted.job,
            "who": request.who,
            "what": f"{length_of(request)}, {', '.join(request.wanted.profilers)}",
            "hosts": len(request.hosts),
            "capture": request.capture,
            "detail": request.detail,
        }
        for request in requests
    ]
    columns = [column for column in COLUMNS if not (of_job and column.key == "job")]
    empty = fragment[
        p[
            "No trace was asked for yet. ",
            a(href="/jobs")["Choose a job"],
            " and ask for one on its page, or in a terminal:",
        ],
        command("traceloom trace --server URL --job JOB --steps 3"),
    ]
    return PageTable("requests", "Traces that were asked for", columns, rows, empty)


async def compute(visit: Visit) -> list[FleetRequestAnswer]:
    """Requests, newest first."""
    return (await visit.answer(FleetRequestsAnswer, "/api/v1/requests", query={"most": "1000"})).requests


def content(requests: list[FleetRequestAnswer]) -> PageContent:
    """What is shown of them."""
    states = [request.state for request in requests]
    running = sum(state not in FLEET_ENDED for state in states)
    numbers = [
        KeyNumber("Being taken", units.count(running), "have not ended"),
        KeyNumber("Done", units.count(states.count("done")), "whole", leads=_only("done")),
        KeyNumber(
            "Partial",
            units.count(states.count("partial")),
            "something of a host is missing",
            "warn" if "partial" in states else "",
            _only("partial"),
        ),
        KeyNumber(
            "Failed",
            units.count(states.count("failed")),
            "gave nothing",
            "bad" if "failed" in states else "",
            _only("failed"),
        ),
    ]
    return PageContent(
        "Requests",
        [ContentSection("requests", "Traces asked for", table(requests))],
        numbers=numbers if requests else (),
    )


def _only(state: str) -> str:
    return f"/requests?requests.q={state}"


PAGE = Page(
    "/requests",
    "Requests",
    "Traces that were asked for and how far each is, newest first.",
    compute,
    content,
    live=True,
    menu="Traces",
)
