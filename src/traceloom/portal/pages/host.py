"""One host: its devices, its processes and whose they are, and what its devices did."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from htpy import Node, code, fragment, li, p, ul

from traceloom.agent.uplink.messages import HostProcess
from traceloom.collect.request_routes import RemovedHostAnswer
from traceloom.collect.watch_routes import HostDetailAnswer, UsageAnswer
from traceloom.collect.watching import BUSY, DeviceNow, UsageOfTime
from traceloom.model import units
from traceloom.portal.forms import sure
from traceloom.portal.links import to_job
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.pages.hosts import state_of
from traceloom.portal.pages.overview import STATES
from traceloom.portal.pictures import areas
from traceloom.portal.table import PageColumn, PageRow, PageTable, instant, state_mark
from traceloom.portal.visit import Visit

_NOT_MEASURED = "the device does not measure it"
DEVICE_COLUMNS = (
    PageColumn("index", "Device", unknown="it has no number"),
    PageColumn("state", "State", "state"),
    PageColumn("model", "Model", unknown="the agent does not name it"),
    PageColumn(
        "jobs",
        "Jobs",
        unknown="no job holds it",
        link=lambda row: "/jobs" if ", " in str(row["jobs"]) else to_job(str(row["jobs"])),
    ),
    PageColumn("busy", "Busy", "share", "share of time in which at least one kernel ran", _NOT_MEASURED),
    PageColumn("sm_active", "SM active", "share", "cycles in which a multiprocessor had work", _NOT_MEASURED),
    PageColumn("power_w", "Power, W", "number", "", _NOT_MEASURED),
    PageColumn("memory", "Memory", "bytes", "in use", _NOT_MEASURED),
    PageColumn("memory_limit", "Of", "bytes", "all memory of the device", _NOT_MEASURED),
    PageColumn("uuid", "Id", "name"),
    PageColumn("stale", "Why silent", unknown="it answers"),
)
PROCESS_COLUMNS = (
    PageColumn("pid", "Process", "text"),
    PageColumn("job", "Job", "name", unknown="it belongs to none", link=lambda row: to_job(str(row["job"]))),
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
    """What the page shows."""

    detail: HostDetailAnswer
    usage: list[UsageOfTime]


async def compute(visit: Visit) -> HostView:
    """Ask the routes."""
    host = visit.names["host"]
    detail = await visit.answer(HostDetailAnswer, "/api/v1/hosts/{host}", host=host)
    used = await visit.answer(UsageAnswer, "/api/v1/usage", query={"host": host, "hours": "6"})
    return HostView(detail, used.usage)


def process_row(process: HostProcess) -> PageRow:
    """A process as a row of `PROCESS_COLUMNS`."""
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


def usage_picture(usage: list[UsageOfTime], label: str) -> Node:
    """Device time by state over time."""
    by_state: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for row in usage:
        by_state[row.state][row.time_ns] += row.device_ms
    times = sorted({row.time_ns for row in usage})
    parts = {(name, colour): by_state[state] for state, name, colour in STATES if state in by_state}
    return areas(times, 60 * 10**9, parts, label)


def content(view: HostView) -> PageContent:
    """What is shown of it."""
    host, devices = view.detail.host, view.detail.devices
    rows = [process_row(process) for process in view.detail.processes]
    is_heard = host.heard_ns is not None
    without_devices: Node = [
        "It has none that its agent can read; on the host ",
        code["traceloom agent doctor"],
        " says why.",
    ]
    if not is_heard:
        without_devices = [
            "Its agent was not heard of since the service started. On the host ", code["traceloom agent status"],
            " says whether it runs, and how the service answers it.",
        ]  # fmt: skip
    trouble = [li(".warn")[f"{name}: {why}"] for name, why in sorted(host.trouble.items())]
    sections = [
        ContentSection("trouble", "Trouble", ul(".wrong")[trouble]) if trouble else None,
        ContentSection(
            "devices",
            "Devices",
            PageTable(
                "devices",
                "Devices of the host",
                DEVICE_COLUMNS,
                [_device_row(device) for device in devices],
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
                "No process there holds a device or belongs to a job." if is_heard else "Nothing was heard of it yet.",
            ),
        ),
        ContentSection(
            "usage", "Device time, last 6 h", usage_picture(view.usage, f"Device time of {host.host} by state")
        )
        if devices
        else None,
    ]
    busy = sum(device.state == "busy" for device in devices)
    offset, error = host.clock_offset_ns, host.clock_error_ns
    numbers = [
        KeyNumber(
            "State",
            state_mark(state_of(host)),
            fragment["heard ", instant(host.heard_ns)]
            if host.heard_ns is not None
            else "not since the service started",
        ),
        KeyNumber("Devices", units.count(len(devices)), f"{units.count(busy)} busy"),
        KeyNumber("Processes", units.count(host.processes), units.counted(len(host.jobs), "job")),
        KeyNumber(
            "Clock",
            "–" if offset is None else units.duration(abs(offset)),
            "not measured yet"
            if error is None or offset is None
            else f"{'ahead of' if offset < 0 else 'behind'} the service, ± {units.duration(error)}",
        ),
        KeyNumber("Agent", host.version or "–", "its version"),
    ]
    return PageContent(host.host, [part for part in sections if part], above=[("Hosts", "/hosts")], numbers=numbers)


def _device_row(device: DeviceNow) -> PageRow:
    values = device.values
    memory, limit = values.get("gpu_memory_used_bytes"), values.get("gpu_memory_limit_bytes")
    power = values.get("gpu_power_watts")
    return {
        "index": device.index,
        "state": device.state,
        "model": device.model,
        "jobs": ", ".join(device.jobs),
        "busy": values.get(BUSY),
        "sm_active": values.get("gpu_sm_active_ratio"),
        "power_w": None if power is None else round(power),
        "memory": None if memory is None else int(memory),
        "memory_limit": None if limit is None else int(limit),
        "uuid": device.device,
        "stale": device.stale,
    }


def controls(visit: Visit, view: HostView) -> Node:
    """Let it go, for operators."""
    if not visit.may("operator"):
        return None
    question = p["Its agent is refused from then on; what it sent is kept."]
    return sure(f"Remove {view.detail.host.host}", question, {"do": "remove"})


async def act(visit: Visit) -> str:
    """Let the host belong to the fleet no more.

    Raises:
        RequestError: `not-allowed`, `no-such-host`.
    """
    await visit.answer(RemovedHostAnswer, "/api/v1/hosts/{host}", method="DELETE", host=visit.names["host"])
    return "/hosts"


PAGE = Page(
    "/hosts/{host}",
    "Host",
    "One host: its devices and what they measure, processes and whose they are, device time.",
    compute,
    content,
    controls,
    act=act,
    live=True,
)
