"""One job: its processes, what was captured and found of it, and the form by which a trace of it is asked for."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import get_args

import msgspec
from htpy import Node, button, code, div, form, fragment, p

from traceloom.agent.http.answers import wrong_request
from traceloom.agent.requests.model import ProfilerName, Wanted
from traceloom.collect.answers import CaptureAnswer, CapturesAnswer
from traceloom.collect.hosts import Choice
from traceloom.collect.request_routes import (
    FleetRequestAnswer,
    FleetRequestsAnswer,
    RequestBody,
)
from traceloom.collect.watch_routes import FindingsAnswer, JobDetailAnswer, UsageAnswer
from traceloom.collect.watching import FleetFinding, UsageOfTime
from traceloom.model import units
from traceloom.portal.forms import choices, number_of, ranks_of, text_field
from traceloom.portal.layout import command, folded
from traceloom.portal.links import to_capture, to_host, to_request
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.pages import captures, host, requests
from traceloom.portal.table import PageColumn, PageTable, declared
from traceloom.portal.visit import Visit
from traceloom.store.schemas import SCHEMAS

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
    *(column for column in host.PROCESS_COLUMNS if column.key not in {"rank", "job", "user"}),
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


async def compute(visit: Visit) -> JobView:
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


def content(view: JobView) -> PageContent:
    """What is shown of it."""
    job = view.detail.job
    no_captures = fragment[
        p["Nothing of this job is kept yet. Ask for a trace while it runs, or upload what was recorded:"],
        command(f"traceloom upload run --job {shlex.quote(view.name)}"),
    ]
    processes = [{"host": member.host, **host.process_row(member.process)} for member in view.detail.processes]
    sections = [
        ContentSection("findings", "What to fix first", findings_table(view.findings), "Findings of its captures.")
        if view.findings
        else None,
        ContentSection("captures", "Captures", captures.table(view.captures, no_captures, of_job=True)),
        ContentSection("requests", "Traces asked for", requests.table(view.requests, of_job=True))
        if view.requests
        else None,
        ContentSection("usage", "Device time, last 6 h", host.usage_picture(view.usage, f"Device time of {view.name}"))
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
        KeyNumber("Ranks", units.count(job.ranks), f"{of}, on {units.counted(len(job.hosts), 'host')}"),
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


def controls(visit: Visit, view: JobView) -> Node:
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


async def act(visit: Visit) -> str:
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


PAGE = Page(
    "/jobs/{job:path}",
    "Job",
    "One job: its processes, captures, findings and device time; the form by which a trace of it is asked for.",
    compute,
    content,
    controls,
    act=act,
    live=True,
)
