"""The fleet at a glance: what its devices do, what is wrong, what runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
from htpy import Node, a, div, li, p, ul

from traceloom.agent.http.answers import RequestError
from traceloom.collect.request_routes import (
    FleetJobAnswer,
    FleetJobsAnswer,
    FleetRequestAnswer,
    FleetRequestsAnswer,
    HostAnswer,
    HostsAnswer,
)
from traceloom.collect.watch_routes import FleetNowAnswer, FleetTroubleAnswer, SlowerKernel
from traceloom.collect.watching import DeviceState
from traceloom.model import units
from traceloom.portal.layout import command
from traceloom.portal.links import to_capture, to_host, to_job, to_request
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.pages import jobs
from traceloom.portal.pages.regressions import times, to_change
from traceloom.portal.pictures import bar
from traceloom.portal.table import instant
from traceloom.portal.visit import Address, Visit

_DAY_NS = 24 * 3600 * 10**9
_DAY = "/topline?since=1d"
_SHOWN = 8  # of what is wrong, of each kind
STATES: tuple[tuple[DeviceState, str, str], ...] = (
    ("busy", "Busy", "compute"),
    ("idle-allocated", "Held, idle", "communication"),
    ("unallocated", "Free", "idle"),
    ("unreachable", "Silent", "blocking"),
)
"""State of a device, how it is called, its colour group."""


@dataclass(frozen=True)
class FleetView:
    """What the page shows."""

    now: FleetNowAnswer
    hosts: list[HostAnswer]
    jobs: list[FleetJobAnswer]
    failed: list[FleetRequestAnswer]  # requests of the last day
    open: list[FleetRequestAnswer]
    trouble: FleetTroubleAnswer | RequestError  # why it is not known


async def compute(visit: Visit) -> FleetView:
    """Ask the routes."""
    now = await visit.answer(FleetNowAnswer, "/api/v1/now")
    hosts = await visit.answer(HostsAnswer, "/api/v1/hosts")
    running = await visit.answer(FleetJobsAnswer, "/api/v1/jobs")
    requests = (await visit.answer(FleetRequestsAnswer, "/api/v1/requests", query={"most": "1000"})).requests
    since = time.time_ns() - _DAY_NS
    ended = {"done", "cancelled", "partial", "failed"}
    trouble: FleetTroubleAnswer | RequestError
    try:
        trouble = await visit.answer(FleetTroubleAnswer, "/api/v1/trouble")
    except RequestError as error:  # it takes most work; what runs and who is silent are known without it
        trouble = error
    return FleetView(
        now,
        hosts.hosts,
        running.jobs,
        [r for r in requests if r.state == "failed" and r.since_ns > since],
        [r for r in requests if r.state not in ended],
        trouble,
    )


def content(view: FleetView) -> PageContent:
    """What is shown of it."""
    now = view.now
    wrong = _wrong(view)
    sections = [
        ContentSection("devices", "Devices now", _devices(view)),
        ContentSection(
            "wrong", "What is wrong", ul(".wrong")[wrong] if wrong else p(".quiet")["Nothing that is known of."]
        ),
        ContentSection("jobs", "Running now", jobs.table(view.jobs)),
    ]
    return PageContent(_answer(view), sections, numbers=_numbers(now, view.open))


def _answer(view: FleetView) -> str:
    devices = sum(view.now.devices.values())
    if not view.now.hosts:
        return "No host belongs to the fleet yet"
    busy = view.now.devices.get("busy", 0)
    hosts = units.counted(view.now.hosts, "host")
    if not devices:
        return f"{hosts}, {units.counted(len(view.jobs), 'job')}, no devices"
    jobs_now = units.counted(len(view.jobs), "job")
    return f"{units.count(busy)} of {units.counted(devices, 'device')} on {hosts} are busy, for {jobs_now}"


def _numbers(now: FleetNowAnswer, requests: list[FleetRequestAnswer]) -> list[KeyNumber]:
    day, about = now.topline, "of the device time that jobs held, last 24 h"
    waiting = sum(now.tasks.get(state, 0) for state in ("received", "checked", "analysed"))
    numbers = []
    if day is not None:
        if day.device_use is not None:
            numbers.append(KeyNumber("Device use", units.share(day.device_use, 1.0), about, leads=_DAY))
        if day.flop_rate is not None:
            rate = units.flop_rate(day.flop_rate)
            numbers.append(KeyNumber("FLOP/s", rate, "of a held device, at least, last 24 h", leads=_DAY))
        if day.power_w is not None:
            watts = f"{units.number(round(day.power_w))} W"
            numbers.append(KeyNumber("Power", watts, "of a held device, last 24 h", leads=_DAY))
    analysed = units.count(now.tasks.get("committed", 0))
    return [
        *numbers,
        KeyNumber("Requests", units.count(len(requests)), "traces that are being taken", leads="/requests"),
        KeyNumber("Captures", analysed, f"analysed; {units.count(waiting)} wait", leads="/captures"),
    ]


def _devices(view: FleetView) -> Node:
    counts = view.now.devices
    whole = sum(counts.values())
    if not view.now.hosts:
        return div(".empty")[
            p["A host joins by a token that works once. Beside the service:"],
            command("traceloom fleet token enrol node7 > node7.token"),
            p["and on the host:"],
            command("traceloom agent run --server URL --token-file node7.token"),
        ]
    if not whole:
        return p(".quiet")["No host has devices."]
    return bar([(name, colour, counts.get(state, 0)) for state, name, colour in STATES])


def _wrong(view: FleetView) -> list[Node]:
    """What to look at, of each kind the first, and how many there are more; what stops work stands first."""
    lost = [host for host in view.hosts if host.lost]
    troubled = [host for host in view.hosts if not host.lost and (host.trouble or host.stale_devices)]
    unknown: list[Node] = []
    trouble = view.trouble
    if isinstance(trouble, RequestError):
        unknown = [["Whether kernels became slower is not known now: ", trouble.message]]
        trouble = FleetTroubleAnswer(slower=[], quarantined=[])
    slower: dict[str, SlowerKernel] = {}
    for kernel in trouble.slower:  # what costs most first, of each kernel once
        slower.setdefault(kernel.kernel, kernel)
    hung = [job.job for job in view.jobs if job.hung]
    kinds: list[tuple[str, str, list[Node]]] = [
        ("bad", "/jobs", [[a(href=to_job(job))[job], " hangs: it makes no steps any more"] for job in hung]),
        ("bad", "/hosts", [_silent(host) for host in lost]),
        ("warn", "/hosts", [_troubled(host) for host in troubled]),
        ("bad", "/regressions", [_slower(kernel) for kernel in slower.values()]),
        ("bad", "/requests?requests.q=failed", [
            [a(href=to_request(of.id))[f"Trace of {of.wanted.job}"], f" failed: {of.detail or of.reason}"]
            for of in view.failed
        ]),
        ("bad", "/captures?captures.q=quarantined", [
            [a(href=to_capture(of.capture))[of.capture], f" could not be analysed: {of.error}"]
            for of in trouble.quarantined
        ]),
        ("warn", "/regressions", unknown),
    ]  # fmt: skip
    return [
        item
        for look, href, items in kinds
        for item in (
            *(li(class_=look)[each] for each in items[:_SHOWN]),
            li[a(href=href)[f"and {units.count(len(items) - _SHOWN)} more"]] if len(items) > _SHOWN else None,
        )
        if item is not None
    ]


def _silent(host: HostAnswer) -> Node:
    link = a(href=to_host(host.host))[host.host]
    if host.heard_ns is None:
        return [link, " was not heard of since the service started"]
    return [link, " was last heard of ", instant(host.heard_ns)]


def _troubled(host: HostAnswer) -> Node:
    silent = [f"{units.counted(host.stale_devices, 'device')} silent"] if host.stale_devices else []
    why = "; ".join([*silent, *(f"{name}: {why}" for name, why in sorted(host.trouble.items()))])
    return [a(href=to_host(host.host))[host.host], f": {why}"]


def _slower(kernel: SlowerKernel) -> Node:
    change = to_change(Address("/", ""), msgspec.structs.asdict(kernel))
    since = [" since ", instant(kernel.since_ns), f", in {units.counted(kernel.jobs_after, 'job')}"]
    return [a(href=change)[kernel.kernel], f" takes {times(kernel.change)}", since]


PAGE = Page(
    "/",
    "Overview",
    "The fleet now: devices by what they do, the topline of the last day, what is wrong, what runs.",
    compute,
    content,
    live=True,
    menu="Watch",
)
