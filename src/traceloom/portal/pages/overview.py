"""The fleet at a glance: what its devices do, what is wrong, what runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from htpy import Node, a, code, div, fragment, li, p, ul

from traceloom.collect.request_routes import (
    FleetJobAnswer,
    FleetJobsAnswer,
    FleetRequestAnswer,
    FleetRequestsAnswer,
    HostAnswer,
    HostsAnswer,
)
from traceloom.collect.watch_routes import FleetNowAnswer
from traceloom.collect.watching import DeviceState
from traceloom.model import units
from traceloom.portal.layout import command
from traceloom.portal.links import to_host, to_request
from traceloom.portal.page import KeyNumber, Page, PageContent, PageSection
from traceloom.portal.pages import jobs
from traceloom.portal.pictures import bar
from traceloom.portal.table import instant
from traceloom.portal.visit import Visit

_DAY_NS = 24 * 3600 * 10**9
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


async def compute(visit: Visit) -> FleetView:
    """Ask the routes."""
    now = await visit.answer(FleetNowAnswer, "/api/v1/now")
    hosts = await visit.answer(HostsAnswer, "/api/v1/hosts")
    running = await visit.answer(FleetJobsAnswer, "/api/v1/jobs")
    requests = (await visit.answer(FleetRequestsAnswer, "/api/v1/requests", query={"most": "1000"})).requests
    since = time.time_ns() - _DAY_NS
    ended = {"done", "cancelled", "partial", "failed"}
    return FleetView(
        now,
        hosts.hosts,
        running.jobs,
        [r for r in requests if r.state == "failed" and r.since_ns > since],
        [r for r in requests if r.state not in ended],
    )


def content(view: FleetView) -> PageContent:
    """What is shown of it."""
    now = view.now
    wrong = _wrong(view)
    sections = [
        PageSection("devices", "Devices now", _devices(view)),
        PageSection(
            "wrong", "What is wrong", ul(".wrong")[wrong] if wrong else p(".quiet")["Nothing that is known of."]
        ),
        PageSection("jobs", "Running now", jobs.table(view.jobs)),
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
            numbers.append(KeyNumber("Device use", units.share(day.device_use, 1.0), about))
        if day.flop_rate is not None:
            numbers.append(KeyNumber("FLOP/s", units.flop_rate(day.flop_rate), "of a held device, at least, last 24 h"))
        if day.power_w is not None:
            numbers.append(KeyNumber("Power", f"{units.number(round(day.power_w))} W", "of a held device, last 24 h"))
    numbers.append(KeyNumber("Requests", units.count(len(requests)), "traces that are being taken"))
    numbers.append(
        KeyNumber("Captures", units.count(now.tasks.get("committed", 0)), f"analysed; {units.count(waiting)} wait")
    )
    return numbers


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
    lost = [host for host in view.hosts if host.lost]
    items: list[Node] = [
        li(".bad")[
            a(href=to_host(host.host))[host.host],
            fragment[" was last heard of ", instant(host.heard_ns)]
            if host.heard_ns is not None
            else " was not heard of since the service started",
        ]
        for host in lost[:_SHOWN]
    ]
    troubled = [host for host in view.hosts if not host.lost and (host.trouble or host.stale_devices)]
    for host in troubled[:_SHOWN]:
        what = "; ".join(f"{name}: {why}" for name, why in sorted(host.trouble.items()))
        silent = f"{units.counted(host.stale_devices, 'device')} silent" if host.stale_devices else ""
        items.append(li(".warn")[a(href=to_host(host.host))[host.host], ": ", "; ".join(filter(None, (silent, what)))])
    for request in view.failed[:_SHOWN]:
        what = request.detail or request.reason
        items.append(li(".bad")[a(href=to_request(request.id))[f"Trace of {request.wanted.job}"], f" failed: {what}"])
    quarantined = view.now.tasks.get("quarantined", 0)
    if quarantined:
        items.append(
            li(".bad")[
                a(href="/captures?captures.q=quarantined")[units.counted(quarantined, "capture")],
                " could not be analysed; ",
                code["traceloom fleet check"],
                " says why",
            ]
        )
    more = max(len(lost) - _SHOWN, 0) + max(len(troubled) - _SHOWN, 0) + max(len(view.failed) - _SHOWN, 0)
    return [*items, li[f"and {units.count(more)} more"]] if more else items


PAGE = Page(
    "/",
    "Overview",
    "The fleet now: devices by what they do, the topline of the last day, what is wrong, what runs.",
    compute,
    content,
    live=True,
    menu="Watch",
)
