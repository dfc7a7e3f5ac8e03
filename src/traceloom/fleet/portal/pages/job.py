"""One job, the request form, requests and one request."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import get_args

import msgspec
from htpy import Node, a, button, code, div, form, fragment, li, ol, p, span

from traceloom.agent.traces.requests import ProfilerName, Wanted
from traceloom.fleet.api import CaptureAnswer, CapturesAnswer
from traceloom.fleet.handlers.hosts import FleetRequestAnswer, FleetRequestsAnswer, RequestBody
from traceloom.fleet.handlers.now import FindingsAnswer, FleetFinding, JobDetailAnswer, UsageAnswer, UsageOfTime
from traceloom.fleet.portal.page import (
    ContentSection,
    KeyNumber,
    Page,
    PageContent,
    choices,
    command,
    folded,
    number_of,
    ranks_of,
    sure,
    text_field,
    to_capture,
    to_host,
    to_job,
    to_request,
)
from traceloom.fleet.portal.page_request import Visit
from traceloom.fleet.portal.pages import captures, overview
from traceloom.fleet.portal.tables import PageColumn, PageRow, PageTable, declared, instant, state_mark
from traceloom.fleet.service.request_plan import FLEET_ENDED, FleetState
from traceloom.fleet.service.requests import Choice
from traceloom.fleet.store.schema import SCHEMAS
from traceloom.server.problem import wrong_request
from traceloom.system import units

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
        return units.count_of(request.wanted.steps, "step")
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


async def compute_requests(visit: Visit) -> list[FleetRequestAnswer]:
    """Requests, newest first."""
    return (await visit.answer(FleetRequestsAnswer, "/api/v1/requests", query={"most": "1000"})).requests


def build_requests_content(requests: list[FleetRequestAnswer]) -> PageContent:
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


REQUESTS_PAGE = Page(
    "/requests",
    "Requests",
    "Traces that were asked for and how far each is, newest first.",
    compute_requests,
    build_requests_content,
    live=True,
    menu="Traces",
)

PROFILERS: tuple[tuple[ProfilerName, str], ...] = (
    ("timeline", "Timeline: operators and GPU work"),
    ("telemetry", "Telemetry of devices and host"),
    ("stacks", "Stacks of the CPU"),
    ("dump", "What all threads do, once"),
    ("launches", "Launches"),
    ("allocations", "Allocations"),
    ("memory", "Memory snapshot"),
)
DETAILS = (("shapes", "Shapes of inputs"), ("stacks", "Python stacks"), ("flops", "FLOPs"), ("modules", "Modules"))
assert {name for name, _ in PROFILERS} == set(get_args(ProfilerName))

_FINDINGS = SCHEMAS["findings"].columns
FINDING_COLUMNS = (
    declared("slug", _FINDINGS["slug"], lambda row: f"https://traceloom.readthedocs.io/findings/{row['slug']}/"),
    declared("saving_fraction", _FINDINGS["saving_fraction"]),
    declared("saving_ns", _FINDINGS["saving_ns"]),
    declared("confidence", _FINDINGS["confidence"]),
    declared("rank", _FINDINGS["rank"]),
    declared("capture", _FINDINGS["capture"], lambda row: to_capture(str(row["capture"]))),
)
PROCESS_COLUMNS = (
    PageColumn("rank", "Rank", "count", unknown="nothing says it"),
    PageColumn("host", "Host", link=lambda row: to_host(str(row["host"]))),
    *(column for column in overview.PROCESS_COLUMNS if column.key not in {"rank", "job", "user"}),
)


@dataclass(frozen=True)
class JobView:
    """What the page shows."""

    name: str
    detail: JobDetailAnswer
    captures: list[CaptureAnswer]
    findings: list[FleetFinding]
    requests: list[FleetRequestAnswer]
    usage: list[UsageOfTime]


async def compute_job(visit: Visit) -> JobView:
    """Ask the routes."""
    job = visit.names["job"]
    asked = await visit.answer(FleetRequestsAnswer, "/api/v1/requests", query={"most": "1000"})
    kept = await visit.answer(CapturesAnswer, "/api/v1/captures", query={"job": job, "most": "200"})
    findings = await visit.answer(FindingsAnswer, "/api/v1/findings/latest", query={"job": job})
    used = await visit.answer(UsageAnswer, "/api/v1/usage", query={"job": job, "hours": "6"})
    return JobView(
        job,
        await visit.answer(JobDetailAnswer, "/api/v1/jobs/{job:path}", job=job),
        kept.captures,
        findings.findings,
        [request for request in asked.requests if request.wanted.job == job],
        used.usage,
    )


def build_job_content(view: JobView) -> PageContent:
    """What is shown of it."""
    job = view.detail.job
    no_captures = fragment[
        p["Nothing of this job is kept yet. Ask for a trace while it runs, or upload what was recorded:"],
        command(f"traceloom upload run --job {shlex.quote(view.name)}"),
    ]
    processes = [{"host": member.host, **overview.process_row(member.process)} for member in view.detail.processes]
    sections = [
        ContentSection("findings", "What to fix first", findings_table(view.findings), "Findings of its captures.")
        if view.findings
        else None,
        ContentSection("captures", "Captures", captures.table(view.captures, no_captures, of_job=True)),
        ContentSection("requests", "Traces asked for", table(view.requests, of_job=True)) if view.requests else None,
        ContentSection(
            "usage", "Device time, last 6 h", overview.usage_picture(view.usage, f"Device time of {view.name}")
        )
        if view.usage
        else None,
        ContentSection(
            "processes", "Processes", PageTable("processes", "Processes of the job", PROCESS_COLUMNS, processes)
        )
        if job
        else None,
    ]
    return PageContent(
        view.name,
        [part for part in sections if part],
        above=[("Jobs", "/jobs")],
        lead=None if job else "It does not run now, as far as hosts say.",
        numbers=_numbers(view) if job else (),
    )


def findings_table(findings: list[FleetFinding], *, with_capture: bool = True) -> PageTable:
    """Findings, each with what it saves; their names lead to what they mean."""
    columns = FINDING_COLUMNS if with_capture else FINDING_COLUMNS[:-1]
    return PageTable(
        "findings",
        "Findings",
        columns,
        [msgspec.structs.asdict(finding) for finding in findings],
        "No rule has anything against it.",
    )


def _numbers(view: JobView) -> list[KeyNumber]:
    job = view.detail.job
    assert job is not None
    steps = job.steps_per_second
    of = f"of {units.count(job.world_size)}" if job.world_size is not None else "the world size is not known"
    return [
        KeyNumber("Ranks", units.count(job.ranks), f"{of}, on {units.count_of(len(job.hosts), 'host')}"),
        KeyNumber("Devices", units.count(job.devices), "that its processes hold"),
        *([KeyNumber("Hangs", "yes", "it makes no steps any more", "bad", "#processes-part")] if job.hung else []),
        KeyNumber(
            "Steps/s",
            "–" if steps is None else units.number(steps),
            "nobody measures it" if steps is None else "of its slowest rank",
        ),
        KeyNumber("User", job.user or "–", job.name if job.name != job.job else job.scheduler),
        KeyNumber(
            "Traceable",
            "all" if job.traceable == job.processes else f"{job.traceable} of {job.processes}",
            "of its processes are prepared",
            "" if job.traceable else "warn",
        ),
    ]


def build_job_controls(visit: Visit, view: JobView) -> Node:
    """The form by which a trace is asked for; for who may not, what would let them."""
    if view.detail.job is None:
        return None
    if not visit.may("requester"):
        inside: Node = p(".quiet")[
            "This needs the role ", code["requester"], "; you are a ", code[visit.token.role], "."
        ]
    elif not view.detail.job.traceable:
        inside = fragment[
            p["None of its processes is prepared for traces on demand. Start it in a shell that is:"],
            command('eval "$(traceloom agent env)"'),
        ]
    else:
        inside = _form(visit)
    return folded("ask", "Ask for a trace", inside, is_open=bool(visit.form))


def _form(visit: Visit) -> Node:
    sent = visit.form
    length = visit.field("by") or "steps"
    return form(method="post")[
        div(".fields")[
            div[
                choices("by", "How long", [("steps", "Steps"), ("seconds", "Seconds")], [length]),
                text_field(
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
                choices(
                    "choose",
                    "Which ranks",
                    [("", "All, or these:"), ("slowest-and-median", "The slowest and one in the middle")],
                    [visit.field("choose")],
                ),
                text_field(
                    "ranks", "Ranks", "Such as 0, 3, 8-11. Empty: all.", value=visit.field("ranks"), maxlength="2000"
                ),
            ],
            choices("profilers", "What is recorded", PROFILERS, sent.get("profilers", ["timeline"]), several=True),
            choices(
                "details",
                "In the timeline also",
                DETAILS,
                sent.get("details", []),
                several=True,
                about="Each slows the job down while it is traced.",
            ),
        ],
        div(".buttons")[button(".primary", type="submit")["Trace"]],
    ]


async def handle_job_action(visit: Visit) -> str:
    """Ask for the trace; its page comes next.

    Raises:
        RequestError: `wrong-request`, `not-allowed`, `no-such-job`.
    """
    by, length = visit.field("by"), visit.field("length")
    steps, seconds = (length, "") if by == "steps" else ("", length)
    wanted = {
        "job": visit.names["job"],
        "profilers": visit.form.get("profilers", []),
        "ranks": ranks_of(visit.field("ranks")),
        "steps": number_of(steps, "the number of steps", int),
        "duration_s": number_of(seconds, "the duration", float),
        **{name: True for name, _ in DETAILS if name in visit.form.get("details", [])},
    }
    if not wanted["profilers"]:
        raise wrong_request("nothing is chosen to be recorded")
    try:
        body = RequestBody(
            wanted=msgspec.convert(wanted, Wanted), choose=msgspec.convert(visit.field("choose"), Choice)
        )
    except msgspec.ValidationError as error:
        raise wrong_request(str(error)) from error
    request = await visit.answer(FleetRequestAnswer, "/api/v1/requests", method="POST", body=body)
    return to_request(request.id)


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


async def compute_request(visit: Visit) -> FleetRequestAnswer:
    """The request."""
    return await visit.answer(FleetRequestAnswer, "/api/v1/requests/{id}", id=visit.names["id"])


def build_request_content(request: FleetRequestAnswer) -> PageContent:
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


def build_request_controls(visit: Visit, request: FleetRequestAnswer) -> Node:
    """Its end before its time, for who asked for it and for operators."""
    own = request.who == visit.token.name and visit.may("requester")
    if request.state in FLEET_ENDED or not (own or visit.may("operator")):
        return None
    return div(".buttons.while-open")[sure("Cancel", p["What was recorded so far is lost."], {"do": "cancel"})]


async def handle_request_action(visit: Visit) -> str:
    """Cancel it.

    Raises:
        RequestError: `not-allowed`, `no-such-request`.
    """
    await visit.answer(FleetRequestAnswer, "/api/v1/requests/{id}", method="DELETE", id=visit.names["id"])
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
