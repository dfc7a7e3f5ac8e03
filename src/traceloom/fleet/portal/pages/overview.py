"""The pages of the fleet, hosts, a host, and jobs at this moment."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import msgspec
from htpy import Node, a, button, code, div, form, fragment, li, p, ul

from traceloom.agent.fleet_link.protocol import HostProcess
from traceloom.fleet.handlers.hosts import (
    EnrolmentBody,
    EnrolmentResponse,
    FleetJobResponse,
    FleetJobsResponse,
    FleetRequestResponse,
    FleetRequestsResponse,
    HostResponse,
    HostsResponse,
    RemovedHostResponse,
)
from traceloom.fleet.handlers.now import (
    BUSY_METRIC,
    DeviceState,
    DeviceStatus,
    FleetProblemsResponse,
    FleetStatusResponse,
    HostDetailResponse,
    SlowerKernel,
    UsagePeriod,
    UsageResponse,
)
from traceloom.fleet.portal.charts import draw_areas, draw_bar
from traceloom.fleet.portal.page import (
    ContentSection,
    KeyFigure,
    Page,
    PageContent,
    build_capture_url,
    build_command,
    build_confirm_button,
    build_fold_out,
    build_host_url,
    build_job_url,
    build_request_url,
    build_text_field,
    parse_positive_number,
)
from traceloom.fleet.portal.page_request import PageRequest, PageUrl
from traceloom.fleet.portal.pages.kernel import build_change_url, format_change
from traceloom.fleet.portal.tables import PageColumn, PageRow, PageTable, render_state, render_time
from traceloom.server.problem import HttpError
from traceloom.system import units

JOBS_COLUMNS = (
    PageColumn("job", "Job", "name", link=lambda row: build_job_url(str(row["job"]))),
    PageColumn("user", "User", hint="whose processes they are", unknown="its processes do not say"),
    PageColumn("hosts", "Hosts", "count"),
    PageColumn("devices", "Devices", "count", "devices that its processes hold"),
    PageColumn("ranks", "Ranks", "count", "ranks that were seen"),
    PageColumn("world_size", "Of", "count", "world size that they say", "they do not say it"),
    PageColumn(
        "steps_per_second", "Steps/s", "number", "of its slowest rank", "nobody measures it"
    ),
    PageColumn("traceable", "Traceable", hint="processes that are prepared for traces on demand"),
    PageColumn("framework", "Framework", unknown="no framework was seen in its processes"),
    PageColumn("scheduler", "Scheduler", unknown="nothing names it"),
)


async def compute_jobs(visit: PageRequest) -> list[FleetJobResponse]:
    """Returns running jobs, sorted by name."""
    return (await visit.answer(FleetJobsResponse, "/api/v1/jobs")).jobs


def build_job_row(job: FleetJobResponse) -> PageRow:
    """Builds a job's row of `JOBS_COLUMNS`."""
    return {
        "job": job.job,
        "user": job.user,
        "hosts": len(job.hosts),
        "devices": job.devices,
        "ranks": job.ranks,
        "world_size": job.world_size,
        "steps_per_second": job.steps_per_second,
        "traceable": "all"
        if job.traceable == job.processes
        else f"{job.traceable} of {job.processes}",
        "framework": job.framework,
        "scheduler": job.scheduler,
    }


def build_jobs_table(jobs: list[FleetJobResponse]) -> PageTable:
    empty = fragment[
        p[
            "No job runs on hosts of the fleet, as far as they say. Prepare one on a host where an agent runs:"
        ],
        build_command('eval "$(traceloom agent env)"'),
        p[
            "and start the program in that shell. ",
            code["TRACELOOM_JOB"],
            " names the job where no scheduler does.",
        ],
    ]
    return PageTable(
        "jobs", "Jobs that run now", JOBS_COLUMNS, [build_job_row(job) for job in jobs], empty
    )


def build_jobs_content(jobs: list[FleetJobResponse]) -> PageContent:
    ready = sum(job.traceable > 0 for job in jobs)
    numbers = [
        KeyFigure("Jobs", units.format_count(len(jobs)), "that run now"),
        KeyFigure(
            "Traceable", units.format_count(ready), "have processes that are prepared for traces"
        ),
        KeyFigure(
            "Devices", units.format_count(sum(job.devices for job in jobs)), "that jobs hold"
        ),
        KeyFigure(
            "Users",
            units.format_count(len({job.user for job in jobs if job.user})),
            "whose jobs run",
        ),
    ]
    return PageContent(
        "Jobs",
        [ContentSection("jobs", "Running now", build_jobs_table(jobs))],
        numbers=numbers if jobs else (),
    )


JOBS_PAGE = Page(
    "/jobs",
    "Jobs",
    "Jobs that run now: whose they are, how fast they step, whether they can be traced.",
    compute_jobs,
    build_jobs_content,
    live=True,
    menu="Watch",
)

_DAY_NS = 24 * 3600 * 10**9
_TOPLINE_URL = "/topline?since=1d"
_MAX_PROBLEMS_PER_KIND = 8  # max problems shown of each kind
DEVICE_STATES: tuple[tuple[DeviceState, str, str], ...] = (
    ("busy", "Busy", "compute"),
    ("idle-allocated", "Held, idle", "communication"),
    ("unallocated", "Free", "idle"),
    ("unreachable", "Silent", "blocking"),
)
"""State of a device, label, colour group."""


@dataclass(frozen=True)
class FleetView:
    """Data of the page."""

    now: FleetStatusResponse
    hosts: list[HostResponse]
    jobs: list[FleetJobResponse]
    failed: list[FleetRequestResponse]  # requests of the last day
    open: list[FleetRequestResponse]
    problems: FleetProblemsResponse | HttpError  # the error why problems are unknown


async def compute_overview(visit: PageRequest) -> FleetView:
    status = await visit.answer(FleetStatusResponse, "/api/v1/now")
    hosts = await visit.answer(HostsResponse, "/api/v1/hosts")
    running = await visit.answer(FleetJobsResponse, "/api/v1/jobs")
    requests = (
        await visit.answer(FleetRequestsResponse, "/api/v1/requests", query={"most": "1000"})
    ).requests
    since = time.time_ns() - _DAY_NS
    ended = {"done", "cancelled", "partial", "failed"}
    problems: FleetProblemsResponse | HttpError
    try:
        problems = await visit.answer(FleetProblemsResponse, "/api/v1/problems")
    except HttpError as error:
        # Problems are the most expensive query; the rest of the page works without them.
        problems = error
    return FleetView(
        status,
        hosts.hosts,
        running.jobs,
        [r for r in requests if r.state == "failed" and r.since_ns > since],
        [r for r in requests if r.state not in ended],
        problems,
    )


def build_overview_content(view: FleetView) -> PageContent:
    status = view.now
    wrong = _list_problems(view)
    sections = [
        ContentSection("devices", "Devices now", _draw_devices(view)),
        ContentSection(
            "wrong",
            "What is wrong",
            ul(".wrong")[wrong] if wrong else p(".quiet")["Nothing that is known of."],
        ),
        ContentSection("jobs", "Running now", build_jobs_table(view.jobs)),
    ]
    return PageContent(
        _describe_fleet(view), sections, numbers=_build_key_figures(status, view.open)
    )


def _describe_fleet(view: FleetView) -> str:
    devices = sum(view.now.devices.values())
    if not view.now.hosts:
        return "No host belongs to the fleet yet"
    busy = view.now.devices.get("busy", 0)
    hosts = units.format_quantity(view.now.hosts, "host")
    if not devices:
        return f"{hosts}, {units.format_quantity(len(view.jobs), 'job')}, no devices"
    jobs_now = units.format_quantity(len(view.jobs), "job")
    return f"{units.format_count(busy)} of {units.format_quantity(devices, 'device')} on {hosts} are busy, for {jobs_now}"


def _build_key_figures(
    now: FleetStatusResponse, requests: list[FleetRequestResponse]
) -> list[KeyFigure]:
    day, note = now.topline, "of the device time that jobs held, last 24 h"
    waiting = sum(now.tasks.get(state, 0) for state in ("received", "checked", "analysed"))
    numbers = []
    if day is not None:
        if day.device_use is not None:
            numbers.append(
                KeyFigure(
                    "Device use", units.format_share(day.device_use, 1.0), note, leads=_TOPLINE_URL
                )
            )
        if day.flop_rate is not None:
            rate = units.format_flop_rate(day.flop_rate)
            numbers.append(
                KeyFigure(
                    "FLOP/s", rate, "of a held device, at least, last 24 h", leads=_TOPLINE_URL
                )
            )
        if day.power_w is not None:
            watts = f"{units.format_number(round(day.power_w))} W"
            numbers.append(
                KeyFigure("Power", watts, "of a held device, last 24 h", leads=_TOPLINE_URL)
            )
    analysed = units.format_count(now.tasks.get("committed", 0))
    return [
        *numbers,
        KeyFigure(
            "Requests",
            units.format_count(len(requests)),
            "traces that are being taken",
            leads="/requests",
        ),
        KeyFigure(
            "Captures", analysed, f"analysed; {units.format_count(waiting)} wait", leads="/captures"
        ),
    ]


def _draw_devices(view: FleetView) -> Node:
    counts = view.now.devices
    total = sum(counts.values())
    if not view.now.hosts:
        return div(".empty")[
            p["A host joins by a token that works once. Beside the service:"],
            build_command("traceloom fleet token enrol node7 > node7.token"),
            p["and on the host:"],
            build_command("traceloom agent run --server URL --token-file node7.token"),
        ]
    if not total:
        return p(".quiet")["No host has devices."]
    return draw_bar([(name, colour, counts.get(state, 0)) for state, name, colour in DEVICE_STATES])


def _list_problems(view: FleetView) -> list[Node]:
    """Lists the first problems of each kind, and the number of further ones.

    Problems that stop work come first.
    """
    lost = [host for host in view.hosts if host.lost]
    troubled = [
        host
        for host in view.hosts
        if not host.lost and (host.collector_errors or host.stale_devices)
    ]
    unknown: list[Node] = []
    problems = view.problems
    if isinstance(problems, HttpError):
        unknown = [["Whether kernels became slower is not known now: ", problems.message]]
        problems = FleetProblemsResponse(slower=[], quarantined=[])
    slower: dict[str, SlowerKernel] = {}
    for kernel in problems.slower:  # most expensive first, each kernel once
        slower.setdefault(kernel.kernel, kernel)
    kinds: list[tuple[str, str, list[Node]]] = [
        (
            "bad",
            "/jobs",
            [
                [a(href=build_job_url(job.job))[job.job], " hangs: it makes no steps any more"]
                for job in view.jobs
                if job.hung
            ],
        ),
        ("bad", "/hosts", [_describe_silent_host(host) for host in lost]),
        ("warn", "/hosts", [_describe_troubled_host(host) for host in troubled]),
        ("bad", "/regressions", [_describe_slower_kernel(kernel) for kernel in slower.values()]),
        (
            "bad",
            "/requests?requests.q=failed",
            [
                [
                    a(href=build_request_url(failure.id))[f"Trace of {failure.spec.job}"],
                    f" failed: {failure.detail or failure.reason}",
                ]
                for failure in view.failed
            ],
        ),
        (
            "bad",
            "/captures?captures.q=quarantined",
            [
                [
                    a(href=build_capture_url(failure.capture))[failure.capture],
                    f" could not be analysed: {failure.error}",
                ]
                for failure in problems.quarantined
            ],
        ),
        ("warn", "/regressions", unknown),
    ]
    return [
        item
        for css_class, href, items in kinds
        for item in (
            *(li(class_=css_class)[problem] for problem in items[:_MAX_PROBLEMS_PER_KIND]),
            li[a(href=href)[f"and {units.format_count(len(items) - _MAX_PROBLEMS_PER_KIND)} more"]]
            if len(items) > _MAX_PROBLEMS_PER_KIND
            else None,
        )
        if item is not None
    ]


def _describe_silent_host(host: HostResponse) -> Node:
    link = a(href=build_host_url(host.host))[host.host]
    if host.heard_ns is None:
        return [link, " was not heard of since the service started"]
    return [link, " was last heard of ", render_time(host.heard_ns)]


def _describe_troubled_host(host: HostResponse) -> Node:
    silent = (
        [f"{units.format_quantity(host.stale_devices, 'device')} silent"]
        if host.stale_devices
        else []
    )
    reason = "; ".join(
        [*silent, *(f"{name}: {reason}" for name, reason in sorted(host.collector_errors.items()))]
    )
    return [a(href=build_host_url(host.host))[host.host], f": {reason}"]


def _describe_slower_kernel(kernel: SlowerKernel) -> Node:
    change = build_change_url(PageUrl("/", ""), msgspec.structs.asdict(kernel))
    since = [
        " since ",
        render_time(kernel.since_ns),
        f", in {units.format_quantity(kernel.jobs_after, 'job')}",
    ]
    return [a(href=change)[kernel.kernel], f" takes {format_change(kernel.change)}", since]


OVERVIEW_PAGE = Page(
    "/",
    "Overview",
    "The fleet now: devices by what they do, the topline of the last day, what is wrong, what runs.",
    compute_overview,
    build_overview_content,
    live=True,
    menu="Watch",
)

HOST_COLUMNS = (
    PageColumn("host", "Host", link=lambda row: build_host_url(str(row["host"]))),
    PageColumn("state", "State", "state", "lost: it was silent for a minute"),
    PageColumn("heard_ns", "Heard", "instant", unknown="not since the service started"),
    PageColumn("devices", "Devices", "count"),
    PageColumn("stale_devices", "Silent", "count", "devices that cannot be read now"),
    PageColumn(
        "processes", "Processes", "count", "that matter: they hold devices, or belong to a job"
    ),
    PageColumn(
        "jobs",
        "Jobs",
        unknown="no job runs there",
        link=lambda row: (
            build_host_url(str(row["host"]))
            if ", " in str(row["jobs"])
            else build_job_url(str(row["jobs"]))
        ),
    ),
    PageColumn(
        "clock_offset_ns",
        "Clock",
        "time",
        "how far its clock is behind that of the service",
        "not measured yet",
    ),
    PageColumn("clock_error_ns", "±", "time", "at most", "not measured yet"),
    PageColumn("version", "Version", unknown="not heard of yet"),
    PageColumn("errors", "Errors", unknown="it reports none"),
)


def get_host_state(host: HostResponse) -> str:
    """Returns `here`, `lost` or `never`."""
    return "never" if host.heard_ns is None else "lost" if host.lost else "here"


async def compute_hosts(visit: PageRequest) -> list[HostResponse]:
    """Returns hosts, sorted by name."""
    return (await visit.answer(HostsResponse, "/api/v1/hosts")).hosts


def build_hosts_content(hosts: list[HostResponse]) -> PageContent:
    rows: list[PageRow] = [
        {
            "host": host.host,
            "state": get_host_state(host),
            "heard_ns": host.heard_ns,
            "devices": host.devices,
            "stale_devices": host.stale_devices,
            "processes": host.processes,
            "jobs": ", ".join(host.jobs),
            "clock_offset_ns": host.clock_offset_ns,
            "clock_error_ns": host.clock_error_ns,
            "version": host.version,
            "errors": "; ".join(
                f"{name}: {reason}" for name, reason in sorted(host.collector_errors.items())
            ),
        }
        for host in hosts
    ]
    empty = fragment[
        p[
            "No host belongs to the fleet yet. A host joins by a token that works once. Beside the service:"
        ],
        build_command("traceloom fleet token enrol node7 > node7.token"),
        p["and on the host:"],
        build_command("traceloom agent run --server URL --token-file node7.token"),
    ]
    lost = sum(host.lost for host in hosts)
    silent = sum(host.stale_devices for host in hosts)
    numbers = [
        KeyFigure("Hosts", units.format_count(len(hosts)), "belong to the fleet"),
        KeyFigure(
            "Lost",
            units.format_count(lost),
            "were not heard of for a minute",
            "bad" if lost else "",
        ),
        KeyFigure("Devices", units.format_count(sum(host.devices for host in hosts)), "on them"),
        KeyFigure(
            "Silent",
            units.format_count(silent),
            "devices that cannot be read",
            "warn" if silent else "",
        ),
    ]
    table = PageTable("hosts", "Hosts of the fleet", HOST_COLUMNS, rows, empty)
    return PageContent(
        "Hosts", [ContentSection("hosts", "By name", table)], numbers=numbers if hosts else ()
    )


def build_hosts_controls(visit: PageRequest, _hosts: list[HostResponse]) -> Node:
    """Builds the form to enrol a host, for operators."""
    if not visit.may("operator"):
        return None
    content = form(method="post")[
        div(".fields")[
            build_text_field(
                "host",
                "Host",
                "Its name; empty: any host.",
                value=visit.field("host"),
                maxlength="253",
            ),
            build_text_field(
                "days",
                "Days",
                "For so many it may be used, once.",
                value=visit.field("days") or "1",
            ),
        ],
        div(".buttons")[button(".primary", type="submit")["Make a token"]],
    ]
    return build_fold_out("join", "Let a host join", content, is_open=bool(visit.form))


async def handle_hosts_action(visit: PageRequest) -> Node:
    """Creates an enrolment token, and shows it once.

    Raises:
        HttpError: `wrong-request`, `not-allowed`.
    """
    days = parse_positive_number(visit.field("days"), "the number of days", float) or 1.0
    body = EnrolmentBody(host=visit.field("host"), days=days)
    answer = await visit.answer(EnrolmentResponse, "/api/v1/agents", method="POST", body=body)
    return div(".notice", role="status")[
        p[
            "The token is shown only now. Put it into a file on ",
            code[answer.host] if answer.host else "the host",
            ":",
        ],
        build_command(answer.token),
        p["and start the agent with it; URL is the address of this page, as far as the port:"],
        build_command("traceloom agent run --server URL --token-file FILE"),
    ]


HOSTS_PAGE = Page(
    "/hosts",
    "Hosts",
    "Hosts of the fleet: which are here, their devices, how far their clocks are off.",
    compute_hosts,
    build_hosts_content,
    build_hosts_controls,
    act=handle_hosts_action,
    live=True,
    menu="Watch",
)

_NOT_MEASURED = "the device does not measure it"
DEVICE_COLUMNS = (
    PageColumn("index", "Device", unknown="it has no number"),
    PageColumn("state", "State", "state"),
    PageColumn("model", "Model", unknown="the agent does not name it"),
    PageColumn(
        "jobs",
        "Jobs",
        unknown="no job holds it",
        link=lambda row: "/jobs" if ", " in str(row["jobs"]) else build_job_url(str(row["jobs"])),
    ),
    PageColumn(
        "busy", "Busy", "share", "share of time in which at least one kernel ran", _NOT_MEASURED
    ),
    PageColumn(
        "sm_active",
        "SM active",
        "share",
        "cycles in which a multiprocessor had work",
        _NOT_MEASURED,
    ),
    PageColumn("power_w", "Power, W", "number", "", _NOT_MEASURED),
    PageColumn("memory", "Memory", "bytes", "in use", _NOT_MEASURED),
    PageColumn("memory_limit", "Of", "bytes", "all memory of the device", _NOT_MEASURED),
    PageColumn("uuid", "Id", "name"),
    PageColumn("stale", "Why silent", unknown="it answers"),
)
PROCESS_COLUMNS = (
    PageColumn("pid", "Process", "text"),
    PageColumn(
        "job",
        "Job",
        "name",
        unknown="it belongs to none",
        link=lambda row: build_job_url(str(row["job"])),
    ),
    PageColumn("rank", "Rank", "count", unknown="nothing says it"),
    PageColumn("user", "User", unknown="nothing says it"),
    PageColumn("account", "Account", unknown="nothing says it"),
    PageColumn("devices", "Devices", "count", "that it holds"),
    PageColumn("steps_per_second", "Steps/s", "number", unknown="nobody measures it"),
    PageColumn("traceable", "Traces", "text", "whether it is prepared for traces on demand"),
    PageColumn("framework", "Framework", unknown="no framework was seen"),
)


@dataclass(frozen=True)
class HostView:
    """Data of the page."""

    detail: HostDetailResponse
    usage: list[UsagePeriod]


async def compute_host(visit: PageRequest) -> HostView:
    host = visit.names["host"]
    detail = await visit.answer(HostDetailResponse, "/api/v1/hosts/{host}", host=host)
    used = await visit.answer(UsageResponse, "/api/v1/usage", query={"host": host, "hours": "6"})
    return HostView(detail, used.usage)


def build_process_row(process: HostProcess) -> PageRow:
    """Builds a process's row of `PROCESS_COLUMNS`."""
    return {
        "pid": process.pid,
        "job": process.job,
        "rank": process.rank,
        "user": process.user,
        "account": process.account,
        "devices": len(process.devices),
        "steps_per_second": process.steps_per_second,
        "traceable": "prepared" if process.polls else "not prepared",
        "framework": process.framework,
    }


def draw_usage(usage: list[UsagePeriod], label: str) -> Node:
    """Draws device time by state over time."""
    usage_by_state: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for row in usage:
        usage_by_state[row.state][row.time_ns] += row.device_ms
    times = sorted({row.time_ns for row in usage})
    parts = {
        (name, colour): usage_by_state[state]
        for state, name, colour in DEVICE_STATES
        if state in usage_by_state
    }
    return draw_areas(times, 60 * 10**9, parts, label)


def build_host_content(view: HostView) -> PageContent:
    host, devices = view.detail.host, view.detail.devices
    rows = [build_process_row(process) for process in view.detail.processes]
    is_heard = host.heard_ns is not None
    without_devices: Node = [
        "It has none that its agent can read; on the host ",
        code["traceloom agent doctor"],
        " says why.",
    ]
    if not is_heard:
        without_devices = [
            "Its agent was not heard of since the service started. On the host ",
            code["traceloom agent status"],
            " says whether it runs, and how the service answers it.",
        ]
    problem_items = [
        li(".warn")[f"{name}: {reason}"] for name, reason in sorted(host.collector_errors.items())
    ]
    sections = [
        ContentSection("problems", "Problems", ul(".wrong")[problem_items])
        if problem_items
        else None,
        ContentSection(
            "devices",
            "Devices",
            PageTable(
                "devices",
                "Devices of the host",
                DEVICE_COLUMNS,
                [_build_device_row(device) for device in devices],
                without_devices,
            ),
        ),
        ContentSection(
            "processes",
            "Processes",
            PageTable(
                "processes",
                "Processes of the host",
                PROCESS_COLUMNS,
                rows,
                "No process there holds a device or belongs to a job."
                if is_heard
                else "Nothing was heard of it yet.",
            ),
        ),
        ContentSection(
            "usage",
            "Device time, last 6 h",
            draw_usage(view.usage, f"Device time of {host.host} by state"),
        )
        if devices
        else None,
    ]
    busy = sum(device.state == "busy" for device in devices)
    offset, error = host.clock_offset_ns, host.clock_error_ns
    numbers = [
        KeyFigure(
            "State",
            render_state(get_host_state(host)),
            fragment["heard ", render_time(host.heard_ns)]
            if host.heard_ns is not None
            else "not since the service started",
        ),
        KeyFigure("Devices", units.format_count(len(devices)), f"{units.format_count(busy)} busy"),
        KeyFigure(
            "Processes",
            units.format_count(host.processes),
            units.format_quantity(len(host.jobs), "job"),
        ),
        KeyFigure(
            "Clock",
            "–" if offset is None else units.format_duration(abs(offset)),
            "not measured yet"
            if error is None or offset is None
            else f"{'ahead of' if offset < 0 else 'behind'} the service, ± {units.format_duration(error)}",
        ),
        KeyFigure("Agent", host.version or "–", "its version"),
    ]
    return PageContent(
        host.host, [part for part in sections if part], above=[("Hosts", "/hosts")], numbers=numbers
    )


def _build_device_row(device: DeviceStatus) -> PageRow:
    values = device.values
    memory, limit = values.get("gpu_memory_used_bytes"), values.get("gpu_memory_limit_bytes")
    power = values.get("gpu_power_watts")
    return {
        "index": device.index,
        "state": device.state,
        "model": device.model,
        "jobs": ", ".join(device.jobs),
        "busy": values.get(BUSY_METRIC),
        "sm_active": values.get("gpu_sm_active_ratio"),
        "power_w": None if power is None else round(power),
        "memory": None if memory is None else int(memory),
        "memory_limit": None if limit is None else int(limit),
        "uuid": device.device,
        "stale": device.stale,
    }


def build_host_controls(visit: PageRequest, view: HostView) -> Node:
    """Builds the button to remove the host, for operators."""
    if not visit.may("operator"):
        return None
    question = p["Its agent is refused from then on; what it sent is kept."]
    return build_confirm_button(f"Remove {view.detail.host.host}", question, {"do": "remove"})


async def handle_host_action(visit: PageRequest) -> str:
    """Removes the host from the fleet.

    Raises:
        HttpError: `not-allowed`, `no-such-host`.
    """
    await visit.answer(
        RemovedHostResponse, "/api/v1/hosts/{host}", method="DELETE", host=visit.names["host"]
    )
    return "/hosts"


HOST_PAGE = Page(
    "/hosts/{host}",
    "Host",
    "One host: its devices and what they measure, processes and whose they are, device time.",
    compute_host,
    build_host_content,
    build_host_controls,
    act=handle_host_action,
    live=True,
)
