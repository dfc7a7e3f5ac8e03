"""One request: how far it is on every host and why, until it ends with its report."""

from __future__ import annotations

from typing import get_args

from htpy import Node, a, div, fragment, li, ol, p, span

from traceloom.collect.plan import FLEET_ENDED, FleetState
from traceloom.collect.request_routes import FleetRequestAnswer
from traceloom.portal.forms import sure
from traceloom.portal.links import to_capture, to_host, to_job
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.pages.requests import length_of
from traceloom.portal.table import PageColumn, PageRow, PageTable, instant, state_mark
from traceloom.portal.visit import Visit

_WAY: tuple[FleetState, ...] = tuple(state for state in get_args(FleetState) if state not in FLEET_ENDED)
_SAYS: dict[FleetState, str] = {
    "planned": "Its hosts are being looked up",
    "announced": "Hosts get ready",
    "armed": "All begin together in a moment",
    "running": "It is being traced",
    "collecting": "Hosts send what they recorded",
    "stitching": "The parts are joined",
    "analysing": "It is being analysed",
    "done": "The trace is there",
    "partial": "The trace is there, but something is missing",
    "failed": "Nothing was traced",
    "cancelled": "It was cancelled",
}
HOST_COLUMNS = (
    PageColumn("host", "Host", link=lambda row: to_host(str(row["host"]))),
    PageColumn("state", "State", "state"),
    PageColumn("since_ns", "Since", "instant"),
    PageColumn("ranks", "Ranks", unknown="it has not said them"),
    PageColumn("why", "Why", unknown="there is nothing to say of it"),
)
TARGET_COLUMNS = (
    PageColumn("host", "Host", link=lambda row: to_host(str(row["host"]))),
    PageColumn("target", "Rank and profiler, and how far it is"),
)


async def compute(visit: Visit) -> FleetRequestAnswer:
    """The request."""
    return await visit.answer(FleetRequestAnswer, "/api/v1/requests/{id}", id=visit.names["id"])


def content(request: FleetRequestAnswer) -> PageContent:
    """What is shown of it."""
    hosts: list[PageRow] = [
        {
            "host": host.host,
            "state": host.state,
            "since_ns": host.since_ns,
            "ranks": _ranks(host.ranks),
            "why": host.detail or host.reason,
        }
        for host in request.hosts
    ]
    targets: list[PageRow] = [
        {"host": host.host, "target": target} for host in request.hosts for target in host.targets
    ]
    wanted = request.wanted
    numbers = [
        KeyNumber("Job", wanted.job, "that is traced", leads=to_job(wanted.job)),
        KeyNumber("What", length_of(request), ", ".join(wanted.profilers)),
        KeyNumber("Asked by", request.who, instant(request.asked_ns)),
        KeyNumber("Begins", instant(request.start_ns) if request.start_ns else "–", "the same instant on all hosts"),
    ]
    sections = [
        ContentSection(
            "hosts",
            "Hosts",
            PageTable("hosts", "Hosts of the request", HOST_COLUMNS, hosts, "No host has such processes."),
        )
    ]
    if targets:
        sections.append(
            ContentSection("targets", "Ranks", PageTable("targets", "Ranks and profilers", TARGET_COLUMNS, targets))
        )
    return PageContent(
        _SAYS[request.state],
        [ContentSection("way", "How far it is", _way(request)), *sections],
        above=[("Requests", "/requests")],
        numbers=numbers,
        ended=request.state in FLEET_ENDED,
    )


def _way(request: FleetRequestAnswer) -> Node:
    ended = request.state in FLEET_ENDED
    at = len(_WAY) if ended else _WAY.index(request.state)
    steps = [*_WAY, request.state if ended else "done"]
    missing = request.detail or request.reason
    return fragment[
        ol(".steps")[
            (
                li(
                    class_=[
                        "passed" if k < at else "here" if k == at else "",
                        request.state if ended and k == at else "",
                    ],
                    aria_current="step" if k == at else None,
                )[span[step]]
                for k, step in enumerate(steps)
            )
        ]
        if request.state not in {"failed", "cancelled"}
        else p[state_mark(request.state)],
        p(".lead")[missing] if missing else None,
        div(".buttons")[
            a(".primary", href=to_capture(request.capture))[
                "See the capture" if request.reason == "analysis-failed" else "Open the report"
            ]
        ]
        if ended and request.capture
        else None,
    ]


def _ranks(ranks: list[int]) -> str:
    """0, 1, 2, 5 as `0-2, 5`."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def controls(visit: Visit, request: FleetRequestAnswer) -> Node:
    """Its end before its time, for who asked for it and for operators."""
    own = request.who == visit.token.name and visit.may("requester")
    if request.state in FLEET_ENDED or not (own or visit.may("operator")):
        return None
    return div(".buttons.while-open")[sure("Cancel", p["What was recorded so far is lost."], {"do": "cancel"})]


async def act(visit: Visit) -> str:
    """Cancel it.

    Raises:
        RequestError: `not-allowed`, `no-such-request`.
    """
    await visit.answer(FleetRequestAnswer, "/api/v1/requests/{id}", method="DELETE", id=visit.names["id"])
    return visit.address.path


PAGE = Page(
    "/requests/{id}",
    "Request",
    "One request, live: how far every host is and why; it ends with its report.",
    compute,
    content,
    controls,
    act=act,
    live=True,
)
