"""The page of a capture: its report, findings and files, and what agents measured meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from htpy import (
    Node,
    a,
    button,
    code,
    div,
    form,
    fragment,
    iframe,
    input as input_,
    label,
    option,
    p,
    select,
)

from traceloom.fleet.api import CaptureResponse, CapturesResponse
from traceloom.fleet.handlers.now import CaptureFactsResponse, FindingsResponse, FleetFinding
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
from traceloom.fleet.portal.pages.job import build_findings_table
from traceloom.fleet.portal.tables import PageColumn, PageRow, PageTable, render_time
from traceloom.system import units

FILE_COLUMNS = (
    PageColumn(
        "name",
        "File",
        "name",
        link=lambda row: (
            f"{build_capture_url(str(row['capture']))}/files/{quote(str(row['name']))}"
        ),
    ),
    PageColumn("bytes", "Size", "bytes"),
)
TELEMETRY_COLUMNS = (
    PageColumn("host", "Host", link=lambda row: build_host_url(str(row["host"]))),
    PageColumn("devices", "Devices", "count"),
    PageColumn("busy", "Busy", "share", "share of the device time that the job held"),
    PageColumn("busy_ns", "Busy time", "time", "of all its devices together"),
    PageColumn(
        "power_w", "Power, W", "number", "of a device that the job held", "no device measures it"
    ),
    PageColumn(
        "flop_rate",
        "FLOP/s",
        "flop_rate",
        "of a device that the job held, at least",
        "they are not measured",
    ),
)
_MAX_OTHERS = 30


@dataclass(frozen=True)
class CaptureView:
    """Data of the page."""

    capture: CaptureResponse
    of_tables: CaptureFactsResponse
    findings: list[FleetFinding]
    others: list[CaptureResponse]  # captures to compare with: of the same job first, newest first


async def compute_capture(visit: PageRequest) -> CaptureView:
    name = visit.names["id"]
    capture = await visit.answer(CaptureResponse, "/api/v1/captures/{id}", id=name)
    # It is not in the tables yet.
    if not any(task.state == "committed" for task in capture.tasks):
        return CaptureView(capture, CaptureFactsResponse(facts=None, beside=[]), [], [])
    facts = await visit.answer(CaptureFactsResponse, "/api/v1/captures/{id}/facts", id=name)
    findings_answer = await visit.answer(
        FindingsResponse, "/api/v1/findings/latest", query={"capture": name}
    )
    job_query = {"job": capture.job, "most": str(_MAX_OTHERS)}
    other_captures: dict[str, CaptureResponse] = {}
    for query in ([job_query] if capture.job else []) + [{"most": str(_MAX_OTHERS)}]:
        last = (await visit.answer(CapturesResponse, "/api/v1/captures", query=query)).captures
        other_captures |= {
            candidate.id: candidate
            for candidate in last
            if candidate.state == "committed" and candidate.id not in {name, *other_captures}
        }
    return CaptureView(
        capture, facts, findings_answer.findings, list(other_captures.values())[:_MAX_OTHERS]
    )


def build_capture_content(view: CaptureView) -> PageContent:
    capture, facts = view.capture, view.of_tables.facts
    is_analysed = any(task.state in {"analysed", "committed"} for task in capture.tasks)
    sections = [
        ContentSection(
            "report",
            "Report",
            _build_report_frame(view) if is_analysed else _build_waiting_notice(capture),
        )
    ]
    if facts is not None:
        sections.append(
            ContentSection(
                "findings",
                "What to fix first",
                build_findings_table(view.findings, show_capture=False),
            )
        )
        sections.append(
            ContentSection(
                "beside",
                "Measured meanwhile",
                _build_telemetry_table(view),
                "By the agents, in the minutes of the capture.",
            )
        )
    files: list[PageRow] = [
        {"capture": capture.id, "name": name, "bytes": size}
        for name, size in sorted(capture.files.items())
    ]
    sections.append(
        ContentSection(
            "files", "Files", PageTable("files", "Files of the capture", FILE_COLUMNS, files)
        )
    )
    return PageContent(
        capture.id,
        sections,
        above=[("Captures", "/captures")],
        numbers=_build_key_figures(view),
        lead=[
            a(href=build_job_url(capture.job))[capture.job]
            if capture.job
            else "of no job that is known",
            ", received ",
            render_time(capture.received_ns),
            f" from {capture.uploader}",
        ],
        ended=capture.state in {"committed", "quarantined"},
    )


def _build_key_figures(view: CaptureView) -> list[KeyFigure]:
    facts, capture = view.of_tables.facts, view.capture
    if facts is None:
        return [
            KeyFigure(
                "State",
                capture.state or "incomplete",
                "of its analysis",
                "bad" if capture.state == "quarantined" else "",
            ),
            KeyFigure(
                "Size",
                units.format_size(capture.bytes),
                units.format_quantity(len(capture.files), "file"),
            ),
        ]
    hosts = (
        f"on {units.format_quantity(facts.hosts, 'host')}"
        if facts.hosts
        else "no file names its host"
    )
    numbers = [
        KeyFigure("Ranks", units.format_count(facts.ranks), hosts),
        KeyFigure(
            "Window",
            units.format_duration(facts.window_ns),
            fragment["from ", render_time(facts.start_ns)],
        ),
    ]
    if facts.step_ns is not None:
        numbers.append(
            KeyFigure("Step", units.format_duration(facts.step_ns), "median of whole steps")
        )
    if facts.roofline_fraction is not None:
        numbers.append(
            KeyFigure(
                "Roofline",
                units.format_share(facts.roofline_fraction, 1.0),
                "that steps reach, mean",
            )
        )
    if facts.mfu is not None:
        numbers.append(KeyFigure("MFU", units.format_share(facts.mfu, 1.0), "mean over the ranks"))
    torch_note = f"PyTorch {facts.torch}" if facts.torch else "the version of PyTorch is not known"
    return [*numbers, KeyFigure("Device", facts.device_model or "–", torch_note)]


def _build_report_frame(view: CaptureView) -> Node:
    """Builds an isolated frame for the report, as it comes from an untrusted trace."""
    capture = view.capture
    report_url = f"{build_capture_url(capture.id)}/report"
    return fragment[
        div(".buttons.above")[
            a(".button", href=report_url)["Open it alone"],
            a(
                ".button",
                href=f"{build_capture_url(capture.id)}/timeline",
                title="open it at ui.perfetto.dev",
            )["Timeline for Perfetto"],
            form(method="get", action="/compare")[
                input_(type="hidden", name="new", value=capture.id),
                label(for_="base")["Hold it against"],
                select(name="base", id="base")[
                    (option(value=other.id)[other.id] for other in view.others)
                ],
                button(type="submit")["Compare"],
            ]
            if view.others
            else None,
        ],
        iframe(
            ".report",
            src=report_url,
            title=f"Report of {capture.id}",
            sandbox="allow-scripts allow-downloads",
            loading="lazy",
        ),
    ]


def _build_waiting_notice(capture: CaptureResponse) -> Node:
    if capture.state == "quarantined":
        return div(".notice.bad")[
            p["It could not be analysed: ", capture.tasks[-1].error],
            p(".quiet")["Once its cause is gone: ", code["traceloom fleet backfill --again"]],
        ]
    return p[
        "It is being analysed; its report follows here."
        if capture.state
        else "Its files are not all there yet."
    ]


def _build_telemetry_table(view: CaptureView) -> PageTable:
    rows: list[PageRow] = []
    for host in view.of_tables.beside:
        held_ms = host.busy_ms + host.idle_ms
        rows.append(
            {
                "host": host.host,
                "devices": host.devices,
                "busy": host.busy_ms / held_ms if held_ms else None,
                "busy_ns": host.busy_ms * 1_000_000,
                "power_w": None
                if host.energy_mj is None or not held_ms
                else host.energy_mj / held_ms,
                "flop_rate": None
                if host.flops_low is None or not held_ms
                else host.flops_low / (held_ms / 1e3),
            }
        )
    empty = p[
        "No agent measured devices of this job in that time. Devices are measured on hosts where an agent runs: ",
        code["traceloom agent run --server URL"],
        ".",
    ]
    return PageTable("beside", "What agents measured meanwhile", TELEMETRY_COLUMNS, rows, empty)


CAPTURE_PAGE = Page(
    "/captures/{id}",
    "Capture",
    "One capture: its report, findings, files, the timeline for Perfetto, and what agents measured meanwhile.",
    compute_capture,
    build_capture_content,
    live=True,
)
