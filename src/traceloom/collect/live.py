"""What hosts, devices and jobs do now, for who balances or scales: from the last heartbeats, kept nowhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from msgspec import Meta

from traceloom.agent.http.answers import HttpAnswer
from traceloom.agent.uplink.messages import HostDevice, HostProcess
from traceloom.collect.hosts import HostNow
from traceloom.collect.routes import FleetRoute

By = Literal["job", "host", "device"]


class LiveParameters(HttpAnswer, frozen=True, forbid_unknown_fields=True):
    """What a row is of, and which jobs and hosts; `*` and `?` stand for any signs."""

    by: Annotated[By, Meta(description="what a row is of: job, host or device")] = "job"
    job: Annotated[str, Meta(max_length=500, description="only these jobs; `*` and `?` stand for any signs")] = ""
    host: Annotated[str, Meta(max_length=500, description="only these hosts; `*` and `?` stand for any signs")] = ""
    top: Annotated[int, Meta(ge=1, le=10_000, description="so many rows")] = 1_000


class LiveRow(HttpAnswer, frozen=True):
    """What is measured now; null: not by all devices, and for `busy` and steps: by none.

    `busy`: share of time in which a kernel runs, mean over devices; power and memory are sums over devices;
    `steps_per_second`: of the slowest rank, `step_s`: how long its steps are; `heard_ns`: the oldest heartbeat in it.
    A device that several jobs share counts for each of them.
    """

    job: str
    host: str
    device: str
    heard_ns: int
    devices: int
    busy: float | None
    power_w: float | None
    memory_bytes: float | None
    memory_limit_bytes: float | None
    steps_per_second: float | None
    step_s: float | None


class LiveAnswer(HttpAnswer, frozen=True):
    """What there is now, by name; `more`: there are rows after these."""

    at_ns: int
    rows: list[LiveRow]
    more: bool


class _LiveGroup:
    """The devices and processes that count for a row."""

    def __init__(self) -> None:
        self.devices: dict[tuple[str, str], HostDevice] = {}
        self.jobs: set[str] = set()
        self.rates: list[float] = []
        self.heard_ns: list[int] = []

    def add(self, host: str, now: HostNow, device: HostDevice | None, process: HostProcess | None) -> None:
        self.heard_ns.append(now.received_ns)
        if device is not None:
            self.devices[host, device.uuid] = device
        if process is not None and process.job:
            self.jobs.add(process.job)
        if process is not None and process.steps_per_second is not None:
            self.rates.append(process.steps_per_second)

    def values(self, metric: str) -> list[float]:
        """Of the devices that measure it now."""
        return [d.values[metric] for d in self.devices.values() if metric in d.values and not d.stale]

    def total(self, metric: str) -> float | None:
        values = self.values(metric)
        return sum(values) if values and len(values) == len(self.devices) else None


def live(hosts: Mapping[str, HostNow], asked: LiveParameters, now_ns: int) -> LiveAnswer:
    """What is measured now.

    Args:
        hosts: Host -> what it said last.
        asked: What a row is of, and which.
        now_ns: Now, Unix time.
    """
    groups: dict[tuple[str, str, str], _LiveGroup] = defaultdict(_LiveGroup)
    of_job, of_host = (pattern.replace("[", "[[]") or "*" for pattern in (asked.job, asked.host))
    for host, now in hosts.items():
        if not fnmatchcase(host, of_host):
            continue
        devices = {device.uuid: device for device in now.heartbeat.devices}
        pairs: list[tuple[HostDevice | None, HostProcess | None]] = [
            (devices.get(uuid), process)
            for process in now.heartbeat.processes
            if fnmatchcase(process.job, of_job)
            for uuid in process.devices or ("",)
        ]
        if not asked.job:
            pairs += [(device, None) for device in devices.values()]
        for device, process in pairs:
            if asked.by == "host":
                groups["", host, ""].add(host, now, device, process)
            elif asked.by == "device" and device is not None:
                groups["", host, device.uuid].add(host, now, device, process)
            elif asked.by == "job" and process is not None and process.job:
                groups[process.job, "", ""].add(host, now, device, process)
    rows = []
    for job, at, uuid in sorted(groups)[: asked.top]:
        group = groups[job, at, uuid]
        busy, rate = group.values("gpu_busy_ratio"), min(group.rates, default=None)
        rows.append(
            LiveRow(
                job=job or ", ".join(sorted(group.jobs)),
                host=at or ", ".join(sorted({host for host, _ in group.devices})),
                device=uuid,
                heard_ns=min(group.heard_ns),
                devices=len(group.devices),
                busy=sum(busy) / len(busy) if busy else None,
                power_w=group.total("gpu_power_watts"),
                memory_bytes=group.total("gpu_memory_used_bytes"),
                memory_limit_bytes=group.total("gpu_memory_limit_bytes"),
                steps_per_second=rate,
                step_s=1 / rate if rate else None,
            )
        )
    return LiveAnswer(at_ns=now_ns, rows=rows, more=len(groups) > asked.top)


LIVE_ROUTES = (
    FleetRoute(
        path="/api/v1/query", summary="What jobs, hosts and devices do now", answer=LiveAnswer,
        answers=lambda asked: live(asked.hosts().fresh(), asked.parameters(LiveParameters), asked.hosts().clock()),
        parameters=LiveParameters, refuses=(400, 503),
    ),
)  # fmt: skip
