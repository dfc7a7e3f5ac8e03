"""The page of captures, newest first."""

from __future__ import annotations

from htpy import Node, a, fragment, p

from traceloom.fleet.api import CaptureResponse, CapturesResponse
from traceloom.fleet.portal.page import (
    ContentSection,
    KeyFigure,
    Page,
    PageContent,
    build_capture_url,
    build_command,
    build_job_url,
)
from traceloom.fleet.portal.page_request import PageRequest
from traceloom.fleet.portal.tables import PageColumn, PageRow, PageTable
from traceloom.system import units

CAPTURE_COLUMNS = (
    PageColumn("id", "Capture", link=lambda row: build_capture_url(str(row["id"]))),
    PageColumn("received_ns", "Received", "instant"),
    PageColumn(
        "job",
        "Job",
        "name",
        unknown="nothing says which",
        link=lambda row: build_job_url(str(row["job"])),
    ),
    PageColumn("state", "State", "state", "how far its analysis is", "its files are not all there"),
    PageColumn("uploader", "By"),
    PageColumn("files", "Files", "count"),
    PageColumn("bytes", "Size", "bytes"),
    PageColumn("error", "Why not", unknown="there is nothing to say of it"),
)
_MAX_CAPTURES = 1000


def build_captures_table(
    captures: list[CaptureResponse], empty: Node, *, single_job: bool = False
) -> PageTable:
    """Builds a table of captures; without the job column for a `single_job`."""
    rows: list[PageRow] = [
        {
            "id": capture.id,
            "received_ns": capture.received_ns,
            "job": capture.job,
            "state": capture.state,
            "uploader": capture.uploader,
            "files": len(capture.files),
            "bytes": capture.bytes,
            "error": capture.tasks[-1].error if capture.tasks else "",
        }
        for capture in captures
    ]
    columns = [column for column in CAPTURE_COLUMNS if not (single_job and column.key == "job")]
    return PageTable("captures", "Captures", columns, rows, empty)


async def compute_captures(visit: PageRequest) -> list[CaptureResponse]:
    """Returns the latest captures, or those before the instant in the URL."""
    query = {"most": str(_MAX_CAPTURES), "before_ns": visit.address.query.get("before", "0")}
    return (await visit.answer(CapturesResponse, "/api/v1/captures", query=query)).captures


def build_captures_content(captures: list[CaptureResponse]) -> PageContent:
    empty = fragment[
        p[
            "Nothing is kept yet. ",
            a(href="/jobs")["Ask for a trace of a job"],
            ", or upload what was recorded:",
        ],
        build_command("traceloom upload run --job JOB"),
    ]
    states = [capture.state for capture in captures]
    quarantined = states.count("quarantined")
    numbers = [
        KeyFigure(
            "Captures",
            units.format_count(len(captures)),
            "the last ones" if len(captures) == _MAX_CAPTURES else "in all",
        ),
        KeyFigure(
            "Analysed",
            units.format_count(states.count("committed")),
            "all tables hold them",
            leads="/captures?captures.q=committed",
        ),
        KeyFigure(
            "Not analysable",
            units.format_count(quarantined),
            "in quarantine",
            "bad" if quarantined else "",
            "/captures?captures.q=quarantined",
        ),
        KeyFigure(
            "Size", units.format_size(sum(capture.bytes for capture in captures)), "of their files"
        ),
    ]
    older = (
        p[a(href=f"/captures?before={captures[-1].received_ns}")["Older captures"]]
        if len(captures) == _MAX_CAPTURES
        else None
    )
    sections = [ContentSection("captures", "Newest first", build_captures_table(captures, empty))]
    if older:
        sections.append(ContentSection("older", "Before them", older))
    return PageContent("Captures", sections, numbers=numbers if captures else ())


CAPTURES_PAGE = Page(
    "/captures",
    "Captures",
    "What is kept and how far its analysis is, newest first.",
    compute_captures,
    build_captures_content,
    live=True,
    menu="Traces",
)
