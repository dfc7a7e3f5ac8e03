"""The pages of a job, with its form to request a trace, of all requests and of one request."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import get_args

import msgspec
from htpy import Node, a, button, code, div, form, fragment, li, ol, p, span

from traceloom.agent.traces.requests import ProfilerName, TraceSpec
from traceloom.fleet.api import CaptureResponse, CapturesResponse
from traceloom.fleet.handlers.hosts import FleetRequestResponse, FleetRequestsResponse, RequestBody
from traceloom.fleet.handlers.now import (
    FindingsResponse,
    FleetFinding,
    JobDetailResponse,
    UsagePeriod,
    UsageResponse,
)
from traceloom.fleet.portal.page import (
    ContentSection,
    KeyFigure,
    Page,
    PageContent,
    build_capture_url,
    build_choices,
    build_command,
    build_confirm_button,
    build_fold_out,
    build_host_url,
    build_job_url,
    build_request_url,
    build_text_field,
    parse_positive_number,
    parse_ranks,
)
from traceloom.fleet.portal.page_request import PageRequest
from traceloom.fleet.portal.pages import captures, overview
from traceloom.fleet.portal.tables import (
    PageColumn,
    PageRow,
    PageTable,
    convert_column,
    render_state,
    render_time,
)
from traceloom.fleet.service.request_plan import ENDED_FLEET_STATES, FleetState, format_rank_runs
from traceloom.fleet.service.requests import Choice
from traceloom.fleet.store.schema import SCHEMAS
from traceloom.server.problem import make_bad_request
from traceloom.system import units

REQUEST_COLUMNS = (
    PageColumn("asked_ns", "Asked", "instant", link=lambda row: build_request_url(str(row["id"]))),
    PageColumn("state", "State", "state"),
    PageColumn("job", "Job", "name", link=lambda row: build_job_url(str(row["job"]))),
    PageColumn("who", "By"),
    PageColumn("what", "What"),
    PageColumn("hosts", "Hosts", "count"),
    PageColumn(
        "capture",
        "Capture",
        unknown="there is none yet",
        link=lambda row: build_capture_url(str(row["capture"])),
    ),
    PageColumn("detail", "Why", unknown="there is nothing to say of it"),
)


def describe_length(request: FleetRequestResponse) -> str:
    if request.spec.steps is not None:
        return units.format_quantity(request.spec.steps, "step")
    return units.format_duration(int((request.spec.duration_s or 0.0) * 1e9))


def build_requests_table(
    requests: list[FleetRequestResponse], *, single_job: bool = False
) -> PageTable:
    """Builds a table of requests, newest first; without the job column for a `single_job`."""
    rows: list[PageRow] = [
        {
            "id": request.id,
            "asked_ns": request.asked_ns,
            "state": request.state,
            "job": request.spec.job,
            "who": request.who,
            "what": f"{describe_length(request)}, {', '.join(request.spec.profilers)}",
            "hosts": len(request.hosts),
            "capture": request.capture,
            "detail": request.detail,
        }
        for request in requests
    ]
    columns = [column for column in REQUEST_COLUMNS if not (single_job and column.key == "job")]
    empty = fragment[
        p[
            "No trace was asked for yet. ",
            a(href="/jobs")["Choose a job"],
            " and ask for one on its page, or in a terminal:",
        ],
        build_command("traceloom trace --server URL --job JOB --steps 3"),
    ]
    return PageTable("requests", "Traces that were asked for", columns, rows, empty)


async def compute_requests(visit: PageRequest) -> list[FleetRequestResponse]:
    """Returns requests, newest first."""
    return (
        await visit.answer(FleetRequestsResponse, "/api/v1/requests", query={"most": "1000"})
    ).requests


def build_requests_content(requests: list[FleetRequestResponse]) -> PageContent:
    states = [request.state for request in requests]
    running = sum(state not in ENDED_FLEET_STATES for state in states)
    numbers = [
        KeyFigure("Being taken", units.format_count(running), "have not ended"),
        KeyFigure(
            "Done",
            units.format_count(states.count("done")),
            "whole",
            leads=_build_state_url("done"),
        ),
        KeyFigure(
            "Partial",
            units.format_count(states.count("partial")),
            "something of a host is missing",
            "warn" if "partial" in states else "",
            _build_state_url("partial"),
        ),
        KeyFigure(
            "Failed",
            units.format_count(states.count("failed")),
            "gave nothing",
            "bad" if "failed" in states else "",
            _build_state_url("failed"),
        ),
    ]
    return PageContent(
        "Requests",
        [ContentSection("requests", "Traces asked for", build_requests_table(requests))],
        numbers=numbers if requests else (),
    )


def _build_state_url(state: str) -> str:
    return f"/requests?requests.q={state}"


REQUESTS_PAGE = Page(
    "/requests",
    "Requests",
    "Traces that were asked for and how far each is, newest first.",
    compute_requests,
    build_requests_content,
    live=True,
    menu="Traces",
)

PROFILER_CHOICES: tuple[tuple[ProfilerName, str], ...] = (
    ("timeline", "Timeline: operators and GPU work"),
    ("telemetry", "Telemetry of devices and host"),
    ("stacks", "Stacks of the CPU"),
    ("dump", "What all threads do, once"),
    ("launches", "Launches"),
    ("allocations", "Allocations"),
    ("memory", "Memory snapshot"),
)
DETAIL_CHOICES = (
    ("shapes", "Shapes of inputs"),
    ("stacks", "Python stacks"),
    ("flops", "FLOPs"),
    ("modules", "Modules"),
)
assert {name for name, _ in PROFILER_CHOICES} == set(get_args(ProfilerName))

_FINDINGS = SCHEMAS["findings"].columns
FINDING_COLUMNS = (
    convert_column(
        "slug",
        _FINDINGS["slug"],
        lambda row: f"https://traceloom.readthedocs.io/findings/{row['slug']}/",
    ),
    convert_column("saving_fraction", _FINDINGS["saving_fraction"]),
    convert_column("saving_ns", _FINDINGS["saving_ns"]),
    convert_column("confidence", _FINDINGS["confidence"]),
    convert_column("rank", _FINDINGS["rank"]),
    convert_column(
        "capture", _FINDINGS["capture"], lambda row: build_capture_url(str(row["capture"]))
    ),
)
PROCESS_COLUMNS = (
    PageColumn("rank", "Rank", "count", unknown="nothing says it"),
    PageColumn("host", "Host", link=lambda row: build_host_url(str(row["host"]))),
    *(column for column in overview.PROCESS_COLUMNS if column.key not in {"rank", "job", "user"}),
)


@dataclass(frozen=True)
class JobView:
    """Data of the page."""

    name: str
    detail: JobDetailResponse
    captures: list[CaptureResponse]
    findings: list[FleetFinding]
    requests: list[FleetRequestResponse]
    usage: list[UsagePeriod]


async def compute_job(visit: PageRequest) -> JobView:
    job = visit.names["job"]
    requests_answer = await visit.answer(
        FleetRequestsResponse, "/api/v1/requests", query={"most": "1000"}
    )
    captures_answer = await visit.answer(
        CapturesResponse, "/api/v1/captures", query={"job": job, "most": "200"}
    )
    findings = await visit.answer(FindingsResponse, "/api/v1/findings/latest", query={"job": job})
    used = await visit.answer(UsageResponse, "/api/v1/usage", query={"job": job, "hours": "6"})
    return JobView(
        job,
        await visit.answer(JobDetailResponse, "/api/v1/jobs/{job:path}", job=job),
        captures_answer.captures,
        findings.findings,
        [request for request in requests_answer.requests if request.spec.job == job],
        used.usage,
    )


def build_job_content(view: JobView) -> PageContent:
    job = view.detail.job
    no_captures = fragment[
        p[
            "Nothing of this job is kept yet. Ask for a trace while it runs, or upload what was recorded:"
        ],
        build_command(f"traceloom upload run --job {shlex.quote(view.name)}"),
    ]
    processes = [
        {"host": member.host, **overview.build_process_row(member.process)}
        for member in view.detail.processes
    ]
    sections = [
        ContentSection(
            "findings",
            "What to fix first",
            build_findings_table(view.findings),
            "Findings of its captures.",
        )
        if view.findings
        else None,
        ContentSection(
            "captures",
            "Captures",
            captures.build_captures_table(view.captures, no_captures, single_job=True),
        ),
        ContentSection(
            "requests", "Traces asked for", build_requests_table(view.requests, single_job=True)
        )
        if view.requests
        else None,
        ContentSection(
            "usage",
            "Device time, last 6 h",
            overview.draw_usage(view.usage, f"Device time of {view.name}"),
        )
        if view.usage
        else None,
        ContentSection(
            "processes",
            "Processes",
            PageTable("processes", "Processes of the job", PROCESS_COLUMNS, processes),
        )
        if job
        else None,
    ]
    return PageContent(
        view.name,
        [part for part in sections if part],
        above=[("Jobs", "/jobs")],
        lead=None if job else "It does not run now, as far as hosts say.",
        numbers=_build_key_figures(view) if job else (),
    )


def build_findings_table(findings: list[FleetFinding], *, show_capture: bool = True) -> PageTable:
    """Builds a table of findings with their savings; names link to their meaning."""
    return PageTable(
        "findings",
        "Findings",
        FINDING_COLUMNS if show_capture else FINDING_COLUMNS[:-1],
        [msgspec.structs.asdict(finding) for finding in findings],
        "No rule has anything against it.",
    )


def _build_key_figures(view: JobView) -> list[KeyFigure]:
    job = view.detail.job
    assert job is not None
    steps = job.steps_per_second
    rank_note = (
        f"of {units.format_count(job.world_size)}"
        if job.world_size is not None
        else "the world size is not known"
    )
    return [
        KeyFigure(
            "Ranks",
            units.format_count(job.ranks),
            f"{rank_note}, on {units.format_quantity(len(job.hosts), 'host')}",
        ),
        KeyFigure("Devices", units.format_count(job.devices), "that its processes hold"),
        *(
            [KeyFigure("Hangs", "yes", "it makes no steps any more", "bad", "#processes-part")]
            if job.hung
            else []
        ),
        KeyFigure(
            "Steps/s",
            "–" if steps is None else units.format_number(steps),
            "nobody measures it" if steps is None else "of its slowest rank",
        ),
        KeyFigure("User", job.user or "–", job.name if job.name != job.job else job.scheduler),
        KeyFigure(
            "Traceable",
            "all" if job.traceable == job.processes else f"{job.traceable} of {job.processes}",
            "of its processes are prepared",
            "" if job.traceable else "warn",
        ),
    ]


def build_job_controls(visit: PageRequest, view: JobView) -> Node:
    """Builds the form to request a trace, or a note on what a reader without permission needs."""
    if view.detail.job is None:
        return None
    if not visit.may("requester"):
        content: Node = p(".quiet")[
            "This needs the role ", code["requester"], "; you are a ", code[visit.token.role], "."
        ]
    elif not view.detail.job.traceable:
        content = fragment[
            p[
                "None of its processes is prepared for traces on demand. Start it in a shell that is:"
            ],
            build_command('eval "$(traceloom agent env)"'),
        ]
    else:
        content = _build_request_form(visit)
    return build_fold_out("ask", "Ask for a trace", content, is_open=bool(visit.form))


def _build_request_form(visit: PageRequest) -> Node:
    sent = visit.form
    length = visit.field("by") or "steps"
    return form(method="post")[
        div(".fields")[
            div[
                build_choices(
                    "by", "How long", [("steps", "Steps"), ("seconds", "Seconds")], [length]
                ),
                build_text_field(
                    "length",
                    "That many",
                    "Three whole steps tell most.",
                    value=visit.field("length") or "3",
                    inputmode="decimal",
                    required="required",
                    maxlength="12",
                ),
            ],
            div[
                build_choices(
                    "choose",
                    "Which ranks",
                    [
                        ("", "All, or these:"),
                        ("slowest-and-median", "The slowest and one in the middle"),
                    ],
                    [visit.field("choose")],
                ),
                build_text_field(
                    "ranks",
                    "Ranks",
                    "Such as 0, 3, 8-11. Empty: all.",
                    value=visit.field("ranks"),
                    maxlength="2000",
                ),
            ],
            build_choices(
                "profilers",
                "What is recorded",
                PROFILER_CHOICES,
                sent.get("profilers", ["timeline"]),
                several=True,
            ),
            build_choices(
                "details",
                "In the timeline also",
                DETAIL_CHOICES,
                sent.get("details", []),
                several=True,
                hint="Each slows the job down while it is traced.",
            ),
        ],
        div(".buttons")[button(".primary", type="submit")["Trace"]],
    ]


async def handle_job_action(visit: PageRequest) -> str:
    """Requests the trace; redirects to its page.

    Raises:
        HttpError: `wrong-request`, `not-allowed`, `no-such-job`.
    """
    length_kind, length = visit.field("by"), visit.field("length")
    steps, seconds = (length, "") if length_kind == "steps" else ("", length)
    spec_fields = {
        "job": visit.names["job"],
        "profilers": visit.form.get("profilers", []),
        "ranks": parse_ranks(visit.field("ranks")),
        "steps": parse_positive_number(steps, "the number of steps", int),
        "duration_s": parse_positive_number(seconds, "the duration", float),
        **{name: True for name, _ in DETAIL_CHOICES if name in visit.form.get("details", [])},
    }
    if not spec_fields["profilers"]:
        raise make_bad_request("nothing is chosen to be recorded")
    try:
        body = RequestBody(
            spec=msgspec.convert(spec_fields, TraceSpec),
            choose=msgspec.convert(visit.field("choose"), Choice),
        )
    except msgspec.ValidationError as error:
        raise make_bad_request(str(error)) from error
    request = await visit.answer(FleetRequestResponse, "/api/v1/requests", method="POST", body=body)
    return build_request_url(request.id)


JOB_PAGE = Page(
    "/jobs/{job:path}",
    "Job",
    "One job: its processes, captures, findings and device time; the form by which a trace of it is asked for.",
    compute_job,
    build_job_content,
    build_job_controls,
    act=handle_job_action,
    live=True,
)

_PROGRESS_STATES: tuple[FleetState, ...] = tuple(
    state for state in get_args(FleetState) if state not in ENDED_FLEET_STATES
)
_STATE_TEXTS: dict[FleetState, str] = {
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
    PageColumn("host", "Host", link=lambda row: build_host_url(str(row["host"]))),
    PageColumn("state", "State", "state"),
    PageColumn("since_ns", "Since", "instant"),
    PageColumn("ranks", "Ranks", unknown="it has not said them"),
    PageColumn("why", "Why", unknown="there is nothing to say of it"),
)
TARGET_COLUMNS = (
    PageColumn("host", "Host", link=lambda row: build_host_url(str(row["host"]))),
    PageColumn("target", "Rank and profiler, and how far it is"),
)


async def compute_request(visit: PageRequest) -> FleetRequestResponse:
    return await visit.answer(FleetRequestResponse, "/api/v1/requests/{id}", id=visit.names["id"])


def build_request_content(request: FleetRequestResponse) -> PageContent:
    hosts: list[PageRow] = [
        {
            "host": host.host,
            "state": host.state,
            "since_ns": host.since_ns,
            "ranks": ", ".join(format_rank_runs(host.ranks)),
            "why": host.detail or host.reason,
        }
        for host in request.hosts
    ]
    targets: list[PageRow] = [
        {"host": host.host, "target": target} for host in request.hosts for target in host.targets
    ]
    spec = request.spec
    numbers = [
        KeyFigure("Job", spec.job, "that is traced", leads=build_job_url(spec.job)),
        KeyFigure("What", describe_length(request), ", ".join(spec.profilers)),
        KeyFigure("Asked by", request.who, render_time(request.asked_ns)),
        KeyFigure(
            "Begins",
            render_time(request.start_ns) if request.start_ns else "–",
            "the same instant on all hosts",
        ),
    ]
    sections = [
        ContentSection(
            "hosts",
            "Hosts",
            PageTable(
                "hosts", "Hosts of the request", HOST_COLUMNS, hosts, "No host has such processes."
            ),
        )
    ]
    if targets:
        sections.append(
            ContentSection(
                "targets",
                "Ranks",
                PageTable("targets", "Ranks and profilers", TARGET_COLUMNS, targets),
            )
        )
    return PageContent(
        _STATE_TEXTS[request.state],
        [ContentSection("way", "How far it is", _draw_progress(request)), *sections],
        above=[("Requests", "/requests")],
        numbers=numbers,
        ended=request.state in ENDED_FLEET_STATES,
    )


def _draw_progress(request: FleetRequestResponse) -> Node:
    ended = request.state in ENDED_FLEET_STATES
    current_step = len(_PROGRESS_STATES) if ended else _PROGRESS_STATES.index(request.state)
    steps = [*_PROGRESS_STATES, request.state if ended else "done"]
    missing = request.detail or request.reason
    return fragment[
        ol(".steps")[
            (
                li(
                    class_=[
                        "passed" if k < current_step else "here" if k == current_step else "",
                        request.state if ended and k == current_step else "",
                    ],
                    aria_current="step" if k == current_step else None,
                )[span[step]]
                for k, step in enumerate(steps)
            )
        ]
        if request.state not in {"failed", "cancelled"}
        else p[render_state(request.state)],
        p(".lead")[missing] if missing else None,
        div(".buttons")[
            a(".primary", href=build_capture_url(request.capture))[
                "See the capture" if request.reason == "analysis-failed" else "Open the report"
            ]
        ]
        if ended and request.capture
        else None,
    ]


def build_request_controls(visit: PageRequest, request: FleetRequestResponse) -> Node:
    """Builds the cancel button, for the requester and operators."""
    is_own = request.who == visit.token.name and visit.may("requester")
    if request.state in ENDED_FLEET_STATES or not (is_own or visit.may("operator")):
        return None
    return div(".buttons.while-open")[
        build_confirm_button("Cancel", p["What was recorded so far is lost."], {"do": "cancel"})
    ]


async def handle_request_action(visit: PageRequest) -> str:
    """Cancels the request.

    Raises:
        HttpError: `not-allowed`, `no-such-request`.
    """
    await visit.answer(
        FleetRequestResponse, "/api/v1/requests/{id}", method="DELETE", id=visit.names["id"]
    )
    return visit.address.path


REQUEST_PAGE = Page(
    "/requests/{id}",
    "Request",
    "One request, live: how far every host is and why; it ends with its report.",
    compute_request,
    build_request_content,
    build_request_controls,
    act=handle_request_action,
    live=True,
)
